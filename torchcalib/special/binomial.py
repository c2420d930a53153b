"""Exact two-sided binomial test of a count against a probability, and its critical values."""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import constant, value_if_available
from torchcalib.ops.segments import run_index
from torchcalib.special.beta import (
    deviation,
    in_pieces,
    integral_beyond,
    is_true_without_sync,
    kind,
    log_integrand,
    log_kernel,
    lower_tail,
    mirrored,
    to_float64,
)

TIE = math.log1p(1e-7)  # outcomes up to 1 + 1e-7 times as probable as k count as ties, as in scipy.stats.binomtest
_MARGIN = 1e-9  # relative safety margin around alpha; rounding errors are about 1e-13
_PIECE = 512  # number of bins processed at a time; intermediate results for more bins would not fit into the CPU cache


def _count(name: str, value: Tensor | int, device: torch.device) -> Tensor:
    """Convert an int or an integer tensor to float64; raise TypeError for other types."""
    whole = not (value.is_floating_point() or value.is_complex()) if isinstance(value, Tensor) else type(value) is int
    if not whole or (isinstance(value, Tensor) and value.dtype == torch.bool):
        advice = f"Convert it with torch.as_tensor({name}).long()."
        raise TypeError(f"`{name}` must be an integer tensor or an int, got {kind(value)}. {advice}")
    return to_float64(name, value, device)


def log_probability(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """Return log P(k), the log-probability of k successes in n trials, for 0 <= k <= n and 0 < p < 1."""
    is_zero, is_full = k == 0, k == n
    a, b = k.masked_fill(is_zero | is_full, 1), (n - k).masked_fill(is_zero | is_full, 1)
    _, c, d, x = mirrored(a, b, p)
    inside = log_kernel(c, d, x, deviation(c, d, x)) + ((a + b) / a / b).log()
    return torch.where(is_zero, n * torch.log1p(-p), torch.where(is_full, n * p.log(), inside))


class Tails(NamedTuple):
    """Both tails of a two-sided binomial test of X. If k > n p, fields are for n - X, n - k and 1 - p instead."""

    near: Tensor  # P(X <= k), the tail that contains k
    far: Tensor  # P(X >= first), the other tail
    k: Tensor  # number of successes
    first: Tensor  # smallest outcome j above n p with P(X = j) <= (1 + 1e-7) P(X = k); n + 1 if there is none
    log_pmf: Tensor  # log P(X = k)
    log_ratio: Tensor  # log P(X = first) - log P(X = k)
    log_odds: Tensor  # log p - log(1 - p)


def two_tails(k: Tensor, n: Tensor, p: Tensor) -> Tails:
    """Return both tails of the test for k successes in n trials, for float64 tensors of one shape.

    The result is undefined unless 0 <= k <= n, 0 < p < 1 and k != n p.
    """
    mean = n * p  # rounded as in scipy, because k can be on the other side of the exact mean
    flip = k > mean
    log_odds = (p.log() - torch.log1p(-p)) * torch.where(flip, -1.0, 1.0)
    near = torch.where(flip, n - k, k)
    # Probabilities decrease from `start` on, so the far tail contains all outcomes from `first` on. Search for `first`
    # by Stirling's formula, and divide the range by 16 in each round. The log of the formula has an error of 0.07, so
    # the result may differ by one outcome. Exact probabilities of four outcomes correct it.
    start = torch.where(flip, n - mean.floor(), mean.ceil())
    axis = (-1, *(1 for _ in range(p.dim())))
    parts = torch.arange(1, 16, dtype=torch.float64, device=p.device).reshape(axis) / 16

    def neg_log_pmf(j: Tensor) -> Tensor:
        up, down = j + 0.5, (n + 0.5) - j
        return torch.xlogy(up, up) + torch.xlogy(down, down) - j * log_odds

    limit = neg_log_pmf(near) - TIE
    outside, inside = start - 1, n + 1
    for _ in range(4 if is_true_without_sync((n < 16**4 - 1).all()) else 8):
        j = torch.addcmul(outside, inside - outside, parts).floor()
        rare = (neg_log_pmf(j) >= limit) & (j > outside)
        outside, inside = torch.where(rare, outside, j).amax(0), torch.where(rare, j, inside).amin(0)
    four = inside + torch.arange(-1, 3, dtype=torch.float64, device=p.device).reshape(axis)
    outcomes = torch.cat((four.clamp(max=n), near.unsqueeze(0)))
    log_pmf = log_probability(torch.where(flip, n - outcomes, outcomes), n, p)
    log_ratio = log_pmf[:4] - log_pmf[4]
    far_side = ((log_ratio <= TIE) & (four >= start)) | (four > n)
    count = far_side.sum(0)
    first = inside + 3 - count
    bound = torch.stack((near, first.minimum(n)))  # the innermost outcome of each tail
    bound = torch.where(flip, n - bound, bound)  # undo the mirroring
    ratio_first = log_ratio.gather(0, (4 - count).clamp(0, 3).unsqueeze(0)).squeeze(0)
    is_upper = torch.stack((flip, ~flip))
    # With I_p the regularised incomplete beta function and K = x^a (1-x)^b / B(a, b) at x = p:
    # P(X >= j) = I_p(j, n-j+1), where K = P(j) j (1-p).
    # P(X <= j) = 1 - I_p(j+1, n-j), where K = P(j) (n-j) p.
    a = torch.where(is_upper, bound, bound + 1)
    integral, is_lower = integral_beyond(a, n + 1 - a, p.expand(a.shape))
    log_bound = log_pmf[4] + torch.stack((torch.zeros_like(ratio_first), ratio_first))
    kernel = torch.where(is_upper, bound * (1 - p), (n - bound) * p)
    tail = log_bound.exp() * (kernel * integral)
    tail = torch.where(is_lower == is_upper, tail, 1 - tail)
    # For k = n and k = 0 the tail is p^n or (1-p)^n. A power can equal alpha exactly, for example 0.1^2 = 0.01.
    power = torch.where(flip, p, 1 - p) ** n
    power = torch.where(flip | (p > 0.5), power, torch.exp(n * torch.log1p(-p)))
    near_tail = torch.where(near == 0, power, tail[0])
    far_tail = torch.where(first < n, tail[1], torch.where(first == n, log_bound[1].exp(), 0.0))
    return Tails(near_tail, far_tail, near, first, log_pmf[4], ratio_first, log_odds)


def tails_at_jump(k: Tensor, n: Tensor, j: Tensor) -> Tails:
    """Return both tails at the p with P(j) = (1 + 1e-7) P(k), above which the far tail excludes j; 0 <= k < j <= n.

    The arguments are float64 tensors of one shape. P(j) / P(k) is a constant times odds^(j-k). P(j) and P(k) at any p
    determine the constant, and therefore the odds.
    """
    p = (k + j + 1) / (2 * (n + 1))  # any p is valid; a value near the result limits rounding errors
    log_k, log_j = log_probability(torch.stack((k, j)), n, p).unbind()
    step = (TIE + log_k - log_j) / (j - k)
    log_odds = torch.logit(p) + step
    swap = p > 0.5
    moved = log_integrand(torch.where(swap, -step, step), torch.where(swap, n - k, k), n, torch.where(swap, 1 - p, p))
    # Integrate from the smaller of p and 1-p, which has the smaller rounding error.
    flip = log_odds > 0
    less, more = torch.stack((-log_odds.abs(), log_odds.abs())).sigmoid().unbind()
    a = torch.stack((k + 1, j))
    b = n + 1 - a
    integral, is_lower = integral_beyond(torch.where(flip, b, a), torch.where(flip, a, b), less.expand(a.shape))
    kernel = torch.stack(((n - k) * torch.where(flip, more, less), j * torch.where(flip, less, more)))
    ratio = constant([0.0, TIE], torch.float64, k.device).reshape(2, *[1] * k.dim())
    log_bound = log_k + moved + ratio
    tail = log_bound.exp() * (kernel * integral)
    near_is_lower, far_is_lower = (is_lower ^ flip).unbind()
    near = torch.where(near_is_lower, 1 - tail[0], tail[0])
    far = torch.where(far_is_lower, tail[1], 1 - tail[1])
    return Tails(near, far, k, j, log_bound[0], torch.full_like(k, TIE), log_odds)


def p_value(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """Return the p-value of `binomial_test` for float64 tensors of one shape."""
    return in_pieces(_p_value, k, n, p)


def _p_value(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    tails = two_tails(k, n, p)
    value = (tails.near + tails.far).clamp(max=1)
    value = torch.where((p == 0) | (p == 1), 0.0, value).masked_fill(k == n * p, 1)
    return value.where((k >= 0) & (k <= n) & (p >= 0) & (p <= 1), torch.nan)


@torch.no_grad()
def binomial_test(k: Tensor | int, n: Tensor | int, p: Tensor | float) -> Tensor:
    """Return the p-value of the exact two-sided binomial test for k successes in n trials with probability p.

    The p-value is the sum of P(j) over all outcomes j with P(j) <= (1 + 1e-7) P(k) (minimum-likelihood test). The
    factor includes ties despite rounding errors, as in `scipy.stats.binomtest`. The relative error is below 1e-12 for n
    up to 1e8. As a function of p, the p-value has jumps and is not monotone on either side of k/n.

    Args:
        k: number of successes, from 0 to n; integer tensor or int.
        n: number of trials; integer tensor or int. With n = 0 the p-value is 1.
        p: probability of success under the null hypothesis; floating tensor or float in [0, 1], converted to float64.
            The three arguments are broadcast.

    Returns:
        P-values in [0, 1], float64 with the broadcast shape. NaN if p is NaN or outside [0, 1], or k is not in 0 to n.

    Raises:
        TypeError: if `k` or `n` does not contain integers, or `p` is complex.

    Gradient:
        None.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), with the rule for
        ties from scipy.

    Example:
        >>> import torch
        >>> from torchcalib.special import binomial_test
        >>> binomial_test(1, 30, torch.tensor([0.0, 1 / 30, 0.170, 0.177]))
        tensor([0.0000, 1.0000, 0.0491, 0.0507], dtype=torch.float64)
    """
    devices = [t.device for t in (p, k, n) if isinstance(t, Tensor)] or [torch.device("cpu")]
    device = devices[0]
    wide = _count("k", k, device), _count("n", n, device), to_float64("p", p, device)
    return p_value(*torch.broadcast_tensors(*wide))  # type: ignore[no-untyped-call]


def critical_values(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return four ascending critical values of p `(4, ...)`, which decide most tests `binomial_test(k, n, p) <= alpha`.

    p is rejected up to the first value and from the fourth value on. It is accepted from the second to the third value.
    All ranges are closed. For other p the test must be computed.

    Notation. Let p > k/n; the other side is its mirror image. Let b_j = P(j) and c = 1 + 1e-7. Let J(p) be the first
    outcome from n p on with b_J <= c b_k. The p-value is V(p) = F(p) + S_J(p), with F = P(X <= k) and S_j = P(X >= j).
    b_j / b_k is a constant times odds^(j-k), so J does not decrease with p: J = j up to the point p_j where
    b_j = c b_k, which has a closed form. Between p_(J-1) and p_J the p-value is smooth. At p_J it jumps down by b_J, to
    F + S_(J+1). It may increase between jumps, so there is no single critical value. Two bounds are used.

    Acceptance. Let p' be between k/n and p, and J = J(p). Then V(p') >= F(p') + S_J(p') =: G(p'). The derivative of G
    is n (P(J-1) - P(k)), with probabilities for n - 1 trials. Their ratio is a constant times odds^(J-1-k), so G
    decreases to a minimum at a known t and increases afterwards. If t >= p, then V(p') >= G(p') >= G(p) = V(p).
    Otherwise G' increases from t to p, because both probabilities are beyond their maxima (which is checked). Hence
    V(p') >= G(t) >= V(p) - (p-t) G'(p). If this is above alpha, all p' from k/n to p are accepted.

    Rejection. F decreases with p, and S_J(p_J) does not increase with J, as follows. With l = log odds, the derivative
    of S_j in l is j (1-p) b_j. Between p_(j-1) and p_j, b_j = c b_k exp((j-k) (l-l_j)), and b_k (1-p) decreases because
    p > k/n. Let m = j-k. The increase of S_j from p to p_j is therefore at most j (1-p) (c b_k - b_j) / m, evaluated
    at p. At p = p_(j-1), c b_k = b_(j-1) and j (1-p) b_j = (n-j+1) p b_(j-1). There the bound is
    b_(j-1) (j - (n+1) p) / m. It is less than b_(j-1) because (n+1) p > k. The jump subtracts b_(j-1):
    S_j(p_j) <= S_j(p_(j-1)) + b_(j-1) = S_(j-1)(p_(j-1)). Between two jumps, G decreases and then increases. It is at
    most the larger of its values at the two ends. Hence

        V(p) + j (1-p) (c b_k - b_j) / m <= alpha with j = J(p) rejects all p' >= p. At p_j it is V(p_j) <= alpha.
        F(p_j) + S_(j+1)(p_j) <= alpha and V(p_(j+1)) <= alpha reject all p' > p_j.

    This requires that the p_j increase and that J takes the value j, which is checked at one j: (n+1) p_j < j implies
    b_(j-1) > b_j there. The check is l_j < s_(j-1), with s_j = log((j+1)/(n-j)). l_(j+1) is the mean of l_j with weight
    m and s_j with weight 1. The check therefore also holds for j+1, and l_(j+1) > l_j.

    Algorithm. Both bounds are evaluated at four adjacent jumps around the estimated last jump from a value above alpha.
    Usually this jump separates acceptance and rejection, and only p within 1e-9 of it must be tested. Otherwise p
    between two jumps, a range of about 1/(2n) or more, must be tested.
    """
    k, n = torch.broadcast_tensors(k.double(), n.double())  # type: ignore[no-untyped-call]
    pieces = zip(torch.split(k.reshape(-1), _PIECE), torch.split(n.reshape(-1), _PIECE), strict=True)
    return torch.cat([_critical_values(*piece, alpha) for piece in pieces], -1).reshape(4, *k.shape)


def _critical_values(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the critical values `(4, B)` for counts `(B,)`."""
    fraction = k / n
    # Mirror the lower side: p < k/n is equivalent to 1-p > (n-k)/n. If k = n, there is no p above k/n.
    k, n = torch.stack((k, n - k)), n.expand(2, -1)
    is_full = k == n
    k, n = k.masked_fill(is_full, 0), n.masked_fill(is_full, 1)
    # Step 1: select four adjacent jumps around the estimated last jump with a p-value above alpha.
    window = torch.arange(-1, 3, dtype=torch.float64, device=k.device).reshape(-1, 1, 1)
    j = (_estimate_jump(k, n, alpha) + window).maximum(k + 1).minimum(n)
    k, n = k.expand(j.shape), n.expand(j.shape)
    # Step 2: compute both bounds at each jump, and for p just above it.
    tails = tails_at_jump(k, n, j)
    accepts, rejects = decide_ranges(tails, n, alpha)
    next_rejects = torch.cat((rejects[1:] & (j[1:] == j[:-1] + 1), torch.zeros_like(rejects[:1]))) | (j == n)
    after = tails.near + tails.far - (tails.log_pmf + TIE).exp()  # p-value above the jump, lower by P(j) = c P(k)
    rejects_after = next_rejects & (after <= alpha * (1 - _MARGIN) - 1e-12)
    band = _MARGIN / (j - k) + 1e-14  # log odds within this distance of the jump may be rounded to its other side
    known_to = torch.where(accepts, tails.log_odds - band, -torch.inf).amax(0)
    known_from = torch.where(rejects_after, tails.log_odds + band, torch.inf)
    known_from = torch.where(rejects, tails.log_odds, torch.inf).minimum(known_from).amin(0)
    # Step 3: convert log odds to p, rounded towards the decided side. At p = 0 and p = 1 the p-value is 1 if p = k/n,
    # and otherwise 0.
    sign = constant([[1.0], [-1.0]], torch.float64, k.device)
    limit = (sign + 1) / 2
    accepted = (sign * known_to).sigmoid() * (1 - sign * 4e-16)
    accepted = torch.where(is_full, limit, torch.where(known_to == -torch.inf, fraction, accepted))
    rejected = ((sign * known_from).sigmoid() * (1 + sign * 4e-16)).clamp(max=1)
    rejected = torch.where(is_full, sign * torch.inf, rejected)
    return torch.stack((rejected[1], accepted[1], accepted[0], rejected[0]))


def _estimate_jump(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return an estimate of the last j with V(p_j) > alpha, as in `critical_values`; it may be outside k + 1 to n."""
    z = NormalDist().inv_cdf(alpha / 2)
    limit = (k + z * z / 2 - z * (z * z / 4 + k - k * k / n).sqrt()) / (n + z * z)  # Wilson (1927)
    stretch = constant([0.8, 1.0, 1.25], torch.float64, k.device).reshape(-1, 1, 1)
    j = (k + 2 * (n * limit - k) * stretch).round().maximum(k + 1).minimum(n)
    # Evaluate V at three jumps around the Wilson limit: p from Stirling's formula, tails from the normal approximation
    # of Peizer and Pratt (1968). The normal deviate of V is nearly linear in j, so one secant step is sufficient.
    up, down = torch.stack((j, k.expand(j.shape))) + 0.5, (n + 0.5) - torch.stack((j, k.expand(j.shape)))
    log_terms = torch.xlogy(up, up) + torch.xlogy(down, down)
    log_odds = (log_terms[0] - log_terms[1]) / (j - k)
    p, q = log_odds.sigmoid(), (-log_odds).sigmoid()
    last = torch.stack((k.expand(j.shape), j - 1))
    up, down = last + 0.5, (n - 0.5) - last
    deviance = torch.xlogy(up, up / (n * p)) + torch.xlogy(down, down / (n * q))
    d = last + 2 / 3 - (n + 1 / 3) * p + 0.02 * (q / (last + 1) - p / (n - last) + (q - 0.5) / (n + 1))
    deviate = d / (up - n * p).abs() * (2 / (1 + 1 / (6 * n)) * deviance).sqrt()
    value = torch.special.ndtr(torch.stack((deviate[0], -deviate[1]))).sum(0)
    y = torch.special.ndtri((value / 2).clamp(1e-300, 0.5))
    at = ((y > z).sum(0) - 1).clamp(0, 1).unsqueeze(0)
    (j0, y0), (j1, y1) = (torch.stack((j, y)).gather(1, (at + i).expand(2, 1, *at.shape[1:]))[:, 0] for i in (0, 1))
    return torch.where(j1 > j0, j0 + (z - y0) * (j1 - j0) / (y1 - y0), j0).nan_to_num(0.0).floor()


def decide_ranges(tails: Tails, n: Tensor, alpha: float, rejected_from: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return two masks `(...)`: whether the test accepts all p' from k/n to p, and whether it rejects all p' from p on.

    A False mask means unknown. `critical_values` contains the derivation. `rejected_from` are log odds beyond which all
    p are rejected; None if unknown.
    """
    k, first, log_odds = tails.k, tails.first, tails.log_odds
    p, q, pmf = log_odds.sigmoid(), (-log_odds).sigmoid(), tails.log_pmf.exp()
    value = tails.near + tails.far
    no_far_tail = first > n  # the p-value is F, which decreases with p
    count = first - k  # m = J - k
    end = log_odds + (TIE - tails.log_ratio) / count  # log odds of the next jump p_J
    in_turn = no_far_tail | ((n + 1) * end.sigmoid() < first)  # check that the p_j increase
    # Acceptance: G has its minimum at t = turn. For t < p, its value is at least V(p) - (p-t) G'(p).
    excess = tails.log_ratio + (first / (n - k)).log() - log_odds  # log of the ratio P(J-1) / P(k) in G'
    turn = (log_odds - excess / (count - 1)).sigmoid()
    falls = no_far_tail | (excess <= 0) | (count == 1)  # t >= p; if J = k+1, then G = 1
    convex = ((n - 1) * turn >= k) & ((n - 1) * p <= first - 1)  # check that G' increases from t to p
    dip = (p - turn) * pmf * (n - k) / q * excess.expm1()
    accepts = in_turn & (falls | convex) & (value - torch.where(falls, 0.0, dip) > alpha * (1 + _MARGIN))
    # Rejection: S_J increases by at most j (1-p) (c b_k - b_j) / m up to the next jump.
    rise = first * q * pmf * (math.exp(TIE) - tails.log_ratio.exp()).clamp(min=0) / count
    if rejected_from is not None:
        # Half of the margin covers rounding errors. Jumps to V > alpha are a full margin below `rejected_from`.
        no_far_tail = no_far_tail | (end >= rejected_from - _MARGIN / count / 2)
    rejects = in_turn & (value + torch.where(no_far_tail, 0.0, rise) <= alpha * (1 - _MARGIN))
    return accepts, rejects


_SMALL = 511  # largest number of samples in a bin for which critical values are cached on the CPU


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
    """Return the `critical_values` `(4, B)`, computed once for equal counts, which replicates often have."""
    largest = int(n.max())
    if largest <= _SMALL and n.is_cpu:
        index, cached = n * (n + 1) // 2 + k, _cache(alpha)
        missing = cached[0].index_select(0, index).isnan().nonzero().squeeze(1)
        if len(missing):
            new, of_new = torch.unique(index.index_select(0, missing), return_inverse=True)
            which = torch.empty_like(new).scatter(0, of_new, missing)  # one bin for each pair
            found = critical_values(k[which], n[which], alpha)
            cached[1:, new], cached[0, new] = found[1:], found[0]  # the tested row last, because of other threads
        return cached.index_select(1, index)
    if largest >= 2**31 - 1:  # the pair (n, k) does not fit into one int64
        return critical_values(k, n, alpha)
    unique, index = torch.unique(n * (largest + 1) + k, return_inverse=True)
    return critical_values(unique % (largest + 1), unique // (largest + 1), alpha)[:, index]


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # the cache is filled in place, also outside of inference mode
def _cache(alpha: float) -> Tensor:  # noqa: ARG001
    """Return the cache of `critical_values` for counts up to `_SMALL`, `(4, K)`; NaN if they are not yet computed.

    The index of (n, k) is n (n + 1) / 2 + k.
    """
    size = (_SMALL + 1) * (_SMALL + 2) // 2
    return torch.full((4, size), torch.nan, dtype=torch.float64, device="cpu")


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
