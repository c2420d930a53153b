"""Bisection: halve an interval around the place where an increasing function reaches a limit."""

from collections.abc import Callable

import torch
from torch import Tensor


def bisect(is_below: Callable[[float], bool], low: float, high: float, rounds: int) -> tuple[float, float]:
    """Return both ends of the interval after a number of rounds."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def bisect_each(is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Return both ends of each interval `(...)`, like `bisect`."""
    for _ in range(rounds):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low, high


def bisect_in_parts(
    is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int
) -> tuple[Tensor, Tensor]:
    """Return the result of `bisect_each` with a quarter of the calls, for few intervals and a multiple of 4 rounds.

    A call of `is_below` gets all points `(15, ...)` at which the next four rounds may halve the intervals.
    """
    parts = torch.arange(1, 16, dtype=low.dtype, device=low.device).reshape(-1, *[1] * low.dim())
    for _ in range(rounds // 4):
        sixteenth = (high - low) / 16
        below = is_below(low + sixteenth * parts)
        n_below = torch.zeros_like(low, dtype=torch.int64)  # number of parts below the limit
        for half in (8, 4, 2, 1):
            middle = n_below + half
            n_below = torch.where(below.gather(0, middle.unsqueeze(0) - 1).squeeze(0), middle, n_below)
        low = low + sixteenth * n_below
        high = low + sixteenth
    return low, high
