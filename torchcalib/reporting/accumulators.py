"""What a report accumulates of its predictions, and limits on its size."""

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

MOST_BINS = 1000  # more are neither visible nor readable
MOST_COPIES = 2**53  # integers up to here are exact in float64
_MOST_SUMS = 2**27  # 1 GiB

S_co = TypeVar("S_co", covariant=True)


class Accumulator(Protocol):
    """What a report holds of its predictions. Accumulators add; methods return new ones and change nothing."""

    def of(self, p: Predictions) -> Self:
        """Return the accumulator of a batch alone."""

    def __add__(self, other: Self, /) -> Self:
        """Return the accumulator of both, the rows of `other` last."""

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `loaded`."""

    def loaded(self, state: Any) -> Self:
        """Return the accumulator of a saved state, on the CPU, given an empty one. The state need not be trusted.

        Raises:
            Exception: of any kind, for a state that no accumulator has.
        """


@dataclass(frozen=True, eq=False)
class Accumulated(Generic[S_co]):
    """Sums or samples.

    Attributes:
        kind: of the content.
        content: a state of that kind; None before any data.
    """

    kind: SumsKind[S_co] | SamplesKind
    content: Any = None

    def of(self, p: Predictions) -> Self:
        """Return the accumulator of a batch alone."""
        return replace(self, content=self.kind.detach(self.kind.of(p)))

    def __add__(self, other: Self) -> Self:
        if self.content is None:
            return other
        return replace(self, content=self.kind.add(self.content, other.content))

    @property
    def statistic(self) -> S_co:
        """The sums or samples."""
        statistic: S_co = self.kind.statistic(self.content)
        return statistic

    @property
    def left_out(self) -> tuple[int, int]:
        """Number of bad rows, which come from CUDA, and of missing ones."""
        n_invalid, n_dropped = self.kind.left_out(self.content).tolist()
        return int(n_invalid), int(n_dropped)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `loaded`."""
        return {"parts": list(self.kind.parts(self.content))}

    def loaded(self, state: Any) -> Self:
        """Return the accumulator of a saved state, given an empty one."""
        parts = saved_value(state, "parts", list)
        with torch.device("meta"):  # which takes no memory for as many classes as a file claims
            expected = _numel(self.kind.parts(self.kind.empty()))
        content = self.kind.check(parts, self.kind.empty()) if _numel(parts) == expected else None
        if content is None:
            raise ValueError(f"`parts` must hold {expected:,} float64 numbers, got {_numel(parts):,}")
        return replace(self, content=content)


def _numel(parts: Sequence[Any]) -> int:
    return sum(part.numel() for part in parts if isinstance(part, Tensor))


def check_size(task: Task, num_outputs: int, n_bins: int) -> None:
    """Raise if the sums of a report with so many classes or labels take more than a gigabyte."""
    per_output = 3 * len(SCORES) * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MOST_SUMS:
        what = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MOST_SUMS // per_output:,} {what} with {n_bins} bins, got {num_outputs:,}: "
            f"the report keeps sums of each. Check the class axis, or compute single metrics."
        )


def are_counts(weights: Tensor | None) -> bool:
    """Return whether every weight is a whole number."""
    if weights is None:
        return True
    w = weights.detach().double()
    return bool(((w == w.round()) & (w <= MOST_COPIES)).all())
