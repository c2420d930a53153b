"""Null replicates: the errors of each system if it were calibrated, with the dependence between the systems.

The distribution of a sum of outcomes is that of the noise floor: a sum of independent trials with known mean and
variance (consistency resampling, Broecker and Smith 2007). Its quantile levels determine the dependence:

- Bins: the level of bin k in replicate r is the rank of its residual (outcomes minus confidences) in bootstrap
  replicate r. The sums therefore have the rank correlations of the bootstrap (Iman and Conover 1982), and all systems
  share the bootstrap replicates.
- Ranked samples: all systems share a uniform number u for each row. The level is u if the event of the system occurred,
  otherwise 1 - u. If two systems have equal outcomes in a row, their simulated outcomes have a positive correlation.
  For the top label, if only one of two predictions is correct, the correlation is negative.

For clusters of dependent rows, a second null distribution multiplies the residuals of each cluster by a random sign,
which all systems share (wild bootstrap, Cameron, Gelbach and Miller 2008).

Reference:
    Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007). Iman, Conover:
    A distribution-free approach to inducing rank correlation among input variables (Communications in Statistics,
    1982).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcalib.core.predictions import replicates_at_once
from torchcalib.core.sums import BinStats
from torchcalib.inference.simulation import BinCells, OrderedSample
from torchcalib.ops.count_moments import deviation_quantiles
from torchcalib.ops.counter_rng import random_words

UNIFORM_STREAMS, _TIE_STREAMS = 2**32, 2**33
"""First random streams of the uniform numbers of rows, and of ties. The bootstrap uses streams with smaller numbers."""


def bins_of_calibrated(b: BinStats, residuals: Tensor, seed: int) -> BinStats:
    """Return bins `(..., B)`, with sums of noise, as if calibrated in R replicates `(R, ..., B)`.

    `residuals` `(R, ..., B)` are the sums of outcomes minus confidences in bootstrap replicates. `seed` orders ties.
    """
    cells = BinCells.from_bins(b)
    flat = residuals.flatten(1)
    streams = _TIE_STREAMS + torch.arange(len(flat), device=residuals.device)
    order = random_words(seed, streams, torch.arange(flat.shape[-1], device=residuals.device)).argsort(0)
    # Sorting is stable: equal values keep their random order. Equal sums may differ by rounding errors.
    scale = flat.abs().amax(0).clamp(min=torch.finfo(flat.dtype).tiny)
    rounded = (flat / scale * 2**40).round()
    order = order.gather(0, rounded.gather(0, order).sort(dim=0, stable=True).indices)
    ranks = torch.arange(len(flat), dtype=residuals.dtype, device=residuals.device).unsqueeze(-1).expand_as(flat)
    level = (torch.zeros_like(flat).scatter_(0, order, ranks).reshape(residuals.shape) + 0.5) / len(residuals)
    deviation = deviation_quantiles(level, cells.n, cells.expected, cells.spread, cells.noise)
    return cells.with_gaps(deviation * cells.variance.sqrt())


def samples_of_calibrated(sample: OrderedSample, rows: Tensor, seed: int, n_replicates: int) -> Iterator[OrderedSample]:
    """Yield a sample `(..., N)` as if calibrated, in chunks of r replicates `(r, ..., N)`.

    `rows` is the number of the row of each element, int64 `(..., N)`, equal for all systems.
    """
    s = sample.sorted()
    n, p = s.counts.to(s.confidence.dtype), s.confidence.masked_fill(~s.counted, 0)
    occurred = s.positives.to(p.dtype) > n * p
    is_plain = sample.n is None and not s.positives.is_floating_point()
    streams = UNIFORM_STREAMS + torch.arange(n_replicates, device=p.device)
    for some in torch.split(streams, replicates_at_once(sample.score.numel())):
        u = (random_words(seed, some, rows.flatten()).to(p.dtype) + 0.5).div_(2**32).reshape(len(some), *rows.shape)
        level = torch.where(occurred, u, 1 - u)
        if is_plain:  # one trial per element
            outcomes = (level > 1 - p).to(p.dtype)
        else:
            columns = n, n * p, *s.variances
            outcomes = columns[1] + deviation_quantiles(level, *columns) * columns[3].sqrt()
        yield sample.with_outcomes(outcomes)


def samples_of_flipped(sample: OrderedSample, clusters: Tensor, signs: Tensor) -> Iterator[OrderedSample]:
    """Yield a sample `(..., N)` whose residuals have a random sign for each cluster, `(r, ..., N)`.

    `clusters` is the number of the cluster of each element, int64 `(..., N)`. `signs` are those of G clusters `(R, G)`.
    """
    s = sample.sorted()
    expected = s.counts * s.confidence.masked_fill(~s.counted, 0)
    residual = s.positives - expected
    for some in torch.split(signs, replicates_at_once(sample.score.numel())):
        yield sample.with_outcomes(torch.addcmul(expected, some[:, clusters], residual))
