"""Integrated calibration index."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, check_count, is_number, task_read_as
from torchcalib.core.events import Reduction
from torchcalib.core.ranked import RankedSample
from torchcalib.core.ranked_bins import Binning
from torchcalib.metrics.ranked.reading import RankedReading, TestedRankedMetric, evaluate
from torchcalib.ops.host_values import look
from torchcalib.ops.loess import loess

ICIComponent = Literal["ici", "e50", "e90", "emax"]
_SHARES: dict[str, float] = {"e50": 0.5, "e90": 0.9, "emax": 1.0}


def ici_from_sample(sample: RankedSample, component: ICIComponent, span: float, degree: int, n_points: int) -> Tensor:
    """Mean or a quantile `(...)` of |confidence - smoothed outcome| over the samples, pooled if they are many."""
    confidence, frequency, n = _points(sample, n_points)
    empty = n == 0
    confidence, frequency = confidence.masked_fill(empty, 0), frequency.masked_fill(empty, 0)
    distance = (confidence - loess(confidence, frequency, n, span, degree)).abs()
    if component == "ici":
        return (n * distance).sum(-1) / n.sum(-1)
    return _quantile(distance, n, _SHARES[component])


def _points(sample: RankedSample, n_points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, frequency and number of samples of every point `(..., M)`, in order of the confidence."""
    if sample.score.shape[-1] > n_points or _may_be_many(sample, n_points):
        bins = Binning("equal_mass", n_points).of(sample)
        return bins.confidence, bins.frequency, bins.n.detach()
    s = sample.sorted()
    n = s.counts.to(s.confidence.dtype)
    return s.confidence, s.positives / n, n


def _may_be_many(sample: RankedSample, n_points: int) -> bool:
    """Whether some series may have more than `n_points` samples, counting copies.

    True if values cannot be read: pooling at most `n_points` samples into `n_points` bins changes nothing.
    """
    return sample.n is not None and look((sample.n.sum(-1) <= n_points).all()) is not True


def _quantile(x: Tensor, n: Tensor, share: float) -> Tensor:
    """Quantile of whole numbers of copies `n`, between neighbours linear in the rank, as numpy and R have it."""
    ordered, order = x.masked_fill(n == 0, torch.inf).sort(-1)
    upto = n.gather(-1, order).cumsum(-1)
    rank = share * (upto[..., -1:] - 1).clamp(min=0)
    ranks = torch.cat((rank.floor(), rank.ceil()), -1)
    place = torch.searchsorted(upto, ranks + 0.5).clamp(max=x.shape[-1] - 1)
    below, above = ordered.gather(-1, place).unbind(-1)
    value = below + (above - below) * (rank - rank.floor()).squeeze(-1)
    return value.masked_fill(upto[..., -1] == 0, torch.nan)


def ici(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: ICIComponent = "ici",
    span: float = 0.75,
    degree: int = 2,
    n_points: int = 1024,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Integrated calibration index: the mean distance of the predictions from a smooth calibration curve.

    The curve is a local regression (loess) of the outcomes on the predictions: around each prediction a parabola,
    fitted to the three quarters of the samples that are nearest to it, by tricube weights. It may leave [0, 1].

    It is fitted at every prediction, as `loess(y ~ p, surface = "direct")` of R with its defaults does (the paper lets
    R interpolate between a few of them). More than `n_points` samples, counting copies, are first
    pooled into `n_points` bins of equal mass, each at the mean of its samples. This changes the value in about the
    sixth digit. A sketch is pooled by the same rule.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        component: `"ici"`, the mean; or of the same distances the median `"e50"`, the 90th percentile `"e90"` or the
            largest `"emax"`.
        span: share of the samples that a local fit sees, in (0, 1].
        degree: of the local polynomial, 0, 1 or 2.
        n_points: points at which the curve is fitted. Time grows with its square, 0.1 s for 1,024.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers: neighbourhoods count copies.

    Returns:
        A probability, `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds` (at least
        float32); mostly below 1, for the curve may leave [0, 1]. NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, through the curve too, but where neighbours change. It keeps some 20 numbers for each pair
        of points.

    Source:
        Austin, Steyerberg: The Integrated Calibration Index (ICI) and related metrics for quantifying the calibration
        of logistic regression models (Statistics in Medicine 2019). Cleveland, Devlin: Locally Weighted Regression
        (JASA 1988).

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> ici(preds, target, task="binary")
        tensor(0.4000)
    """
    from_sample = _read(component, span, degree, n_points)
    reading = RankedReading(task_read_as(task, options), reduction, average)
    return evaluate(from_sample, reading, task, preds, target, options)


def _read(component: ICIComponent, span: float, degree: int, n_points: int) -> Callable[[RankedSample], Tensor]:
    """Return the reading of a sample that the arguments say; raise where they cannot be."""
    check_choice("component", component, get_args(ICIComponent))
    if not is_number(span):
        raise TypeError(f"`span` must be a number, got {span!r}.")
    if not 0 < span <= 1:
        raise ValueError(f"`span` must be above 0 and at most 1, got {span!r}.")
    check_count("degree", degree, at_least=0, at_most=2)
    check_count("n_points", n_points, at_least=2, at_most=2**14)
    return partial(ici_from_sample, component=component, span=float(span), degree=degree, n_points=n_points)


class ICI(TestedRankedMetric):
    """Integrated calibration index, streamed; see `ici`. `resolution` keeps a sketch instead of every sample."""

    question = "how far are predictions from a smooth calibration curve, on average"
    source = "Austin & Steyerberg, Statistics in Medicine 2019"
    plot_upper_bound = None
    has_interval = False  # each replicate would have a curve fitted to it, in a tenth of a second

    def __init__(
        self,
        *,
        component: ICIComponent = "ici",
        span: float = 0.75,
        degree: int = 2,
        n_points: int = 1024,
        **options: Any,
    ) -> None:
        from_sample = _read(component, span, degree, n_points)
        super().__init__(**options)
        self.from_sample = from_sample
