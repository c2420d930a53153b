"""Turn compiled code into torch functions that support derivatives, `torch.compile` and `vmap`.

`fused` combines compiled code for the values, an optional function for the first derivative, and a formula in plain
torch. The formula is used for tracing, `vmap`, forward mode and higher derivatives. `operation` registers a function
without a formula, such as a sort, with `torch.library`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

Mode = Literal["formula", "gradient", "numbers"]


def mode_of(*arguments: Any) -> Mode:
    """Return the mode in which a `fused` function must be computed for these arguments.

    "formula" under `torch.compile`, `torch.func` or forward mode, where tensors have no readable memory. "gradient" if
    autograd records the call. Otherwise "numbers".
    """
    if torch.compiler.is_compiling():
        return "formula"
    mode: Mode = "numbers"
    for x in arguments:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, Parameter) or x.is_meta:
                return "formula"
            try:
                x.data_ptr()  # a tensor under vmap, grad or jvp has no memory
            except RuntimeError:
                return "formula"
            if x.is_floating_point():
                if unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
                    return "formula"
                if x.requires_grad and torch.is_grad_enabled():
                    mode = "gradient"
    return mode


def is_plain(*arguments: Any) -> bool:
    """Return True if only values are needed for these arguments, without derivatives, tracing or `vmap`."""
    return mode_of(*arguments) == "numbers"


def fused(
    fast: Callable[..., Any], formula: Callable[..., Any], gradient: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function with values from `fast(backend, *arguments)`, and tracing and derivatives from `formula`.

    `formula(*arguments)` is the same function in differentiable torch operations. Only the first result is
    differentiable. `gradient(backend, arguments, results, needed, grads)` computes the first derivative without an
    autograd graph. It returns the gradients in the arguments at the positions `needed`, given the gradient `grads` in
    the first result. All arguments of the returned function are positional, except the keyword `backend`.
    """

    class Fused(torch.autograd.Function):
        """Autograd function: `fast` in the forward pass, `gradient` or the formula in the backward pass."""

        @staticmethod
        def forward(ctx: Any, backend: str, *arguments: Any) -> Any:
            values = fast(backend, *arguments)
            results = (values,) if isinstance(values, Tensor) else values
            ctx.mark_non_differentiable(*results[1:])
            ctx.set_materialize_grads(False)  # without zeros for these results
            ctx.backend, ctx.n_results = backend, len(results)
            ctx.options = [None if isinstance(x, Tensor) else x for x in arguments]
            ctx.save_for_backward(*results, *(x if isinstance(x, Tensor) else None for x in arguments))
            return values

        @staticmethod
        def backward(ctx: Any, grads: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
            """Return the gradient in each argument, or None for an argument that requires no gradient."""
            if grads is None:  # the first result has no gradient
                return (None,) * len(ctx.needs_input_grad)
            results, tensors = ctx.saved_tensors[: ctx.n_results], ctx.saved_tensors[ctx.n_results :]
            arguments = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
            needed = [k for k, need in enumerate(ctx.needs_input_grad[1:]) if need]
            # Double backward and vmap require the formula.
            if gradient is None or torch.is_grad_enabled() or mode_of(grads) == "formula":
                input_grads = gradient_of(formula, arguments, needed, grads, create_graph=torch.is_grad_enabled())
            else:
                input_grads = gradient(ctx.backend, arguments, results, needed, grads)
            # One gradient for each argument of `forward`; the first one is `backend`.
            grad_of = dict(zip(needed, input_grads, strict=True))
            return None, *(grad_of.get(k) for k in range(len(arguments)))

    def call(*arguments: Any, backend: str = "auto") -> Any:
        # Without derivatives, skip `Fused.apply`, which takes as long as the loops for a small batch.
        mode = mode_of(*arguments)
        if mode == "numbers":
            return fast(backend, *arguments)
        if mode == "gradient" and gradient is not None:
            return Fused.apply(backend, *arguments)  # type: ignore[no-untyped-call]
        return formula(*arguments)

    return call


def gradient_of(
    formula: Callable[..., Any],
    arguments: list[Any] | tuple[Any, ...],
    needed: list[int],
    grads: Tensor,
    create_graph: bool = False,
) -> list[Tensor]:
    """Return the gradients in the arguments at positions `needed`, given the gradient `grads` in the first result."""
    arguments = list(arguments)
    if not create_graph:
        for k in needed:
            arguments[k] = arguments[k].detach().requires_grad_()
    with torch.enable_grad():
        values = formula(*arguments)
    result = values if isinstance(values, Tensor) else values[0]
    return list(torch.autograd.grad(result, [arguments[k] for k in needed], grads, create_graph=create_graph))


class Operation:
    """Function registered as a torch operation."""

    def __init__(self, function: Callable[..., Any], registered: Any) -> None:
        self._function = function
        self.registered = registered  # `torch.ops.torchcalib.<name>.default`

    def __call__(self, *arguments: Any) -> Any:
        """Call the operation through the torch dispatcher."""
        return self.registered(*arguments)

    def direct(self, *arguments: Any) -> Any:
        """Call the function without the torch dispatcher if only values are needed.

        The dispatcher is about as slow as the computation for a small batch. Do not use this method in a backward pass,
        where `vmap` may batch only the gradients.
        """
        return self._function(*arguments) if is_plain(*arguments) else self.registered(*arguments)

    def differentiate(self, gradient: "Operation", *, with_results: bool = False) -> None:
        """Register the operation that computes the gradients in the first arguments, in reverse mode.

        Its arguments are the tensors of this operation, the results if `with_results`, the gradient in the first
        result, and the other arguments, which follow the tensors.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            n = next(k for k, x in enumerate(inputs) if x is not None and not isinstance(x, Tensor))
            ctx.n_inputs, ctx.options = len(inputs), inputs[n:]
            ctx.save_for_backward(*inputs[:n], *(output if with_results else ()))

        def backward(ctx: Any, grads: Tensor, *_: None) -> tuple[Tensor | None, ...]:
            found = gradient(*ctx.saved_tensors, grads, *ctx.options)
            found = (found,) if isinstance(found, Tensor) else found
            return (*found, *[None] * (ctx.n_inputs - len(found)))

        torch.library.register_autograd(self.registered, backward, setup_context=save)


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operation]:
    """Decorate a function to register it as a torch operation, opaque to `torch.compile` and `vmap`.

    `torch.library.custom_op` does the same, but its first call imports the compiler, which is slow.

    `schema` is as for `torch.library.define`. All tensors must accept another leading batch axis, which `vmap` adds.
    `fake` returns empty results of correct shapes and dtypes.
    """
    name = schema.split("(")[0]

    def register(function: Callable[..., Any]) -> Operation:
        torch.library.define(f"torchcalib::{name}", schema.removeprefix(name))
        torch.library.impl(f"torchcalib::{name}", "default")(function)
        torch.library.impl(f"torchcalib::{name}", "Meta")(fake)  # `register_fake` searches all modules for its caller
        registered = getattr(torch.ops.torchcalib, name).default

        def batched(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
            # Move the batch axis of `vmap` to the front, or add one to tensors without it.
            given = list(arguments)
            for k, (x, dim) in enumerate(zip(arguments, in_dims, strict=True)):
                if isinstance(x, Tensor):
                    given[k] = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                    given[k] = given[k].contiguous()
            result = registered(*given)
            return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

        torch.library.register_vmap(f"torchcalib::{name}", batched)
        return Operation(function, registered)

    return register
