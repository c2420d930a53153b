"""Accumulators of a report: the interface, the accumulator of sums or samples, and limits on memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import SamplesKind, SumsKind
from torchcalib.io.saved import saved_value
from torchcalib.reporting.lines import SCORES

MAX_BINS = 1000  # largest number of bins that a diagram or table can show legibly
MAX_COPIES = 2**53  # largest count: float64 represents all integers up to this one exactly
_MAX_SUMS = 2**27  # largest number of sums: 1 GiB of float64

S_co = TypeVar("S_co", covariant=True)


class Accumulator(Protocol):
    """Interface of the immutable accumulators of a report, such as sums, ranked samples and bins of groups."""

    def of(self, p: Predictions) -> Self:
        """Return a new accumulator that contains only the batch `p`."""

    def __add__(self, other: Self, /) -> Self:
        """Return an accumulator with the rows of both accumulators: first `self`, then `other`."""

    def state(self) -> dict[str, Any]:
        """Return the accumulated data as tensors and plain values, for `loaded`."""

    def loaded(self, state: Any) -> Self:
        """Return an accumulator with the content of `state()`, on the CPU.

        Call this method on an empty accumulator. The state is checked, because a file may be damaged or malicious.

        Raises:
            Exception: of any type, if the state is invalid.
        """


@dataclass(frozen=True, eq=False)
class Accumulated(Generic[S_co]):
    """Accumulator whose state consists of sums over samples, or of the samples.

    Attributes:
        kind: operations on the state, `SumsKind` or `SamplesKind`.
        content: the state; None before any data.
    """

    kind: SumsKind[S_co] | SamplesKind
    content: Any = None

    def of(self, p: Predictions) -> Self:
        """Return a new accumulator that contains one batch."""
        return replace(self, content=self.kind.detach(self.kind.of(p)))

    def __add__(self, other: Self) -> Self:
        if self.content is None:
            return other
        return replace(self, content=self.kind.add(self.content, other.content))

    @property
    def statistic(self) -> S_co:
        """The accumulated sums or samples."""
        statistic: S_co = self.kind.statistic(self.content)
        return statistic

    @property
    def n_ignored(self) -> tuple[int, int]:
        """Numbers of invalid rows (counted on CUDA only) and of rows dropped by `nan_policy="drop"`."""
        n_invalid, n_dropped = self.kind.n_ignored(self.content).tolist()
        return int(n_invalid), int(n_dropped)

    def state(self) -> dict[str, Any]:
        """Return the state as a list of tensors, for `loaded`."""
        return {"parts": list(self.kind.parts(self.content))}

    def loaded(self, state: Any) -> Self:
        """Return an accumulator with the content of `state()`; see `Accumulator.loaded`."""
        parts = saved_value(state, "parts", list)
        with torch.device("meta"):  # a damaged file may declare any number of classes: allocate no memory for them
            expected = _numel(self.kind.parts(self.kind.empty()))
        content = self.kind.check(parts, self.kind.empty()) if _numel(parts) == expected else None
        if content is None:
            raise ValueError(f"`parts` must contain {expected:,} float64 numbers, got {_numel(parts):,}")
        return replace(self, content=content)


def _numel(parts: Sequence[Any]) -> int:
    return sum(part.numel() for part in parts if isinstance(part, Tensor))


def check_size(task: Task, num_outputs: int, n_bins: int) -> None:
    """Raise a ValueError if a report with this number of classes or labels needs more than 1 GiB for sums."""
    per_output = 3 * len(SCORES) * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MAX_SUMS:
        outputs = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MAX_SUMS // per_output:,} {outputs} with {n_bins} bins, "
            f"got {num_outputs:,}. Check the class axis, or compute single metrics, which need less memory."
        )


def are_counts(weights: Tensor | None) -> bool:
    """Return True if there are no weights, or all of them are whole numbers of at most 2^53."""
    if weights is None:
        return True
    w = weights.detach().double()
    return bool(((w == w.round()) & (w <= MAX_COPIES)).all())
