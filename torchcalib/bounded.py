"""Samples in bounded memory: whole as long as they are few, from there on as a sketch."""

from dataclasses import replace

import torch

from torchcalib.reductions import Reduction
from torchcalib.samples import LogitCells, RankedSample
from torchcalib.statistics import BinStats
from torchcalib.streaming import StreamingMetric

MOST_SAMPLES = 2**24
"""Samples that are kept whole, every label of a sample being one: 9 bytes each (5 of float32), with weights 8 more."""

RESOLUTION = 2048
_RESOLUTION_IN_ALL = 2**15  # of the cells of all labels together: 110 MB

_PIECE = 2**22  # samples that are put into cells at a time


class BoundedSample:
    """Puts the samples that a metric holds into cells whenever there are more than `MOST_SAMPLES`.

    What is read from the cells is exact for data in which every probability has moved by less than 1 / `resolution` in
    log-odds, and with a resolution of 2,048 for float16 and bfloat16 probabilities as they are; see `LogitCells`. That
    is the resolution, unless there are more than 16 labels, which have cells of their own: they share 2^15.

    Attributes:
        resolution: cells for each unit of log-odds; None as long as all samples are whole.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.resolution: int | None = None
        self._reduction: Reduction = reduction
        self._cells: BinStats | None = None
        self._has_labels = True

    def relieve(self, metric: StreamingMetric[RankedSample]) -> None:
        """Take the samples of a metric whose state is every sample, if they are too many to stay there."""
        if sum(score.numel() for score in metric.state.scores) <= MOST_SAMPLES:
            return
        sample = _held_by(metric)
        self._has_labels &= _has_labels(sample)
        if self.resolution is None:
            n_series = sample.score.shape[:-1].numel()
            self.resolution = max(1, min(RESOLUTION, _RESOLUTION_IN_ALL // n_series))
        self._cells = self._with(sample, self.resolution)
        metric.reset()

    def has_labels(self, metric: StreamingMetric[RankedSample]) -> bool:
        """Whether all outcomes were labels so far, and none a share of votes."""
        return self._has_labels and _has_labels(_held_by(metric))

    def with_those_of(self, metric: StreamingMetric[RankedSample]) -> RankedSample:
        """Return all samples that the metric has seen."""
        sample = _held_by(metric)
        if self.resolution is None:
            return sample
        return LogitCells(self._reduction, self.resolution).wrap(self._with(sample, self.resolution).sums)

    def _with(self, sample: RankedSample, resolution: int) -> BinStats:
        """The cells, with those of more samples."""
        recipe = LogitCells(self._reduction, resolution)
        cells = self._cells
        for start in range(0, sample.score.shape[-1], width := max(1, _PIECE // sample.score.shape[:-1].numel())):
            piece = recipe.of_sample(sample.narrow(start, width))
            cells = piece if cells is None else cells + piece
        assert cells is not None  # there is a resolution where there have been samples
        return cells


def _held_by(metric: StreamingMetric[RankedSample]) -> RankedSample:
    """The samples of a metric. Whether some that came on CUDA were bad is for others to say, which see the same."""
    sample = metric.kind.statistic(metric.state)
    if sample.n is None and _has_labels(sample):  # labels that were given as floating numbers
        return replace(sample, positives=sample.positives.to(torch.uint8))
    return sample


def _has_labels(sample: RankedSample) -> bool:
    """Whether every outcome is 0 or 1."""
    positives, all_of = sample.positives, 1 if sample.n is None else sample.n
    if not positives.is_floating_point():
        return True
    return bool(((positives == 0) | (positives == all_of)).all())
