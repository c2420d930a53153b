"""Python functions as torch operations, so that `torch.compile` and `vmap` take each as one step.

`torch.library.custom_op` does the same, but its first call in a process imports the compiler: two seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

# How many transformations of `torch.func` and how many modes (fake tensors, tracing) surround a call. torch says it
# nowhere else; where it no longer says it here, every call is dispatched.
_in_transform: Callable[[], Any] | None = getattr(torch._C._functorch, "peek_interpreter_stack", None)
_count_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)


class Operation:
    """A function that torch knows as an operation.

    Attributes:
        registered: the operation, `torch.ops.torchcalib.<name>.default`, which a call goes to.
    """

    def __init__(self, function: Callable[..., Any], registered: Any) -> None:
        self._function = function
        self.registered = registered

    def __call__(self, *arguments: Any) -> Any:
        """Call the operation."""
        return self.registered(*arguments)

    def direct(self, *arguments: Any) -> Any:
        """Call the function past torch's dispatcher if nothing but numbers is asked for.

        What the dispatcher costs in Python is as much as the whole of a small batch. Not for a backward pass, whose
        gradients may be batches that nothing tells from tensors.
        """
        return self._function(*arguments) if is_plain(*arguments) else self.registered(*arguments)


def is_plain(*arguments: Any) -> bool:
    """Return whether nothing but numbers is asked for: no trace, no transformation, no derivative."""
    if torch.compiler.is_compiling() or _in_transform is None or _count_modes is None:
        return False
    if _in_transform() is not None or _count_modes():
        return False
    differentiable = torch.is_grad_enabled()
    for x in arguments:
        if isinstance(x, Tensor) and (
            type(x) not in (Tensor, torch.nn.Parameter)
            or (differentiable and x.requires_grad)
            or (x.is_floating_point() and unpack_dual(x).tangent is not None)  # type: ignore[no-untyped-call]
        ):
            return False
    return True


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operation]:
    """Register the decorated function as an operation and return that.

    Its arguments and results must have their batch axes in front, as all of them then have under `vmap`; an argument
    that is no tensor is the same for the whole batch. Where there is a gradient, `torch.library.register_autograd` says
    it of `torchcalib::` and the name.

    Args:
        schema: name, arguments and results, as `torch.library.define` takes them.
        fake: what the results look like, from the same arguments.
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
