"""Ranked samples in bounded memory: exact up to a maximal number, a sketch above it."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import LogitCells, RankedSample
from torchcalib.core.state import Samples, SamplesKind
from torchcalib.core.sums import BinStats
from torchcalib.io.saved import saved_tensor, saved_value

MOST_SAMPLES = 2**24
"""Largest number of exact samples, every label of a sample being one: 9 bytes each (5 for float32), 17 with weights."""

RESOLUTION = 2048
_RESOLUTION_IN_ALL = 2**15  # of the cells of all labels together: 110 MB

_PIECE = 2**22  # samples that are added to the sketch at a time


@dataclass(frozen=True, eq=False)
class SampleOrSketch:
    """Ranked samples, which move into a sketch whenever there are more than `MOST_SAMPLES`.

    Values from the sketch are exact for data in which every probability has moved by less than 1 / `resolution` in
    log-odds, and with a resolution of 2,048 for float16 and bfloat16 probabilities as they are; see `LogitCells`. That
    is the resolution up to 16 labels. Each label has its own cells, and more labels share a resolution of 2^15.

    Attributes:
        kind: of the exact samples.
        samples: the exact samples.
        cells: the sketch; None as long as all samples are exact.
        sketch_has_labels: whether all outcomes in the sketch are labels.
    """

    kind: SamplesKind
    samples: Samples
    cells: BinStats | None = None
    sketch_has_labels: bool = True

    @classmethod
    def empty(cls, kind: SamplesKind) -> Self:
        """Return an accumulator of no samples."""
        return cls(kind, kind.empty())

    @property
    def resolution(self) -> int | None:
        """Cells for each unit of log-odds; None as long as all samples are exact."""
        return None if self.cells is None else self._sketch.resolution

    @property
    def size(self) -> int:
        """Number of exact samples; more than `MOST_SAMPLES` if there is a sketch."""
        return sum(score.numel() for score in self.samples.scores) if self.cells is None else MOST_SAMPLES + 1

    def of(self, p: Predictions) -> Self:
        """Return the samples of a batch alone."""
        return type(self)(self.kind, self.kind.detach(self.kind.of(p))).limited()

    def __add__(self, other: Self) -> Self:
        cells = [each.cells for each in (self, other) if each.cells is not None]
        return replace(
            self,
            samples=self.kind.add(self.samples, other.samples),
            cells=cells[0] + cells[1] if len(cells) > 1 else next(iter(cells), None),
            sketch_has_labels=self.sketch_has_labels and other.sketch_has_labels,
        ).limited()

    def limited(self, n_samples: int = 0) -> Self:
        """Return a sketch if there are too many samples here, or in all accumulators that will be added."""
        n_exact = sum(score.numel() for score in self.samples.scores)
        if not n_exact or max(n_exact, n_samples) <= MOST_SAMPLES:
            return self
        return type(self)(self.kind, self.kind.empty(), self._with(self._exact), self.has_labels)

    @property
    def has_labels(self) -> bool:
        """Whether all outcomes are labels, and none is a share."""
        return self.sketch_has_labels and are_labels(self._exact)

    @property
    def statistic(self) -> RankedSample:
        """All samples, those of the sketch as cells."""
        return self._exact if self.cells is None else self._sketch.wrap(self._with(self._exact).sums)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `loaded`: the exact samples, and the cells that hold any."""
        state: dict[str, Any] = {"parts": list(self.samples)}
        if self.cells is not None:
            sums = self.cells.sums
            places = (sums != 0).flatten(0, -2).any(0).nonzero().squeeze(-1)
            state |= {"cells": sums[..., places], "places": places, "has_labels": self.sketch_has_labels}
        return state

    def loaded(self, state: Any) -> Self:
        """Return the samples of a saved state, given no samples."""
        samples = self.kind.check(saved_value(state, "parts", list), self.samples)
        if samples is None:
            raise ValueError("`parts` must be chunks of samples")
        made = replace(self, samples=samples)
        _check_values(made._exact)
        if "cells" not in state:
            return made
        n_cells = self._sketch.shape("binary", 2)[-1]
        places = saved_tensor(state, "places", torch.int64, (None,))
        cells = saved_tensor(state, "cells", torch.float64, (*self.kind.lead, 3, len(places)))
        if not bool(((places >= 0) & (places < n_cells)).all() & (places.diff() > 0).all()):
            raise ValueError("`places` must be increasing numbers of cells")
        if not bool((cells >= 0).all()):
            raise ValueError("`cells` must be sums of at least 0")
        sums = cells.new_zeros((*cells.shape[:-1], n_cells)).index_copy_(-1, places, cells)
        _check_values(self._sketch.wrap(sums))
        return replace(made, cells=BinStats(sums), sketch_has_labels=saved_value(state, "has_labels", bool))

    @property
    def _exact(self) -> RankedSample:
        """The exact samples, with integer labels if all outcomes are labels."""
        sample: RankedSample = self.kind.statistic(self.samples)
        if sample.n is None and are_labels(sample):  # labels of a floating dtype
            return replace(sample, positives=sample.positives.to(torch.uint8))
        return sample

    @property
    def _sketch(self) -> LogitCells:
        resolution = max(1, min(RESOLUTION, _RESOLUTION_IN_ALL // torch.Size(self.kind.lead).numel()))
        return LogitCells(self.kind.accumulator.mode, resolution, self.kind.from_logits)

    def _with(self, sample: RankedSample) -> BinStats:
        """Return the cells, with those of more samples."""
        cells = self.cells
        for start in range(0, sample.score.shape[-1], width := max(1, _PIECE // sample.score.shape[:-1].numel())):
            piece = self._sketch.of_sample(sample.narrow(start, width))
            cells = piece if cells is None else cells + piece
        assert cells is not None  # there are samples where there are no cells
        return cells


def _check_values(sample: RankedSample) -> None:
    """Raise for values that no update accepts: they become indices."""
    score, positives, n = sample.score, sample.positives, 1 if sample.n is None else sample.n
    possible = score.isnan() | sample.from_logits | ((score >= 0) & (score <= 1))
    possible &= (positives >= 0) & (positives <= n)
    if sample.n is not None:
        possible &= (sample.n >= 0) & (sample.n == sample.n.round()) & (sample.n <= 2**53)
    if not bool(possible.all()):
        raise ValueError("samples must have scores in [0, 1], whole counts and 0 to count positives, got other values")


def are_labels(sample: RankedSample) -> bool:
    """Return whether every outcome is 0 or 1."""
    positives, all_of = sample.positives, 1 if sample.n is None else sample.n
    if not positives.is_floating_point():
        return True
    return bool(((positives == 0) | (positives == all_of)).all())
