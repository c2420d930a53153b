"""Ranked samples in bounded memory: exact up to a maximal number, a sketch above it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, Self

import torch

from torchcalib.core.events import Reduction
from torchcalib.core.ranked import LogitCells, RankedSample
from torchcalib.core.sums import BinStats, series_shape
from torchcalib.io.saved import saved_tensor, saved_value
from torchcalib.metrics.base import StreamingMetric

MOST_SAMPLES = 2**24
"""Largest number of exact samples, every label of a sample being one: 9 bytes each (5 for float32), 17 with weights."""

RESOLUTION = 2048
_RESOLUTION_IN_ALL = 2**15  # of the cells of all labels together: 110 MB

_PIECE = 2**22  # samples that are added to the sketch at a time


class BoundedSample:
    """Moves the samples of a metric into a sketch whenever there are more than `MOST_SAMPLES`.

    Values from the sketch are exact for data in which every probability has moved by less than 1 / `resolution` in
    log-odds, and with a resolution of 2,048 for float16 and bfloat16 probabilities as they are; see `LogitCells`. That
    is the resolution up to 16 labels. Each label has its own cells, and more labels share a resolution of 2^15.

    Attributes:
        resolution: cells for each unit of log-odds; None as long as all samples are exact.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.resolution: int | None = None
        self._reduction: Reduction = reduction
        self._cells: BinStats | None = None
        self._has_labels = True

    def n_whole(self, metric: StreamingMetric[RankedSample]) -> int:
        """Return the number of exact samples in the metric; more than `MOST_SAMPLES` if there is a sketch."""
        return _size(metric) if self.resolution is None else MOST_SAMPLES + 1

    def relieve(self, metric: StreamingMetric[RankedSample], n_elsewhere: int = 0) -> None:
        """Move the samples of a metric into the sketch and reset the metric, if there are too many.

        Args:
            metric: with all samples as its state.
            n_elsewhere: number of samples that will be merged with these.
        """
        held = _size(metric)
        if not held or held + n_elsewhere <= MOST_SAMPLES:
            return
        sample = _sample_of(metric)
        self._has_labels &= _has_labels(sample)
        self.resolution = _resolution_of(sample.score.shape[:-1])
        self._cells = self._with(sample, self.resolution)
        metric.reset()

    def has_labels(self, metric: StreamingMetric[RankedSample]) -> bool:
        """Return whether all outcomes were labels so far, and none a share."""
        return self._has_labels and _has_labels(_sample_of(metric))

    def with_those_of(self, metric: StreamingMetric[RankedSample]) -> RankedSample:
        """Return all samples of the metric and of the sketch."""
        sample = _sample_of(metric)
        if self.resolution is None:
            return sample
        return self._recipe(sample, self.resolution).wrap(self._with(sample, self.resolution).sums)

    def __add__(self, other: "BoundedSample") -> "BoundedSample":
        """Return the sketch of both; their metrics are merged elsewhere."""
        both = BoundedSample(self._reduction)
        both.resolution = self.resolution or other.resolution
        cells = [bounded._cells for bounded in (self, other) if bounded._cells is not None]
        both._cells = reduce(add, cells) if cells else None
        both._has_labels = self._has_labels and other._has_labels
        return both

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `of_state`: the cells that hold samples."""
        if self._cells is None:
            return {"cells": None}
        sums = self._cells.sums
        places = (sums != 0).flatten(0, -2).any(0).nonzero().squeeze(-1)
        return {"cells": sums[..., places], "places": places, "has_labels": self._has_labels}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], reduction: Reduction, metric: StreamingMetric[RankedSample]) -> Self:
        """Return the saved sketch, for samples like those of `metric`, whose state is checked here too.

        Raises:
            ValueError: for a state that no samples have.
        """
        _check_values(_sample_of(metric))
        bounded = cls(reduction)
        if state["cells"] is None:
            return bounded
        task, num_classes = metric.input_format.read_as, metric.input_format.num_classes
        resolution = _resolution_of(torch.Size(series_shape(reduction, task, num_classes)))
        recipe = LogitCells(reduction, resolution, metric.input_format.from_logits)
        shape = recipe.shape(task, num_classes)
        places = saved_tensor(state, "places", torch.int64, (None,))
        cells = saved_tensor(state, "cells", torch.float64, (*shape[:-1], len(places)))
        if not bool(((places >= 0) & (places < shape[-1])).all() & (places.diff() > 0).all()):
            raise ValueError("`places` must be increasing numbers of cells")
        if not bool((cells >= 0).all()):
            raise ValueError("`cells` must be sums of at least 0")
        sums = cells.new_zeros(shape).index_copy_(-1, places, cells)
        _check_values(recipe.wrap(sums))
        bounded.resolution, bounded._cells = resolution, BinStats(sums)
        bounded._has_labels = saved_value(state, "has_labels", bool)
        return bounded

    def _recipe(self, sample: RankedSample, resolution: int) -> LogitCells:
        return LogitCells(self._reduction, resolution, sample.from_logits)

    def _with(self, sample: RankedSample, resolution: int) -> BinStats:
        """Return the cells, with those of more samples."""
        recipe = self._recipe(sample, resolution)
        cells = self._cells
        for start in range(0, sample.score.shape[-1], width := max(1, _PIECE // sample.score.shape[:-1].numel())):
            piece = recipe.of_sample(sample.narrow(start, width))
            cells = piece if cells is None else cells + piece
        assert cells is not None  # a resolution implies that there have been samples
        return cells


def _size(metric: StreamingMetric[RankedSample]) -> int:
    return sum(score.numel() for score in metric.state.scores)


def _resolution_of(series: torch.Size) -> int:
    """Return the number of cells for each unit of log-odds, where each of these series has its own cells."""
    return max(1, min(RESOLUTION, _RESOLUTION_IN_ALL // series.numel()))


def _check_values(sample: RankedSample) -> None:
    """Raise for values that no update accepts: they become indices."""
    score, positives, n = sample.score, sample.positives, 1 if sample.n is None else sample.n
    possible = score.isnan() | sample.from_logits | ((score >= 0) & (score <= 1))
    possible &= (positives >= 0) & (positives <= n)
    if sample.n is not None:
        possible &= (sample.n >= 0) & (sample.n == sample.n.round()) & (sample.n <= 2**53)
    if not bool(possible.all()):
        raise ValueError("samples must have scores in [0, 1], whole counts and 0 to count positives, got other values")


def _sample_of(metric: StreamingMetric[RankedSample]) -> RankedSample:
    """Return the samples of a metric. Bad rows from CUDA are reported elsewhere, by metrics of the same rows."""
    sample = metric.kind.statistic(metric.state)
    if sample.n is None and _has_labels(sample):  # labels of a floating dtype
        return replace(sample, positives=sample.positives.to(torch.uint8))
    return sample


def _has_labels(sample: RankedSample) -> bool:
    """Return whether every outcome is 0 or 1."""
    positives, all_of = sample.positives, 1 if sample.n is None else sample.n
    if not positives.is_floating_point():
        return True
    return bool(((positives == 0) | (positives == all_of)).all())
