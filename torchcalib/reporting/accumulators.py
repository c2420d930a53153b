"""Interface of the accumulators of a report, the accumulator of sums or samples, and limits on memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.clusters import distinct, distinct_in, number_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import SampleState, SumState
from torchcalib.io.saved import saved_value
from torchcalib.reporting.lines import SCORES

_MAX_SUMS = 2**27  # maximum number of float64 sums (1 GiB)

S_co = TypeVar("S_co", covariant=True)


class Accumulator(Protocol):
    """Interface of the accumulators of a report. They are immutable, and contain sums or samples of all batches."""

    def from_predictions(self, p: Predictions) -> Self:
        """Return a new accumulator that contains only the batch `p`."""

    def __add__(self, other: Self, /) -> Self:
        """Return an accumulator with the data of `self`, followed by the data of `other`."""

    def state(self) -> dict[str, Any]:
        """Return the accumulated data as a dict of tensors and Python values, which `loaded` restores."""

    def loaded(self, state: Any) -> Self:
        """Return an accumulator on the CPU, restored from a result of `state()`.

        Call this method on an empty accumulator. The state is checked, because a file may be damaged or malicious.

        Raises:
            Exception: of any type, if the state is invalid.
        """


@dataclass(frozen=True, eq=False)
class Accumulated(Generic[S_co]):
    """Accumulator of sums over samples, or of ranked samples.

    Attributes:
        kind: operations on the sums (`SumState`) or samples (`SampleState`).
        content: the sums or samples; None before the first batch.
    """

    kind: SumState[S_co] | SampleState
    content: Any = None

    def from_predictions(self, p: Predictions) -> Self:
        """Return a new accumulator that contains only the batch `p`."""
        return replace(self, content=self.kind.detach(self.kind.from_predictions(p)))

    def __add__(self, other: Self) -> Self:
        if self.content is None:
            return other
        return replace(self, content=self.kind.add(self.content, other.content))

    @property
    def statistic(self) -> S_co:
        """The accumulated data as an object with metric values, such as `BinStats` or `RankedSample`."""
        statistic: S_co = self.kind.statistic(self.content)
        return statistic

    @property
    def n_ignored(self) -> tuple[int, int]:
        """Number of invalid rows (counted only on CUDA), and number of rows dropped by `nan_policy="drop"`."""
        n_invalid, n_dropped = self.kind.n_ignored(self.content).tolist()
        return int(n_invalid), int(n_dropped)

    def state(self) -> dict[str, Any]:
        """Return a dict with the list of tensors `parts`, which `loaded` restores."""
        return {"parts": list(self.kind.parts(self.content))}

    def loaded(self, state: Any) -> Self:
        """Return an accumulator, restored from a result of `state()`; see `Accumulator.loaded`."""
        parts = saved_value(state, "parts", list)
        with torch.device("meta"):  # allocates no memory: a damaged file may declare any number of classes
            expected = _numel(self.kind.parts(self.kind.empty()))
        content = self.kind.check(parts, self.kind.empty()) if _numel(parts) == expected else None
        if content is None:
            raise ValueError(
                f"`parts` must have {expected:,} float64 numbers, got {_numel(parts):,}. The file is corrupt."
            )
        return replace(self, content=content)


@dataclass(frozen=True, eq=False)
class DistinctClusters:
    """Accumulator of the distinct identifiers of clusters.

    Attributes:
        identifiers: at most 100,001 identifiers, int64 `(n,)`; see `core.clusters.distinct`.
    """

    identifiers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def from_predictions(self, p: Predictions) -> Self:
        """Return a new accumulator that contains only the batch `p`."""
        return replace(self, identifiers=distinct_in(p))

    def __add__(self, other: Self) -> Self:
        both = self.identifiers, other.identifiers.to(self.identifiers.device)
        return replace(self, identifiers=distinct(torch.cat(both)))

    @property
    def number(self) -> int:
        """Number of distinct clusters; `MAX_DISTINCT` + 1 stands for any larger number."""
        return number_of(self.identifiers)

    def state(self) -> dict[str, Any]:
        """Return a dict with the tensor `identifiers`, which `loaded` restores."""
        return {"identifiers": self.identifiers}

    def loaded(self, state: Any) -> Self:
        """Return an accumulator, restored from a result of `state()`; see `Accumulator.loaded`."""
        identifiers = state["identifiers"]
        if not isinstance(identifiers, Tensor) or (identifiers.dim(), identifiers.dtype) != (1, torch.int64):
            raise ValueError(f"`identifiers` must be an int64 tensor, got {identifiers!r:.80}. The file is corrupt.")
        return replace(self, identifiers=distinct(identifiers))


def _numel(parts: Sequence[Any]) -> int:
    return sum(part.numel() for part in parts if isinstance(part, Tensor))


def check_size(task: Task, num_outputs: int, n_bins: int) -> None:
    """Raise a ValueError if the sums for `num_outputs` classes or labels need more than 1 GiB."""
    per_output = 3 * len(SCORES) * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MAX_SUMS:
        outputs = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MAX_SUMS // per_output:,} {outputs} with {n_bins} bins, "
            f"got {num_outputs:,}. Check the class axis, or compute single metrics, which need less memory."
        )
