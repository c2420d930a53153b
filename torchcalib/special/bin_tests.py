"""Binomial tests and t-tests of predicted probabilities against the outcomes in their bin.

[TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023).
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from torchcalib.ops.host_values import constant, value_if_available
from torchcalib.ops.sorting import run_index
from torchcalib.special.beta import in_pieces, lower_tail
from torchcalib.special.binomial import critical_values, decide_ranges, p_value, two_tails

_SMALL = 127  # largest number of samples in a bin for which critical values are cached
_MIN_BINS = 1000  # smallest number of bins for which the cache is used


@torch.no_grad()
def rejected_in_bins(
    p: Tensor, ends: Tensor, k: Tensor, n: Tensor, alpha: float, counts: Tensor | None = None
) -> Tensor:
    """Return the number of samples in each bin for which `binomial_test(k, n, p) <= alpha`, int64 `(..., B)`.

    The result is exact. Most decisions follow from the `critical_values` of the bin, by binary search in the sorted
    samples. The test is computed only for samples between critical values, once for each different p. Under
    `torch.compile` and `vmap`, where values cannot be read, every sample is tested.

    Probabilities `p` `(..., M)` ascend, with NaN after the last bin. Bin b has the elements from `ends[b-1]` (0 for the
    first bin) up to and excluding `ends[b]`, and may be empty. It has `k` successes in `n` trials; with frequency
    weights, `n` exceeds the number of elements. Each element represents `counts` `(..., M)` samples.
    """
    starts = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
    any_nan = value_if_available(p[..., -1:].isnan().any())
    if any_nan is None:
        return count_rejected(p_value, p, ends, k, n, alpha, counts)
    if any_nan:
        p = p.nan_to_num(nan=torch.inf)  # binary search fails with NaN, because all its comparisons are False
    # Step 1: flatten the bins and remove empty ones.
    result = torch.zeros(ends.numel(), dtype=torch.int64, device=p.device)
    occupied = (ends > starts).reshape(-1).nonzero().squeeze(1)
    if not len(occupied):
        return result.reshape(ends.shape)
    n_samples, n_bins = p.shape[-1], ends.shape[-1]
    offset = occupied // n_bins * n_samples  # start of the batch element of a bin in the flattened samples
    k, n, start, end = (t.reshape(-1).index_select(0, occupied) for t in (k, n, starts, ends))
    # Step 2: find the positions of the critical values among the samples.
    low, accepted_from, accepted_to, high = _unique_critical_values(k, n, alpha)
    below = torch.full_like(low, -torch.inf)
    limits = torch.stack((low, accepted_from.nextafter(below), accepted_to, high.nextafter(below)), -1)
    all_limits = torch.zeros(ends.numel(), 4, dtype=torch.float64, device=p.device).index_copy(0, occupied, limits)
    position = _count_up_to(p, all_limits.reshape(*p.shape[:-1], 4 * n_bins)).reshape(-1, 4).index_select(0, occupied)
    position = position.maximum(start.unsqueeze(1)).minimum(end.unsqueeze(1)) + offset.unsqueeze(1)
    p = p.reshape(-1)
    # Step 3: test the undecided samples. Each bin has two gaps (B, 2) between rejected and accepted samples, one below
    # k/n and one above it.
    k, n = k.double(), n.double()
    first, last = _narrow_gaps(p, position[:, ::2], position[:, 1::2], k, n, alpha, torch.stack((low, high), -1))
    sample, owner = _samples_in_gaps(first, last)
    rejected = _test_samples(p.index_select(0, sample), owner, k, n, alpha).long()
    # Step 4: add the rejected samples below the first gap and above the second gap.
    borders = torch.stack((start + offset, first[:, 0], last[:, 1], end + offset))
    if counts is not None:
        counts = counts.reshape(-1)
        borders = torch.cat((counts.new_zeros(1), counts.cumsum(0)))[borders]
        rejected = rejected * counts.index_select(0, sample)
    total = (borders[1] - borders[0] + borders[3] - borders[2]).index_add(0, owner, rejected)
    return result.index_copy(0, occupied, total).reshape(ends.shape)


@torch.no_grad()
def count_rejected(
    test: Callable[[Tensor, Tensor, Tensor], Tensor],
    p: Tensor,
    ends: Tensor,
    k: Tensor,
    n: Tensor,
    alpha: float,
    counts: Tensor | None,
) -> Tensor:
    """Return the number of rejected samples in each bin, int64 `(..., B)`, by testing every sample.

    `test` maps successes, trials and probabilities, all float64 `(..., M)`, to p-values. The other arguments are those
    of `rejected_in_bins`. No branch depends on values.
    """
    index = run_index(ends, p.shape[-1])
    ignored = index >= ends.shape[-1]  # these elements have no bin; the test gets valid values
    owner = index.clamp(max=ends.shape[-1] - 1)
    successes = k.gather(-1, owner).masked_fill(ignored, 0).double()
    trials = n.gather(-1, owner).masked_fill(ignored, 1).double()
    rejected = (test(successes, trials, p.double().masked_fill(ignored, 0.5)) <= alpha) & ~ignored
    weight = rejected.long() if counts is None else rejected * counts
    return torch.zeros_like(ends).scatter_add(-1, owner, weight)


def _unique_critical_values(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the `critical_values` `(4, B)`, computed once for equal counts, which bootstrap replicates often have."""
    largest = int(n.max())
    if largest <= _SMALL and len(n) >= _MIN_BINS:
        return _small_critical_values(alpha).to(n.device)[:, n * (n + 1) // 2 + k]
    if largest >= 2**31 - 1:  # the pair (n, k) does not fit into one int64
        return critical_values(k, n, alpha)
    unique, index = torch.unique(n * (largest + 1) + k, return_inverse=True)
    return critical_values(unique % (largest + 1), unique // (largest + 1), alpha)[:, index]


@lru_cache(maxsize=4)
def _small_critical_values(alpha: float) -> Tensor:
    """Return the `critical_values` for all 0 <= k <= n <= 127, `(4, K)`. The index of (n, k) is n (n + 1) / 2 + k."""
    k, n = torch.tensor([(k, n) for n in range(_SMALL + 1) for k in range(n + 1)]).T
    return critical_values(k, n, alpha)


def _count_up_to(p: Tensor, limits: Tensor) -> Tensor:
    """Return, for each float64 limit, the number of elements of the ascending row of `p` that are at most the limit."""
    if p.dtype != limits.dtype:  # limits rounded down to the dtype of p give the same results as comparison in float64
        near = limits.to(p.dtype)
        limits = torch.where(near > limits, near.nextafter(torch.full_like(near, -torch.inf)), near)
    return torch.searchsorted(p.contiguous(), limits, right=True)


def _samples_in_gaps(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions and bin indices of all samples in the half-open gaps from `first` to `last`, each `(B, 2)`."""
    size = (last - first).reshape(-1)
    gap = torch.repeat_interleave(size)
    shift = first.reshape(-1) - size.cumsum(0) + size
    return torch.arange(len(gap), device=gap.device) + shift.index_select(0, gap), gap // 2


def _test_samples(p: Tensor, owner: Tensor, k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return whether the test rejects each `p` in bin `owner`, once for equal values, which are adjacent."""
    if not len(p):
        return torch.zeros_like(owner, dtype=torch.bool)
    is_new = torch.cat((torch.ones_like(owner[:1]), (p[1:] != p[:-1]) | (owner[1:] != owner[:-1])))
    unique = is_new.nonzero().squeeze(1)
    bin_ = owner.index_select(0, unique)
    decision = p_value(k.index_select(0, bin_), n.index_select(0, bin_), p.index_select(0, unique).double()) <= alpha
    return decision.index_select(0, is_new.cumsum(0) - 1)


def _narrow_gaps(
    p: Tensor, first: Tensor, last: Tensor, k: Tensor, n: Tensor, alpha: float, rejected: Tensor
) -> tuple[Tensor, Tensor]:
    """Narrow the gaps by `decide_ranges` at seven samples in each gap, repeated while this is cheaper than tests.

    For rare events, gaps contain many samples. A gap is a half-open range of positions in the flattened `p`, from
    `first` to `last`, each `(B, 2)`. `rejected` are the critical values at its rejected end, `(B, 2)`.
    """
    parts = torch.arange(1, 8, device=p.device).reshape(-1, 1)
    previous, undecided = -1, int((last - first).sum())
    while 1000 < undecided != previous:
        wide = (last - first > 16).nonzero(as_tuple=True)
        if undecided < 1000 + 16 * len(wide[0]):
            break
        low, high, bin_, sign = first[wide], last[wide], wide[0], 2.0 * wide[1] - 1
        position = low + (high - low) * parts // 8
        x = p[position].double()
        successes, trials = k[bin_].expand(x.shape), n[bin_].expand(x.shape)
        from_log_odds = sign * torch.logit(rejected[wide])
        accepts, rejects = decide_ranges(two_tails(successes, trials, x), trials, alpha, from_log_odds)
        valid = (x > 0) & (x < 1) & (sign * (trials * x - successes) > 0)
        accepts, rejects = accepts & valid, rejects & valid
        up = sign > 0
        low_side, high_side = torch.where(up, accepts, rejects), torch.where(up, rejects, accepts)
        first = first.index_put(wide, torch.where(low_side, position + 1, low).amax(0))
        last = last.index_put(wide, torch.where(high_side, position, high).amin(0))
        previous, undecided = undecided, int((last - first).sum())
    return first, last


def t_critical(df: Tensor, alpha: float) -> Tensor:
    """Return the two-sided critical value t of Student's t-distribution, P(|T| >= t) = alpha, for `df` >= 1 in float64.

    Newton's method solves for log t, because log P is a nearly linear function of log t in the tails. The initial value
    is the expansion of t in 1/df up to the second term. From there, three steps reach a relative error of 1e-10 for all
    degrees of freedom and alpha up to 0.5. Eight leave a margin.
    """
    z = torch.special.ndtri(constant(1 - alpha / 2, torch.float64, df.device))
    t = z * (1 + (z * z + 1) / (4 * df)) + 1e-3
    log_density_at_0 = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (df * math.pi).log()
    for _ in range(8):
        tail = in_pieces(lower_tail, df / 2, torch.full_like(df, 0.5), df / (df + t * t))
        density = (log_density_at_0 - (df + 1) / 2 * torch.log1p(t * t / df)).exp()
        t = t * ((tail.log() - math.log(alpha)) * tail / (2 * density * t)).exp()
    critical: Tensor = t
    return critical


def t_interval(k: Tensor, n: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the ends of the closed interval of means p that a two-sided t-test accepts for k positive labels among n.

    If all labels are equal, their variance is 0 and only p = k/n is accepted. For n <= 1 every p is accepted.
    """
    several = n > 1
    n = n.masked_fill(~several, 2).double()
    mean = k.double() / n
    deviation = (mean * (1 - mean) / (n - 1)).clamp(min=0).sqrt()
    half = t_critical(n - 1, alpha) * deviation
    # The test rejects p at the exact ends. Move both ends inwards to the next floats.
    low, high = mean - half, mean + half
    infinity = torch.full_like(mean, math.inf)
    low = torch.where(half > 0, low.nextafter(infinity), mean)
    high = torch.where(half > 0, high.nextafter(-infinity), mean)
    return low.masked_fill(~several, -math.inf), high.masked_fill(~several, math.inf)
