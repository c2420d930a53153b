"""Smooth expected calibration error (smECE), based on kernel smoothing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, is_number
from torchcalib.core.event_sums import EventSums
from torchcalib.core.events import Events, Mode
from torchcalib.core.partition import Partition
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats, Ranges, kind_of_noise, noise_flag_of
from torchcalib.functional.estimator import Declaration, Estimator, factory_of, metric_function
from torchcalib.functional.ranked import no_average
from torchcalib.inference.simulation import BinCells, BinsWithGaps
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_test
from torchcalib.io.errors import shown
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.smoothing import best_width, errors_of_replicates, smoothed_error, smoothed_frequency
from torchcalib.ops.smoothing.cells import FINEST, LEVELS, N_CELLS, cell_index, event_columns, smoothing_sums

_CHUNK = 2**22  # maximum number of values in memory for batch elements that are processed together


@dataclass(frozen=True, eq=False)
class SmoothingCells(BinStats):
    """Sums over the cells between adjacent nodes of all smoothing grids; see `ops.smoothing.cells`.

    The summed quantities are weight, confidence p, outcome y, p (1 - p), `noise` (optional) and p y, in this order.
    They determine the linear rounding of samples to any grid. The grid can therefore be chosen after accumulation.
    """


@dataclass(frozen=True)
class SmoothingAccumulator(EventSums[BinStats]):
    """Accumulator of the sums for the smooth calibration error; see `SmoothingCells`."""

    n_cells = N_CELLS
    with_noise: bool = False  # Include the sums for the noise floor, `BinStats.noise`

    @property
    def n_quantities(self) -> int:
        """Number of sums per cell: 5, or 6 if `with_noise` is True."""
        return 5 + self.with_noise

    @property
    def ranges(self) -> Ranges:
        """Ranges of the quantities of `SmoothingCells`."""
        return ((1, 1), (0, 1), (0, 1), (0, 0.25), *[(0, math.inf)] * self.with_noise, (0, 1))

    def cell(self, confidence: Tensor) -> Tensor:
        """Return the cell index for every event."""
        return cell_index(confidence.to(wide_dtype(confidence.device)))

    def quantities(self, events: Events) -> tuple[Tensor, ...]:
        """Return the summands 1, p, y, p (1 - p) and p y for every event with confidence p and outcome y."""
        p, y = self._wide(events)
        return torch.ones_like(p), p, y, p * (1 - p), p * y

    def columns(self, events: Events, p: Predictions) -> list[Tensor]:
        """Return the weighted summands of E events, one tensor `(..., E)` per sum; any noise is second to last."""
        return event_columns(*self._wide(events), events.weights, kind_of_noise(p, self.with_noise), p.copies)

    def of_events(self, events: Events, p: Predictions) -> SmoothingCells:
        """Return the sums over all events in `p`, computed in one pass."""
        columns = (events.confidence, events.outcome, events.weights)
        cells = self.wrap(smoothing_sums(*columns, noise=kind_of_noise(p, self.with_noise), copies=p.copies))
        return replace(cells, noise_flag=noise_flag_of(p, cells.sums, events)) if self.with_noise else cells

    def wrap(self, sums: Tensor) -> SmoothingCells:
        """Convert a tensor of sums `(..., F, K)` to `SmoothingCells`."""
        return SmoothingCells(sums, has_noise=self.with_noise)


def _cell_sums(cells: BinStats) -> tuple[Tensor, Tensor]:
    """Return sums over events in each cell: (w, w p) and (w r, w r p), each `(..., 2, K)`.

    The symbols are weight w, confidence p and residual r = p - y. Simulated `BinStats` do not contain sums of products.
    Their sum of w r p is approximated with the mean confidence in each cell. Cells are at most 1 / 5,120 wide, and the
    effect after smoothing is negligible.
    """
    sums = cells.sums
    n, confidence, outcome = sums[..., :3, :].unbind(-2)
    if isinstance(cells, SmoothingCells):
        # sum p (p - y) = sum p - sum p (1 - p) - sum p y
        residual_p = confidence - sums[..., 3, :] - sums[..., -1, :]
    else:
        residual_p = (confidence - outcome) * (confidence / n.masked_fill(n == 0, 1))
    return torch.stack((n, confidence), -2), torch.stack((confidence - outcome, residual_p), -2)


def smece_from_cells(cells: BinStats, bandwidth: float | None = None) -> Tensor:
    """Compute the smooth calibration error `(...)` from sums over cells; see `smece`."""
    weight, residual = _cell_sums(cells)
    width = best_width(weight, residual) if bandwidth is None else bandwidth
    return smoothed_error(weight, residual, width)


def occupied_cells(cells: BinStats) -> Tensor:
    """Return the indices of the cells that are not empty `(..., K)`; batch elements are padded with empty cells."""
    is_empty = cells.n == 0
    n_kept = max([1, *(~is_empty).sum(-1).flatten().tolist()])
    return is_empty.to(torch.uint8).argsort(dim=-1, stable=True)[..., :n_kept]


def sums_of_cells(sums: Tensor, cells: Tensor) -> Tensor:
    """Return the sums `(..., F, K)` of some cells, with indices `(..., K)`."""
    return sums.gather(-1, cells.unsqueeze(-2).expand(*sums.shape[:-1], cells.shape[-1]))


def smece_from_bins(bins: BinStats, bandwidth: float | None) -> Tensor:
    """Compute the smooth calibration error `(...)` from narrow bins, with all events at the mean confidence of a bin.

    It equals `smece_from_cells` for simulated cells, without the cost of empty cells. Bins may be `BinsWithGaps` with
    replicates `(R, ..., B)`.
    """
    cells = bins.cells if isinstance(bins, BinsWithGaps) else BinCells.from_bins(bins)
    n_bins, gap = cells.n.shape[-1], bins.gap
    confidence, weight = cells.confidence.reshape(-1, n_bins), cells.n.reshape(-1, n_bins)
    found = errors_of_replicates(confidence, weight, weight * gap.reshape(-1, *weight.shape), bandwidth)
    return found.reshape(gap.shape[:-1])


def width_from_cells(cells: BinStats) -> Tensor:
    """Compute the kernel width `(...)` of the smooth calibration error from sums over cells; NaN without data."""
    weight, residual = _cell_sums(cells)
    return best_width(weight, residual).masked_fill(~(cells.total > 0), torch.nan)


@dataclass(frozen=True, eq=False)
class SmoothEstimator(Estimator[BinStats]):
    """Estimator of a metric computed from `SmoothingCells`. The sums take 763 kB per batch element or class."""

    bandwidth: float | None = None  # width of the kernel; None to select it from the data

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the metric value `(...)` for validated predictions, processing batch elements in chunks."""
        accumulator: Any = self.accumulator
        if p.replicates and p.weights is not None:
            return super().from_predictions(p)
        events = accumulator.events(p)
        *lead, n = events.confidence.shape
        at_once = max(1, _CHUNK // max(1, n, accumulator.n_quantities * accumulator.n_cells))
        if not lead or math.prod(lead) <= at_once:
            return self.value(accumulator.of_events(events, p))
        values = torch.cat([self.values(accumulator.of_events(piece, p)) for piece in _event_chunks(events, at_once)])
        values = values.reshape(*lead, *values.shape[1:])
        return values.mean(len(lead) - 1) if self.averages else values

    def test_from(self, statistic: BinStats, clusters: Partition[Any] | None = None, **how: Any) -> CalibrationTest:
        """Compute the calibration test from sums over cells; its interval is NaN."""
        test = ErrorTest(partial(smece_from_bins, bandwidth=self.bandwidth))
        kept = occupied_cells(statistic)
        if clusters is not None:
            clusters = replace(clusters, sums=sums_of_cells(clusters.sums, kept))
        few = replace(statistic, sums=sums_of_cells(statistic.sums, kept))
        found = run_error_test(test, few, clusters=clusters, average=self.averages, **how)
        return replace(found, statistic=self.value(statistic))

    def streamed(self, num_classes: int | None, **options: Any) -> "SmoothEstimator":
        """Return a copy of this estimator for a streaming metric, with the sums for the noise floor."""
        accumulator: Any = self.accumulator
        return replace(super().streamed(num_classes, **options), accumulator=replace(accumulator, with_noise=True))


def _event_chunks(events: Events, at_once: int) -> Iterator[Events]:
    """Flatten the batch axes, and yield the events of up to `at_once` batch elements at a time, in order."""
    shape = events.confidence.shape
    flat = events.map(lambda x: x.expand(shape).reshape(-1, shape[-1]))
    for start in range(0, len(flat.confidence), at_once):
        yield flat.map(itemgetter(slice(start, start + at_once)))


@metric_function(
    Declaration(
        name="smECE",
        question="mean distance between kernel-smoothed frequency and confidence",
        source="Blasiok & Nakkiran, Smooth ECE, ICLR 2024, arXiv 2309.12236",
        unit="probability",
        perfect=0.0,
        value_range=(0.0, 1.0),
        noise_increases=True,
        has_test=True,
        diagram="torchcalib.plots.reliability:smooth_diagram",
        diagram_of_classes="torchcalib.plots.reliability:smooth_diagram",
    )
)
def smece(
    task: Task | None = None,
    *,
    bandwidth: float | None = None,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SmoothEstimator:
    """Smooth expected calibration error (smECE): mean absolute value of kernel-smoothed residuals.

    smECE is the mean of |r(c)| over the smoothed density of the confidence c. The function r is the kernel regression
    of the residuals (outcome minus confidence) on the confidence. The kernel is Gaussian, reflected at 0 and 1. Its
    width is the smallest multiple of 1/1024 that is at least the smECE for this width. Small changes of the predictions
    have a small effect on smECE. For a large number of samples it tends to 0 only if the model is calibrated.

    The numerical method follows the authors' package relplot 1.0.3. Samples are rounded linearly to a grid of 1,000
    steps, or to steps of width / 10 for widths below 0.01. The smoothed residuals are evaluated at 200 points, or at
    10 / width points for widths below 0.05.

    Args:
        bandwidth: Width of the kernel, from 1/512 to 1. None selects it from the data. For a width below 0.01 that is
            not a multiple of 1/1024, the finest grid is used.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        With respect to the confidences, for a constant width of the kernel.

    Reference:
        Blasiok, Nakkiran: Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing (ICLR 2024).

    Example:
        >>> smece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.1753)
    """
    if not (bandwidth is None or is_number(bandwidth)):
        raise TypeError(
            f"`bandwidth` must be a number or None, got {shown(bandwidth)}. Omit it to select it from the data."
        )
    if bandwidth is not None and not FINEST / LEVELS <= bandwidth <= 1:
        raise ValueError(
            f"`bandwidth` must be from {FINEST / LEVELS:g} to 1, got {shown(bandwidth)}. Omit it to select it."
        )
    formula = partial(smece_from_cells, bandwidth=bandwidth)
    return SmoothEstimator.of_events(SmoothingAccumulator, formula, task, mode, average, options, bandwidth)


@metric_function()
def smece_width(
    task: Task | None = None, *, mode: Mode | None = None, **options: Unpack[InputOptions]
) -> SmoothEstimator:
    """Width of the kernel that smooth expected calibration error (`smece`) selects from the data.

    Returns:
        Multiples of 1/1024 from 2/1024 to 1, `(...)`, class-wise and multi-label `(..., C)`. They have the unit of the
        confidence and the dtype of `preds` (at least float32). NaN without data.

    Gradient:
        None.

    Reference:
        Blasiok, Nakkiran: Smooth ECE (ICLR 2024).

    Example:
        >>> smece_width(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.1758)
    """
    average = no_average(task, mode, options)
    return SmoothEstimator.of_events(SmoothingAccumulator, width_from_cells, task, mode, average, options)


class SmoothCurve(NamedTuple):
    """Kernel regression of the outcomes on the confidence, for one sample."""

    confidence: Tensor  # P equally spaced points in [0, 1], `(P,)`
    frequency: Tensor  # smoothed frequency at each point, `(P,)`; NaN where no data are within reach of the kernel
    density: Tensor  # smoothed density of the confidence at each point, `(P,)`
    width: float  # standard deviation of the kernel
    error: float  # smooth expected calibration error (smECE) for this width


def smooth_curve_of(cells: SmoothingCells, bandwidth: float | None = None) -> SmoothCurve:
    """Return the smoothed frequency for sums over cells without batch axes, with data; see `smece` for the kernel.

    Reference:
        Blasiok, Nakkiran: Smooth ECE (ICLR 2024), sec. 4: kernel regression with a reflected Gaussian kernel.
    """
    weight, residual = _cell_sums(cells)
    width = float(best_width(weight, residual)) if bandwidth is None else bandwidth
    outcome = torch.stack((cells.outcomes, cells.sums[..., -1, :]), -2)
    error = float(smoothed_error(weight, residual, width))
    return SmoothCurve(*smoothed_frequency(weight, outcome, width), width, error)


def smoothing_cells(
    preds: Tensor, target: Tensor, *, task: Task, mode: Mode | None = None, **options: Unpack[InputOptions]
) -> SmoothingCells:
    """Return the sums over cells for predictions, from which `smooth_curve_of` computes a curve."""
    estimator = factory_of(smece)(task=task, mode=mode, **options)
    cells: SmoothingCells = estimator.statistic(preds, target, options.get("weights"))
    return cells


def cells_of_sample(sample: RankedSample) -> SmoothingCells:
    """Return the sums over cells for samples, or for a sketch with all samples of a cell at its score."""
    is_counted = ~sample.score.isnan()
    score = sample.score.to(wide_dtype(sample.score.device)).masked_fill(~is_counted, 0)
    n = is_counted.to(score.dtype) if sample.n is None else sample.n.to(score.dtype).masked_fill(~is_counted, 0)
    outcome = sample.positives.to(score.dtype) / n.masked_fill(n == 0, 1)
    confidence = score.sigmoid() if sample.from_logits else score
    return SmoothingAccumulator("positive").wrap(smoothing_sums(confidence, outcome.expand_as(score), n))
