"""The exact two-sided binomial test of one count against one probability, elementwise."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.special.beta import (
    cheaply_known,
    deviation,
    drop,
    in_pieces,
    integral_beyond,
    kind,
    log_kernel,
    mirrored,
    real,
)

TIE = math.log1p(1e-7)  # scipy.stats.binomtest counts outcomes up to 1 + 1e-7 times as probable as the one observed


def _count(name: str, value: Tensor | int, device: torch.device) -> Tensor:
    """Return an int or an integer tensor as float64."""
    whole = not (value.is_floating_point() or value.is_complex()) if isinstance(value, Tensor) else type(value) is int
    if not whole or (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise TypeError(f"`{name}` must be an integer tensor or an int, got {kind(value)}. Counts are whole numbers.")
    return real(name, value, device)


def log_probability(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """Return log P(k) for 0 <= k <= n and 0 < p < 1."""
    none, every = k == 0, k == n
    a, b = k.masked_fill(none | every, 1), (n - k).masked_fill(none | every, 1)
    _, c, d, x = mirrored(a, b, p)
    inside = log_kernel(c, d, x, deviation(c, d, x)) + ((a + b) / a / b).log()
    return torch.where(none, n * torch.log1p(-p), torch.where(every, n * p.log(), inside))


class Tails(NamedTuple):
    """The two tails of a two-sided test, as seen from the side of the observed count: mirrored where k > n p."""

    near: Tensor  # P(as far from n p as k is, on its side)
    far: Tensor  # P(outcomes of the other side that are no more probable than k)
    k: Tensor  # k, or n - k if mirrored
    first: Tensor  # the first outcome of the far side, or n less it; n + 1 if there is none
    log_pmf: Tensor  # log P(k)
    log_ratio: Tensor  # log P(first) / P(k)
    log_odds: Tensor  # log p / (1-p), or its negative


def two_tails(k: Tensor, n: Tensor, p: Tensor) -> Tails:
    """Return both tails for 0 <= k <= n, 0 < p < 1 and k != n p; elsewhere they mean nothing. float64, one shape."""
    mean = n * p  # rounded, as in scipy: it says which side k is on
    flip = k > mean
    log_odds = (p.log() - torch.log1p(-p)) * torch.where(flip, -1.0, 1.0)
    near = torch.where(flip, n - k, k)
    # From `start` on the probabilities fall, so the far side is all outcomes from `first` on. It is searched for with
    # Stirling's formula, in 16 parts at a time: r rounds are enough for 16^r outcomes. The formula's error of 0.07
    # (and, from rounding, 4e-7 at n = 1e8) may cost an outcome, so the probabilities themselves decide among the four
    # around.
    start = torch.where(flip, n - mean.floor(), mean.ceil())
    axis = (-1, *(1 for _ in range(p.dim())))
    parts = torch.arange(1, 16, dtype=torch.float64, device=p.device).reshape(axis) / 16

    def rareness(j: Tensor) -> Tensor:
        up, down = j + 0.5, (n + 0.5) - j
        return torch.xlogy(up, up) + torch.xlogy(down, down) - j * log_odds

    limit = rareness(near) - TIE
    outside, inside = start - 1, n + 1
    for _ in range(4 if cheaply_known((n < 16**4 - 1).all()) else 8):
        j = torch.addcmul(outside, inside - outside, parts).floor()
        rare = (rareness(j) >= limit) & (j > outside)
        outside, inside = torch.where(rare, outside, j).amax(0), torch.where(rare, j, inside).amin(0)
    four = inside + torch.arange(-1, 3, dtype=torch.float64, device=p.device).reshape(axis)
    outcomes = torch.cat((four.clamp(max=n), near.unsqueeze(0)))
    log_pmf = log_probability(torch.where(flip, n - outcomes, outcomes), n, p)
    log_ratio = log_pmf[:4] - log_pmf[4]
    far_side = ((log_ratio <= TIE) & (four >= start)) | (four > n)
    count = far_side.sum(0)
    first = inside + 3 - count
    last = torch.stack((near, first.minimum(n)))  # the outcomes that the tails begin with
    last = torch.where(flip, n - last, last)
    ratio_first = log_ratio.gather(0, (4 - count).clamp(0, 3).unsqueeze(0)).squeeze(0)
    is_upper = torch.stack((flip, ~flip))
    # P(X >= j) = I_p(j, n-j+1), whose kernel is P(j) j (1-p); and P(X <= j) = 1 - I_p(j+1, n-j), with P(j) (n-j) p.
    a = torch.where(is_upper, last, last + 1)
    integral, is_lower = integral_beyond(a, n + 1 - a, p.expand(a.shape))
    log_last = log_pmf[4] + torch.stack((torch.zeros_like(ratio_first), ratio_first))
    kernel = torch.where(is_upper, last * (1 - p), (n - last) * p)
    tail = log_last.exp() * (kernel * integral)
    tail = torch.where(is_lower == is_upper, tail, 1 - tail)
    # A power is given as one: p^n against alpha is where ties happen (0.1^2 and 0.01).
    power = torch.where(flip, p, 1 - p) ** n
    power = torch.where(flip | (p > 0.5), power, torch.exp(n * torch.log1p(-p)))
    return Tails(
        near=torch.where(near == 0, power, tail[0]),
        far=torch.where(first < n, tail[1], torch.where(first == n, log_last[1].exp(), 0.0)),
        k=near,
        first=first,
        log_pmf=log_pmf[4],
        log_ratio=ratio_first,
        log_odds=log_odds,
    )


def tails_at_jump(k: Tensor, n: Tensor, j: Tensor) -> Tails:
    """Return both tails, for 0 <= k < j <= n, at the odds where the far one is about to lose j: P(j) = (1 + 1e-7) P(k).

    float64, of one shape. Those odds have a closed form: P(j) / P(k) is a constant times odds^(j-k). It is taken from
    the probabilities at a p nearby.
    """
    p = (k + j + 1) / (2 * (n + 1))
    log_k, log_j = log_probability(torch.stack((k, j)), n, p).unbind()
    step = (TIE + log_k - log_j) / (j - k)
    log_odds = torch.logit(p) + step
    swap = p > 0.5
    moved = drop(torch.where(swap, -step, step), torch.where(swap, n - k, k), n, torch.where(swap, 1 - p, p))
    # The tails are integrals from the lesser of p and 1-p, for the greater is rounded.
    flip = log_odds > 0
    less, more = torch.stack((-log_odds.abs(), log_odds.abs())).sigmoid().unbind()
    a = torch.stack((k + 1, j))
    b = n + 1 - a
    integral, is_lower = integral_beyond(torch.where(flip, b, a), torch.where(flip, a, b), less.expand(a.shape))
    kernel = torch.stack(((n - k) * torch.where(flip, more, less), j * torch.where(flip, less, more)))
    log_last = log_k + moved + torch.tensor([0.0, TIE], dtype=torch.float64, device=k.device).reshape(2, *[1] * k.dim())
    tail = log_last.exp() * (kernel * integral)
    near_is_lower, far_is_lower = (is_lower ^ flip).unbind()
    return Tails(
        near=torch.where(near_is_lower, 1 - tail[0], tail[0]),
        far=torch.where(far_is_lower, tail[1], 1 - tail[1]),
        k=k,
        first=j,
        log_pmf=log_last[0],
        log_ratio=torch.full_like(k, TIE),
        log_odds=log_odds,
    )


def p_value(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """Return the p-value; float64 of one shape."""
    return in_pieces(_p_value, k, n, p)


def _p_value(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    tails = two_tails(k, n, p)
    value = (tails.near + tails.far).clamp(max=1)
    value = torch.where((p == 0) | (p == 1), 0.0, value).masked_fill(k == n * p, 1)
    return value.where((k >= 0) & (k <= n) & (p >= 0) & (p <= 1), torch.nan)


@torch.no_grad()
def binomial_test(k: Tensor | int, n: Tensor | int, p: Tensor | float) -> Tensor:
    """P-value of the exact two-sided binomial test: how surprising are k successes in n trials if each has chance p.

    The minimum-likelihood test: the sum of the probabilities of all outcomes that are at most 1 + 1e-7 times as
    probable as k, the rule of `scipy.stats.binomtest` (the factor is there to count ties). Its relative error is
    below 1e-12 for n up to 1e8. As a function of p the p-value jumps, and is not monotone on either side of k/n.

    Args:
        k: successes, 0 to n; integer tensor or int.
        n: trials; integer tensor or int. The p-value of no trials is 1.
        p: the chance of success under the hypothesis; floating tensor or float in [0, 1], widened to float64. The
            three are broadcast.

    Returns:
        float64 of the broadcast shape in [0, 1]. NaN where p is NaN or outside [0, 1], or k is not in 0 to n.

    Raises:
        TypeError: if `k` or `n` is not of integers, or `p` is complex.

    Gradient:
        None.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023); the rule
        for outcomes that are nearly as probable is scipy's.

    Example:
        >>> binomial_test(1, 30, torch.tensor([0.0, 1 / 30, 0.170, 0.177]))
        tensor([0.0000, 1.0000, 0.0491, 0.0507], dtype=torch.float64)
    """
    devices = [t.device for t in (p, k, n) if isinstance(t, Tensor)] or [torch.device("cpu")]
    device = devices[0]
    wide = _count("k", k, device), _count("n", n, device), real("p", p, device)
    return p_value(*torch.broadcast_tensors(*wide))  # type: ignore[no-untyped-call]
