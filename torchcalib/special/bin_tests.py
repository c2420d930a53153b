"""Decisions of the two-sided test for whole bins of sorted samples, at the price of a few binary searches."""

from functools import lru_cache

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.special.binomial import p_value, two_tails
from torchcalib.special.critical import critical_values, verdicts

_SMALL = 127  # samples of a bin, up to which all critical values are held
_OFTEN = 1000  # bins, from which on it is worth to have them all


@torch.no_grad()
def rejected_in_bins(
    p: Tensor, ends: Tensor, k: Tensor, n: Tensor, alpha: float, counts: Tensor | None = None
) -> Tensor:
    """How many samples of each bin the test of their probability rejects: `binomial_test(k, n, p) <= alpha`.

    Every decision is that of the test. But for most it is known from `critical_values` of the bin, and as the samples
    are sorted, a binary search for each of these counts them. The test itself is made only for samples in the gaps
    between critical values, once for each different p. Where values cannot be looked at (`torch.compile`, `vmap`)
    every sample is tested.

    Args:
        p: probabilities in ascending order, float32 or float64 `(..., M)`. NaN comes last, beyond the last end.
        ends: int64 `(..., B)`; bin b is the elements from `ends[b-1]` (0 for the first) up to, and without, `ends[b]`.
            Bins may be empty.
        k: successes of every bin, int64 `(..., B)`.
        n: trials of every bin, int64 `(..., B)`; with weights more than the bin has elements.
        alpha: level of the test, in (0, 1).
        counts: how many samples each element stands for, int64 `(..., M)`; None for one.

    Returns:
        int64 `(..., B)`; 0 for an empty bin.

    Gradient:
        None.
    """
    starts = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
    seen = look((ends > starts).any())
    if seen is None:
        return _by_testing_all(p, ends, k, n, alpha, counts)
    result = torch.zeros(ends.numel(), dtype=torch.int64, device=p.device)
    if not seen:
        return result.reshape(ends.shape)
    if look(p[..., -1].isnan().any()):
        p = p.nan_to_num(nan=torch.inf)  # a binary search does not expect NaN to be great
    # One row of the bins that hold something, for all rows of samples.
    held = (ends > starts).reshape(-1).nonzero().squeeze(1)
    n_samples, n_bins = p.shape[-1], ends.shape[-1]
    begin = held // n_bins * n_samples  # where a bin's row begins, in all rows laid end to end
    k, n, start, end = (t.reshape(-1).index_select(0, held) for t in (k, n, starts, ends))
    low, kept_from, kept_to, high = _of_each_once(k, n, alpha)
    below = torch.full_like(low, -torch.inf)
    limits = torch.stack((low, kept_from.nextafter(below), kept_to, high.nextafter(below)), -1)
    every_limit = torch.zeros(ends.numel(), 4, dtype=torch.float64, device=p.device).index_copy(0, held, limits)
    place = _number_up_to(p, every_limit.reshape(*p.shape[:-1], 4 * n_bins)).reshape(-1, 4).index_select(0, held)
    place = place.maximum(start.unsqueeze(1)).minimum(end.unsqueeze(1)) + begin.unsqueeze(1)
    p = p.reshape(-1)
    # The gaps (bins, sides): below k/n from rejected to kept, above it from kept to rejected.
    k, n = k.double(), n.double()
    first, last = _narrowed(p, place[:, ::2], place[:, 1::2], k, n, alpha, torch.stack((low, high), -1))
    sample, owner = _in_gaps(first, last)
    rejected = _tested(p.index_select(0, sample), owner, k, n, alpha).long()
    sure = torch.stack((start + begin, first[:, 0], last[:, 1], end + begin))
    if counts is not None:
        counts = counts.reshape(-1)
        sure = torch.cat((counts.new_zeros(1), counts.cumsum(0)))[sure]
        rejected = rejected * counts.index_select(0, sample)
    total = (sure[1] - sure[0] + sure[3] - sure[2]).index_add(0, owner, rejected)
    return result.index_copy(0, held, total).reshape(ends.shape)


def _by_testing_all(p: Tensor, ends: Tensor, k: Tensor, n: Tensor, alpha: float, counts: Tensor | None) -> Tensor:
    """Return what `rejected_in_bins` does, without a look at values."""
    index = torch.zeros_like(p, dtype=torch.int64)
    index = torch.cat((index, index[..., :1]), -1).scatter_add(-1, ends, torch.ones_like(ends)).cumsum(-1)[..., :-1]
    owner = index.clamp(max=ends.shape[-1] - 1)
    rejected = p_value(k.gather(-1, owner).double(), n.gather(-1, owner).double(), p.double()) <= alpha
    rejected = rejected & (index < ends.shape[-1])
    weight = rejected.long() if counts is None else rejected * counts
    return torch.zeros_like(ends).scatter_add(-1, owner, weight)


def _of_each_once(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the `critical_values` of bins `(B,)`, B > 0, as `(4, B)`, found once for all that are alike.

    Among replicates of a sample many are.
    """
    largest = int(n.max())
    if largest <= _SMALL and len(n) >= _OFTEN:
        return _of_small_bins(alpha).to(n.device)[:, n * (n + 1) // 2 + k]
    if largest >= 2**31 - 1:  # n and k do not fit into one int64
        return torch.stack(critical_values(k, n, alpha))
    alike, which = torch.unique(n * (largest + 1) + k, return_inverse=True)
    return torch.stack(critical_values(alike % (largest + 1), alike // (largest + 1), alpha))[:, which]


@lru_cache(maxsize=4)
def _of_small_bins(alpha: float) -> Tensor:
    """Return the `critical_values` of all 0 <= k <= n <= `_SMALL`, `(4, K)`: each pair at n (n + 1) / 2 + k."""
    n = torch.repeat_interleave(torch.arange(_SMALL + 1), torch.arange(_SMALL + 1) + 1)
    k = torch.arange(len(n)) - n * (n + 1) // 2
    return torch.stack(critical_values(k, n, alpha))


def _number_up_to(p: Tensor, limits: Tensor) -> Tensor:
    """Return how many elements of each ascending row of p are at most the limits, of float64."""
    if p.dtype != limits.dtype:
        near = limits.to(p.dtype)
        limits = torch.where(near > limits, near.nextafter(torch.full_like(near, -torch.inf)), near)
    return torch.searchsorted(p.contiguous(), limits, right=True)


def _in_gaps(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of all samples in the gaps, both (B, 2), and their bins."""
    size = (last - first).reshape(-1)
    gap = torch.repeat_interleave(size)
    shift = first.reshape(-1) - size.cumsum(0) + size
    return torch.arange(len(gap), device=gap.device) + shift.index_select(0, gap), gap // 2


def _tested(p: Tensor, owner: Tensor, k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the decision for each p against its bin, where equal ones of a bin are neighbours."""
    if not len(p):
        return torch.zeros_like(owner, dtype=torch.bool)
    fresh = torch.cat((torch.ones_like(owner[:1]), (p[1:] != p[:-1]) | (owner[1:] != owner[:-1])))
    case = fresh.nonzero().squeeze(1)
    place = owner.index_select(0, case)
    decision = p_value(k.index_select(0, place), n.index_select(0, place), p.index_select(0, case).double()) <= alpha
    return decision.index_select(0, fresh.cumsum(0) - 1)


def _narrowed(
    p: Tensor, first: Tensor, last: Tensor, k: Tensor, n: Tensor, alpha: float, rejected: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gaps without the samples that a verdict over seven among them decides, while that is cheaper than tests.

    All are (B, 2), but for k and n, (B). `rejected` are the critical values from which on the test rejects.
    """
    parts = torch.arange(1, 8, device=p.device).reshape(-1, 1)
    before, unsure = -1, int((last - first).sum())
    while 1000 < unsure != before:
        wide = (last - first > 16).nonzero(as_tuple=True)
        if unsure < 1000 + 16 * len(wide[0]):
            break
        low, high, bin_, sign = first[wide], last[wide], wide[0], 2.0 * wide[1] - 1
        place = low + (high - low) * parts // 8
        x = p[place].double()
        successes, trials = k[bin_].expand(x.shape), n[bin_].expand(x.shape)
        from_log_odds = sign * torch.logit(rejected[wide])
        keeps, rejects = verdicts(two_tails(successes, trials, x), trials, alpha, from_log_odds)
        valid = (x > 0) & (x < 1) & (sign * (trials * x - successes) > 0)
        keeps, rejects = keeps & valid, rejects & valid
        up = sign > 0
        low_side, high_side = torch.where(up, keeps, rejects), torch.where(up, rejects, keeps)
        first = first.index_put(wide, torch.where(low_side, place + 1, low).amax(0))
        last = last.index_put(wide, torch.where(high_side, place, high).amin(0))
        before, unsure = unsure, int((last - first).sum())
    return first, last
