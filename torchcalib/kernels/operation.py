"""Python functions as torch operations, so that `torch.compile` and `vmap` take each as one step.

`torch.library.custom_op` does the same, but its first call in a process imports the compiler: two seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as an operation and return that.

    Its arguments and results must have their batch axes in front, as all of them then have under `vmap`; an argument
    that is no tensor is the same for the whole batch. Where there is a gradient, `torch.library.register_autograd` says
    it of `torchcalib::` and the name.

    Args:
        schema: name, arguments and results, as `torch.library.define` takes them.
        fake: what the results look like, from the same arguments.
    """
    name = schema.split("(")[0]

    def register(function: Callable[..., Any]) -> Any:
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
        return registered

    return register


def _batch_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return an argument with the axis that `vmap` adds in front."""
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()
