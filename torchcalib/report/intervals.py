"""Intervals of a report's lines: every replicate is read as the data are."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.bootstrap import Interval, Resampling
from torchcalib.predictions import Predictions, replicates_at_once
from torchcalib.reductions import NamedReduction
from torchcalib.report.data import Line, LineInterval
from torchcalib.report.lines import GROUPS, SCORES, error_values, order_values, score_values
from torchcalib.samples import ExactSample
from torchcalib.statistics import EqualWidthBins, ScoreRecipe

LEVEL, N_REPLICATES, SEED = 0.95, 199, 0
"""Five replicates lie below an interval, and five above."""

BIASED = ("ECE", "MCE", "RMSCE", "ACE")
"""What chance gaps make too large. The bias is told where it matters, which by Efron and Tibshirani (1993, ch. 10.2) is
from a quarter of the standard error on."""

UNFIT = ("RMSCE debiased",)
"""What takes off the noise of its bins, and does not know of that of a replicate, which repeats samples."""

MOST_EVENTS = 2**18
"""Events (samples, or samples times classes) up to which there are intervals of what is read from sums."""

MOST_IN_ORDER = 2**13
"""Events up to which there are intervals of what is read from samples in order."""


class Reading(NamedTuple):
    """Lines that are read from one statistic.

    Attributes:
        recipe: of the statistic.
        values: the statistic of replicates to the values of its lines `(r,)`, by their keys.
        most: events up to which they have intervals.
        name: what the lines are, for people.
    """

    recipe: ScoreRecipe | EqualWidthBins | ExactSample
    values: Callable[[Any], Mapping[str, Tensor]]
    most: int
    name: str


def readings(
    p: Predictions,
    bins: Mapping[NamedReduction, EqualWidthBins],
    ordered: Sequence[NamedReduction],
    has_labels: bool,
) -> list[Reading]:
    """Return what the lines of a report are read from: scores, bins, and samples in order of these reductions."""
    found = [
        Reading(m.score.recipe(by_class=True), partial(score_values, m, task=p.task), MOST_EVENTS, m.__name__)
        for m in SCORES
    ]
    for reduction, recipe in bins.items():
        name = f"the errors over equal-width bins, {GROUPS[reduction]}"
        found.append(Reading(recipe, partial(error_values, reduction=reduction), MOST_EVENTS, name))
    for reduction in ordered:
        n_bins = bins[reduction].n_bins
        values = partial(order_values, has_labels=has_labels, reduction=reduction, n_bins=n_bins)
        name = f"what is read from samples in order, {GROUPS[reduction]}"
        found.append(Reading(ExactSample(reduction), values, MOST_IN_ORDER, name))
    return found


def with_intervals(
    lines: Sequence[Line], p: Predictions, read: Sequence[Reading]
) -> tuple[list[Line], tuple[str, ...]]:
    """Return lines with their intervals, where this does not take long, and notes of which have none."""
    replicates = _replicates(p, [reading for reading in read if reading.recipe.n_events(p) <= reading.most])
    found = [
        replace(line, interval=interval_of(line, replicates[line.key]))
        if line.key in replicates and line.name not in UNFIT
        else line
        for line in lines
    ]
    notes = tuple(
        f"There is no interval of {reading.name}, above {reading.most:,} samples"
        f"{' times classes' if reading.recipe.n_events(p) > p.samples.numel() else ''}; torchcalib.bootstrap "
        "computes it."
        for reading in read
        if reading.recipe.n_events(p) > reading.most
    )
    return found, notes


@torch.no_grad()
def _replicates(p: Predictions, read: Sequence[Reading]) -> dict[str, Tensor]:
    """Read all replicates `(R,)`, by the keys of lines. A few at a time share their draws."""
    draws = Resampling(p, SEED)
    streams = torch.arange(N_REPLICATES, device=p.given.device)
    found: dict[str, list[Tensor]] = defaultdict(list)
    most = max((reading.recipe.n_events(p) for reading in read), default=1)
    for some in torch.split(streams, replicates_at_once(most)) if read else ():
        replicate = p.resampled(draws.counts(some))
        for reading in read:
            for key, values in reading.values(reading.recipe.of(replicate)).items():
                found[key].append(values)
    return {key: torch.cat(values) for key, values in found.items()}


def interval_of(line: Line, replicates: Tensor) -> LineInterval:
    """Return the interval of a line, given the values of its replicates `(R,)`."""
    interval = Interval(torch.tensor(line.value, dtype=replicates.dtype), replicates.cpu(), LEVEL)
    found = LineInterval(*(float(x) for x in (interval.low, interval.high)))
    if line.name not in BIASED or not float(interval.bias) > float(interval.standard_error) / 4:
        return found
    return replace(found, bias=float(interval.bias))
