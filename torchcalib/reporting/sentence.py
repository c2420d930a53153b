"""Sentences on the main findings of a comparison: expected calibration error (ECE) and scores.

Verdicts in sentences use p-values adjusted for all differences of the comparison.
"""

import math
from collections.abc import Sequence

from torchcalib.display.words import ends, listed, p_words
from torchcalib.io.errors import short_name
from torchcalib.reporting.results import ComparedLine, Difference

_SCORES = ("Accuracy", "NLL", "Brier score")
"""Names of the scores in the sentences of a comparison."""

_NAME_LENGTH = 60  # largest number of characters of the name of a system


def comparison_sentence(lines: Sequence[ComparedLine], first: str, second: str) -> str:
    """Return sentences on the difference in ECE between two systems, and on the differences of scores."""
    ece = next(line for line in lines if line.name == "ECE").differences[second]
    scores = {line.name: line.differences[second] for line in lines if line.name in _SCORES}
    first, second = short_name(first, _NAME_LENGTH), short_name(second, _NAME_LENGTH)
    error = f"its ECE is {_in_words(ece)}"
    if ece.adjusted_verdict != "not significant":
        sentences = [f"{second} is {ece.adjusted_verdict} calibrated than {first}: {error}"]
    elif ece.interval is None:
        sentences = [f"The calibration of {second} and {first} cannot be compared: {error}, without an interval"]
    elif ece.verdict == "not significant" and (ece.interval.low > 0 or ece.interval.high < 0):
        noise = f"and {ece.chance:+.2g} is expected by sampling noise alone"
        sentences = [f"The calibration of {second} and {first} does not differ significantly: {error}, {noise}"]
    else:
        sentences = [f"The calibration of {second} and {first} does not differ significantly: {error}"]
    for verdict in ("better", "worse"):
        names = [
            f"{name} ({_in_words(d, ', 95% interval {}, adjusted p {}')})"
            for name, d in scores.items()
            if d.adjusted_verdict == verdict
        ]
        sentences += [f"It is {verdict} in {listed(names)}"] if names else []
    undecided = [name for name, d in scores.items() if d.adjusted_verdict == "not significant" and d.interval]
    sentences += [f"There is no significant difference in {listed(undecided)}"] if undecided else []
    return ". ".join(sentences) + "."


def _in_words(difference: Difference, evidence: str = " (95% interval {}, adjusted p {})") -> str:
    """Return a text such as `"lower by 0.012 (95% interval 0.008 to 0.016, adjusted p = 0.005)"`.

    The bounds are those of the decrease or increase.
    """
    if math.isnan(difference.value):
        return "undefined"
    value = difference.value
    words = f"{'higher' if value > 0 else 'lower'} by {abs(value):.3g}" if value else "equal"
    if (
        difference.interval is None
        or difference.adjusted_p_value is None
        or (value == difference.interval.low == difference.interval.high)
    ):
        return words
    low, high = difference.interval.low, difference.interval.high
    bounds = (low, high) if value >= 0 else (-high, -low)
    return words + evidence.format(ends(*bounds, digits=3), p_words(difference.adjusted_p_value, "= "))
