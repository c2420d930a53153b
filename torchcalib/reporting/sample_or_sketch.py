"""Ranked samples in bounded memory: exact samples up to a limit, and a sketch above it."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import LogitCells, RankedSample
from torchcalib.core.state import Samples, SampleState
from torchcalib.core.sums import BinStats
from torchcalib.io.saved import saved_tensor, saved_value

MAX_SAMPLES = 2**24
"""Maximum number of exact samples (multi-label: samples times labels). A sample takes 5 to 17 bytes."""

RESOLUTION = 2048
"""Cells of the sketch for each unit of log-odds, for up to 16 labels."""

_TOTAL_RESOLUTION = 2**15  # maximum sum of the resolutions of all labels, which limits the sketch to 110 MB

_CHUNK = 2**22  # number of samples added to the sketch at a time, to limit temporary memory


@dataclass(frozen=True, eq=False)
class SampleOrSketch:
    """Ranked samples, which are converted to a sketch when there are more than `MAX_SAMPLES`.

    The sketch contains sums over cells of log-odds, for each label separately. It changes each probability by less than
    1 / `resolution` in log-odds; see `LogitCells`. The resolution is 2,048, or 2^15 / L for L > 16 labels. With 2,048,
    rank-based errors of float16 and bfloat16 probabilities are exact.

    Attributes:
        kind: operations on the exact samples.
        samples: the exact samples.
        cells: the sketch; None while all samples are exact.
        sketch_has_labels: whether all outcomes in the sketch are 0 or 1.
    """

    kind: SampleState
    samples: Samples
    cells: BinStats | None = None
    sketch_has_labels: bool = True

    @classmethod
    def empty(cls, kind: SampleState) -> Self:
        """Return an accumulator without samples."""
        return cls(kind, kind.empty())

    @property
    def resolution(self) -> int | None:
        """Number of cells for each unit of log-odds; None while all samples are exact."""
        return None if self.cells is None else self._sketch.resolution

    @property
    def size(self) -> int:
        """Number of exact samples; `MAX_SAMPLES + 1` if there is a sketch."""
        return sum(score.numel() for score in self.samples.scores) if self.cells is None else MAX_SAMPLES + 1

    def from_predictions(self, p: Predictions) -> Self:
        """Return a new accumulator that contains only the batch `p`."""
        return type(self)(self.kind, self.kind.detach(self.kind.from_predictions(p))).limited()

    def __add__(self, other: Self) -> Self:
        cells = [each.cells for each in (self, other) if each.cells is not None]
        return replace(
            self,
            samples=self.kind.add(self.samples, other.samples),
            cells=cells[0] + cells[1] if len(cells) > 1 else next(iter(cells), None),
            sketch_has_labels=self.sketch_has_labels and other.sketch_has_labels,
        ).limited()

    def limited(self, n_samples: int = 0) -> Self:
        """Return a sketch if the number of samples, or the merged number `n_samples`, is too large; else `self`."""
        n_exact = sum(score.numel() for score in self.samples.scores)
        if not n_exact or max(n_exact, n_samples) <= MAX_SAMPLES:
            return self
        return type(self)(self.kind, self.kind.empty(), self._cells_with(self._exact), self.has_labels)

    @property
    def has_labels(self) -> bool:
        """True if all outcomes, of the exact samples and in the sketch, are 0 or 1."""
        return self.sketch_has_labels and are_labels(self._exact)

    @property
    def statistic(self) -> RankedSample:
        """All samples: the exact samples or, if there is a sketch, its cells as weighted samples."""
        return self._exact if self.cells is None else self._sketch.wrap(self._cells_with(self._exact).sums)

    def state(self) -> dict[str, Any]:
        """Return the exact samples and the non-empty cells as a dict of tensors, which `loaded` restores."""
        state: dict[str, Any] = {"parts": list(self.samples)}
        if self.cells is not None:
            sums = self.cells.sums
            places = (sums != 0).flatten(0, -2).any(0).nonzero().squeeze(-1)
            state |= {"cells": sums[..., places], "places": places, "has_labels": self.sketch_has_labels}
        return state

    def loaded(self, state: Any) -> Self:
        """Return an accumulator, restored from a result of `state()`; see `Accumulator.loaded`."""
        samples = self.kind.check(saved_value(state, "parts", list), self.samples)
        if samples is None:
            raise ValueError("`parts` must be chunks of ranked samples, got invalid chunks. The file is corrupt.")
        loaded = replace(self, samples=samples)
        _check_values(loaded._exact)
        if "cells" not in state:
            return loaded
        n_cells = self._sketch.shape("binary", 2)[-1]
        places = saved_tensor(state, "places", torch.int64, (None,))
        cells = saved_tensor(state, "cells", torch.float64, (*self.kind.lead, 3, len(places)))
        if not bool(((places >= 0) & (places < n_cells)).all() & (places.diff() > 0).all()):
            raise ValueError(
                f"`places` must be increasing cell indices below {n_cells:,}, got {places.tolist()!s:.80}. "
                "The file is corrupt."
            )
        if not bool((cells >= 0).all()):
            raise ValueError("`cells` must be non-negative sums, got a negative number or NaN. The file is corrupt.")
        sums = cells.new_zeros((*cells.shape[:-1], n_cells)).index_copy_(-1, places, cells)
        _check_values(self._sketch.wrap(sums))
        return replace(loaded, cells=BinStats(sums), sketch_has_labels=saved_value(state, "has_labels", bool))

    @property
    def _exact(self) -> RankedSample:
        """The exact samples, with uint8 outcomes if all outcomes are 0 or 1."""
        sample: RankedSample = self.kind.statistic(self.samples)
        if sample.n is None and are_labels(sample):
            return replace(sample, positives=sample.positives.to(torch.uint8))
        return sample

    @property
    def _sketch(self) -> LogitCells:
        resolution = max(1, min(RESOLUTION, _TOTAL_RESOLUTION // torch.Size(self.kind.lead).numel()))
        return LogitCells(self.kind.accumulator.mode, resolution, self.kind.from_logits)

    def _cells_with(self, sample: RankedSample) -> BinStats:
        """Return the cells of the sketch after adding a ranked sample."""
        cells = self.cells
        for start in range(0, sample.score.shape[-1], width := max(1, _CHUNK // sample.score.shape[:-1].numel())):
            piece = self._sketch.of_sample(sample.narrow(start, width))
            cells = piece if cells is None else cells + piece
        assert cells is not None  # without existing cells, all callers pass at least one sample
        return cells


def _check_values(sample: RankedSample) -> None:
    """Raise a ValueError for invalid scores or counts, because they would cause invalid cell indices."""
    score, positives, n = sample.score, sample.positives, 1 if sample.n is None else sample.n
    possible = score.isnan() | sample.from_logits | ((score >= 0) & (score <= 1))
    possible &= (positives >= 0) & (positives <= n)
    if sample.n is not None:
        possible &= (sample.n >= 0) & (sample.n == sample.n.round()) & (sample.n <= 2**53)
    if not bool(possible.all()):
        counts = torch.ones_like(score) if sample.n is None else sample.n
        first = int((~possible.expand(score.shape)).reshape(-1).int().argmax())
        found = [x.expand(score.shape).reshape(-1)[first].item() for x in (score, positives, counts)]
        raise ValueError(
            "`parts` and `cells` must have scores in [0, 1], whole counts n and 0 to n positives, got "
            "score {:.4g}, positives {:g} and n = {:g}. The file is corrupt.".format(*found)
        )


def are_labels(sample: RankedSample) -> bool:
    """Return True if every outcome is 0 or 1. An entry with n samples then has 0 or n positives."""
    positives, n = sample.positives, 1 if sample.n is None else sample.n
    if not positives.is_floating_point():
        return True
    return bool(((positives == 0) | (positives == n)).all())
