"""The main findings of a report and of a comparison, in a sentence or two."""

import math
from collections.abc import Mapping, Sequence

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.core.words import ends, fixed, in_clauses, listed, places_of
from torchcalib.reporting.data import ComparedLine, Difference, Line

LEVEL = 0.05
"""p-value from which on miscalibration is not significant."""

SLIGHT, BAD = 0.02, 0.1
"""ECE above the noise floor below which miscalibration is slight, and from which on it is bad."""


def sentence_of(task: Task, values: Mapping[str, float], table: BinTable, ece: Line) -> str:
    """Return the verdict on calibration, its evidence, and the NLL.

    Args:
        task: of the predictions.
        values: of lines, by their keys.
        table: of the bins of the ECE.
        ece: the line of the ECE, with its evidence.
    """
    confidence, frequency = float(table.mean("confidence")), float(table.mean("frequency"))
    means = {
        "binary": f"mean P(y=1) is {confidence:.1%}, and y = 1 in {frequency:.1%} of samples",
        "multiclass": f"mean confidence is {confidence:.1%}, accuracy {frequency:.1%}",
        "multilabel": f"mean probability of labels is {confidence:.1%}, and {frequency:.1%} of them are present",
    }[task]
    verdict, error = _verdict(task, ece, frequency - confidence)
    score = ""
    if math.isfinite(values["nce"]):  # undefined for data of one class
        score = f"; NLL is {values['nce']:.0%} of that of the class frequencies"
    elif math.isinf(values["nll"]):
        score = "; NLL is infinite, because an outcome with predicted probability 0 occurred"
    return f"{verdict}: {means}; {error}{score}."


def _verdict(task: Task, ece: Line, difference: float) -> tuple[str, str]:
    """Return the verdict, and the ECE with its evidence, as two clauses."""
    floor, p_value = (math.nan if x is None else x for x in (ece.noise_floor, ece.p_value))
    low, high = (math.nan, math.nan) if ece.interval is None else (ece.interval.low, ece.interval.high)
    places = places_of(ece.value, floor, high)
    name = "mean ECE of labels" if task == "multilabel" else "ECE"
    error = f"{name} is {fixed(ece.value, places)}"
    excess = ece.value - floor
    if excess <= 0 or not p_value < LEVEL:
        known = f"{error} ({in_clauses(floor, p_value, places=places)})"
        if not (high >= BAD or floor >= BAD):
            return "This sample shows no significant miscalibration", known
        possible = f", but {fixed(high, places)} is not excluded" * (high >= BAD)
        return "This sample is too small to detect miscalibration", f"{known}{possible}"
    degree = "slightly" if excess < SLIGHT else "clearly" if excess < BAD else "badly"
    if abs(difference) < ece.value / 2:
        direction = "off, too high in some ranges and too low in others"
    elif task == "multiclass":
        direction = "over-confident" if difference < 0 else "under-confident"
    else:
        direction = "too high" if difference < 0 else "too low"
    verdict = f"The {'model is' if task == 'multiclass' else 'probabilities are'} {degree} {direction}"
    return verdict, f"{error} ({in_clauses(floor, p_value, low, high, places=places)})"


_CALIBRATION, _OTHERS = "ECE", ("Accuracy", "NLL", "Brier score")
"""Names of the lines of a verdict on calibration, and of further verdicts."""


def comparison_sentence(lines: Sequence[ComparedLine], first: str, second: str) -> str:
    """Return whether the second system is better calibrated than the first, and other significant differences."""
    ece = next(line for line in lines if line.name == _CALIBRATION).differences[second]
    by = f"its ECE is {_by(ece)}"
    if ece.verdict != "not told apart":
        sentences = [f"{second} is {ece.verdict} calibrated than {first}: {by}"]
    elif ece.interval is None:
        sentences = [f"Calibration of {second} and {first} is not distinguishable: {by}, without an interval"]
    elif ece.interval.low > 0 or ece.interval.high < 0:
        part = f"of which {ece.chance:+.2g} may be due to sampling noise"
        sentences = [f"Calibration of {second} and {first} is not distinguishable: {by}, {part}"]
    else:
        sentences = [f"Calibration of {second} and {first} does not differ significantly: {by}"]
    others = {line.name: line.differences[second] for line in lines if line.name in _OTHERS}
    for verdict in ("better", "worse"):
        names = [f"{name} ({_by(found, ', 95 % {}')})" for name, found in others.items() if found.verdict == verdict]
        sentences += [f"It is {verdict} in {listed(names)}"] if names else []
    alike = [name for name, found in others.items() if found.verdict == "not told apart"]
    sentences += [f"There is no significant difference in {listed(alike)}"] if alike else []
    return ". ".join(sentences) + "."


def _by(found: Difference, interval: str = " (95 % {})") -> str:
    """Return `"lower by 0.012 (95 % 0.008 to 0.016)"`, with the sign of the interval that the words have."""
    if math.isnan(found.value):
        return "undefined"
    words = f"{'higher' if found.value > 0 else 'lower'} by {abs(found.value):.3g}" if found.value else "equal"
    if found.interval is None or (found.value == found.interval.low == found.interval.high):
        return words
    low, high = found.interval.low, found.interval.high
    both = (low, high) if found.value >= 0 else (-high, -low)
    return words + interval.format(ends(*both, digits=3))
