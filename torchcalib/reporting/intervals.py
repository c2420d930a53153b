"""Bootstrap intervals of what has none by its evidence: every replicate is read as the data are."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.events import NamedReduction
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sums import EqualWidthBins, ScoreRecipe
from torchcalib.inference.bootstrap import Interval, Resampling
from torchcalib.reporting.data import Line, LineInterval
from torchcalib.reporting.lines import GROUPS, SCORES, error_values, label_values, score_values

LEVEL, N_REPLICATES, SEED = 0.95, 199, 0
"""Five replicates lie below an interval, and five above."""

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


def score_readings(p: Predictions) -> list[Reading]:
    """Return what the scores of a report are read from."""
    return [
        Reading(m.score.recipe(by_class=True), partial(score_values, m, task=p.task), MOST_EVENTS, m.__name__)
        for m in SCORES
    ]


def label_readings(ordered: Sequence[NamedReduction]) -> list[Reading]:
    """Return what DSC and UNC, parts of the Brier score, are read from: samples in order of these reductions."""
    return [
        Reading(
            ExactSample(reduction),
            partial(label_values, reduction=reduction),
            MOST_IN_ORDER,
            f"DSC and UNC, {GROUPS[reduction]}",
        )
        for reduction in ordered
    ]


def bin_readings(bins: Mapping[NamedReduction, EqualWidthBins]) -> list[Reading]:
    """Return what the errors over equal-width bins are read from."""
    return [
        Reading(
            recipe,
            partial(error_values, reduction=reduction),
            MOST_EVENTS,
            f"the errors over equal-width bins, {GROUPS[reduction]}",
        )
        for reduction, recipe in bins.items()
    ]


def with_intervals(
    lines: Sequence[Line], p: Predictions, read: Sequence[Reading]
) -> tuple[list[Line], tuple[str, ...]]:
    """Return lines with their intervals, where this does not take long, and notes of which have none."""
    replicates = _replicates(p, [reading for reading in read if reading.recipe.n_events(p) <= reading.most])
    found = [
        replace(line, interval=interval_of(line, replicates[line.key]))
        if line.interval is None and line.key in replicates
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
    return LineInterval(float(interval.low), float(interval.high))
