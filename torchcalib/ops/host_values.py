"""Conversion of tensors to Python values, unless `torch.compile` or `vmap` forbids it."""

import torch
from torch import Tensor


def value_if_available(flag: Tensor) -> bool | None:
    """Return the value of a boolean scalar tensor, or None under `torch.compile` and `vmap`, where it is unknown."""
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError as error:  # torch has no public test for vmap, but a conversion to bool raises there
        if "vmap" not in str(error):
            raise
        return None


def first_values(x: Tensor) -> list[float]:
    """Return up to 8 values of the first row of a tensor, or none under `torch.compile` and `vmap`."""
    if torch.compiler.is_compiling() or not x.numel():
        return []
    try:
        row = x if x.dim() == 1 else x[0] if x.dim() == 2 else x[(0,) * (x.dim() - 1)]
        return row[:8].tolist()
    except RuntimeError:  # tensors have no values under vmap
        return []


def largest(counts: Tensor, bound: int) -> int:
    """Return the maximum of `counts`, or its upper limit `bound` under `torch.compile` and `vmap`; 0 if empty."""
    if not counts.numel():
        return 0
    readable = value_if_available((top := counts.max()) >= 0)
    return bound if readable is None else int(top)


def is_captured(x: Tensor) -> bool:
    """Return True if operations on `x` are being captured into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
