"""Samples in order as sums whose outcomes can be drawn: short runs of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcalib.consistency.replicates import Cells
from torchcalib.kernels.ranking import end_of_ties, run_sums
from torchcalib.samples import RankedSample, SortedSample

MOST_RUNS = 2**11
RUNS_ON_PATHS = 2**9  # where a sample is read at many steps of a path
_N_GROUPS = 15  # of neighbouring runs, which deviate alike on the paths that intervals are looked for on


def run_cells(sample: RankedSample, at_most: int = MOST_RUNS, *, stable: bool = False) -> Cells:
    """Return runs of neighbouring scores as cells, each element by itself where they are no more than that.

    Args:
        sample: any.
        at_most: number of runs; elements of equal score are in one, if they are put into runs at all.
        stable: elements of equal score are in the order given.
    """
    s = sample.sorted(stable)
    size, length = s.size.unsqueeze(-1), s.score.shape[-1]
    places = torch.arange(1, min(at_most, length) + 1, device=size.device)
    ends = places.minimum(size)
    if length > at_most:  # whether runs are needed is not for the elements that are left out to say
        ends = torch.where(size > at_most, end_of_ties(s.score.detach(), places * size // at_most), ends)
    n, p = s.counts.to(s.confidence.dtype), s.confidence
    columns = (n, (n * p).masked_fill(~s.counted, 0), s.positives, *s.variances)
    weight, expected, outcomes, spread, noise = (run_sums(column, ends) for column in columns)
    return Cells(weight, expected, outcomes, spread, noise, _as_sample)


@dataclass(frozen=True, eq=False)
class OrderedSample(RankedSample):
    """A sample of which the elements are in order already; those that stand for none may be anywhere."""

    def sorted(self, stable: bool = False) -> SortedSample:  # noqa: ARG002 - they are
        """Return the elements as they are."""
        assert self.n is not None
        size = torch.full(self.score.shape[:-1], self.score.shape[-1], device=self.score.device)
        return SortedSample(self.score.contiguous(), self.positives, self.n, size, self.from_logits)


def _as_sample(cells: Cells, gaps: Tensor) -> OrderedSample:
    """Return runs as samples at their mean score. One that ties have left empty has the score of the one before it."""
    score = cells.confidence.masked_fill(cells.n == 0, 0).cummax(-1).values
    outcomes = torch.addcmul(cells.expected, cells.n, gaps)
    whole = outcomes.round()
    outcomes = torch.where((outcomes - whole).abs() < 1e-6, whole, outcomes)  # what was drawn as a count is one
    return OrderedSample(score.expand_as(gaps), outcomes, cells.n.expand_as(gaps), False)


def grouped(cells: Cells) -> tuple[Cells, Tensor]:
    """Return groups of neighbouring cells of about equal weight as cells, and the group of every cell `(..., K)`."""
    before = cells.n.cumsum(-1) - cells.n
    total = cells.n.sum(-1, keepdim=True)
    group = (before * _N_GROUPS / total).nan_to_num(0).long().clamp(0, _N_GROUPS - 1)

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:-1], _N_GROUPS)).scatter_add_(-1, group, x)

    return cells.map(summed), group
