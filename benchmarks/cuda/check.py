"""One line of the result, and how far two tensors differ."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    dtype: str
    what: str
    error: float
    tolerance: float
    said: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def label_of(dtype: torch.dtype) -> str:
    """Name a dtype without the name of its package."""
    return str(dtype).removeprefix("torch.")


def relative_error(found: Tensor, expected: Tensor, scale: float = 0.01) -> float:
    """Largest difference, as a share of the largest expected value, or of `scale` where all of them are less.

    Equal infinities do not differ: half types round some probabilities to 0 and 1.
    """
    found, expected = (x.detach().double().cpu() for x in (found, expected))
    difference = torch.where(found == expected, 0.0, found - expected).abs().max()
    size = expected.masked_fill(expected.isinf(), 0).abs().max()
    return float(difference / size.clamp(min=scale))


def elementwise_error(found: Tensor, expected: Tensor, size: Tensor | None = None, floor: float = 1e-12) -> float:
    """Largest difference as a share of what it is expected to be, or of `size`; NaN if any is NaN, 0 of nothing."""
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    share = (found - expected).abs() / ((expected.abs() if size is None else size) + floor)
    return float(torch.where(found == expected, 0.0, share).max())


def guarded(name: str, dtype: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Turn an exception into a failed check, so that one failure does not hide the others."""
    try:
        yield from checks()
    except Exception as error:
        yield Check(name, dtype, "runs", float("inf"), 0, f"{type(error).__name__}: {error}"[:300])
