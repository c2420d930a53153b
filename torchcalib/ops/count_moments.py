"""Quantiles of the number of successes of independent trials (Poisson binomial), from its mean and variance."""

import math

import torch
from torch import Tensor

from torchcalib.ops.host_values import look

_TABLES = ((1.0, 32), (2.5, 64), (7.5, 128))
"""Largest standard deviation and number of probabilities of each size of table. A table covers at least 8 deviations on
either side of the mean: even a Poisson variable has less probability beyond than 32 random bits resolve. Above the
largest deviation the distribution is smooth, and an expansion is exact enough."""

_MOST_DEVIATION, _WIDEST = _TABLES[-1]
_IN_CACHE = 2**15  # entries of the tables of a piece on a CPU: new memory costs more than the arithmetic


def unit_of(spread: Tensor, noise: Tensor) -> Tensor:
    """Return the weight of one independent row in every cell `(..., K)`; see `BinStats` for both sums.

    It is 1 without weights, and less if an outcome is the share of several annotators. A cell without noise has the
    unit of all cells of the series.
    """
    of_all = noise.sum(-1, keepdim=True) / spread.sum(-1, keepdim=True)
    of_all = torch.where((of_all > 0) & of_all.isfinite(), of_all, torch.ones_like(of_all))
    unit = noise / spread
    return torch.where((unit > 0) & unit.isfinite(), unit, of_all)


def deviations_by_chance(chance: Tensor, n: Tensor, expected: Tensor, spread: Tensor, noise: Tensor) -> Tensor:
    """Return quantiles of the standardised sums of outcomes under perfect calibration.

    Args:
        chance: probabilities in (0, 1), `(R, ..., K)`.
        n: weight `(..., K)`.
        expected: sum of confidences.
        spread: see `BinStats`.
        noise: see `BinStats`.

    Returns:
        Deviations from the expectation in standard deviations, `(R, ..., K)`; normal quantiles without noise.
    """
    unit = unit_of(spread, noise)
    ones, zeros = expected / unit, (n - expected) / unit
    few = torch.minimum(ones, zeros).clamp(min=0)
    variance = torch.minimum(noise / unit.square(), few)
    # Count the rarer outcome: more zeros are fewer ones.
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(few)
    counts = counts_by_chance(0.5 + sign * (chance - 0.5), few, variance)
    deviation = (counts - few).mul_(sign / variance.sqrt())
    if look((variance > 0).all()):
        return deviation
    return torch.where(variance > 0, deviation, torch.special.ndtri(chance))


def counts_by_chance(chance: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the quantiles at `chance` of a number of successes.

    The number of successes of independent trials with probabilities p is close to a binomial variable of the same
    mean and variance, with n = (sum p)^2 / sum p^2 trials, and equals it if all p are equal. If n is not an integer,
    a mixture of the binomial variables of the two neighbouring integers keeps both moments.

    Args:
        chance: in (0, 1), `(R, ...)`.
        mean: sum of p, at least 0, `(...)`. It should be at most half of the trials: count failures otherwise.
        variance: sum of p (1 - p), at most the mean, `(...)`.

    Returns:
        Integers as float64 `(R, ...)`, increasing with `chance`; the mean where the variance is 0 or NaN.

    Source:
        Ehm: Binomial approximation to the Poisson binomial distribution (Statistics and Probability Letters, 1991).
        Cornish, Fisher: Moments and cumulants in the specification of distributions (1938), for large variances.
    """
    if mean.device.type != "cpu" or look((variance > 0).any()) is None:  # values cannot be read back to choose tables
        return _counts(chance, mean, variance, _WIDEST)
    shape = chance.shape
    chance, mean, variance = chance.flatten(1), mean.flatten(), variance.flatten()
    counts, deviation = mean.expand(chance.shape).clone(), variance.sqrt()
    above = 0.0
    for up_to, width in (*_TABLES, (math.inf, 1)):  # the last uses the expansion, without a table
        here = ((deviation > above) & (deviation <= up_to)).nonzero().squeeze(-1)
        for some in torch.split(here, max(1, _IN_CACHE // max(width, len(chance)))):
            counts[:, some] = _counts(chance[:, some], mean[some], variance[some], width)
        above = up_to
    return counts.reshape(shape)


def _counts(chance: Tensor, mean: Tensor, variance: Tensor, width: int) -> Tensor:
    """See `counts_by_chance`; up to `_MOST_DEVIATION` from tables of `width` probabilities."""
    square = (mean - variance).clamp(min=0)  # sum p^2
    n = (mean.square() / square.masked_fill(square == 0, torch.finfo(mean.dtype).tiny)).clamp(max=2.0**52)
    fewer = torch.maximum(n.floor(), mean.ceil()).clamp(min=1)
    more = fewer + 1
    # The variance is linear in 1 / n, so interpolate 1 / n between 1 / more and 1 / fewer.
    share_of_more = ((1 / fewer - 1 / n) * fewer * more).clamp(0, 1)
    first = (mean - width // 2).floor().clamp(min=0)
    cells = first.unsqueeze(-1) + torch.arange(width, device=mean.device)
    share_of_more = share_of_more.unsqueeze(-1)
    pmf = (1 - share_of_more) * _binomial(cells, fewer, mean) + share_of_more * _binomial(cells, more, mean)
    above = pmf.cumsum(-1).nan_to_num(1)
    drawn = torch.searchsorted(above, chance.movedim(0, -1).contiguous()).movedim(-1, 0)
    counts = first + drawn.clamp(max=width - 1).to(mean.dtype)
    deviation = variance.sqrt()
    if look((deviation > _MOST_DEVIATION).any()) is not False:
        expanded = mean + deviation * _cornish_fisher(chance, skewness=(1 - 2 * mean / n) / deviation)
        counts = torch.where(deviation > _MOST_DEVIATION, expanded.round().clamp(min=0), counts)
    return torch.where(variance > 0, counts, mean)


def _binomial(counts: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Return the probabilities of consecutive counts `(..., K)`, normalised: the rest is negligible."""
    n = n.unsqueeze(-1)
    odds = (mean.unsqueeze(-1) / (n - mean.unsqueeze(-1))).log()
    # Recurrence: P(k + 1) = P(k) (n - k) / (k + 1) * odds.
    steps = ((n - counts) / (counts + 1)).clamp(min=0).log() + odds
    logs = torch.cat((torch.zeros_like(steps[..., :1]), steps[..., :-1].cumsum(-1)), -1)
    return logs.nan_to_num(nan=-math.inf).softmax(-1)


def _cornish_fisher(chance: Tensor, skewness: Tensor) -> Tensor:
    """Return the standardised quantile of a nearly normal variable: the Cornish-Fisher expansion of order 2."""
    z: Tensor = torch.special.ndtri(chance)
    return z + skewness * (z.square() - 1) / 6 - skewness.square() * (2 * z.square() - 5) * z / 36
