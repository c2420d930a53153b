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
