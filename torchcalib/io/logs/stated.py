"""Confidences that a model states, as numbers whose scale follows from all answers of a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

ScaleName = Literal["fraction", "percent"]
SCALES: tuple[ScaleName, ...] = ("fraction", "percent")

# Not 8/10, 0-100 or 0,85, whose scale is unclear
_NUMBER = r"(\d{1,3}(?:\.\d+)?|\.\d+)(?![\d.,]*\d)(?!\s*(?:/|out of|[-–]\s*\d|to\s+\d))"
_SCALE = r"(?:\s*\([^()\n]{1,24}\))?"  # such as (0-100)
# A sentence on a probability can be the answer to a question, so that it must begin a line. The lookbehind avoids
# quadratic time for long numbers.
_STATED = re.compile(
    rf"(?:\b(?:confidence|certainty)\b(?!\s+interval){_SCALE}[^\d\n.%]{{0,24}}"
    rf"|^[^\w\n]{{0,8}}probability\b{_SCALE}[^\w\n.%]{{0,8}}){_NUMBER}\s*(%|percent\b)?"
    rf"|(?<![\d.]){_NUMBER}\s*(%|percent)\s+(?:confident|certain|sure)\b",
    re.IGNORECASE | re.MULTILINE,
)
_CELL = re.compile(r"\s*(\d{1,3}(?:\.\d+)?|\.\d+)\s*(%|percent\b)?\s*", re.IGNORECASE)
_LARGEST_OF_TEN = 10  # without a larger number, the scale may be 0 to 10
MOST = 100
"""Largest percentage."""


class Stated(NamedTuple):
    """A stated number in [0, 100], and whether it has a percent sign."""

    value: float
    is_percent: bool = False


@dataclass(frozen=True)
class Scale:
    """Evidence on the scale of the numbers without a percent sign. All answers of a log have the same scale."""

    chosen: ScaleName | None = None  # by the caller
    has_signs: bool = False
    has_fractions: bool = False  # numbers between 0 and 1, exclusive
    largest: float = 0.0

    def including(self, stated: Stated) -> Scale:
        """Return the evidence after one more number."""
        return self.including_all(np.array([stated.value]), np.array([stated.is_percent]))

    def including_all(self, values: Array, signs: Array) -> Scale:
        """Return the evidence after more numbers `(n,)`, and whether they have a percent sign `(n,)`."""
        without = values[signs == 0]
        return replace(
            self,
            has_signs=self.has_signs or len(without) < len(values),
            has_fractions=self.has_fractions or bool(((without > 0) & (without < 1)).any()),
            largest=max(self.largest, float(without.max(initial=0.0))),
        )

    @property
    def name(self) -> ScaleName | None:
        """Scale of the numbers without a percent sign; None if they are ambiguous."""
        return None if self.problem else (self.chosen or ("percent" if self.largest > 1 else "fraction"))

    @property
    def problem(self) -> str:
        """Reason why the scale is ambiguous, as a sentence; empty if it is not."""
        if self.chosen == "fraction" and self.largest > 1:
            return f"`scale` is 'fraction', but the log contains the confidence {self.largest:g}."
        if self.chosen is not None or not self.largest:
            return ""
        if self.largest > 1 and self.has_fractions:
            return f"Some confidences lie between 0 and 1, and others are as large as {self.largest:g}."
        if 1 < self.largest <= _LARGEST_OF_TEN:
            return (
                f"The largest confidence is {self.largest:g}, so that the scale may be 0 to 10, which must be divided "
                "by 10 first, or 0 to 100."
            )
        if not self.has_fractions and self.largest == 1:
            return "Every confidence without a percent sign is 0 or 1, which may be 100% or 1%."
        return ""

    @property
    def rule(self) -> str:
        """The rule that determined the scale, as a sentence."""
        if not self.largest:
            return "All confidences are percentages, with a percent sign." if self.has_signs else ""
        if self.problem:
            return f"The scale of confidences without a percent sign is ambiguous. {self.problem}"
        why = "by `scale`"
        if self.chosen is None:
            why = f"because the largest is {self.largest:g}" if self.name == "percent" else "because none exceeds 1"
        what = "percentages" if self.name == "percent" else "fractions"
        return f"Confidences without a percent sign are {what}, {why}."

    def fraction(self, stated: Stated) -> float:
        """Return a stated confidence as a fraction."""
        return float(self.fractions(np.array([stated.value]), np.array([stated.is_percent]))[0])

    def fractions(self, values: Array, signs: Array) -> Array:
        """Return numbers `(n,)` as fractions; `signs` is 1 for numbers with a percent sign, else 0."""
        return np.where((signs != 0) | (self.name == "percent"), values / MOST, values)


def stated_in(text: str) -> Stated | None:
    """Return the last confidence that a text states, such as "Confidence: 85%"; None for none, or more than 100."""
    found = None
    for first, unit, second, also in _STATED.findall(text):
        found = Stated(float(first or second), bool(unit or also))
    return None if found is None or found.value > MOST else found


def stated_by(value: Any, words: Mapping[str, float]) -> Stated | None:
    """Return the confidence in a field: a number, a text with one, or one of `words`; None for other texts."""
    if not isinstance(value, str):
        return Stated(float(value))
    if (word := words.get(value.strip().lower())) is not None:
        return Stated(MOST * word, True)
    match = _CELL.fullmatch(value)
    return stated_in(value) if match is None else Stated(float(match[1]), match[2] is not None)
