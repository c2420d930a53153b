"""Joint simulation of the labels of a calibrated multi-class model, for errors averaged over classes.

Each row has exactly one label, so outcomes of different classes are dependent. In each replicate, the label of every
row is drawn from its predicted distribution, by inversion of the distribution function. Only the sums of outcomes in
the cells of each class change. The average of a replicate over all classes has the distribution of the average of the
data if the model is calibrated. Its p-value is therefore as exact as that of a single class.

Reference:
    Vaicenavicius et al.: Evaluating model calibration in classification (AISTATS 2019), sec. 5 (consistency
    resampling).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.ranked import RankedSample
from torchcalib.inference.simulation import GAPS_AT_ONCE, BinCells, RunCells
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.logs import wide_dtype

MAX_LABELS = 2**25
"""Largest number of simulated labels, rows times replicates. With more, the p-values of the classes are combined."""

_MAX_ELEMENTS = 2**32  # offset between the random number counters of consecutive batch elements
_MAX_SUMS = 2**24  # simulated sums of outcomes in memory (64 MB); if all fit, they are stored for the next metric
_AT_ONCE = 2**16  # labels that are drawn at a time, which fit in the cache
_MAX_ENTRIES = 2**20  # entries of distribution functions in memory


@dataclass(frozen=True, eq=False)
class LabelRows:
    """Rows of one batch element of a multi-class task."""

    score: Tensor  # probability, or log-odds, of every class (C, N)
    from_logits: bool  # whether `score` contains log-odds
    weights: Tensor | None  # importance of each row, float64 (N,); None for 1. Copies of a row are separate rows
    cell: Callable[[Tensor], Tensor] | None  # from scores to cells (C, n); None finds the cells by `Cells.upper`

    @classmethod
    def from_sample(
        cls, sample: RankedSample, *, copies: bool = True, cell: Callable[[Tensor], Tensor] | None = None
    ) -> list[Self] | None:
        """Return the rows of each batch element of class-wise events `(..., C, N)`.

        It is None if targets are soft, or if `sample` is a sketch. `copies` states that weights count copies of a row.
        """
        n_classes, length = sample.score.shape[-2:]
        n = torch.ones_like(sample.positives) if sample.n is None else sample.n
        n = n.expand(sample.score.shape)
        # A row has one label if all copies of one class, and none of the others, are positive.
        absent = sample.score.isnan().any(-2, keepdim=True)
        is_label = (sample.positives == 0) | (sample.positives == n)
        one = (sample.positives.sum(-2, keepdim=True) == n).all(-2, keepdim=True) & is_label.all(-2, keepdim=True)
        if not bool((one | absent).all()):
            return None
        n_elements = sample.score.shape[:-2].numel()
        columns = (x.reshape(n_elements, n_classes, length) for x in (sample.score, n))
        rows = []
        for score, weight, missing in zip(*columns, absent.reshape(n_elements, length), strict=True):
            present = _in_order(score, weight[0], (~missing).nonzero().squeeze(-1), sample.from_logits)
            weights = None
            if sample.n is not None and copies:
                present = present.repeat_interleave(weight[0, present].long())
            elif sample.n is not None:
                weights = weight[0, present].to(wide_dtype(score.device))
            rows.append(cls(score[:, present], sample.from_logits, weights, cell))
        return rows

    def __len__(self) -> int:
        return self.score.shape[-1]


def _in_order(score: Tensor, weight: Tensor, rows: Tensor, from_logits: bool) -> Tensor:
    """Return the indices `rows` `(n,)`, sorted by a projection of the probabilities `(C, N)`, then by weight `(N,)`.

    Random numbers then do not depend on the order of the rows, for example on batches. Equal rows are exchangeable.
    """
    # Sort by the last key first, because the second sort is stable.
    rows = rows[weight[rows].argsort(stable=True)]
    values = score[:, rows].to(wide_dtype(score.device))
    # The projection sum_c sqrt(c) p_c differs for rows that differ, except by coincidence.
    factors = torch.arange(1, len(score) + 1, dtype=values.dtype, device=values.device).sqrt()
    projection = factors @ (values.sigmoid() if from_logits else values)
    return rows[projection.argsort(stable=True)]


class LabelSimulation:
    """Simulation of R replicates of the labels of all rows of a batch element, in cells `(1, C, K)` of all classes.

    The random number of a row depends on the seed, the replicate, the batch element and the rank of the row only; see
    `_in_order`.
    """

    def __init__(self, cells: BinCells | RunCells, rows: LabelRows, index: int, seed: int, n_replicates: int) -> None:
        self.cells, self.rows, self.index, self.seed, self.n_replicates = cells, rows, index, seed, n_replicates

    def statistics(self) -> Iterator[Any]:
        """Yield the simulated statistic of a part of the replicates `(r, 1, C, ...)`; see `Simulation.statistics`."""
        cells, size = self.cells, self.cells.n.numel()
        for some in torch.split(torch.arange(self.n_replicates, device=cells.n.device), max(1, _MAX_SUMS // size)):
            for outcomes in torch.split(self._outcomes(some), max(1, GAPS_AT_ONCE // size)):
                gaps = (outcomes.to(cells.n.dtype) - cells.expected) / cells.positive_n
                # The cells of a score near an edge may differ by rounding.
                yield cells.with_gaps(gaps.masked_fill(cells.n == 0, 0))

    def _outcomes(self, streams: Tensor) -> Tensor:
        """Return the sums of outcomes `(r, 1, C, K)` in the replicates with indices `streams`, `(r,)`."""
        rows, (_, n_classes, n_cells) = self.rows, self.cells.n.shape
        dtype = torch.int32 if rows.weights is None else rows.weights.dtype
        sums = torch.zeros(len(streams) * n_classes * n_cells, dtype=dtype, device=streams.device)
        for some in torch.split(torch.arange(len(rows), device=streams.device), max(1, _MAX_ENTRIES // n_classes)):
            # Inverse transform sampling: the label is the first class whose distribution function exceeds the word.
            limits, cells = self._limits_and_cells(some)
            weights = None if rows.weights is None else rows.weights[some].unsqueeze(-1)
            counters = self.index * _MAX_ELEMENTS + some
            for chunk in torch.split(
                torch.arange(len(streams), device=some.device), max(1, _AT_ONCE // max(1, len(some)))
            ):
                words = random_words(self.seed, streams[chunk], counters).T.contiguous()
                label = torch.searchsorted(limits, words, right=True)
                # Index in the flat sums (r, C, K): only the cell of the label gets an outcome.
                place = (cells.gather(-1, label) + chunk * (n_classes * n_cells)).flatten()
                added = torch.ones((), dtype=dtype, device=sums.device) if weights is None else weights
                sums.scatter_add_(0, place, added.expand(label.shape).reshape(-1))
        return sums.reshape(len(streams), *self.cells.n.shape)

    def _limits_and_cells(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distribution functions times 2^32, int64 `(n, C - 1)`, and the cells of all classes `(n, C)`."""
        score = self.rows.score[:, rows]
        wide = score.T.to(wide_dtype(score.device))
        cumulative = (wide.sigmoid() if self.rows.from_logits else wide).cumsum(-1)
        limits = (cumulative[:, :-1] / cumulative[:, -1:] * 2**32).long().contiguous()
        n_classes, n_cells = self.cells.n.shape[-2:]
        if self.rows.cell is not None:
            cells = self.rows.cell(score)
        else:
            assert self.cells.upper is not None  # cells of a ranked sample are runs
            cells = torch.searchsorted(self.cells.upper[0].to(score.dtype).contiguous(), score.contiguous())
        cells = cells.clamp(max=n_cells - 1) + n_cells * torch.arange(n_classes, device=cells.device).unsqueeze(-1)
        return limits, cells.T.contiguous()
