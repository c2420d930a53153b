"""Differences between systems and the baseline: values, intervals, p-values and verdicts.

Each difference has replicates of the paired bootstrap. For calibration errors, it also has one or two sets of null
replicates, in which both systems are calibrated (`torchcalib.reporting.comparison.system`). The p-value is the largest
one of these sets (intersection-union test, Berger 1982). The interval contains those of all sets. The bootstrap
alone has no valid level for rare outcomes, and null replicates alone have none for equally miscalibrated systems.

The noise floors of two systems can differ by c. Noise adds less to large gaps, so that an unknown part of c, from none
(large gaps) to all of it (calibrated systems), is in the expected difference d. The hypothesis is that d lies between 0
and c. It holds approximately if the gaps of both systems have the same pattern. For equal errors with different
patterns, d can lie outside by up to one noise floor.

The interval is that of the difference beyond chance, d minus the unknown part: if [l, h] is an interval of d, it is
[l - max(c, 0), h - min(c, 0)], the union over all parts. Its coverage is at least that of [l, h], and it excludes 0 if
and only if [l, h] excludes the hypothesis, which p <= 5% tests.

Reference:
    Berger: Multiparameter hypothesis testing and acceptance sampling (Technometrics, 1982), for the largest p-value;
    Westfall, Young: Resampling-Based Multiple Testing (1993), algorithm 4.1, for the adjustment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.functional.estimator import Better
from torchcalib.inference.adjustment import step_down
from torchcalib.inference.resampling import Interval, nominal_tail
from torchcalib.reporting.testing import LEVEL, interval_of
from torchcalib.results.lines import (
    ComparedLine,
    Difference,
    Line,
    LineInterval,
    Quantity,
    Verdict,
    is_significant,
)


@dataclass(frozen=True)
class SystemReplicates:
    """Replicates of the lines of one system, `(R,)` by `Line.key`."""

    bootstrap: Mapping[str, Tensor]  # values in the replicates of the paired bootstrap; none for debiased errors
    null: Sequence[Mapping[str, Tensor]]  # calibration errors in each set of null replicates


class PairTest(NamedTuple):
    """Test of the difference of one line between two systems, `(...)`."""

    value: Tensor  # the difference; for a signed metric, the difference of absolute values
    chance: Tensor  # difference of the noise floors; 0 without null replicates
    low: Tensor  # lower end of the 95% interval of the difference beyond chance; NaN if undefined
    high: Tensor
    p_value: Tensor  # hypothesis: the expected difference is between 0 and `chance`; NaN if undefined
    distance: Tensor  # distance of the difference from the hypothesis in standard errors
    standardised: Tensor  # replicates minus their mean, divided by their standard deviation, `(R, ...)`
    has_null: bool  # whether there are null replicates


Pair = tuple[Tensor, Tensor]
"""Values `(...)` or replicates `(R, ...)` of one line for the baseline and another system."""


def pair_test(
    values: Pair, bootstrap: Pair, nulls: Sequence[Pair], better: Better, n_clusters: float | None = None
) -> PairTest:
    """Test the difference of one line: `values` `(...)`, their paired bootstrap, and each set of null replicates.

    `n_clusters` is the effective number of resampled clusters; None if rows were resampled.
    """
    value = _minus(values, better)
    if better == "nearer to 0":
        # The target is a difference of expected absolute values, of which absolute values of replicates are no sample.
        deviations = [x.std(0) for x in bootstrap]
        sizes, of_replicates = (
            [_expected_size(x, deviation) for x, deviation in zip(pair, deviations, strict=True)]
            for pair in (values, bootstrap)
        )
        sets = [Interval(sizes[1] - sizes[0], of_replicates[1] - of_replicates[0], LEVEL, n_clusters)]
    else:
        # An outcome of probability 0 makes the expected log loss infinite, also if a resample does not contain it.
        drawn = torch.where(value.isinf(), value, _minus(bootstrap, better))
        sets = [Interval(value, drawn, LEVEL, n_clusters)]
    chance = torch.zeros_like(value)
    if nulls:
        floors = [torch.stack([_minus((0 * x, x), better).mean(0) for x in pair]) for pair in nulls]
        first, second = torch.stack(floors).amax(0)
        chance = second - first
    for pair in nulls:
        null = _minus(pair, better)
        # Reflection at the value, as in the basic bootstrap interval (Davison and Hinkley 1997, eq. 5.6).
        sets.append(Interval(value, value + null.mean(0) - null, LEVEL, n_clusters))
    # Values that are 0 by definition, such as the mean signed error over all classes, have float32 rounding errors.
    size = torch.stack(values).abs().nan_to_num(0, 0, 0).amax(0).clamp(min=1)
    rounding = torch.finfo(torch.float32).eps * size
    least, most = chance.clamp(max=0) - rounding, chance.clamp(min=0) + rounding
    low, high = (torch.stack(ends) for ends in zip(*(each.without_bias for each in sets), strict=True))
    # NaN if one of the sets has no interval
    ends = [low.amin(0) - chance.clamp(min=0), high.amax(0) - chance.clamp(max=0)]
    low, high = (end.masked_fill(end.abs() <= rounding, 0) for end in ends)
    # All sets must reject on the same side, as their union does.
    above = torch.stack([each.p_value(-torch.inf, most) for each in sets])
    below = torch.stack([each.p_value(least, torch.inf) for each in sets])
    p_values = torch.where(above.amax(0) < below.amax(0), above, below)
    distances = torch.stack([_distance(each, least, most) for each in sets])
    # Select the set with the largest p-value; of equal ones, that with the smallest distance.
    weakest = (p_values - 1e-9 * distances / (1 + distances).clamp(max=1e9)).nan_to_num(2).argmax(0, keepdim=True)
    n = min(len(each.replicates) for each in sets)
    standardised = torch.stack(
        [((x - x.mean(0)) / x.std(0)).nan_to_num(0, 0, 0)[:n] for x in (each.replicates for each in sets)]
    )
    return PairTest(
        value,
        chance,
        low,
        high,
        p_values.amax(0).masked_fill(low.isnan() | high.isnan(), torch.nan),
        distances.gather(0, weakest).squeeze(0),
        standardised.gather(0, weakest.unsqueeze(1).expand(1, *standardised.shape[1:])).squeeze(0),
        bool(nulls),
    )


def _minus(pair: Pair, better: Better) -> Tensor:
    """Return b - a for a pair (a, b), or |b| - |a| for signed metrics."""
    a, b = pair
    return b.abs() - a.abs() if better == "nearer to 0" else b - a


def _expected_size(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the expected absolute value of a normal variable (folded normal distribution)."""
    z = (mean / deviation).nan_to_num(0, torch.inf, -torch.inf)
    density = deviation * math.sqrt(2 / math.pi) * torch.exp(-z.square() / 2)
    return density + mean * torch.erf(z / math.sqrt(2))


def _distance(interval: Interval, least: Tensor, most: Tensor) -> Tensor:
    """Return the distance of the mean of the replicates from [`least`, `most`] in standard errors `(...)`.

    For few clusters it is converted from Student's t-distribution to a normal quantile.
    """
    mean = interval.corrected.mean(0)
    outside = torch.maximum(mean - most, least - mean).clamp(min=0)
    # An infinite difference, such as that of an infinite log loss, has no standard error.
    distance = (outside / interval.standard_error).nan_to_num(0, torch.inf).masked_fill(outside.isposinf(), torch.inf)
    if interval.n_clusters is None:
        return distance
    quantile: Tensor = torch.special.ndtri(nominal_tail(torch.special.ndtr(-distance), interval.n_clusters))
    return -quantile


def compared_lines(
    lines: Sequence[Mapping[str, Line]],
    better: Mapping[str, Better],
    replicates: Mapping[str, SystemReplicates],
    n_clusters: float | None = None,
) -> tuple[ComparedLine, ...]:
    """Compare all lines, given by system name with the baseline first, with those of the baseline.

    `better` is by `Line.key`, and `replicates` is by system name. For `n_clusters` see `pair_test`.
    """
    first, *others = replicates
    values: dict[tuple[str, str], Pair] = {}
    tests: dict[tuple[str, str], PairTest | None] = {}
    for by_system in lines:
        key = by_system[first].key
        for name in others:
            a, b = (
                torch.tensor(by_system[system].value, dtype=torch.float64, device="cpu") for system in (first, name)
            )
            values[key, name] = a, b
            x, y = replicates[first], replicates[name]
            test = None
            if key in x.bootstrap and key in y.bootstrap:
                nulls = [(i[key], j[key]) for i, j in zip(x.null, y.null, strict=True) if key in i]
                test = pair_test((a, b), (x.bootstrap[key], y.bootstrap[key]), nulls, better[key], n_clusters)
            tests[key, name] = None if test is None or bool(test.p_value.isnan()) else test  # NaN if a bound is
    adjusted = dict(zip(tests, _adjusted_p_values(list(tests.values())), strict=True))
    compared = []
    for by_system in lines:
        line = by_system[first]
        key = line.key
        intervals: dict[str, LineInterval | None] = {}
        for name, each in by_system.items():
            bootstrap = replicates[name].bootstrap.get(key)
            intervals[name] = None if bootstrap is None else interval_of(each, bootstrap, n_clusters)
        compared.append(
            ComparedLine(
                **{each.name: getattr(line, each.name) for each in fields(Quantity)},
                better=better[key],
                values={name: each.value for name, each in by_system.items()},
                intervals=intervals,
                differences={
                    name: _difference(values[key, name], better[key], tests[key, name], adjusted[key, name])
                    for name in others
                },
            )
        )
    return tuple(compared)


def _difference(values: Pair, better: Better, test: PairTest | None, adjusted: float | None) -> Difference:
    if test is None:
        return Difference(float(_minus(values, better)), None, None, None, None, None, "not significant")
    interval = LineInterval(float(test.low), float(test.high))
    verdict: Verdict = "not significant"
    if is_significant(float(test.p_value)):
        verdict = "better" if (interval.low > 0) == (better == "higher") else "worse"
    chance = float(test.chance) if test.has_null else None
    beyond = float(test.value - test.chance)
    return Difference(float(test.value), chance, beyond, interval, float(test.p_value), adjusted, verdict)


def _adjusted_p_values(family: Sequence[PairTest | None]) -> list[float | None]:
    """Return p-values adjusted for all differences; see `step_down`.

    Each difference contributes the replicates of the set that decides its p-value. Those of the bootstrap and of bins
    share random numbers. Null replicates of rank-based errors are independent of them, which makes the adjustment
    conservative.

    Reference:
        Westfall and Young, as above; Romano, Wolf: Exact and approximate stepdown methods for multiple hypothesis
        testing (Journal of the American Statistical Association, 2005).
    """
    tested = [(k, test) for k, test in enumerate(family) if test is not None]
    adjusted: list[float | None] = [None] * len(family)
    if tested:
        n_replicates = min(len(test.standardised) for _, test in tested)
        replicates = torch.stack([test.standardised[:n_replicates].abs() for _, test in tested], -1)
        p_values, _ = step_down(torch.stack([test.distance for _, test in tested]), [replicates])
        for (k, test), p_value in zip(tested, p_values.tolist(), strict=True):
            adjusted[k] = max(p_value, float(test.p_value))
    return adjusted
