"""Bootstrap intervals of lines that have none from their evidence: each replicate is evaluated as the data are."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedReduction
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sums import ScoreRecipe
from torchcalib.inference.bootstrap import Interval, Resampling
from torchcalib.reporting.data import Line, LineInterval
from torchcalib.reporting.lines import GROUPS, SCORES, error_values, label_values, score_values

LEVEL, N_REPLICATES, SEED = 0.95, 199, 0
"""Five replicates lie below the interval, and five above."""

MOST_EVENTS = 2**18
"""Events (samples, or samples times classes) up to which lines that follow from sums have intervals."""

MOST_IN_ORDER = 2**13
"""Events up to which rank-based lines have intervals."""


_LEFT_OUT = "Bootstrap intervals are left out: {}."


class Estimator(NamedTuple):
    """Lines that are functions of one statistic.

    Attributes:
        recipe: of the statistic.
        values: function from statistics of replicates to the values of lines `(r,)`, by their keys.
        most: number of events up to which there are intervals.
        name: of the lines, for people.
    """

    recipe: ScoreRecipe | EqualWidthBins | ExactSample
    values: Callable[[Any], Mapping[str, Tensor]]
    most: int
    name: str


def score_estimators(p: Predictions) -> list[Estimator]:
    """Return the estimators of the scores."""
    return [
        Estimator(m.score.recipe(by_class=True), partial(score_values, m, task=p.task), MOST_EVENTS, m.__name__)
        for m in SCORES
    ]


def label_estimators(ordered: Sequence[NamedReduction]) -> list[Estimator]:
    """Return the estimators of DSC and UNC."""
    return [
        Estimator(ExactSample(r), partial(label_values, reduction=r), MOST_IN_ORDER, f"DSC and UNC, {GROUPS[r]}")
        for r in ordered
    ]


def bin_estimators(bins: Iterable[EqualWidthBins]) -> list[Estimator]:
    """Return the estimators of errors over equal-width bins."""
    found = []
    for recipe in bins:
        reduction: NamedReduction = recipe.reduction  # type: ignore[assignment]  # reports have no other
        name = f"the errors over equal-width bins, {GROUPS[reduction]}"
        found.append(Estimator(recipe, partial(error_values, reduction=reduction), MOST_EVENTS, name))
    return found


def with_intervals(
    lines: Sequence[Line], p: Predictions | None, why_not: str, ordered: Sequence[NamedReduction]
) -> tuple[list[Line], tuple[str, ...]]:
    """Return lines with bootstrap intervals where these are fast and missing, and notes on omissions.

    Args:
        lines: with their evidence.
        p: predictions; None if there are none.
        why_not: why there are none, a clause.
        ordered: reductions with rank-based lines that need labels.
    """
    found, notes = list(lines), []
    if p is not None:
        estimators = [*score_estimators(p), *label_estimators(ordered)]
        slow = [each for each in estimators if each.recipe.n_events(p) > each.most]
        try:
            replicates = _replicates(p, [each for each in estimators if each not in slow])
        except (RuntimeError, ValueError) as error:  # memory, or more copies in a replicate than can be counted
            return found, (_LEFT_OUT.format(f"computing them failed with {failure(error)}"),)
        for k, line in enumerate(found):
            if line.interval is None and line.key in replicates:
                found[k] = replace(line, interval=interval_of(line, replicates[line.key]))
        for each in slow:
            what = "samples times classes" if each.recipe.n_events(p) > p.samples.numel() else "samples"
            limit = f"above {each.most:,} {what}"
            notes.append(f"There is no interval of {each.name}, {limit}; torchcalib.bootstrap computes it.")
    return found, (*notes, *[_LEFT_OUT.format(why_not)] * bool(why_not))


@torch.no_grad()
def _replicates(p: Predictions, estimators: Sequence[Estimator]) -> dict[str, Tensor]:
    """Return the values of all replicates `(R,)`, by the keys of lines."""
    draws = Resampling(p, SEED)
    streams = torch.arange(N_REPLICATES, device=p.given.device)
    found: dict[str, list[Tensor]] = defaultdict(list)
    most = max((each.recipe.n_events(p) for each in estimators), default=1)
    # All estimators share the draws of a few replicates, so that memory is bounded.
    for some in torch.split(streams, replicates_at_once(most)) if estimators else ():
        replicate = p.resampled(draws.counts(some))
        for each in estimators:
            for key, values in each.values(each.recipe.of(replicate)).items():
                found[key].append(values)
    return {key: torch.cat(values) for key, values in found.items()}


def interval_of(line: Line, replicates: Tensor) -> LineInterval:
    """Return the percentile interval of a line, given the values of its replicates `(R,)`."""
    interval = Interval(torch.tensor(line.value, dtype=replicates.dtype), replicates.cpu(), LEVEL)
    return LineInterval(float(interval.low), float(interval.high))


def failure(error: Exception) -> str:
    """Return the first line of an error, for a note."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
