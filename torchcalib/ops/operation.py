"""How compiled code becomes a torch function: derivatives, `torch.compile`, `vmap`.

`fused` is for a function that has a formula in plain torch. Compiled code then only computes numbers, and everything
else is the formula: the trace under `torch.compile`, `vmap`, and derivatives of every order and mode. `operation` is
for a function without a formula, such as a sort; it is registered with `torch.library`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

Mode = Literal["formula", "gradient", "numbers"]


def mode_of(*arguments: Any) -> Mode:
    """Return how to compute a function of the arguments.

    "formula" under a trace, a transformation of `torch.func` or forward mode, where tensors do not hold numbers of
    their own; "gradient" where autograd records the call; else "numbers".
    """
    if torch.compiler.is_compiling():
        return "formula"
    mode: Mode = "numbers"
    recorded = torch.is_grad_enabled()
    for x in arguments:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
                return "formula"
            try:
                x.data_ptr()  # a tensor under vmap, grad or jvp has no memory
            except RuntimeError:
                return "formula"
            if x.is_floating_point():
                if unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
                    return "formula"
                if recorded and x.requires_grad:
                    mode = "gradient"
    return mode


def is_plain(*arguments: Any) -> bool:
    """Return whether a function of the arguments only has to compute numbers."""
    return mode_of(*arguments) == "numbers"


def fused(
    fast: Callable[..., Any], formula: Callable[..., Any], gradient: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that computes numbers by `fast`, and everything else by `formula`.

    The function has the arguments of the formula, all positional, and the keyword `backend`.

    Args:
        fast: compiled code, or plain torch in chunks: `fast(backend, *arguments)`. Its first result has the gradient.
        formula: the same in operations that torch can differentiate, trace and batch: `formula(*arguments)`.
        gradient: the first-order gradient in numbers, without the memory of a graph of the formula:
            `gradient(backend, arguments, results, needed, grads)` returns those of the arguments at the positions
            `needed`, from the results of `fast` and the gradient `grads` in the first one. None for autograd's own.
    """

    class Fused(torch.autograd.Function):
        """The fast function, with `gradient` for a backward pass and the formula for a differentiable one."""

        @staticmethod
        def forward(ctx: Any, backend: str, *arguments: Any) -> Any:
            """Call the fast function."""
            found = fast(backend, *arguments)
            results = (found,) if isinstance(found, Tensor) else found
            ctx.mark_non_differentiable(*results[1:])
            ctx.backend, ctx.n_results = backend, len(results)
            ctx.options = [None if isinstance(x, Tensor) else x for x in arguments]
            ctx.save_for_backward(*results, *(x if isinstance(x, Tensor) else None for x in arguments))
            return found

        @staticmethod
        def backward(ctx: Any, grads: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
            """Return the gradients in those arguments that need one."""
            results, tensors = ctx.saved_tensors[: ctx.n_results], ctx.saved_tensors[ctx.n_results :]
            arguments = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
            needed = [k for k, need in enumerate(ctx.needs_input_grad[1:]) if need]
            # Only the formula has a gradient that can be differentiated, and takes gradients in a batch.
            if gradient is None or torch.is_grad_enabled() or mode_of(grads) == "formula":
                found = gradient_of(formula, arguments, needed, grads, create_graph=torch.is_grad_enabled())
            else:
                found = gradient(ctx.backend, arguments, results, needed, grads)
            of = dict(zip(needed, found, strict=True))
            return None, *(of.get(k) for k in range(len(arguments)))

    def call(*arguments: Any, backend: str = "auto") -> Any:
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
    """Return the gradients of the first result of a formula in the needed arguments, by autograd."""
    arguments = list(arguments)
    if not create_graph:
        for k in needed:
            arguments[k] = arguments[k].detach().requires_grad_()
    with torch.enable_grad():
        found = formula(*arguments)
    result = found if isinstance(found, Tensor) else found[0]
    return list(torch.autograd.grad(result, [arguments[k] for k in needed], grads, create_graph=create_graph))


class Operation:
    """A function registered with torch as an operation.

    Attributes:
        registered: the operation, `torch.ops.torchcalib.<name>.default`.
    """

    def __init__(self, function: Callable[..., Any], registered: Any) -> None:
        self._function = function
        self.registered = registered

    def __call__(self, *arguments: Any) -> Any:
        """Call the operation."""
        return self.registered(*arguments)

    def direct(self, *arguments: Any) -> Any:
        """Call the function itself if only numbers are needed: the dispatcher costs as much as a small batch.

        Not for a backward pass, where `vmap` may batch the gradients but not the other arguments.
        """
        return self._function(*arguments) if is_plain(*arguments) else self.registered(*arguments)


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operation]:
    """Register the decorated function as an operation, which `torch.compile` and `vmap` take as one step.

    `torch.library.custom_op` does the same, but its first call in a process imports the compiler: two seconds.

    Batch axes are the first axes of all tensor arguments and results; `vmap` adds one. An argument that is no tensor is
    the same for the whole batch. `torch.library.register_autograd` adds a gradient to `torchcalib::` and the name.

    Args:
        schema: name, arguments and results, as for `torch.library.define`.
        fake: returns empty results of the right shape and dtype from the same arguments.
    """
    name = schema.split("(")[0]

    def register(function: Callable[..., Any]) -> Operation:
        torch.library.define(f"torchcalib::{name}", schema.removeprefix(name))
        torch.library.impl(f"torchcalib::{name}", "default")(function)
        torch.library.register_fake(f"torchcalib::{name}")(fake)
        registered = getattr(torch.ops.torchcalib, name).default

        def batched(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
            result = registered(
                *(
                    _batch_first(x, dim, info.batch_size) if isinstance(x, Tensor) else x
                    for x, dim in zip(arguments, in_dims, strict=True)
                )
            )
            return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

        torch.library.register_vmap(f"torchcalib::{name}", batched)
        return Operation(function, registered)

    return register


def _batch_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return an argument with the axis that `vmap` adds in front."""
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()
