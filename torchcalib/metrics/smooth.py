"""Calibration errors of a smooth curve: smECE, smoothed by a kernel, and ICI, by a local regression."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_choice,
    check_count,
    is_number,
    task_read_as,
)
from torchcalib.core.event_sums import EventSums
from torchcalib.core.events import Events, Mode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import KIND_OF_NOISE, BinStats, apart_of, noise_of
from torchcalib.inference.testing import CalibrationTest, ErrorTest, evidence_of
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.estimator import Estimator, functional
from torchcalib.metrics.ranked import RankedMetric, kept_apart, ranked
from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.host_values import look
from torchcalib.ops.loess import loess
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.smoothing import best_width, smoothed_error
from torchcalib.ops.smoothing.cells import FINEST, LEVELS, N_CELLS, cell_index, smoothing_sums

_MOST = 2**22  # numbers that the batch elements read at a time hold


@dataclass(frozen=True, eq=False)
class SmoothingCells(BinStats):
    """Bins between the nodes of all grids that residuals are smoothed on; see `ops.smoothing.cells`.

    Beside weight, confidence and outcome there are the sums of confidence times 1 - confidence, then `noise` if it was
    asked for, and of confidence times outcome (last). So rounding a sample to the nodes on its sides can wait until a
    grid is chosen.
    """


@dataclass(frozen=True)
class SmoothingAccumulator(EventSums[BinStats]):
    """The sums of `SmoothingCells`.

    Attributes:
        with_noise: sum `BinStats.noise` too.
    """

    n_cells = N_CELLS
    with_noise: bool = False

    @property
    def n_quantities(self) -> int:
        """Return 5, or 6 with noise."""
        return 5 + self.with_noise

    def cell(self, confidence: Tensor) -> Tensor:
        """Return the cell of every event."""
        return cell_index(confidence.to(wide_dtype(confidence.device)))

    def quantities(self, events: Events) -> tuple[Tensor, ...]:
        """Return 1, p, y, p (1 - p), p y."""
        p, y = self._wide(events)
        return torch.ones_like(p), p, y, p * (1 - p), p * y

    def columns(self, events: Events, p: Predictions) -> list[Tensor]:
        """Return what each event adds, with the noise before the last."""
        *columns, last = super().columns(events, p)
        return [*columns, noise_of(events, p)[1], last] if self.with_noise else [*columns, last]

    def of_events(self, events: Events, p: Predictions) -> SmoothingCells:
        """Take the sums over events of `p`, from one read of them."""
        columns = (events.confidence, events.outcome, events.weights)
        noise: Noise = KIND_OF_NOISE[p.hard] if self.with_noise else "none"
        cells = self.wrap(smoothing_sums(*columns, noise=noise, copies=p.copies))
        return replace(cells, apart=apart_of(p, cells.sums, events)) if self.with_noise else cells

    def wrap(self, sums: Tensor) -> SmoothingCells:
        """Return `sums` as `SmoothingCells`."""
        return SmoothingCells(sums, has_noise=self.with_noise)


def _parts(cells: BinStats) -> tuple[Tensor, Tensor]:
    """Return weight and residual, each alone and times the confidence, `(..., 2, K)`.

    Bins that are no `SmoothingCells` hold less, as those in which outcomes were drawn do. All of a cell is then taken
    to lie at its mean confidence: cells are at most 1 / 5,120 wide, and smoothing leaves nothing of that.
    """
    sums = cells.sums
    n, confidence, outcome = sums[..., :3, :].unbind(-2)
    if isinstance(cells, SmoothingCells):
        of_residual = confidence - sums[..., 3, :] - sums[..., -1, :]
    else:
        of_residual = (confidence - outcome) * (confidence / n.masked_fill(n == 0, 1))
    return torch.stack((n, confidence), -2), torch.stack((confidence - outcome, of_residual), -2)


def smece_from_cells(cells: BinStats, bandwidth: float | None = None) -> Tensor:
    """Smooth calibration error `(...)`: mean |residual smoothed by the kernel|, at a width or at that of the data."""
    weight, residual = _parts(cells)
    width = best_width(weight, residual) if bandwidth is None else bandwidth
    return smoothed_error(weight, residual, width)


def width_from_cells(cells: BinStats) -> Tensor:
    """Width that smECE chooses `(...)`; NaN without data."""
    weight, residual = _parts(cells)
    return best_width(weight, residual).masked_fill(~(cells.total > 0), torch.nan)


class SmoothEstimator(Estimator[BinStats]):
    """A function of sums over smoothing cells. Large batches are summed in pieces: a class has 763 kB of sums."""

    def of(self, p: Predictions) -> Tensor:
        """Return the value of checked predictions."""
        accumulator: Any = self.accumulator
        if p.replicates and p.weights is not None:
            return super().of(p)
        events = accumulator.events(p)
        *lead, n = events.confidence.shape
        most = max(1, _MOST // max(1, n, accumulator.n_quantities * accumulator.n_cells))
        if not lead or math.prod(lead) <= most:
            return self.value(accumulator.of_events(events, p))
        values = torch.cat([self.values(accumulator.of_events(some, p)) for some in _pieces(events, most)])
        values = values.reshape(*lead, *values.shape[1:])
        return values.mean(len(lead) - 1) if self.averages else values

    def streamed(self, num_classes: int | None, **options: Any) -> "SmoothEstimator":
        """Return the estimator of a stream, with sums of noise for its evidence."""
        accumulator: Any = self.accumulator
        return replace(super().streamed(num_classes, **options), accumulator=replace(accumulator, with_noise=True))


def _pieces(events: Events, most: int) -> Iterator[Events]:
    """Yield at most `most` batch elements at a time, in order, with a single batch axis."""
    shape = events.confidence.shape
    flat = events.map(lambda x: x.expand(shape).reshape(-1, shape[-1]))
    for start in range(0, len(flat.confidence), most):
        yield flat.map(itemgetter(slice(start, start + most)))


def _smoothed(
    formula: Callable[[BinStats], Tensor],
    task: Task,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
) -> SmoothEstimator:
    mode = resolve_mode(task_read_as(task, options), mode)
    is_classwise = mode == "classwise"
    check_average(average, is_classwise)
    averages = is_classwise and average is not None
    return SmoothEstimator(input_format_of(task, options), SmoothingAccumulator(mode), formula, averages)


def _smece(
    *,
    task: Task,
    bandwidth: float | None = None,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SmoothEstimator:
    """Smooth calibration error, smECE: the mean |residual| after smoothing over the confidence, without bins.

    Residuals are smoothed by a Gaussian kernel that is reflected at 0 and 1. Its width is chosen by the data: it is
    where width and error are equal, of the multiples of 1/1024 the first that is not below the error. The value then
    moves little when predictions do, and is zero, in the limit of many samples, for calibrated ones alone.

    The steps are those of the authors' package relplot 1.0.3: samples are rounded linearly to a grid of 1,000 steps
    (of width / 10 for widths below 0.01), smoothed there, and looked at in 200 points (10 / width for widths below
    0.05). Per series this takes ten transforms of the grid, after one pass over the samples.

    Args:
        bandwidth: width of the kernel, 1/512 to 1; None chooses it. (Below 0.01 a width that is no multiple of 1/1024
            is looked at on the finest of the grids, so that the state of a stream serves any.)

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, through residuals and places, at the width that was chosen, which is a constant.

    Source:
        Blasiok, Nakkiran: Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing (ICLR 2024).

    Example:
        >>> smece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.1753)
    """
    if not (bandwidth is None or is_number(bandwidth)):
        raise TypeError(f"`bandwidth` must be a number or None, got {bandwidth!r}.")
    if bandwidth is not None and not FINEST / LEVELS <= bandwidth <= 1:
        raise ValueError(f"`bandwidth` must be from {FINEST / LEVELS:g} to 1, got {bandwidth!r}.")
    return _smoothed(partial(smece_from_cells, bandwidth=bandwidth), task, mode, average, options)


smece = functional(_smece)


class SmECE(CalibrationMetric[BinStats]):
    """Smooth calibration error, streamed; see `smece`.

    The state is 6 sums over each of 15,888 cells, 763 kB for each class, whatever the number of samples: cells of the
    confidence between the nodes of the grids. Samples are rounded to a grid linearly, so that the value follows from
    these sums to the last digits, with any weights; a sketch of the samples could not promise that, and whole samples
    would grow. As the cells are bins, what chance would make of the value is read from them too (`test`, but for
    the interval, which would take minutes).
    """

    factory = staticmethod(_smece)
    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    question = "how far is frequency from confidence, on average, smoothed instead of binned"
    source = "Blasiok & Nakkiran, Smooth ECE, ICLR 2024"

    def test_from(self, statistic: BinStats, *, with_interval: bool = True, **how: Any) -> CalibrationTest:  # noqa: ARG002
        """Return the evidence of a statistic; see `torchcalib.inference.calibration_test`. The interval is NaN."""
        test = ErrorTest(self.estimator.formula, with_interval=False)
        return evidence_of(test, statistic, average=self.estimator.averages, **how)

    def width(self) -> Tensor:
        """Return the width that is chosen, over all ranks if `torch.distributed` is running; see `smece_width`."""
        return width_from_cells(self._synced_statistic())


def _smece_width(*, task: Task, mode: Mode | None = None, **options: Unpack[InputOptions]) -> SmoothEstimator:
    """Width of the kernel that `smece` chooses: a probability, `(...)`, or `(..., C)` for classes.

    Returns:
        A multiple of 1/1024, from 2/1024 to 1, in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        Blasiok, Nakkiran: Smooth ECE (ICLR 2024).

    Example:
        >>> smece_width(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.1758)
    """
    return _smoothed(width_from_cells, task, mode, kept_apart(task, mode, options), options)


smece_width = functional(_smece_width)


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


def _ici(
    *,
    task: Task,
    component: ICIComponent = "ici",
    span: float = 0.75,
    degree: int = 2,
    n_points: int = 1024,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Integrated calibration index: the mean distance of the predictions from a smooth calibration curve.

    The curve is a local regression (loess) of the outcomes on the predictions: around each prediction a parabola,
    fitted to the three quarters of the samples that are nearest to it, by tricube weights. It may leave [0, 1].

    It is fitted at every prediction, as `loess(y ~ p, surface = "direct")` of R with its defaults does (the paper lets
    R interpolate between a few of them). More than `n_points` samples, counting copies, are first
    pooled into `n_points` bins of equal mass, each at the mean of its samples. This changes the value in about the
    sixth digit. A sketch is pooled by the same rule.

    Args:
        component: `"ici"`, the mean; or of the same distances the median `"e50"`, the 90th percentile `"e90"` or the
            largest `"emax"`.
        span: share of the samples that a local fit sees, in (0, 1].
        degree: of the local polynomial, 0, 1 or 2.
        n_points: points at which the curve is fitted. Time grows with its square, 0.1 s for 1,024.

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
    check_choice("component", component, get_args(ICIComponent))
    if not is_number(span):
        raise TypeError(f"`span` must be a number, got {span!r}.")
    if not 0 < span <= 1:
        raise ValueError(f"`span` must be above 0 and at most 1, got {span!r}.")
    check_count("degree", degree, at_least=0, at_most=2)
    check_count("n_points", n_points, at_least=2, at_most=2**14)
    formula = partial(ici_from_sample, component=component, span=float(span), degree=degree, n_points=n_points)
    return ranked(formula, task, mode, average, options)


ici = functional(_ici)


class ICI(RankedMetric):
    """Integrated calibration index, streamed; see `ici`. `resolution` keeps a sketch instead of every sample."""

    factory = staticmethod(_ici)
    question = "how far are predictions from a smooth calibration curve, on average"
    source = "Austin & Steyerberg, Statistics in Medicine 2019"
    plot_upper_bound = None
    has_interval = False  # each replicate would have a curve fitted to it, in a tenth of a second
