"""Ranked samples in bounded memory: exact samples up to a limit, and a sketch above it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import LogitCells, RankedSample
from torchcalib.core.state import Samples, SampleState, check_counts
from torchcalib.core.sums import BinStats, check_sums
from torchcalib.io.errors import shown
from torchcalib.ops.logs import wide_dtype

MAX_SAMPLES = 2**24
"""Maximum number of exact samples (multi-label: samples times labels). A sample takes 5 to 17 bytes."""

RESOLUTION = 2048
"""Cells of the sketch for each unit of log-odds, for up to 16 labels."""

_TOTAL_RESOLUTION = 2**15  # maximum sum of the resolutions of all labels, which limits the sketch to 110 MB


class SampleOrSketch(NamedTuple):
    """State that stores exact samples, or a sketch of them."""

    exact: Samples  # the samples that are not in the sketch
    cells: BinStats | None = None  # the sketch; None while all samples are exact
    has_labels: bool = True  # whether all outcomes in the sketch are 0 or 1
    n_rows: int = 0  # number of samples in the sketch, without their copies


@dataclass(frozen=True)
class SampleOrSketchState:
    """Operations on a state of samples, which becomes a sketch when there are more than `MAX_SAMPLES`.

    The sketch contains sums over cells of log-odds, for each label separately. It changes each probability by less than
    1 / `resolution` in log-odds; see `LogitCells`. The resolution is 2,048, or 2^15 / L for L > 16 labels. With 2,048,
    rank-based errors of float16 and bfloat16 probabilities are exact.
    """

    exact: SampleState  # operations on the exact samples

    def empty(self) -> SampleOrSketch:
        """Return a state without samples."""
        return SampleOrSketch(self.exact.empty())

    def from_predictions(self, p: Predictions) -> SampleOrSketch:
        """Return the state for one batch of predictions."""
        return self.limited(SampleOrSketch(self.exact.from_predictions(p)))

    def add(self, state: SampleOrSketch, more: SampleOrSketch) -> SampleOrSketch:
        """Return the sum of two states."""
        cells = [each.cells for each in (state, more) if each.cells is not None]
        return self.limited(
            SampleOrSketch(
                self.exact.add(state.exact, more.exact),
                cells[0] + cells[1] if len(cells) > 1 else next(iter(cells), None),
                state.has_labels and more.has_labels,
                state.n_rows + more.n_rows,
            )
        )

    def detach(self, state: SampleOrSketch) -> SampleOrSketch:
        """Return the state without its autograd graph."""
        return state._replace(exact=self.exact.detach(state.exact))

    def limited(self, state: SampleOrSketch, n_samples: int = 0) -> SampleOrSketch:
        """Return a sketch if the number of samples, or the merged number `n_samples`, is too large; else `state`."""
        n_exact = _n_samples(state.exact)
        if not n_exact or max(n_exact, n_samples) <= MAX_SAMPLES:
            return state
        sample = self._exact_sample(state)
        has_labels, n_rows = state.has_labels and are_labels(sample), state.n_rows + _n_rows(sample)
        return SampleOrSketch(self.exact.empty(), self._cells_with(state, sample), has_labels, n_rows)

    def size(self, state: SampleOrSketch) -> int:
        """Return the number of exact samples; `MAX_SAMPLES + 1` if there is a sketch."""
        return _n_samples(state.exact) if state.cells is None else MAX_SAMPLES + 1

    def resolution(self, state: SampleOrSketch) -> int | None:
        """Return the number of cells for each unit of log-odds; None while all samples are exact."""
        return None if state.cells is None else self._sketch.resolution

    def has_labels(self, state: SampleOrSketch) -> bool:
        """Return True if all outcomes, of the exact samples and in the sketch, are 0 or 1."""
        return state.has_labels and are_labels(self._exact_sample(state))

    def n_rows(self, state: SampleOrSketch) -> int | None:
        """Return the number of samples of positive weight, without their copies; None while all samples are exact."""
        return None if state.cells is None else state.n_rows + _n_rows(self._exact_sample(state))

    def statistic(self, state: SampleOrSketch) -> RankedSample:
        """Return all samples: the exact samples or, if there is a sketch, its cells as weighted samples."""
        sample = self._exact_sample(state)
        return sample if state.cells is None else self._sketch.wrap(self._cells_with(state, sample).sums)

    def parts(self, state: SampleOrSketch) -> list[Any]:
        """Return the parts of a state to save: the exact samples and, if there is a sketch, its non-empty cells."""
        parts: list[Any] = list(state.exact)
        if state.cells is not None:
            sums = state.cells.sums
            places = (sums != 0).flatten(0, -2).any(0).nonzero().squeeze(-1)
            parts += [places, sums[..., places], torch.tensor(state.has_labels), torch.tensor(state.n_rows)]
        return parts

    def check(self, parts: Sequence[Any], like: SampleOrSketch) -> SampleOrSketch | None:
        """Return a copy of a saved state on the device of `like`, or None if its parts are not valid.

        Invalid scores, counts or cells raise ValueError.
        """
        n_exact = len(like.exact)
        exact = self.exact.check(parts[:n_exact], like.exact)
        if exact is None:
            return None
        if len(parts) == n_exact:
            return SampleOrSketch(exact)
        dtypes = (torch.int64, torch.float64, torch.bool, torch.int64)
        if tuple(part.dtype if isinstance(part, Tensor) else None for part in parts[n_exact:]) != dtypes:
            return None
        places, cells, has_labels, n_rows = parts[n_exact:]
        shapes_fit = places.dim() == 1 and cells.shape == (*self.exact.leading_shape, 3, len(places))
        if not shapes_fit or has_labels.numel() != 1 or n_rows.numel() != 1 or n_rows < 0:
            return None
        n_cells = self._sketch.shape("binary", 2)[-1]
        if not bool(((places >= 0) & (places < n_cells)).all() & (places.diff() > 0).all()):
            raise ValueError(
                f"`places` must be increasing cell indices below {n_cells:,}, got {shown(places.tolist())}. "
                "The file is corrupt."
            )
        check_sums(cells, self._sketch.ranges, None)
        check_counts("the numbers of samples", cells[..., 0, :])
        sums = cells.new_zeros((*cells.shape[:-1], n_cells)).index_copy_(-1, places, cells)
        return SampleOrSketch(exact, BinStats(sums), bool(has_labels), int(n_rows))

    def _exact_sample(self, state: SampleOrSketch) -> RankedSample:
        """Return the exact samples, with uint8 outcomes if all outcomes are 0 or 1."""
        sample: RankedSample = self.exact.statistic(state.exact)
        if sample.n is None and are_labels(sample):
            return replace(sample, positives=sample.positives.to(torch.uint8))
        return sample

    @property
    def _sketch(self) -> LogitCells:
        resolution = max(1, min(RESOLUTION, _TOTAL_RESOLUTION // torch.Size(self.exact.leading_shape).numel()))
        return LogitCells(self.exact.accumulator.mode, resolution, self.exact.from_logits)

    def _cells_with(self, state: SampleOrSketch, sample: RankedSample) -> BinStats:
        """Return the cells of the sketch after adding a ranked sample."""
        if state.cells is not None:
            sums = state.cells.sums.clone()
        else:
            shape = (*sample.score.shape[:-1], *self._sketch.shape("binary", 2)[-2:])
            sums = torch.zeros(shape, dtype=wide_dtype(sample.score.device), device=sample.score.device)
        self._sketch.add_sample(sample, sums)
        return BinStats(sums)


def _n_samples(exact: Samples) -> int:
    return sum(score.numel() for score in exact.scores)


def _n_rows(sample: RankedSample) -> int:
    is_counted = ~sample.score.isnan()
    return int((is_counted if sample.n is None else is_counted & (sample.n > 0)).sum())


def are_labels(sample: RankedSample) -> bool:
    """Return True if every outcome is 0 or 1. An entry with n samples then has 0 or n positives."""
    positives, n = sample.positives, 1 if sample.n is None else sample.n
    if not positives.is_floating_point():
        return True
    return bool(((positives == 0) | (positives == n)).all())
