"""Reading a value back from a tensor, where that is possible, and whether there is one yet."""

import torch
from torch import Tensor


def look(flag: Tensor) -> bool | None:
    """Return the value of a boolean scalar, or None where values cannot be looked at (`torch.compile`, `vmap`)."""
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError as error:  # vmap refuses to branch on values, and has no public way to ask beforehand
        if "vmap" not in str(error):
            raise
        return None


def largest(counts: Tensor, bound: int) -> int:
    """Return the largest count, or `bound` where values cannot be looked at."""
    if not counts.numel():
        return 0
    seen = look((top := counts.max()) >= 0)
    return bound if seen is None else int(top)


def is_captured(x: Tensor) -> bool:
    """Return whether what is done to `x` goes into a CUDA graph, to be done later and more than once, and not now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
