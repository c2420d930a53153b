"""What the numbers of a report say, in one plain sentence."""

import math
from collections.abc import Mapping

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.inference.words import fixed, in_clauses, places_of
from torchcalib.reporting.data import Line

LEVEL = 0.05
"""A p-value from which on a model is not said to be miscalibrated."""

SLIGHT, BAD = 0.02, 0.1
"""Errors, without what chance adds, below and above which probabilities are slightly and badly off."""


def sentence_of(task: Task, values: Mapping[str, float], table: BinTable, ece: Line) -> str:
    """What the numbers say, in one plain sentence.

    Args:
        task: what was predicted.
        values: of lines, by their keys.
        table: of the bins that the ECE is of.
        ece: the line of the ECE, with its evidence.
    """
    claimed, came_true = float(table.mean("confidence")), float(table.mean("frequency"))
    claim = {
        "binary": f"it gives P(y=1) = {claimed:.1%} on average and y = 1 in {came_true:.1%} of samples",
        "multiclass": f"it claims to be right with {claimed:.1%} on average and is right in {came_true:.1%} of samples",
        "multilabel": f"it gives its labels {claimed:.1%} on average and {came_true:.1%} of them hold",
    }[task]
    verdict, apart = _found(task, ece, came_true - claimed)
    nce = values["nce"]
    if math.isfinite(nce):
        worth = f"; its NLL is {nce:.0%} of what always predicting the class shares gets"
    else:  # a single class in the data, or a probability of 0 for something that happened
        worth = "; its NLL is infinite, for it gave probability 0 to something that happened" * math.isinf(
            values["nll"]
        )
    return f"{verdict}: {claim}, {apart}{worth}."


def _found(task: Task, ece: Line, difference: float) -> tuple[str, str]:
    """The verdict, and the ECE with what there is to know of it, as two clauses."""
    floor, p_value = (math.nan if x is None else x for x in (ece.noise_floor, ece.p_value))
    low, high = (math.nan, math.nan) if ece.interval is None else (ece.interval.low, ece.interval.high)
    places = places_of(ece.value, floor, high)
    name = "ECE, mean over labels" if task == "multilabel" else "ECE"
    apart = f"with frequency and probability {fixed(ece.value, places)} apart"
    excess = ece.value - floor
    if excess <= 0 or not p_value < LEVEL:
        by_chance = f"which a calibrated model of this size shows too: {in_clauses(floor, p_value, places=places)}"
        if not (high >= BAD or floor >= BAD):
            return "As far as this sample can tell the probabilities can be trusted", f"{apart} ({name}, {by_chance})"
        off = f"; so might one that is off by {fixed(high, places)}" * (high >= BAD)
        return (
            "This sample is too small to tell whether the probabilities can be trusted",
            f"{apart} ({name}, {by_chance}{off})",
        )
    degree = "slightly" if excess < SLIGHT else "clearly" if excess < BAD else "badly"
    if abs(difference) < ece.value / 2:
        direction = "off, too high in some ranges and too low in others"
    elif task == "multiclass":
        direction = "over-confident" if difference < 0 else "under-confident"
    else:
        direction = "too high" if difference < 0 else "too low"
    verdict = f"The {'model is' if task == 'multiclass' else 'probabilities are'} {degree} {direction}"
    known = in_clauses(floor, p_value, low, high, places=places)
    return verdict, f"{apart} ({name}, {known})"
