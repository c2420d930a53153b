"""The curve of a CORP reliability diagram: the best rising recalibration, and where it would be by chance."""

from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, task_read_as
from torchcalib.core.events import Reduction
from torchcalib.core.inputs import read_input
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.ranked_bins import Binning
from torchcalib.inference.samples import run_cells
from torchcalib.inference.testing import check_arguments
from torchcalib.metrics.ranked.reading import RankedReading
from torchcalib.ops.sorting import run_index

_MOST_POINTS = 2**10
_AT_ONCE = 2**18  # numbers of replicates that are recalibrated at a time


@dataclass(frozen=True, eq=False)
class CORPCurve:
    """Frequency over confidence, by isotonic regression. All are `(..., M)` but the level, in order of the confidence.

    Attributes:
        confidence: of the points, which are samples, or where there are many, runs of neighbouring ones.
        n: samples of each point, weights counted; one that ties have left empty has 0.
        frequency: isotonic regression of the outcomes on the confidences.
        band_low, band_high: between which the regression lies, point by point, in a share `level` of data sets, if the
            confidences are the probabilities of the outcomes: a consistency band. NaN without data.
        level: of the band.
    """

    confidence: Tensor
    n: Tensor
    frequency: Tensor
    band_low: Tensor
    band_high: Tensor
    level: float

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `curve[k]` is the curve of class k."""
        if self.n.dim() < 2:
            raise IndexError("a curve of one series has no batch axis to index")
        columns = (self.confidence, self.n, self.frequency, self.band_low, self.band_high)
        confidence, n, frequency, low, high = (column[index] for column in columns)
        return type(self)(confidence, n, frequency, low, high, self.level)


def corp_curve(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    reduction: Reduction | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    **options: Unpack[InputOptions],
) -> CORPCurve:
    """Curve of a CORP reliability diagram: isotonic regression of the outcomes, with a consistency band.

    No bins have to be chosen: blocks of equal frequency follow from the sample. The band is found by drawing outcomes
    anew as if every confidence were true, and regressing these in the same way. `torchcalib.corp_diagram` draws it.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: integer labels.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        reduction: what the confidence is of; see `ece`.
        level: of the band, in (0, 1).
        n_replicates: R.
        seed: of the draws, which are the same on every device.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers.

    Returns:
        A `CORPCurve` of `(..., M)`, class-wise and multi-label `(..., C, M)`, M at most 1,024, in float64.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2 and
        sec. "Uncertainty quantification" (consistency bands by resampling).

    Example:
        >>> curve = corp_curve(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary")
        >>> curve.frequency
        tensor([0.0000, 0.6667, 0.6667, 0.6667], dtype=torch.float64)
    """
    check_arguments(level, n_replicates, seed)
    reading = RankedReading(task_read_as(task, options), reduction, hard_targets=True)
    with torch.no_grad():
        p = read_input(task, preds, target, options, **reading.demands)
        sample = ExactSample(reading.resolved_reduction).of(p)
        return curve_of(sample, level, n_replicates, seed)


def curve_of(sample: RankedSample, level: float = 0.95, n_replicates: int = 999, seed: int = 0) -> CORPCurve:
    """Return the curve of samples; see `corp_curve`."""
    cells = run_cells(sample, _MOST_POINTS)
    seen = cells.with_gaps(cells, cells.gap)
    assert isinstance(seen, RankedSample)  # as of runs
    low, high = [], []
    flat, n_points = cells.map(lambda x: x.reshape(-1, x.shape[-1])), cells.n.shape[-1]
    for place in range(len(flat.n)):  # replicates of one series are as much as is kept
        one = flat.map(lambda x, place=place: x[place])  # type: ignore[misc]
        drawn = one.drawn(seed, torch.arange(n_replicates, device=one.n.device), place)
        gaps = torch.split(one.gaps_if_calibrated(drawn), max(1, _AT_ONCE // max(1, n_points)))
        fits = torch.cat([_recalibrated(one.with_gaps(one, some)) for some in gaps])
        fits = fits.sort(0).values
        outside = max(0, round((n_replicates + 1) * (1 - level) / 2) - 1)
        low.append(fits[outside])
        high.append(fits[n_replicates - 1 - outside])
    frequency = _recalibrated(seen)
    band_low, band_high = (torch.stack(ends).reshape(frequency.shape) for ends in (low, high))
    return CORPCurve(seen.score.clone(), cells.n, frequency, band_low, band_high, level)


def _recalibrated(sample: Any) -> Tensor:
    """Return the isotonic regression at every element of a sample in order."""
    blocks = Binning("pava").of(sample)
    index = run_index(blocks.ends, sample.score.shape[-1]).clamp(max=blocks.ends.shape[-1] - 1)
    return blocks.frequency.gather(-1, index)
