"""Random counts of successes of independent trials that need not be equally likely: from mean and variance alone."""

import math

import torch
from torch import Tensor

from torchcalib.ops.host_values import look

_TABLES = ((1.0, 32), (2.5, 64), (7.5, 128))
"""Standard deviations, and up to each how many probabilities are written into a table. At least 8 deviations lie to
either side of the mean: what even a Poisson variable has beyond is less than the 32 bits of a draw resolve. Where the
deviation is larger the distribution is smooth, and an expansion is exact enough."""

_MOST_DEVIATION, _WIDEST = _TABLES[-1]
_IN_CACHE = 2**15  # numbers of tables that are made at a time on a CPU: fresh memory costs more than the arithmetic


def unit_of(spread: Tensor, noise: Tensor) -> Tensor:
    """Return the weight of one independent row in every cell `(..., K)`; see `BinStats` for both sums.

    It is 1 without weights, and less where an outcome is the share of several votes. Where a cell does not tell, it is
    that of all cells of the series.
    """
    of_all = noise.sum(-1, keepdim=True) / spread.sum(-1, keepdim=True)
    of_all = torch.where((of_all > 0) & of_all.isfinite(), of_all, torch.ones_like(of_all))
    unit = noise / spread
    return torch.where((unit > 0) & unit.isfinite(), unit, of_all)


def deviations_by_chance(chance: Tensor, n: Tensor, expected: Tensor, spread: Tensor, noise: Tensor) -> Tensor:
    """Return how far sums of outcomes are from what is expected, in standard deviations, if confidences are true.

    Args:
        chance: in (0, 1), `(R, ..., K)`: the share of sums that are less.
        n: weight `(..., K)`.
        expected: sum of confidences.
        spread: see `BinStats`.
        noise: see `BinStats`.

    Returns:
        `(R, ..., K)`. Where there is no noise, quantiles of a normal variable.
    """
    unit = unit_of(spread, noise)
    ones, zeros = expected / unit, (n - expected) / unit
    few = torch.minimum(ones, zeros).clamp(min=0)
    variance = torch.minimum(noise / unit.square(), few)
    # Of the rarer outcome, of which more ones are fewer zeros.
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(few)
    counts = counts_by_chance(0.5 + sign * (chance - 0.5), few, variance)
    deviation = (counts - few).mul_(sign / variance.sqrt())
    if look((variance > 0).all()):
        return deviation
    return torch.where(variance > 0, deviation, torch.special.ndtri(chance))


def counts_by_chance(chance: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return counts that are rare by as much as `chance`: the inverse of their cumulative distribution.

    The number of successes of independent trials of different probabilities p is close to a binomial variable of the
    same mean and variance, and is one where all p are equal: n = (sum p)^2 / sum p^2 trials. Where that is no whole
    number, it is a mixture of the two next to it, each with the same mean, which keeps both moments.

    Args:
        chance: in (0, 1), `(R, ...)`.
        mean: sum of p, at least 0, `(...)`. It should be at most half of the trials: count failures otherwise.
        variance: sum of p (1 - p), at most the mean, `(...)`.

    Returns:
        Whole numbers of float64 `(R, ...)`, rising with `chance`; the mean itself where the variance is 0 or NaN.

    Source:
        Ehm: Binomial approximation to the Poisson binomial distribution (Statistics and Probability Letters, 1991).
        Cornish, Fisher: Moments and cumulants in the specification of distributions (1938), for large variances.
    """
    if mean.device.type != "cpu" or look((variance > 0).any()) is None:  # no values to choose tables by
        return _counts(chance, mean, variance, _WIDEST)
    shape = chance.shape
    chance, mean, variance = chance.flatten(1), mean.flatten(), variance.flatten()
    counts, deviation = mean.expand(chance.shape).clone(), variance.sqrt()
    above = 0.0
    for up_to, width in (*_TABLES, (math.inf, 1)):  # the last are expanded, and need no table
        here = ((deviation > above) & (deviation <= up_to)).nonzero().squeeze(-1)
        for some in torch.split(here, max(1, _IN_CACHE // max(width, len(chance)))):
            counts[:, some] = _counts(chance[:, some], mean[some], variance[some], width)
        above = up_to
    return counts.reshape(shape)


def _counts(chance: Tensor, mean: Tensor, variance: Tensor, width: int) -> Tensor:
    """Return what `counts_by_chance` does; where the deviation is not too large, from `width` probabilities each."""
    square = (mean - variance).clamp(min=0)  # sum p^2
    n = (mean.square() / square.masked_fill(square == 0, torch.finfo(mean.dtype).tiny)).clamp(max=2.0**52)
    fewer = torch.maximum(n.floor(), mean.ceil()).clamp(min=1)
    more = fewer + 1
    # 1 / n lies as far between 1 / more and 1 / fewer as the variance between those of the two.
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
    """Return the probabilities of consecutive counts `(..., K)`, which hold all but nothing of the whole."""
    n = n.unsqueeze(-1)
    odds = (mean.unsqueeze(-1) / (n - mean.unsqueeze(-1))).log()
    # Each probability is the one before it times (n - k) / (k + 1) times the odds.
    steps = ((n - counts) / (counts + 1)).clamp(min=0).log() + odds
    logs = torch.cat((torch.zeros_like(steps[..., :1]), steps[..., :-1].cumsum(-1)), -1)
    return logs.nan_to_num(nan=-math.inf).softmax(-1)


def _cornish_fisher(chance: Tensor, skewness: Tensor) -> Tensor:
    """Return the standardised quantile of a variable that is nearly normal."""
    z: Tensor = torch.special.ndtri(chance)
    return z + skewness * (z.square() - 1) / 6 - skewness.square() * (2 * z.square() - 5) * z / 36
