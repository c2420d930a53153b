"""Bootstrap intervals of lines that have none from their evidence: each replicate is evaluated as the data are."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.events import NamedReduction
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample
from torchcalib.inference.bootstrap import Interval, Resampling
from torchcalib.reporting.data import Line, LineInterval
from torchcalib.reporting.lines import GROUPS, Estimator, corp_values, score_estimators

LEVEL, N_REPLICATES, SEED = 0.95, 199, 0
"""Five replicates lie below the interval, and five above."""

MOST_EVENTS = 2**18
"""Events (samples, or samples times classes) up to which lines that follow from sums have intervals."""

MOST_IN_ORDER = 2**13
"""Events up to which rank-based lines have intervals."""


_LEFT_OUT = "Bootstrap intervals are left out: {}."


def estimators_of(task: Task, ordered: Sequence[NamedReduction]) -> list[tuple[Estimator, int]]:
    """Return the estimators of scores, DSC and UNC, each with the number of events up to which there are intervals."""
    in_order = [
        Estimator(r, ExactSample(r), partial(corp_values, reduction=r), f"DSC and UNC, {GROUPS[r]}") for r in ordered
    ]
    return [(each, MOST_EVENTS) for each in score_estimators(task)] + [(each, MOST_IN_ORDER) for each in in_order]


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
        estimators = estimators_of(p.task, ordered)
        slow = [(each, most) for each, most in estimators if each.recipe.n_events(p) > most]
        try:
            replicates = _replicates(p, [each for each, most in estimators if each.recipe.n_events(p) <= most])
        except (RuntimeError, ValueError) as error:  # memory, or more copies in a replicate than can be counted
            return found, (_LEFT_OUT.format(f"computing them failed with {failure(error)}"),)
        for k, line in enumerate(found):
            if line.interval is None and line.key in replicates:
                found[k] = replace(line, interval=interval_of(line, replicates[line.key]))
        for each, most in slow:
            what = "samples times classes" if each.recipe.n_events(p) > p.samples.numel() else "samples"
            limit = f"above {most:,} {what}"
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
