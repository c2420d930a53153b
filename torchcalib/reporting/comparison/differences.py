"""Differences between systems and the baseline: values, bootstrap intervals and verdicts."""

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
from torchcalib.metrics.truthful import ATB
from torchcalib.reporting.lines import ERRORS, SCORES, SELECTIVE
from torchcalib.reporting.results import Better, ComparedLine, Difference, Line, LineInterval, Quantity, Verdict
from torchcalib.reporting.testing import LEVEL, interval_of, none_if_nan

_DIRECTIONS: dict[bool | None, Better] = {True: "higher", False: "lower", None: "nearer to 0"}
_METRICS: tuple[type[ScoreMetric | BinnedMetric | RankedMetric], ...] = (*SCORES, *ERRORS, ACE, TCE, KS, ATB)
_BETTER: dict[str, Better] = {m.__name__: _DIRECTIONS[m.higher_is_better] for m in _METRICS}
_BETTER |= {name: _DIRECTIONS[metric.higher_is_better] for metric, name in SELECTIVE.values()}
_BETTER["DSC"] = "higher"
"""Direction of better values, by the name of the line. Lower is better for all other lines."""

_INCREASE_BY_NOISE = {**dict.fromkeys(("ECE", "MCE", "RMSCE", "ACE", "KS"), math.sqrt(2)), "ATB": 2.0}
"""Factor by which a calibration error increases if the variance of the gaps of bins is doubled, for calibrated systems.

A gap is frequency minus confidence. Resampling doubles the variance of the gaps. Most errors are proportional to their
standard deviation, so that an error e increases to sqrt(2) e in the replicates. ATB is proportional to the variance.
The bias of the replicates, divided by the factor minus 1, estimates e, the contribution of sampling noise. For ECE
(expected calibration error) `expected_ece` is used: bins with frequency 0 have no noise in the replicates.
"""

_WITHOUT_INTERVALS = ("ECE debiased", "RMSCE debiased")
"""Lines for which the bootstrap is invalid: debiasing does not subtract the noise of repeated samples."""


def compared_line(
    lines: Mapping[str, Line],
    replicates: Mapping[str, Mapping[str, Tensor]],
    chance: Mapping[str, Mapping[str, float]],
    n_clusters: float | None = None,
) -> ComparedLine:
    """Compare one score or calibration error of all systems with its value for the baseline.

    Args:
        lines: `Line` with the value of each system, by system name, the baseline first.
        replicates: values in all bootstrap replicates `(R,)`, by system name and `Line.key`.
        chance: expected value of a calibrated system, by system name and `Line.key`; keys may be missing.
        n_clusters: effective number of resampled clusters; None if rows were resampled.

    Returns:
        The values and their differences from the baseline, both with intervals.
    """
    first, *others = lines
    line = lines[first]
    better = _BETTER.get(line.name, "lower")
    values = {name: None if line.name in _WITHOUT_INTERVALS else replicates[name].get(line.key) for name in lines}
    expected = {name: chance[name].get(line.key) for name in lines}

    def difference(name: str) -> Difference:
        a, b = expected[first], expected[name]
        expected_difference = None if a is None or b is None else b - a
        return _difference(better, (line, lines[name]), (values[first], values[name]), expected_difference, n_clusters)

    return ComparedLine(
        **{each.name: getattr(line, each.name) for each in fields(Quantity)},
        better=better,
        values={name: each.value for name, each in lines.items()},
        intervals={
            name: None if (found := values[name]) is None else interval_of(each, found, n_clusters)
            for name, each in lines.items()
        },
        differences={name: difference(name) for name in others},
    )


def _difference(
    better: Better,
    lines: tuple[Line, Line],
    replicates: tuple[Tensor | None, Tensor | None],
    chance: float | None,
    n_clusters: float | None,
) -> Difference:
    """Return the value of the second system minus the value of the first, with its interval and verdict."""
    values = [line.value for line in lines]
    a, b = (torch.tensor(value, dtype=torch.float64) for value in values)
    value = _minus(b, a, better)
    undecided = Difference(float(value), None, None, "not significant")
    if replicates[0] is None or replicates[1] is None:
        return undecided
    bootstrap = Interval(value, _minus(replicates[1], replicates[0], better), LEVEL, n_clusters)
    interval = none_if_nan(LineInterval(*(float(end) for end in bootstrap.without_bias)))
    if interval is None:
        return undecided
    if chance is None and lines[0].name in _INCREASE_BY_NOISE:
        chance = float(bootstrap.bias) / (_INCREASE_BY_NOISE[lines[0].name] - 1)
    verdict: Verdict = "not significant"
    # Values that are 0 by definition, such as the mean signed error over all classes, have float32 rounding errors.
    rounding = torch.finfo(torch.float32).eps * max([1.0, *(abs(x) for x in values if math.isfinite(x))])
    if interval.low - max(0.0, chance or 0.0) > rounding or interval.high - min(0.0, chance or 0.0) < -rounding:
        verdict = "better" if (interval.low > 0) == (better == "higher") else "worse"
    return Difference(float(value), interval, chance, verdict)


def _minus(b: Tensor, a: Tensor, better: Better) -> Tensor:
    """Return b - a, or |b| - |a| for signed metrics."""
    return b.abs() - a.abs() if better == "nearer to 0" else b - a
