"""Bisection of a number."""

from collections.abc import Callable


def bisect(is_below: Callable[[float], bool], low: float, high: float, rounds: int) -> tuple[float, float]:
    """Halve an interval around the root of a monotone function `rounds` times, and return its ends."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high
