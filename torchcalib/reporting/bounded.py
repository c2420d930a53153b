"""Samples in bounded memory: whole as long as they are few, from there on as a sketch."""

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

    def n_whole(self, metric: StreamingMetric[RankedSample]) -> int:
        """Number of samples, all of which the metric holds; more than `MOST_SAMPLES` if there are cells."""
        held = sum(score.numel() for score in metric.state.scores)
        return held if self.resolution is None else MOST_SAMPLES + 1

    def relieve(self, metric: StreamingMetric[RankedSample], n_elsewhere: int = 0) -> None:
        """Take the samples of a metric whose state is every sample, if they are too many to stay there.

        Args:
            metric: what holds them; it is reset.
            n_elsewhere: samples that others hold, which are to be together with these.
        """
        held = sum(score.numel() for score in metric.state.scores)
        if not held or held + n_elsewhere <= MOST_SAMPLES:
            return
        sample = _held_by(metric)
        self._has_labels &= _has_labels(sample)
        self.resolution = _resolution_of(sample.score.shape[:-1])
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
        return self._recipe(sample, self.resolution).wrap(self._with(sample, self.resolution).sums)

    def __add__(self, other: "BoundedSample") -> "BoundedSample":
        """Return the cells of both; what their metrics hold is for them to merge."""
        both = BoundedSample(self._reduction)
        both.resolution = self.resolution or other.resolution
        cells = [bounded._cells for bounded in (self, other) if bounded._cells is not None]
        both._cells = reduce(add, cells) if cells else None
        both._has_labels = self._has_labels and other._has_labels
        return both

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, of which `of_state` makes the same again: the cells that hold samples."""
        if self._cells is None:
            return {"cells": None}
        sums = self._cells.sums
        places = (sums != 0).flatten(0, -2).any(0).nonzero().squeeze(-1)
        return {"cells": sums[..., places], "places": places, "has_labels": self._has_labels}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], reduction: Reduction, metric: StreamingMetric[RankedSample]) -> Self:
        """Return what was saved, of samples such as those of `metric`, whose own state is checked beside it.

        Raises:
            ValueError: it is no such thing, or samples with values that none can have.
        """
        _check_values(_held_by(metric))
        bounded = cls(reduction)
        if state["cells"] is None:
            return bounded
        input_format = metric.input_format
        lead = series_shape(reduction, input_format.read_as, input_format.num_classes)
        resolution = _resolution_of(torch.Size(lead))
        recipe = LogitCells(reduction, resolution, input_format.from_logits)
        shape = recipe.shape(input_format.read_as, input_format.num_classes)
        places = saved_tensor(state, "places", torch.int64, (None,))
        cells = saved_tensor(state, "cells", torch.float64, (*shape[:-1], len(places)))
        if not bool(((places >= 0) & (places < shape[-1])).all() & (places.diff() > 0).all()):
            raise ValueError("`places` must be cells in order")
        if not bool((cells >= 0).all()):
            raise ValueError("`cells` must be sums of what is not negative")
        sums = cells.new_zeros(shape).index_copy_(-1, places, cells)
        _check_values(recipe.wrap(sums))
        bounded.resolution, bounded._cells = resolution, BinStats(sums)
        bounded._has_labels = saved_value(state, "has_labels", bool)
        return bounded

    def _recipe(self, sample: RankedSample, resolution: int) -> LogitCells:
        return LogitCells(self._reduction, resolution, sample.from_logits)

    def _with(self, sample: RankedSample, resolution: int) -> BinStats:
        """The cells, with those of more samples."""
        recipe = self._recipe(sample, resolution)
        cells = self._cells
        for start in range(0, sample.score.shape[-1], width := max(1, _PIECE // sample.score.shape[:-1].numel())):
            piece = recipe.of_sample(sample.narrow(start, width))
            cells = piece if cells is None else cells + piece
        assert cells is not None  # there is a resolution where there have been samples
        return cells


def _resolution_of(series: torch.Size) -> int:
    """Cells for each unit of log-odds, where every one of these series has cells of its own."""
    return max(1, min(RESOLUTION, _RESOLUTION_IN_ALL // series.numel()))


def _check_values(sample: RankedSample) -> None:
    """Raise where a sample has what no update would have let in: its numbers become places in tables."""
    score, positives, n = sample.score, sample.positives, 1 if sample.n is None else sample.n
    possible = score.isnan() | sample.from_logits | ((score >= 0) & (score <= 1))
    possible &= (positives >= 0) & (positives <= n)
    if sample.n is not None:
        possible &= (sample.n >= 0) & (sample.n == sample.n.round()) & (sample.n <= 2**53)
    if not bool(possible.all()):
        raise ValueError("samples must have scores, outcomes and counts that can be, got others")


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
