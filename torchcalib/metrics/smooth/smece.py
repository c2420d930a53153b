"""Smooth calibration error."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, is_number, task_read_as
from torchcalib.core.events import Events, Reduction, resolve_reduction
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats, apart_of, kind_of_noise, noise_of
from torchcalib.inference.evidence import Evidence
from torchcalib.inference.testing import evidence_of
from torchcalib.metrics.smooth.reading import EventMetric, EventReading, EventSums, kept_apart
from torchcalib.metrics.tested import TestedMetric
from torchcalib.ops.smoothing import best_width, smoothed_error
from torchcalib.ops.smoothing.cells import FINEST, LEVELS, N_CELLS, cell_index, smoothing_sums


@dataclass(frozen=True, eq=False)
class SmoothingCells(BinStats):
    """Bins between the nodes of all grids that residuals are smoothed on; see `ops.smoothing.cells`.

    Beside weight, confidence and outcome there are the sums of confidence times 1 - confidence, then `noise` if it was
    asked for, and of confidence times outcome (last). So rounding a sample to the nodes on its sides can wait until a
    grid is chosen.
    """


@dataclass(frozen=True)
class SmoothingRecipe(EventSums[BinStats]):
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
        return cell_index(confidence)

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
        columns, noise = (events.confidence, events.outcome, events.weights), kind_of_noise(p, self.with_noise)
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


def smece(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bandwidth: float | None = None,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Smooth calibration error, smECE: the mean |residual| after smoothing over the confidence, without bins.

    Residuals are smoothed by a Gaussian kernel that is reflected at 0 and 1. Its width is chosen by the data: it is
    where width and error are equal, of the multiples of 1/1024 the first that is not below the error. The value then
    moves little when predictions do, and is zero, in the limit of many samples, for calibrated ones alone.

    The steps are those of the authors' package relplot 1.0.3: samples are rounded linearly to a grid of 1,000 steps
    (of width / 10 for widths below 0.01), smoothed there, and looked at in 200 points (10 / width for widths below
    0.05). Per series this takes ten transforms of the grid, after one pass over the samples.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bandwidth: width of the kernel, 1/512 to 1; None chooses it. (Below 0.01 a width that is no multiple of 1/1024
            is looked at on the finest of the grids, so that the state of a stream serves any.)
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`. Each class
            has a width of its own.
        **options: see `torchcalib.InputOptions`. `weights` may be any, and count as copies: as published, 0.0001
            samples are added to every density, which is nothing unless the weights are tiny.

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
    reading = _reading(task, reduction, average, options)
    from_cells = partial(smece_from_cells, bandwidth=_checked(bandwidth))
    return reading.evaluate(from_cells, task, preds, target, options)


def smece_width(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    reduction: Reduction | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Width of the kernel that `smece` chooses: a probability, `(...)`, or `(..., C)` for classes.

    Args:
        preds: see `smece`.
        target: see `smece`.
        task: see `smece`.
        reduction: see `smece`.
        **options: see `smece`.

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
    reading = _reading(task, reduction, kept_apart(task, reduction, options), options)
    return reading.evaluate(width_from_cells, task, preds, target, options)


def _reading(
    task: Task, reduction: Reduction | None, average: Average | None, options: InputOptions
) -> EventReading[BinStats]:
    read_as = task_read_as(task, options)
    return EventReading(read_as, SmoothingRecipe(resolve_reduction(read_as, reduction)), average)


def _checked(bandwidth: object) -> float | None:
    """Return a bandwidth, or raise."""
    if bandwidth is None:
        return None
    if not is_number(bandwidth):
        raise TypeError(f"`bandwidth` must be a number or None, got {bandwidth!r}.")
    if not FINEST / LEVELS <= bandwidth <= 1:
        raise ValueError(f"`bandwidth` must be from {FINEST / LEVELS:g} to 1, got {bandwidth!r}.")
    return float(bandwidth)


class SmECE(EventMetric[BinStats], TestedMetric[BinStats]):
    """Smooth calibration error, streamed; see `smece`.

    The state is 6 sums over each of 15,888 cells, 763 kB for each class, whatever the number of samples: cells of the
    confidence between the nodes of the grids. Samples are rounded to a grid linearly, so that the value follows from
    these sums to the last digits, with any weights; a sketch of the samples could not promise that, and whole samples
    would grow. As the cells are bins, what chance would make of the value is read from them too (`evidence`, but for
    the interval, which would take minutes).
    """

    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    question = "how far is frequency from confidence, on average, smoothed instead of binned"
    source = "Blasiok & Nakkiran, Smooth ECE, ICLR 2024"

    def __init__(self, *, bandwidth: float | None = None, **options: Any) -> None:
        checked = _checked(bandwidth)
        super().__init__(partial(SmoothingRecipe, with_noise=True), **options)
        self.bandwidth = checked

    def evidence_from(self, statistic: BinStats, **how: Any) -> Evidence:
        """Return the evidence of a statistic; see `TestedMetric`. The interval is NaN."""
        how["with_interval"] = False
        return evidence_of(self._from_cells, statistic, average=self.reading.averages, **how)

    def _value(self, statistic: BinStats) -> Tensor:
        return self.reading.read(self._from_cells, statistic)

    def _from_cells(self, cells: BinStats) -> Tensor:
        return smece_from_cells(cells, self.bandwidth)

    def width(self) -> Tensor:
        """Return the width that is chosen, over all ranks if `torch.distributed` is running; see `smece_width`."""
        return width_from_cells(self._synced_statistic())
