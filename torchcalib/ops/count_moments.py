"""Quantiles of a Poisson binomial variable (successes in independent trials), from its mean and variance."""

import math

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available

_TABLES = ((1.0, 32), (2.5, 64), (7.5, 128))
"""Tables of the probability mass function: largest standard deviation, and number of entries.

A table covers at least 8 standard deviations on either side of the mean. The probability outside the table is below
2^-32, the resolution of the random numbers, even for a Poisson variable. Above the largest standard deviation the
Cornish-Fisher expansion is accurate enough.
"""

_MAX_DEVIATION, _MAX_ITEMSIZE = _TABLES[-1]
_IN_CACHE = 2**15  # table entries computed together on the CPU, so that they stay in the cache


def effective_weight(spread: Tensor, noise: Tensor) -> Tensor:
    """Return the effective weight of one independent outcome in every bin, `noise / spread`, `(..., K)`.

    It is 1 without weights, and below 1 if an outcome is the mean over several annotators. For a bin without noise, it
    is computed from the sums over all bins. For the arguments see `deviation_quantiles`.
    """
    overall = noise.sum(-1, keepdim=True) / spread.sum(-1, keepdim=True)
    overall = torch.where((overall > 0) & overall.isfinite(), overall, torch.ones_like(overall))
    unit = noise / spread
    return torch.where((unit > 0) & unit.isfinite(), unit, overall)


def deviation_quantiles(chance: Tensor, n: Tensor, expected: Tensor, spread: Tensor, noise: Tensor) -> Tensor:
    """Return quantiles of the standardised sum of outcomes in every bin, under perfect calibration.

    Args:
        chance: quantile levels in (0, 1), `(R, ..., K)`.
        n: total weight of every bin, `(..., K)`.
        expected: sum of w p in every bin, `(..., K)`.
        spread: sum of w p (1 - p) in every bin, `(..., K)`.
        noise: variance of the sum of outcomes in every bin, `(..., K)`.

    Returns:
        (quantile - expected) / standard deviation, `(R, ..., K)`; the normal quantile for a bin without noise.
    """
    unit = effective_weight(spread, noise)
    ones, zeros = expected / unit, (n - expected) / unit
    rarer = torch.minimum(ones, zeros).clamp(min=0)
    variance = torch.minimum(noise / unit.square(), rarer)
    # Model the count of the rarer outcome, as `count_quantiles` requires. More zeros mean fewer ones: flip the sign.
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(rarer)
    counts = count_quantiles(0.5 + sign * (chance - 0.5), rarer, variance)
    deviation = (counts - rarer).mul_(sign / variance.sqrt())
    if value_if_available((variance > 0).all()):
        return deviation
    return torch.where(variance > 0, deviation, torch.special.ndtri(chance))


def count_quantiles(chance: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return quantiles of the number of successes in independent trials with probabilities p.

    The distribution is approximated by the binomial distribution of equal mean and variance. It has
    n = (sum p)^2 / sum p^2 trials. The approximation is exact if all p are equal. If n is not an integer, a mixture of
    the binomial distributions for the two neighbouring integers has the same moments.

    Args:
        chance: quantile levels in (0, 1), `(R, ...)`.
        mean: sum of p, at least 0, `(...)`. If it exceeds half of the trials, count failures instead.
        variance: sum of p (1 - p), at most the mean, `(...)`.

    Returns:
        Whole numbers as float64, `(R, ...)`, increasing with `chance`; the mean where the variance is 0 or NaN.

    Reference:
        Ehm: Binomial approximation to the Poisson binomial distribution (Statistics and Probability Letters, 1991).
        Cornish, Fisher: Moments and cumulants in the specification of distributions (1938), for large variances.
    """
    # Reading values to choose a table would synchronise a GPU, and is impossible under `vmap`: use the largest table.
    if mean.device.type != "cpu" or value_if_available((variance > 0).any()) is None:
        return _counts(chance, mean, variance, _MAX_ITEMSIZE)
    shape = chance.shape
    chance, mean, variance = chance.flatten(1), mean.flatten(), variance.flatten()
    counts, deviation = mean.expand(chance.shape).clone(), variance.sqrt()
    lower_limit = 0.0
    for limit, width in (*_TABLES, (math.inf, 1)):  # above the last limit only the expansion is used
        in_table = ((deviation > lower_limit) & (deviation <= limit)).nonzero().squeeze(-1)
        for batch in torch.split(in_table, max(1, _IN_CACHE // max(width, len(chance)))):
            counts[:, batch] = _counts(chance[:, batch], mean[batch], variance[batch], width)
        lower_limit = limit
    return counts.reshape(shape)


def _counts(chance: Tensor, mean: Tensor, variance: Tensor, width: int) -> Tensor:
    """Implement `count_quantiles`, using a table of `width` entries for standard deviations up to `_MAX_DEVIATION`."""
    square = (mean - variance).clamp(min=0)  # sum p^2
    n = (mean.square() / square.masked_fill(square == 0, torch.finfo(mean.dtype).tiny)).clamp(max=2.0**52)
    fewer = torch.maximum(n.floor(), mean.ceil()).clamp(min=1)
    more = fewer + 1
    # Mixture weights: the variance is linear in 1 / n, so interpolate 1 / n between 1 / more and 1 / fewer.
    share_of_more = ((1 / fewer - 1 / n) * fewer * more).clamp(0, 1)
    first = (mean - width // 2).floor().clamp(min=0)
    cells = first.unsqueeze(-1) + torch.arange(width, device=mean.device)
    share_of_more = share_of_more.unsqueeze(-1)
    pmf = (1 - share_of_more) * _binomial(cells, fewer, mean) + share_of_more * _binomial(cells, more, mean)
    # Invert the cumulative distribution function, by binary search in the table.
    cumulative = pmf.cumsum(-1).nan_to_num(1)
    place = torch.searchsorted(cumulative, chance.movedim(0, -1).contiguous()).movedim(-1, 0)
    counts = first + place.clamp(max=width - 1).to(mean.dtype)
    deviation = variance.sqrt()
    if value_if_available((deviation > _MAX_DEVIATION).any()) is not False:
        expanded = mean + deviation * _cornish_fisher(chance, skewness=(1 - 2 * mean / n) / deviation)
        counts = torch.where(deviation > _MAX_DEVIATION, expanded.round().clamp(min=0), counts)
    return torch.where(variance > 0, counts, mean)


def _binomial(counts: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Return the binomial probabilities of consecutive counts `(..., K)`, normalised to sum 1."""
    n = n.unsqueeze(-1)
    odds = (mean.unsqueeze(-1) / (n - mean.unsqueeze(-1))).log()
    # Sum the recurrence P(k + 1) = P(k) * odds * (n - k) / (k + 1) in logarithms, which cannot underflow.
    steps = ((n - counts) / (counts + 1)).clamp(min=0).log() + odds
    logs = torch.cat((torch.zeros_like(steps[..., :1]), steps[..., :-1].cumsum(-1)), -1)
    return logs.nan_to_num(nan=-math.inf).softmax(-1)


def _cornish_fisher(chance: Tensor, skewness: Tensor) -> Tensor:
    """Return the quantile of a standardised variable by the Cornish-Fisher expansion of order 2."""
    z: Tensor = torch.special.ndtri(chance)
    return z + skewness * (z.square() - 1) / 6 - skewness.square() * (2 * z.square() - 5) * z / 36
