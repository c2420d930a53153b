"""Values and caches of the host. `torch.compile` and `vmap` forbid the conversion of tensors to Python values."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - used as a decorator
    """Decorator for a cached property whose value is stored in the dictionary `self.computed` of the instance.

    In Python 3.11 `functools.cached_property` uses a lock, which `torch.compile` cannot trace.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> T:
        if self.name not in owner.computed:
            owner.computed[self.name] = self.compute(owner)
        value: T = owner.computed[self.name]
        object.__setattr__(owner, self.name, value)  # an attribute of the instance precedes this descriptor from now on
        return value


def value_if_available(x: Tensor) -> Any:
    """Return the value of a scalar tensor, or None under `torch.compile` and `vmap`, where it is unknown."""
    if torch.compiler.is_compiling():
        return None
    try:
        return x.item()
    except RuntimeError as error:  # torch has no public test for vmap, but a conversion to a number raises there
        if "vmap" not in str(error):
            raise
        return None


def largest(counts: Tensor, bound: int) -> int:
    """Return the maximum of `counts`, or its upper limit `bound` under `torch.compile` and `vmap`; 0 if empty."""
    if not counts.numel():
        return 0
    value = value_if_available(counts.max())
    return bound if value is None else int(value)


def constant(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device. The host does not wait for the copy, unlike in `torch.tensor`."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def is_captured(x: Tensor) -> bool:
    """Return True if operations on `x` are being captured into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
