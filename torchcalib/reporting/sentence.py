"""Sentences on the main findings of a report and of a comparison.

They describe the expected calibration error (ECE) and the negative log-likelihood (NLL).
"""

import math
from collections.abc import Mapping, Sequence

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.core.words import ends, fixed, in_clauses, listed, places_of
from torchcalib.reporting.data import ComparedLine, Difference, Line

LEVEL = 0.05
"""Significance level: miscalibration is significant if its p-value is below this value."""

SLIGHT, BAD = 0.02, 0.1
"""Thresholds for ECE minus its noise floor: "slightly" below `SLIGHT`, "badly" from `BAD` on, "clearly" between."""


def sentence_of(task: Task, values: Mapping[str, float], table: BinTable, ece: Line) -> str:
    """Return the sentence of a report on calibration, mean confidence, outcome frequency, ECE and NLL.

    Args:
        task: task of the predictions.
        values: scores and calibration errors, by key.
        table: bins of the expected calibration error (ECE).
        ece: ECE with its noise floor, p-value and interval.
    """
    confidence, frequency = float(table.mean("confidence")), float(table.mean("frequency"))
    means = {
        "binary": f"mean P(y=1) is {confidence:.1%}, frequency of y = 1 is {frequency:.1%}",
        "multiclass": f"mean confidence is {confidence:.1%}, accuracy {frequency:.1%}",
        "multilabel": f"mean probability of labels is {confidence:.1%}, their frequency is {frequency:.1%}",
    }[task]
    verdict, error = _verdict(task, ece, frequency - confidence)
    score = ""
    if math.isfinite(values["nce"]):  # NaN if all targets have the same class
        score = f"; NLL is {values['nce']:.0%} of the NLL of predicting the class frequencies"
    elif math.isinf(values["nll"]):
        score = "; NLL is infinite, because an outcome with predicted probability 0 occurred"
    return f"{verdict}: {means}; {error}{score}."


def _verdict(task: Task, ece: Line, difference: float) -> tuple[str, str]:
    """Return two clauses, on calibration and on ECE; `difference` is mean frequency minus mean confidence."""
    floor, p_value = (math.nan if x is None else x for x in (ece.noise_floor, ece.p_value))
    low, high = (math.nan, math.nan) if ece.interval is None else (ece.interval.low, ece.interval.high)
    places = places_of(ece.value, floor, high)
    name = "mean ECE of labels" if task == "multilabel" else "ECE"
    error = f"{name} is {fixed(ece.value, places)}"
    excess = ece.value - floor
    if excess <= 0 or not p_value < LEVEL:
        tested = f"{error} ({in_clauses(floor, p_value, places=places)})"
        if not (high >= BAD or floor >= BAD):
            return "This sample shows no significant miscalibration", tested
        upper = f", but a true ECE of {fixed(high, places)} is not excluded" * (high >= BAD)
        return "This sample is too small to detect miscalibration", f"{tested}{upper}"
    degree = "slightly" if excess < SLIGHT else "clearly" if excess < BAD else "badly"
    if abs(difference) < ece.value / 2:
        direction = "off, too high in some ranges and too low in others"
    elif task == "multiclass":
        direction = "over-confident" if difference < 0 else "under-confident"
    else:
        direction = "too high" if difference < 0 else "too low"
    verdict = f"The {'model is' if task == 'multiclass' else 'probabilities are'} {degree} {direction}"
    return verdict, f"{error} ({in_clauses(floor, p_value, low, high, places=places)})"


_SCORES = ("Accuracy", "NLL", "Brier score")
"""Names of the scores in the sentences of a comparison."""


def comparison_sentence(lines: Sequence[ComparedLine], first: str, second: str) -> str:
    """Return sentences on the difference in ECE between two systems, and on the differences of scores."""
    ece = next(line for line in lines if line.name == "ECE").differences[second]
    error = f"its ECE is {_in_words(ece)}"
    if ece.verdict != "not significant":
        sentences = [f"{second} is {ece.verdict} calibrated than {first}: {error}"]
    elif ece.interval is None:
        sentences = [f"The calibration of {second} and {first} cannot be compared: {error}, without an interval"]
    elif ece.interval.low > 0 or ece.interval.high < 0:
        noise = f"of which {ece.chance:+.2g} may be due to sampling noise"
        sentences = [f"The calibration of {second} and {first} does not differ significantly: {error}, {noise}"]
    else:
        sentences = [f"The calibration of {second} and {first} does not differ significantly: {error}"]
    scores = {line.name: line.differences[second] for line in lines if line.name in _SCORES}
    for verdict in ("better", "worse"):
        names = [f"{name} ({_in_words(d, ', 95% interval {}')})" for name, d in scores.items() if d.verdict == verdict]
        sentences += [f"It is {verdict} in {listed(names)}"] if names else []
    undecided = [name for name, difference in scores.items() if difference.verdict == "not significant"]
    sentences += [f"There is no significant difference in {listed(undecided)}"] if undecided else []
    return ". ".join(sentences) + "."


def _in_words(difference: Difference, interval: str = " (95% interval {})") -> str:
    """Return a text such as `"lower by 0.012 (95% interval 0.008 to 0.016)"`, with bounds of the decrease."""
    if math.isnan(difference.value):
        return "undefined"
    value = difference.value
    words = f"{'higher' if value > 0 else 'lower'} by {abs(value):.3g}" if value else "equal"
    if difference.interval is None or (value == difference.interval.low == difference.interval.high):
        return words
    low, high = difference.interval.low, difference.interval.high
    bounds = (low, high) if value >= 0 else (-high, -low)
    return words + interval.format(ends(*bounds, digits=3))
