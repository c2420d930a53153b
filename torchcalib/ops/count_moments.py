"""Quantiles of a Poisson binomial variable (successes in independent trials), from its mean and variance."""

import math

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available

_TABLES = ((1.0, 32), (2.5, 64), (7.5, 128))
"""Largest standard deviation and number of entries of each table of the probability mass function.

A table covers at least 8 standard deviations on either side of the mean. The probability outside the table is below
2^-32, the resolution of the random numbers, even for a Poisson variable. Above the largest standard deviation the
Cornish-Fisher expansion is accurate enough.
"""

_MAX_DEVIATION, _MAX_ITEMSIZE = _TABLES[-1]
_IN_CACHE = 2**15  # number of table entries that the CPU computes at a time, small enough for its cache


def effective_weight(spread: Tensor, noise: Tensor) -> Tensor:
    """Return the effective weight of an outcome in every bin, the ratio `noise / spread`, `(..., K)`.

    It is 1 without weights, and below 1 if an outcome is the mean over several annotators. A bin with ratio 0, infinity
    or NaN gets the ratio of the sums over all bins, or 1 if this ratio is also 0, infinity or NaN. The arguments are
    described in `deviation_quantiles`.
    """
    overall = noise.sum(-1, keepdim=True) / spread.sum(-1, keepdim=True)
    overall = torch.where((overall > 0) & overall.isfinite(), overall, torch.ones_like(overall))
    unit = noise / spread
    return torch.where((unit > 0) & unit.isfinite(), unit, overall)


def deviation_quantiles(chance: Tensor, n: Tensor, expected: Tensor, spread: Tensor, noise: Tensor) -> Tensor:
    """Return quantiles `(R, ..., K)` of the standardised sum of outcomes under perfect calibration.

    For sample weights w and probabilities p, every bin has the sums `n` of w, `expected` of w p and `spread` of w p (1
    - p). `noise` is the variance of the weighted sum of outcomes. `chance` are the levels in (0, 1), `(R, ..., K)`. The
    result is the normal quantile where the variance is 0.
    """
    unit = effective_weight(spread, noise)
    ones, zeros = expected / unit, (n - expected) / unit
    rarer = torch.minimum(ones, zeros).clamp(min=0)
    variance = torch.minimum(noise / unit.square(), rarer)
    # `count_quantiles` counts the rarer outcome. If this is 0, reflect the quantile level and the deviation.
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(rarer)
    counts = count_quantiles(0.5 + sign * (chance - 0.5), rarer, variance)
    deviation = (counts - rarer).mul_(sign / variance.sqrt())
    if value_if_available((variance > 0).all()):
        return deviation
    return torch.where(variance > 0, deviation, torch.special.ndtri(chance))


def count_quantiles(chance: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return quantiles `(R, ...)` of the number of successes in independent trials, at the levels `chance` in (0, 1).

    The distribution is approximated by the binomial distribution of equal mean (sum p) and variance (sum p (1 - p)). It
    has n = (sum p)^2 / sum p^2 trials. The approximation is exact if all p are equal. If n is not an integer, a mixture
    of the binomial distributions with the two nearest integers is used. It has the same mean and variance.

    `mean` is at most half of the trials: count failures instead of more frequent successes. The results are whole
    numbers, or the mean where the variance is 0 or NaN.

    Sources: Ehm: Binomial approximation to the Poisson binomial distribution (Statistics and Probability Letters,
    1991). Cornish, Fisher: Moments and cumulants in the specification of distributions (1938), for large variances.
    """
    # Use the largest table on a GPU and under `vmap`. Choosing by the values would synchronise or fail.
    if mean.device.type != "cpu" or value_if_available((variance > 0).any()) is None:
        return _counts(chance, mean, variance, _MAX_ITEMSIZE)
    shape = chance.shape
    chance, mean, variance = chance.flatten(1), mean.flatten(), variance.flatten()
    counts, deviation = mean.expand(chance.shape).clone(), variance.sqrt()
    lower_limit = 0.0
    for limit, width in (*_TABLES, (math.inf, 1)):  # larger deviations use only the expansion
        in_table = ((deviation > lower_limit) & (deviation <= limit)).nonzero().squeeze(-1)
        for batch in torch.split(in_table, max(1, _IN_CACHE // max(width, len(chance)))):
            counts[:, batch] = _counts(chance[:, batch], mean[batch], variance[batch], width)
        lower_limit = limit
    return counts.reshape(shape)


def _counts(chance: Tensor, mean: Tensor, variance: Tensor, width: int) -> Tensor:
    """Compute `count_quantiles` from a table of `width` probabilities, or by expansion above `_MAX_DEVIATION`."""
    # 1. n = (sum p)^2 / sum p^2 trials of probability sum p / n have the given mean and variance.
    square = (mean - variance).clamp(min=0)  # sum p^2
    n = (mean.square() / square.masked_fill(square == 0, torch.finfo(mean.dtype).tiny)).clamp(max=2.0**52)
    fewer = torch.maximum(n.floor(), mean.ceil()).clamp(min=1)
    more = fewer + 1
    # 2. Mixture weights of `fewer` and `more` trials: the variance is linear in 1 / n, so 1 / n is interpolated.
    share_of_more = ((1 / fewer - 1 / n) * fewer * more).clamp(0, 1)
    # 3. Probabilities of the counts around the mean.
    first = (mean - width // 2).floor().clamp(min=0)
    cells = first.unsqueeze(-1) + torch.arange(width, device=mean.device)
    share_of_more = share_of_more.unsqueeze(-1)
    pmf = (1 - share_of_more) * _binomial(cells, fewer, mean) + share_of_more * _binomial(cells, more, mean)
    # 4. Invert the cumulative distribution function, by binary search in the table.
    cumulative = pmf.cumsum(-1).nan_to_num(1)
    place = torch.searchsorted(cumulative, chance.movedim(0, -1).contiguous()).movedim(-1, 0)
    counts = first + place.clamp(max=width - 1).to(mean.dtype)
    # 5. Cornish-Fisher expansion for large variances, with the skewness (1 - 2 p) / standard deviation.
    deviation = variance.sqrt()
    if value_if_available((deviation > _MAX_DEVIATION).any()) is not False:
        z, skewness = torch.special.ndtri(chance), (1 - 2 * mean / n) / deviation
        z = z + skewness * (z.square() - 1) / 6 - skewness.square() * (2 * z.square() - 5) * z / 36
        expanded = mean + deviation * z
        counts = torch.where(deviation > _MAX_DEVIATION, expanded.round().clamp(min=0), counts)
    return torch.where(variance > 0, counts, mean)


def _binomial(counts: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Return the binomial probabilities of consecutive counts `(..., K)`, normalised to sum to 1."""
    n = n.unsqueeze(-1)
    log_odds = (mean.unsqueeze(-1) / (n - mean.unsqueeze(-1))).log()
    # P(k + 1) = P(k) * odds * (n - k) / (k + 1). The recurrence is summed in logarithms, which cannot underflow.
    steps = ((n - counts) / (counts + 1)).clamp(min=0).log() + log_odds
    logs = torch.cat((torch.zeros_like(steps[..., :1]), steps[..., :-1].cumsum(-1)), -1)
    return logs.nan_to_num(nan=-math.inf).softmax(-1)
