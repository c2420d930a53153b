"""Differences of systems to the baseline, their intervals and verdicts."""

import math
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from torchcalib.inference.resampling import Interval
from torchcalib.metrics.binned import ACE, BinnedMetric
from torchcalib.metrics.ranked import KS, RankedMetric
from torchcalib.metrics.scores import ScoreMetric
from torchcalib.metrics.test_based import TCE
from torchcalib.reporting.data import Better, ComparedLine, Difference, Line, LineInterval, Quantity, Verdict
from torchcalib.reporting.lines import ERRORS, SCORES
from torchcalib.reporting.testing import LEVEL, interval_of

_DIRECTIONS: dict[bool | None, Better] = {True: "higher", False: "lower", None: "nearer to 0"}
_METRICS: tuple[type[ScoreMetric | BinnedMetric | RankedMetric], ...] = (*SCORES, *ERRORS, ACE, TCE, KS)
_BETTER: dict[str, Better] = {m.__name__: _DIRECTIONS[m.higher_is_better] for m in _METRICS}
_BETTER["DSC"] = "higher"
"""Which values are better, by the name of the line; lower ones for other names."""

_SIZED = ("ECE", "MCE", "RMSCE", "ACE", "KS")
"""Errors that are proportional to the standard deviation of gaps if there is nothing but sampling noise. A replicate
doubles the variance of the gaps, so that the error of a calibrated system increases by sqrt(2) - 1 of itself: the bias
of the replicates, divided by that, estimates the part of sampling noise. For ECE the part is computed directly, which
is more accurate: a bin without a single event has replicates without any, too."""

_UNFIT = ("RMSCE debiased",)
"""Lines without intervals. Debiasing subtracts the noise of bins, but not that of replicates, which repeat samples."""


def compared_line(
    lines: Mapping[str, Line], replicates: Mapping[str, Mapping[str, Tensor]], chance: Mapping[str, Mapping[str, float]]
) -> ComparedLine:
    """Compare one quantity.

    Args:
        lines: of all systems by name, the baseline first.
        replicates: of all systems, by the keys of lines.
        chance: expected value of each system if it were calibrated, by the keys of lines, as far as it is known.
    """
    first, *others = lines
    line = lines[first]
    better = _BETTER.get(line.name, "lower")
    known = {name: None if line.name in _UNFIT else replicates[name].get(line.key) for name in lines}
    by_chance = {name: chance[name].get(line.key) for name in lines}

    def difference(name: str) -> Difference:
        a, b = by_chance[first], by_chance[name]
        part = None if a is None or b is None else b - a
        return _difference(better, (line, lines[name]), (known[first], known[name]), part)

    return ComparedLine(
        **{each.name: getattr(line, each.name) for each in fields(Quantity)},
        better=better,
        values={name: of.value for name, of in lines.items()},
        intervals={
            name: None if (drawn := known[name]) is None else _if_known(interval_of(of, drawn))
            for name, of in lines.items()
        },
        differences={name: difference(name) for name in others},
    )


def _difference(
    better: Better, lines: tuple[Line, Line], replicates: tuple[Tensor | None, Tensor | None], chance: float | None
) -> Difference:
    """Return the difference of the second system to the first."""
    values = [line.value for line in lines]
    a, b = (torch.tensor(value, dtype=torch.float64) for value in values)
    value = _minus(b, a, better)
    undecided = Difference(float(value), None, None, "not told apart")
    if replicates[0] is None or replicates[1] is None:
        return undecided
    drawn = Interval(value, _minus(replicates[1], replicates[0], better), LEVEL)
    bias = float(drawn.bias)
    if not abs(bias) > float(drawn.standard_error) / 4:  # small; or NaN or infinite, which cannot be subtracted
        bias = 0.0
    found = _if_known(LineInterval(float(drawn.low) - bias, float(drawn.high) - bias))
    if found is None:
        return undecided
    if chance is None and lines[0].name in _SIZED:
        chance = float(drawn.bias) / (math.sqrt(2) - 1)
    verdict: Verdict = "not told apart"
    # Rows are evaluated in float32 at least: values that are 0 by definition, such as ESCE class-wise, are 0 up to eps.
    rounding = torch.finfo(torch.float32).eps * max([1.0, *(abs(x) for x in values if math.isfinite(x))])
    if found.low - max(0.0, chance or 0.0) > rounding or found.high - min(0.0, chance or 0.0) < -rounding:
        verdict = "better" if (found.low > 0) == (better == "higher") else "worse"
    return Difference(float(value), found, chance, verdict)


def _if_known(found: LineInterval) -> LineInterval | None:
    """Return an interval, or None if replicates are NaN: they hold no row, or infinity minus infinity."""
    return None if math.isnan(found.low) or math.isnan(found.high) else found


def _minus(b: Tensor, a: Tensor, better: Better) -> Tensor:
    """Return b - a; for signed metrics the difference of absolute values."""
    return b.abs() - a.abs() if better == "nearer to 0" else b - a
