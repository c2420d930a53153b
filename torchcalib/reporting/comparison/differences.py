"""Differences between systems and the baseline: values, intervals, p-values and verdicts.

Each difference has up to three sets of replicates: those of the paired bootstrap and, for calibration errors, one or
two sets of null replicates, in which both systems are calibrated (`torchcalib.reporting.comparison.null`). The p-value
is the largest one of these sets, and the interval contains the intervals of all sets (intersection-union test, Berger
1982). The bootstrap alone has no valid level for rare outcomes: a bin in which no event occurred has no noise in the
replicates. The null replicates alone have no valid level for two systems that are equally miscalibrated.

The hypothesis is that the expected difference lies between 0 and the difference of the noise floors. This interval
contains the expected difference of two systems with equal miscalibration. If the miscalibration is 0, the expected
difference is that of the noise floors. If it is large, the noise adds little to the errors (the root of the sum of the
squares is near the larger term).

Reference:
    Berger: Multiparameter hypothesis testing and acceptance sampling (Technometrics, 1982), for the largest p-value;
    Westfall, Young: Resampling-Based Multiple Testing (1993), algorithm 4.1, for the adjustment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from torchcalib.inference.resampling import Interval, nominal_tail
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

_WITHOUT_INTERVALS = ("RMSCE debiased",)
"""Lines for which the bootstrap is invalid: debiasing does not subtract the noise of repeated samples."""


@dataclass(frozen=True)
class SystemReplicates:
    """Replicates of all lines of one system, `(R,)` by `Line.key`.

    Attributes:
        bootstrap: values in the replicates of the paired bootstrap.
        null: calibration errors in the null replicates; see `System.null_replicates`.
    """

    bootstrap: Mapping[str, Tensor]
    null: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Evidence:
    """Difference of one line between one system and the baseline, and its standardised replicates.

    Attributes:
        difference: the difference with its unadjusted p-value.
        distance: distance of the difference from the hypothesis in standard errors; NaN without a p-value.
        standardised: replicates minus their mean, divided by their standard deviation, `(R,)`.
    """

    difference: Difference
    distance: float = math.nan
    standardised: Tensor | None = None


def compared_lines(
    lines: Sequence[Mapping[str, Line]],
    replicates: Mapping[str, SystemReplicates],
    n_clusters: float | None = None,
) -> tuple[ComparedLine, ...]:
    """Compare all scores and calibration errors of the systems with those of the baseline.

    Args:
        lines: `Line` with the value of each system, by system name, the baseline first.
        replicates: replicates of each system, by name.
        n_clusters: effective number of resampled clusters; None if rows were resampled.

    Returns:
        The values and their differences from the baseline, with intervals, p-values and adjusted p-values.
    """
    first, *others = replicates
    found = [{name: _evidence(line, first, name, replicates, n_clusters) for name in others} for line in lines]
    adjusted = iter(_adjusted_p_values([evidence for by_name in found for evidence in by_name.values()]))
    return tuple(
        ComparedLine(
            **{each.name: getattr(line[first], each.name) for each in fields(Quantity)},
            better=_better(line[first]),
            values={name: each.value for name, each in line.items()},
            intervals={name: _interval(each, replicates[name], n_clusters) for name, each in line.items()},
            differences={name: replace(by_name[name].difference, adjusted_p_value=next(adjusted)) for name in others},
        )
        for line, by_name in zip(lines, found, strict=True)
    )


def _better(line: Line) -> Better:
    return _BETTER.get(line.name, "lower")


def _interval(line: Line, replicates: SystemReplicates, n_clusters: float | None) -> LineInterval | None:
    values = replicates.bootstrap.get(line.key)
    return None if values is None or line.name in _WITHOUT_INTERVALS else interval_of(line, values, n_clusters)


def _evidence(
    lines: Mapping[str, Line],
    first: str,
    second: str,
    replicates: Mapping[str, SystemReplicates],
    n_clusters: float | None,
) -> _Evidence:
    """Return the value of the second system minus the value of the first, with its interval, p-value and verdict."""
    line, better = lines[first], _better(lines[first])
    values = [lines[name].value for name in (first, second)]
    a, b = (torch.tensor(value, dtype=torch.float64) for value in values)
    value = _minus(b, a, better)
    undecided = _Evidence(Difference(float(value), None, None, None, None, "not significant"))
    of = [replicates[name] for name in (first, second)]
    if line.name in _WITHOUT_INTERVALS or any(line.key not in each.bootstrap for each in of):
        return undecided
    sets = [Interval(value, _minus(of[1].bootstrap[line.key], of[0].bootstrap[line.key], better), LEVEL, n_clusters)]
    nulls = [(x[line.key], y[line.key]) for x, y in zip(*(each.null for each in of), strict=True) if line.key in x]
    floors = [torch.stack([_minus(x, 0 * x, better).mean() for x in null]) for null in nulls]
    chance = None
    if floors:
        highest = torch.stack(floors).amax(0)
        chance = float(highest[1] - highest[0])
    for x, y in nulls:
        null = _minus(y, x, better)
        # Reflection at the value, as in the basic bootstrap interval (Davison and Hinkley 1997, eq. 5.6).
        sets.append(Interval(value, value + null.mean() - null, LEVEL, n_clusters))
    ends = [none_if_nan(LineInterval(*(float(end) for end in each.without_bias))) for each in sets]
    if any(each is None for each in ends):
        return undecided
    # Values that are 0 by definition, such as the mean signed error over all classes, have float32 rounding errors.
    rounding = torch.finfo(torch.float32).eps * max([1.0, *(abs(x) for x in values if math.isfinite(x))])
    least, most = min(0.0, chance or 0.0) - rounding, max(0.0, chance or 0.0) + rounding
    p_values = [float(each.p_value(least, most)) for each in sets]
    distances = [_distance(each, least, most) for each in sets]
    weakest = max(range(len(sets)), key=lambda k: (p_values[k], -distances[k]))
    interval = LineInterval(min(each.low for each in ends if each), max(each.high for each in ends if each))
    verdict: Verdict = "not significant"
    if p_values[weakest] <= (1 - LEVEL) * (1 + 1e-9):
        verdict = "better" if (interval.low > 0) == (better == "higher") else "worse"
    difference = Difference(float(value), interval, chance, p_values[weakest], None, verdict)
    drawn = sets[weakest].replicates
    standardised = ((drawn - drawn.mean()) / drawn.std()).nan_to_num(0, 0, 0)
    return _Evidence(difference, distances[weakest], standardised)


def _minus(b: Tensor, a: Tensor, better: Better) -> Tensor:
    """Return b - a, or |b| - |a| for signed metrics."""
    return b.abs() - a.abs() if better == "nearer to 0" else b - a


def _distance(interval: Interval, least: float, most: float) -> float:
    """Return the distance of the mean of the replicates from [`least`, `most`] in standard errors, as a normal quantile.

    For few clusters it is smaller, because the standard error is uncertain (t-distribution).
    """
    mean = float(interval.corrected.mean())
    outside = max(0.0, mean - most, least - mean)
    distance = torch.tensor(outside, dtype=torch.float64) / interval.standard_error
    if not outside or interval.n_clusters is None:
        return float(distance.nan_to_num(0 if not outside else math.inf))
    return float(-torch.special.ndtri(nominal_tail(torch.special.ndtr(-distance), interval.n_clusters)))


def _adjusted_p_values(family: Sequence[_Evidence]) -> list[float | None]:
    """Return p-values adjusted for all differences (family-wise error rate, step-down max-T).

    The k-th largest distance is compared with the largest standardised replicate of the differences that are not more
    significant. All differences have the same bootstrap replicates, so that their dependence is included.

    Reference:
        Westfall, Young: Resampling-Based Multiple Testing (1993), algorithm 4.1; Romano, Wolf: Exact and approximate
        stepdown methods for multiple hypothesis testing (Journal of the American Statistical Association, 2005).
    """
    tested = [k for k, each in enumerate(family) if each.standardised is not None]
    tested.sort(key=lambda k: -family[k].distance)
    adjusted: list[float | None] = [None] * len(family)
    if not tested:
        return adjusted
    n_replicates = min(len(family[k].standardised) for k in tested)  # type: ignore[arg-type]
    rows = torch.stack([family[k].standardised[:n_replicates].abs() for k in tested])  # type: ignore[index]
    largest = rows.flip(0).cummax(0).values.flip(0)  # over this difference and all with smaller distances
    p_value = 0.0
    for k, row in zip(tested, largest, strict=True):
        at_least = int((row >= family[k].distance).sum())
        p_value = max(p_value, (1 + at_least) / (n_replicates + 1), family[k].difference.p_value or 0.0)
        adjusted[k] = p_value
    return adjusted
