"""Values of tensors on the host, where they are available."""

import torch
from torch import Tensor


def look(flag: Tensor) -> bool | None:
    """Return the value of a boolean scalar, or None under `torch.compile` and `vmap`, where it is not available."""
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError as error:  # vmap has no public flag; it raises for a branch on a value
        if "vmap" not in str(error):
            raise
        return None


def largest(counts: Tensor, bound: int) -> int:
    """Return the largest count, or `bound` where values are not available."""
    if not counts.numel():
        return 0
    seen = look((top := counts.max()) >= 0)
    return bound if seen is None else int(top)


def is_captured(x: Tensor) -> bool:
    """Return whether operations on `x` are being recorded into a CUDA graph, which runs them later."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
