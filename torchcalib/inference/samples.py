"""Samples in order as sums whose outcomes can be drawn: short runs of them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.core.ranked import RankedSample, SortedSample
from torchcalib.inference.replicates import Cells
from torchcalib.ops.sorting import end_of_ties, run_index, run_sums

MOST_RUNS = 2**11
RUNS_ON_PATHS = 2**9  # where a sample is read at many steps of a path
_LOG_ODDS_CUTS = [8 * 1.25**k for k in range(21)]  # up to 694, next to where float64 probabilities end
_N_GROUPS = 15  # of neighbouring runs, which deviate alike on the paths that intervals are looked for on


def run_cells(sample: RankedSample, at_most: int = MOST_RUNS, *, stable: bool = False) -> Cells:
    """Return runs of neighbouring scores as cells, each element by itself where they are no more than that.

    Args:
        sample: any.
        at_most: number of runs; elements of equal score are in one, if they are put into runs at all. A sample with a
            log score has some 40 more: a run holds no log-odds beyond 8 that differ by more than a quarter. Otherwise
            the contradiction of a nearly certain prediction would count no more than that of its neighbours.
        stable: elements of equal score are in the order given.
    """
    s = sample.sorted(stable)
    size, length = s.size.unsqueeze(-1), s.score.shape[-1]
    places = torch.arange(1, min(at_most, length) + 1, device=size.device)
    ends = places.minimum(size)
    if length > at_most:  # whether runs are needed is not for the elements that are left out to say
        ends = torch.where(size > at_most, end_of_ties(s.score.detach(), places * size // at_most), ends)
        if sample.log_scored:
            ends = torch.cat((ends, _ends_of_log_odds(s)), -1).sort(-1).values
    n, p = s.counts.to(s.confidence.dtype), s.confidence
    columns = (n, (n * p).masked_fill(~s.counted, 0), s.positives, *s.variances)
    weight, expected, outcomes, spread, noise = (run_sums(column, ends) for column in columns)
    log_odds = _log_odds_of_runs(s, n, ends) if sample.log_scored else None
    return Cells(weight, expected, outcomes, spread, noise, _as_sample, log_odds)


def _log_odds(s: SortedSample) -> Tensor:
    """Return the log-odds of every element `(..., M)` in the dtype of sums; +inf where one is left out."""
    p = s.confidence
    log_odds = s.score.to(p.dtype) if s.from_logits else p.log() - torch.log1p(-p)
    return log_odds.masked_fill(~s.counted, torch.inf)


def _ends_of_log_odds(s: SortedSample) -> Tensor:
    """Return where elements reach each of the cuts, and where those of probability 0 end and those of 1 begin."""
    log_odds = _log_odds(s)
    most = torch.finfo(log_odds.dtype).max
    cuts = [-most, *(-cut for cut in reversed(_LOG_ODDS_CUTS)), *_LOG_ODDS_CUTS, torch.inf]
    places = torch.searchsorted(log_odds, log_odds.new_tensor(cuts).expand(*log_odds.shape[:-1], -1).contiguous())
    return places.minimum(s.size.unsqueeze(-1))


def _log_odds_of_runs(s: SortedSample, n: Tensor, ends: Tensor) -> Tensor:
    """Return log(mean of p) - log(mean of 1 - p) of every run; the greatest of each is taken out of its sum."""
    log_odds, run = _log_odds(s), run_index(ends, s.score.shape[-1]).clamp(max=ends.shape[-1] - 1)
    first = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)

    def log_sum(log_p: Tensor, greatest: Tensor) -> Tensor:
        top = log_p.gather(-1, greatest)
        top = top.masked_fill(top == -torch.inf, 0)
        shares = (n * (log_p - top.gather(-1, run)).exp()).masked_fill(~s.counted, 0)
        return run_sums(shares, ends).log() + top

    of_ones = log_sum(logsigmoid(log_odds), (ends - 1).clamp(min=0))
    of_zeros = log_sum(logsigmoid(-log_odds), first.clamp(max=log_odds.shape[-1] - 1))
    return of_ones - of_zeros


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
    from_logits = cells.log_odds is not None
    score = cells.confidence if cells.log_odds is None else cells.log_odds
    score = score.masked_fill(cells.n == 0, -torch.inf if from_logits else 0).cummax(-1).values
    outcomes = torch.addcmul(cells.expected, cells.n, gaps)
    whole = outcomes.round()
    outcomes = torch.where((outcomes - whole).abs() < 1e-6, whole, outcomes)  # what was drawn as a count is one
    return OrderedSample(score.expand_as(gaps), outcomes, cells.n.expand_as(gaps), from_logits)


def grouped(cells: Cells) -> tuple[Cells, Tensor]:
    """Return groups of neighbouring cells of about equal weight as cells, and the group of every cell `(..., K)`."""
    before = cells.n.cumsum(-1) - cells.n
    total = cells.n.sum(-1, keepdim=True)
    group = (before * _N_GROUPS / total).nan_to_num(0).long().clamp(0, _N_GROUPS - 1)

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:-1], _N_GROUPS)).scatter_add_(-1, group, x)

    return replace(cells, log_odds=None).map(summed), group
