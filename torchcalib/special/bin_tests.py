"""Number of samples in each bin whose probability a test rejects: the binomial test and Student's t-test of [TCE]."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.sorting import run_index
from torchcalib.special.beta import in_pieces, lower_tail
from torchcalib.special.binomial import critical_values, p_value, two_tails, verdicts

_SMALL = 127  # samples of a bin up to which all critical values are cached
_OFTEN = 1000  # bins from which on the cache is used: 200 batch elements of 300 samples take half the time


@torch.no_grad()
def rejected_in_bins(
    p: Tensor, ends: Tensor, k: Tensor, n: Tensor, alpha: float, counts: Tensor | None = None
) -> Tensor:
    """Return how many samples of each bin have `binomial_test(k, n, p) <= alpha`.

    Every decision is that of the test, but most follow from the `critical_values` of the bin. Samples are sorted, so
    that a binary search for each critical value counts them. The test is computed only for samples between critical
    values, once for each different p. If values are not available (`torch.compile`, `vmap`), every sample is tested.

    Args:
        p: probabilities in ascending order, float32 or float64 `(..., M)`. NaN comes last, beyond the last end.
        ends: int64 `(..., B)`; bin b is the elements from `ends[b-1]` (0 for the first) to `ends[b]`, exclusive. Bins
            may be empty.
        k: successes of every bin, int64 `(..., B)`.
        n: trials of every bin, int64 `(..., B)`; with weights there are more than elements.
        alpha: significance level of the test, in (0, 1).
        counts: number of samples of each element, int64 `(..., M)`; None for one.

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
        p = p.nan_to_num(nan=torch.inf)  # NaN is last, but compares false in a binary search
    # Flatten the bins with samples.
    held = (ends > starts).reshape(-1).nonzero().squeeze(1)
    n_samples, n_bins = p.shape[-1], ends.shape[-1]
    begin = held // n_bins * n_samples  # start of the row of a bin in the flattened samples
    k, n, start, end = (t.reshape(-1).index_select(0, held) for t in (k, n, starts, ends))
    low, kept_from, kept_to, high = _unique_critical_values(k, n, alpha)
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
    """Return the result of `rejected_in_bins` without access to values."""
    index = run_index(ends, p.shape[-1])
    owner = index.clamp(max=ends.shape[-1] - 1)
    rejected = p_value(k.gather(-1, owner).double(), n.gather(-1, owner).double(), p.double()) <= alpha
    rejected = rejected & (index < ends.shape[-1])
    weight = rejected.long() if counts is None else rejected * counts
    return torch.zeros_like(ends).scatter_add(-1, owner, weight)


def _unique_critical_values(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the `critical_values` of bins `(B,)`, `(4, B)`. Replicates of a sample have many equal bins."""
    largest = int(n.max())
    if largest <= _SMALL and len(n) >= _OFTEN:
        return _small_critical_values(alpha).to(n.device)[:, n * (n + 1) // 2 + k]
    if largest >= 2**31 - 1:  # n and k do not fit into one int64
        return critical_values(k, n, alpha)
    unique, index = torch.unique(n * (largest + 1) + k, return_inverse=True)
    return critical_values(unique % (largest + 1), unique // (largest + 1), alpha)[:, index]


@lru_cache(maxsize=4)
def _small_critical_values(alpha: float) -> Tensor:
    """Return the `critical_values` of all 0 <= k <= n <= 127, with the pair at n (n + 1) / 2 + k, `(4, K)`."""
    k, n = torch.tensor([(k, n) for n in range(_SMALL + 1) for k in range(n + 1)]).T
    return critical_values(k, n, alpha)


def _number_up_to(p: Tensor, limits: Tensor) -> Tensor:
    """Return how many elements of each ascending row of p are at most the float64 limits."""
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
    """Return the decision for each p in its bin. Equal p of a bin are neighbours and are tested once."""
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
    """Narrow the gaps `(B, 2)` by the verdicts at seven samples of each, while that is cheaper than tests.

    `rejected (B, 2)` are the critical values from which on the test rejects; k and n are `(B,)`. With few outcomes in
    large bins, as for rare events, gaps hold many samples.
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


def t_critical(df: Tensor, alpha: float) -> Tensor:
    """Return t with P(|T| >= t) = alpha for Student's distribution with `df >= 1` degrees of freedom; float64.

    Newton's method for log P as a function of log t, which is nearly linear in the tails. It starts from the first two
    terms of the expansion of t in 1/df.
    """
    z = torch.special.ndtri(torch.tensor(1 - alpha / 2, dtype=torch.float64, device=df.device))
    t = z * (1 + (z * z + 1) / (4 * df)) + 1e-3
    log_density_at_0 = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (df * math.pi).log()
    for _ in range(30):
        tail = in_pieces(lower_tail, df / 2, torch.full_like(df, 0.5), df / (df + t * t))
        density = (log_density_at_0 - (df + 1) / 2 * torch.log1p(t * t / df)).exp()
        t = t * ((tail.log() - math.log(alpha)) * tail / (2 * density * t)).exp()
    critical: Tensor = t
    return critical


def t_interval(k: Tensor, n: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the ends of the open interval of p that a two-sided t-test of k ones among n labels accepts.

    Equal labels have no variance and accept only p equal to them. One label, or none, accepts every p.
    """
    several = n > 1
    n = n.masked_fill(~several, 2).double()
    mean = k.double() / n
    deviation = (mean * (1 - mean) / (n - 1)).clamp(min=0).sqrt()
    half = t_critical(n - 1, alpha) * deviation
    # The ends are exclusive: move them by one unit in the last place.
    low, high = mean - half, mean + half
    tiny = torch.full_like(mean, math.inf)
    low = torch.where(half > 0, low.nextafter(tiny), mean)
    high = torch.where(half > 0, high.nextafter(-tiny), mean)
    return low.masked_fill(~several, -math.inf), high.masked_fill(~several, math.inf)
