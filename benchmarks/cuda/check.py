"""Results of the checks on a GPU, and differences of tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """Result of one check: a line of the output."""

    name: str
    dtype: str
    what: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; False for NaN."""
        return self.error <= self.tolerance


def label_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative_error(found: Tensor, expected: Tensor, scale: float = 0.01) -> float:
    """Return the largest difference, relative to the largest expected value, but at least to `scale`."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    size = expected.masked_fill(expected.isinf(), 0).abs().max().clamp(min=scale)
    return elementwise_error(found, expected, size, floor=0.0)


def elementwise_error(found: Tensor, expected: Tensor, size: Tensor | None = None, floor: float = 1e-12) -> float:
    """Return the largest difference, relative to the expected values or to `size`; NaN if any difference is NaN.

    Equal infinities do not differ, because half types round some probabilities to 0 and 1.
    """
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    share = (found - expected).abs() / ((expected.abs() if size is None else size) + floor)
    return float(torch.where(found == expected, 0.0, share).max())


def guarded(name: str, dtype: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Turn an exception into a failed check, so that the other checks still run."""
    try:
        yield from checks()
    except Exception as error:
        yield Check(name, dtype, "runs", float("inf"), 0, f"{type(error).__name__}: {error}"[:300])
