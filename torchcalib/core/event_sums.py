"""Accumulators that sum functions of the confidence and outcome of events over cells, such as bins."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.events import Events, Mode, n_events, reduce_to_events
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.core.pieces import Piece
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import (
    BinStats,
    EventCells,
    Ranges,
    Sums,
    kind_of_noise,
    mode_shape,
    noise_flag_of,
    sums_of_replicates,
    weighted,
)
from torchcalib.ops.bin_sums import Bins, Noise, class_bins, class_sums, event_bins
from torchcalib.ops.bin_sums.formula import weighted_columns
from torchcalib.ops.dispatch import source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import bin_index, bin_sums, cell_sums

if TYPE_CHECKING:
    from torchcalib.ops.batch.formula import Demand

S = TypeVar("S", bound=Sums)

_MAX_CLASS_SUMS = 2**17  # largest number of sums of all classes that take less time than the rows of a piece


@dataclass(frozen=True)
class EventSums(Generic[S]):
    """Base class of accumulators that sum F quantities of the events over K cells, such as bins."""

    mode: Mode  # definition of the events: "positive", "top_label", "classwise" or a `TopK`

    @property
    @abstractmethod
    def n_cells(self) -> int:
        """Number of cells K."""

    @property
    @abstractmethod
    def n_quantities(self) -> int:
        """Number of quantities F."""

    @abstractmethod
    def cell(self, confidence: Tensor) -> Tensor:
        """Return the cell index for each confidence, int64 `(..., N)`."""

    @abstractmethod
    def quantities(self, events: Events) -> Sequence[Tensor]:
        """Return the unweighted summands of each event, one tensor `(..., N)` for each quantity."""

    def columns(self, events: Events, p: Predictions) -> list[Tensor]:  # noqa: ARG002
        """Return the weighted summands of each event, one tensor `(..., N)` for each quantity."""
        return [weighted(x, events.weights, x.dtype) for x in self.quantities(events)]

    def events(self, p: Predictions) -> Events:
        """Convert predictions to events."""
        return reduce_to_events(p, self.mode)

    @abstractmethod
    def wrap(self, sums: Tensor) -> S:
        """Convert sums `(..., F, K)` to the statistic of the metric, for example `BinStats`."""

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape of the sums: `(F, K)`, or `(C, F, K)` for class-wise events."""
        return (*mode_shape(self.mode, task, num_classes), self.n_quantities, self.n_cells)

    def from_predictions(self, p: Predictions) -> S:
        """Return the sums over all events, with leading axes for replicate weights."""
        events = self.events(p)
        if not p.replicates or events.weights is None:
            return self.of_events(events, p)
        quantities = self.quantities(events)
        finite = events.ecd is None  # the entropic calibration difference (ECD) may be infinite
        return self.wrap(
            sums_of_replicates(self.cell(events.confidence), quantities, events.weights, self.n_cells, finite=finite)
        )

    @abstractmethod
    def of_events(self, events: Events, p: Predictions) -> S:
        """Return the sums over events, which must not have replicate weights."""

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """Range of each quantity, by which saved sums are checked."""

    def cells(self, p: Predictions) -> EventCells:
        """Return the cell index and the weighted summands of each event."""
        events = self.events(p)
        return EventCells(self.cell(events.confidence), torch.stack(self.columns(events, p), -2), self.n_cells)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate: max(N, F K) per batch element and class."""
        n = max(1, p.samples[-1])
        return n_events(p, self.mode) // n * max(n, self.n_quantities * self.n_cells)

    def _wide(self, events: Events) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(events.confidence.device)
        return events.confidence.to(wide), events.outcome.to(wide)


@dataclass(frozen=True)
class EqualWidthBins(EventSums[BinStats]):
    """Accumulator for sums over equal-width bins of the confidence; see `ops.segments.bin_index` for the edges."""

    n_bins: int  # number of bins B
    right: bool  # whether bins are `(a, b]` instead of `[a, b)`
    with_ecd: bool = False  # whether to sum the entropic calibration difference (ECD)
    with_noise: bool = False  # whether to add the four sums of the noise; see `BinStats`

    @property
    def n_cells(self) -> int:
        """Number of bins B."""
        return self.n_bins

    @property
    def n_quantities(self) -> int:
        """Number of quantities: 3, plus 4 for the noise and 1 for the ECD."""
        return 3 + 4 * self.with_noise + self.with_ecd

    @property
    def ranges(self) -> Ranges:
        """Ranges of the quantities of `BinStats`. Noise and squared weights depend on the unit of floating weights."""
        noise = ((0, 0.25), (0, math.inf), (0, math.inf), (0, 1)) if self.with_noise else ()
        ecd = ((-math.inf, math.inf),) if self.with_ecd else ()
        return ((1, 1), (0, 1), (0, 1), *noise, *ecd)

    @property
    def only_confidences(self) -> bool:
        """Whether events need no statistics of rows except confidence and top class; see `pieces.detail_of`."""
        return not self.with_ecd

    def cell(self, confidence: Tensor) -> Tensor:
        """Return the bin index for each confidence, int64 `(..., N)`."""
        return bin_index(confidence, self.n_bins, self.right)

    def quantities(self, events: Events) -> list[Tensor]:
        """Return the unweighted summands of each event: 1, confidence, outcome and, if requested, the ECD."""
        quantities = [torch.ones_like(events.confidence), events.confidence, events.outcome]
        return quantities if events.ecd is None else [*quantities, events.ecd]

    def columns(self, events: Events, p: Predictions) -> list[Tensor]:
        """Return the weighted summands of each event, in the order of `BinStats`."""
        bins = Bins(self.n_bins, self.right, kind_of_noise(p, self.with_noise), p.copies)
        return weighted_columns(events.confidence, events.outcome, events.weights, events.ecd, bins)

    def events(self, p: Predictions) -> Events:
        """Convert predictions to events, with the ECD if requested."""
        return reduce_to_events(p, self.mode, self.with_ecd)

    def from_predictions(self, p: Predictions) -> BinStats:
        """Return the sums over all events, with leading axes for replicate weights."""
        if p.replicates:
            return self._of_replicates(p)
        if self.mode != "classwise" or p.task != "multiclass" or p.soft or self.with_ecd:
            return self.of_events(reduce_to_events(p, self.mode, self.with_ecd), p)
        sums = class_bins(  # a single pass over the rows computes the sums for all classes
            p.input_preds, p.input_target, p.weights, p.rows, n_bins=self.n_bins, right=self.right, copies=p.copies,
            from_logits=p.from_logits, noise=self.with_noise,
        )  # fmt: skip
        return self._bin_stats(p, sums)

    def _of_replicates(self, p: Predictions) -> BinStats:
        if not self.with_noise:
            return super().from_predictions(p)
        events = self.events(p)  # no metric uses the variances of replicates, but the state contains them
        return self._bin_stats(p, bin_sums(self.cell(events.confidence), self.columns(events, p), self.n_bins), events)

    def of_events(self, events: Events, p: Predictions, groups: Tensor | None = None, n_groups: int = 1) -> BinStats:
        """Return the sums over events, which must not have replicate weights. One pass computes all of them.

        With `groups` in [0, G), int64 with the shape of the events, they have a leading axis of groups.
        """
        sums = event_bins(
            events.confidence, events.outcome, events.weights, events.ecd, n_bins=self.n_bins, right=self.right,
            noise=kind_of_noise(p, self.with_noise), copies=p.copies, groups=groups, n_groups=n_groups,
        )  # fmt: skip
        return self._bin_stats(p, sums if groups is None else sums.movedim(-3, 0), events, groups, n_groups)

    def demand(self, task: Task, copies: bool) -> "Demand | None":
        """Return the sums of a batch of labels on an accelerator; None if `ops.batch` has other ones."""
        modes = ("positive", "top_label") if task == "binary" else ("top_label",)
        if type(self) is not EqualWidthBins or self.with_ecd or self.mode not in modes:
            return None  # a subclass may have other sums
        from torchcalib.ops.batch.formula import BinRule, Demand

        noise = ((3, 3, 0, 4) if copies else (3, 5, 6, 4)) if self.with_noise else ()
        return Demand(BinRule(self.n_bins, self.right, self.mode == "top_label"), (0, 1, 2, *noise))

    def takes_pieces(self, task: Task, from_logits: bool) -> bool:
        """Return whether `add_piece` can replace `from_predictions` for labels; see `core.pieces`."""
        is_own = type(self) is EqualWidthBins and not self.with_ecd  # a subclass may have other sums
        if task == "binary":
            # The sigmoid of torch rounds differently, and a probability of a calibrator can be the edge of a bin.
            return is_own and self.mode == "positive" and not from_logits
        return is_own and task == "multiclass" and self.mode in ("top_label", "classwise")

    @cached_property
    def _bins_of_labels(self) -> tuple[Bins, Bins]:
        """Options of the sums without and with weights that count copies."""
        noise: Noise = "labels" if self.with_noise else "none"
        return Bins(self.n_bins, self.right, noise, False), Bins(self.n_bins, self.right, noise, True)

    def add_piece(self, piece: Piece, sums: Any) -> bool:
        """Add the events of a piece to the numpy array `sums` in place: `(F, G * B)`, or `(C, F, B)` for all classes.

        Return False for invalid events. Sums of several classes may then be incomplete.
        """
        bins = self._bins_of_labels[piece.copies]
        if self.mode != "classwise":
            source: Any = source_of("events", "cpu", torch.float64, piece.n_values, "auto")
            columns = piece.confidence, piece.outcome, piece.weights, piece.groups
            is_added: bool = source.add_labelled(*columns, bins, sums, ignored=piece.ignored)
            return is_added
        if piece.has_columns:
            source = source_of("events", "cpu", torch.float64, piece.n_values, "auto")
            columns = piece.label, piece.weights, None, bins
            return all(
                source.add_labelled(piece.values[:, k], *columns, of_class, k, len(sums), piece.ignored)
                for k, of_class in enumerate(sums)
            )
        if piece.groups is not None or sums.size > _MAX_CLASS_SUMS:
            return False
        tensors: list[Any] = [
            None if x is None else torch.from_numpy(x)
            for x in (piece.rows, piece.label, piece.weights, piece.top, piece.confidence)
        ]
        sums += class_sums("auto", *tensors, piece.from_logits, bins).numpy()  # type: ignore[call-arg]  # 5 tensors
        return True

    def of_groups(self, p: Predictions, groups: Tensor, num_groups: int) -> BinStats:
        """Return the sums `(G, ..., F, B)` over the events in each group, for predictions without replicate weights.

        `groups` are indices in [0, G), int64 `(..., N)`, multi-label `(..., 1, N)`.
        """
        events = self.events(p)
        groups = groups if groups.dim() == events.confidence.dim() else groups.unsqueeze(-2)
        return self.of_events(events, p, groups, num_groups)

    def _bin_stats(
        self,
        p: Predictions,
        sums: Tensor,
        events: Events | None = None,
        groups: Tensor | None = None,
        n_groups: int = 1,
    ) -> BinStats:
        noise_flag = noise_flag_of(p, sums, events, groups, n_groups) if self.with_noise else None
        return BinStats(sums, has_noise=self.with_noise, noise_flag=noise_flag)

    def wrap(self, sums: Tensor) -> BinStats:
        """Convert sums `(..., F, B)` to `BinStats`."""
        return BinStats(sums, has_noise=self.with_noise)


@dataclass(frozen=True)
class AllClassBins(EqualWidthBins):
    """Accumulator for sums over bins of the probabilities of all classes: each sample has one event for each class.

    A binary prediction has the classes y=0 and y=1. The mode only determines the axis of the labels of a multi-label
    task.
    """

    @property
    def ranges(self) -> Ranges:
        """Ranges of the quantities of `BinStats`, for a weight that is divided by the number of classes."""
        return ((1, 1), *[(0, math.inf)] * (self.n_quantities - 1))

    def events(self, p: Predictions) -> Events:
        """Return the events of all classes `(..., N * C)`. Those of a sample are adjacent."""
        if p.task == "multiclass":
            confidence, outcome = p.probs, reduce_to_events(p, "classwise").outcome.transpose(-1, -2)
        else:
            confidence = torch.stack((p.not_probs, p.probs), -1)
            outcome = torch.stack((1 - p.target, p.target), -1)
        weights = None if p.weights is None else p.weights.repeat_interleave(confidence.shape[-1], -1)
        return Events(confidence.flatten(-2), outcome.flatten(-2), weights)

    def from_predictions(self, p: Predictions) -> BinStats:
        """Return the sums over all events, with leading axes for replicate weights."""
        if isinstance(p.input_preds, LinearLogits) and not p.replicates:
            return self._bin_stats(p, self._of_rows(p, p.input_preds).sum(-3))
        if p.replicates or p.task != "multiclass" or p.soft:
            return EventSums.from_predictions(self, p)
        sums = class_bins(
            p.input_preds, p.input_target, p.weights, p.rows, n_bins=self.n_bins, right=self.right, copies=p.copies,
            from_logits=p.from_logits,
        )  # fmt: skip
        return self._bin_stats(p, sums.sum(-3))

    def of_groups(self, p: Predictions, groups: Tensor, num_groups: int) -> BinStats:
        """Return the sums `(G, ..., F, B)` over the events in each group; see `EqualWidthBins.of_groups`."""
        if isinstance(p.input_preds, LinearLogits):
            sums = cell_sums(groups, self._of_rows(p, p.input_preds).flatten(-2).transpose(-1, -2), num_groups)
            sums = sums.movedim(-1, 0)
            return self._bin_stats(p, sums.reshape(*sums.shape[:-1], self.n_quantities, self.n_bins))
        return super().of_groups(p, groups.repeat_interleave(p.num_classes, -1), num_groups)

    def _bin_stats(self, p: Predictions, sums: Tensor, *more: Any) -> BinStats:
        """Return the statistic, in which each event counts 1 / C, so that the total is the number of samples."""
        return super()._bin_stats(p, torch.cat((sums[..., :1, :] / p.num_classes, sums[..., 1:, :]), -2), *more)

    def _of_rows(self, p: Predictions, logits: LinearLogits) -> Tensor:
        """Return the weighted sums of each row `(..., N, F, B)`."""
        bins = logits.bins(p.input_target, self.n_bins, self.right, p.zero_weight)
        return weighted(bins, p.weights if p.weights is None else p.weights[..., None, None], bins.dtype)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate."""
        return p.samples.numel() * p.num_classes
