"""What the numbers say of a system beside another one, in plain words."""

import math
from collections.abc import Sequence

from torchcalib.inference.words import listed
from torchcalib.reporting.data import ComparedLine, Difference

_CALIBRATION, _OTHERS = "ECE", ("Accuracy", "NLL", "Brier")
"""What tells whether one is better calibrated, of the confidence that is looked at first; and what else is told."""


def sentence_of(lines: Sequence[ComparedLine], first: str, second: str) -> str:
    """Say whether the second system is better calibrated than the first, and what else tells them apart."""
    ece = next(line for line in lines if line.name == _CALIBRATION).differences[second]
    by = f"its ECE is {_by(ece)}"
    if ece.verdict != "not told apart":
        said = [f"{second} is {ece.verdict} calibrated than {first}: {by}"]
    elif ece.interval is None:
        said = [f"Whether {second} is better calibrated than {first} cannot be told: {by}, without an interval"]
    elif ece.interval.low > 0 or ece.interval.high < 0:
        part = f"of which chance gaps alone may make up {ece.chance:+.2g}"
        said = [f"Whether {second} is better calibrated than {first} cannot be told: {by}, {part}"]
    else:
        said = [f"No difference in calibration can be told between {second} and {first}: {by}"]
    others = {line.name: line.differences[second] for line in lines if line.name in _OTHERS}
    for verdict in ("better", "worse"):
        told = [f"{name} ({_by(found, ', 95 % {}')})" for name, found in others.items() if found.verdict == verdict]
        said += [f"It is {verdict} in {listed(told)}"] if told else []
    alike = [name for name, found in others.items() if found.verdict == "not told apart"]
    said += [f"No difference can be told in {listed(alike)}"] if alike else []
    return ". ".join(said) + "."


def _by(found: Difference, ends_words: str = " (95 % {})") -> str:
    """Say `"lower by 0.012 (95 % 0.008 to 0.016)"`, the ends as far from 0 as the words say."""
    if math.isnan(found.value):
        return "undefined"
    words = f"{'higher' if found.value > 0 else 'lower'} by {abs(found.value):.3g}" if found.value else "equal"
    if found.interval is None or (found.value == found.interval.low == found.interval.high):
        return words
    ends = (found.interval.low, found.interval.high)
    low, high = ends if found.value >= 0 else (-end for end in reversed(ends))
    return words + ends_words.format(f"{round(low, 6) + 0:.3g} to {round(high, 6) + 0:.3g}")
