"""Integrated calibration index (ICI), based on local regression."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, check_count, is_number
from torchcalib.core.events import Mode
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats
from torchcalib.functional.estimator import Estimator, metric_function
from torchcalib.functional.ranked import RankedEstimator, rank_based
from torchcalib.inference.simulation import BinCells, BinsWithGaps
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_test
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.loess import loess

ICIComponent = Literal["ici", "e50", "e90", "emax"]
_QUANTILE_LEVELS: dict[str, float] = {"e50": 0.5, "e90": 0.9, "emax": 1.0}


def ici_from_sample(sample: RankedSample, component: ICIComponent, span: float, degree: int, n_points: int) -> Tensor:
    """Compute the mean or a quantile `(...)` of |confidence - smoothed outcome| over all samples; see `ici`."""
    return _ici_at_points(*_points(sample, n_points), component, span, degree)


def ici_from_bins(bins: BinStats, component: ICIComponent, span: float, degree: int) -> Tensor:
    """Compute the mean or a quantile of the distances `(...)` from narrow bins, with one point for each bin.

    Bins may be `BinsWithGaps` with replicates `(R, ..., B)`, which share the weights of the local regressions.
    """
    cells = bins.cells if isinstance(bins, BinsWithGaps) else BinCells.from_bins(bins)
    return _ici_at_points(cells.confidence, cells.confidence + bins.gap, cells.n, component, span, degree)


def _ici_at_points(
    confidence: Tensor, frequency: Tensor, n: Tensor, component: ICIComponent, span: float, degree: int
) -> Tensor:
    """Compute the mean or a quantile of |confidence - smoothed frequency| `(...)` over points `(..., M)`."""
    empty = n == 0
    confidence, frequency = confidence.masked_fill(empty, 0), frequency.masked_fill(empty, 0)
    distance = (confidence - loess(confidence, frequency, n, span, degree)).abs()
    if component == "ici":
        return (n * distance).sum(-1) / n.sum(-1)
    return _quantile(distance, n.expand_as(distance), _QUANTILE_LEVELS[component])


def _points(sample: RankedSample, n_points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, frequency and sample count at M sorted points, `(..., M)`: samples or equal-mass bins."""
    if sample.score.shape[-1] > n_points or _may_exceed(sample, n_points):
        bins = Binning("equal_mass", n_points).from_sample(sample)
        return bins.confidence, bins.frequency, bins.n.detach()
    s = sample.sorted()
    n = s.counts.to(s.confidence.dtype)
    return s.confidence, s.positives / n, n


def _may_exceed(sample: RankedSample, n_points: int) -> bool:
    """Return True if a batch element has more than `n_points` samples (with copies), or if this is unknown."""
    return sample.n is not None and value_if_available((sample.n.sum(-1) <= n_points).all()) is not True


def _quantile(x: Tensor, n: Tensor, share: float) -> Tensor:
    """Return the quantile `(...)` of values `(..., M)` with integer multiplicities `n`, as `torch.quantile` does."""
    ordered, order = x.masked_fill(n == 0, torch.inf).sort(-1)
    cumulative = n.gather(-1, order).cumsum(-1)
    rank = share * (cumulative[..., -1:] - 1).clamp(min=0)
    ranks = torch.cat((rank.floor(), rank.ceil()), -1)
    index = torch.searchsorted(cumulative, ranks + 0.5).clamp(max=x.shape[-1] - 1)
    below, above = ordered.gather(-1, index).unbind(-1)
    value = below + (above - below) * (rank - rank.floor()).squeeze(-1)
    return value.masked_fill(cumulative[..., -1] == 0, torch.nan)


@dataclass(frozen=True, eq=False)
class ICIEstimator(RankedEstimator):
    """Estimator of the integrated calibration index."""

    component: ICIComponent
    span: float
    degree: int
    n_points: int

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:
        """Compute the calibration test from a `RankedSample`, divided into the points of the regression."""
        n_points = min(self.n_points, max(1, statistic.score.shape[-1]))
        bins = Binning("equal_mass", n_points).from_sample(statistic).with_noise()
        test = ErrorTest(partial(ici_from_bins, component=self.component, span=self.span, degree=self.degree))
        found = run_error_test(test, bins, average=self.averages, **how)
        return replace(found, statistic=self.value(statistic))


@metric_function(
    rank_based(
        name="ICI",
        question="mean distance between predictions and a smooth calibration curve",
        source="Austin & Steyerberg, Statistics in Medicine 2019, doi 10.1002/sim.8281",
        value_range=(0.0, math.inf),
    )
)
def ici(
    task: Task | None = None,
    *,
    component: ICIComponent = "ici",
    span: float = 0.75,
    degree: int = 2,
    n_points: int = 1024,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Integrated calibration index (ICI): mean distance between the predictions and a smooth calibration curve.

    ICI = mean |p - f(p)|, where f is a local regression (loess) of the outcomes on the predictions p. At each p, a
    polynomial is fitted to the nearest samples with tricube weights. Values of f may be outside [0, 1].

    The curve is fitted at every prediction, as in R with `loess(y ~ p, surface = "direct")` and its defaults. (The
    paper uses the R default, which interpolates between a few fits.) More than `n_points` samples, including copies,
    are first pooled into `n_points` equal-mass bins. This changes the value in about the sixth digit.

    Args:
        component: Summary of the distances |p - f(p)|: the mean `"ici"`, the median `"e50"`, the 90th percentile
            `"e90"` or the maximum `"emax"`.
        span: Fraction of the samples in each local fit, in (0, 1].
        degree: Degree of the local polynomial: 0, 1 or 2.
        n_points: Maximum number of points at which the curve is fitted. The time is proportional to its square.

    Returns:
        `(...)`, or `(..., C)` with `average=None`, at least 0 and usually below 1, in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        With respect to the confidences, including their effect on the curve, except where the set of neighbours
        changes. The backward pass stores about 20 numbers per pair of points.

    Reference:
        Austin, Steyerberg: The Integrated Calibration Index (ICI) and related metrics for quantifying the calibration
        of logistic regression models (Statistics in Medicine 2019). Cleveland, Devlin: Locally Weighted Regression
        (JASA 1988).

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> ici(preds, target, task="binary")
        tensor(0.4000)
    """
    check_choice("component", component, get_args(ICIComponent))
    if not is_number(span):
        raise TypeError(f"`span` must be a number, got {shown(span)}. The default is 0.75.")
    if not 0 < span <= 1:
        raise ValueError(f"`span` must be above 0 and at most 1, got {shown(span)}. The default is 0.75.")
    check_count("degree", degree, at_least=0, at_most=2)
    check_count("n_points", n_points, at_least=2, at_most=2**14)
    settings: dict[str, Any] = {"component": component, "span": float(span), "degree": degree, "n_points": n_points}
    formula = partial(ici_from_sample, **settings)
    return ICIEstimator.of_events(
        ExactSample, formula, task, mode, average, options, *settings.values(), whole_weights=True
    )
