"""Answers of a language model to questions, as logs of evaluations contain them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from torchcalib.io.errors import InputError, reading, shown
from torchcalib.io.logs.blocks import Array, Block, Columns
from torchcalib.io.logs.objects import RowGroup, Rows, lines_of
from torchcalib.io.logs.stated import MOST, Stated, stated_by, stated_in

_GROUP = 2**7  # rows that are read at once: with more, the garbage collector often traverses their objects
MOST_LOG_PROB = 1e-3
"""Largest log-probability: a sum of rounded ones of a certain text can be slightly above 0."""

_OUTCOMES = {1.0: ("C", "TRUE", "CORRECT", "YES", "RIGHT"), 0.0: ("I", "N", "FALSE", "INCORRECT", "NO", "WRONG")}
_RIGHT = {text: outcome for outcome, texts in _OUTCOMES.items() for text in texts}


@dataclass(slots=True)
class Answer:
    """One answer to one question, with every confidence in it that a log contains.

    Options have a score from each source: a log-probability, not normalised, in `log_probs`, or a probability in
    `probs`. The chosen option of a source is the one with the greatest score, the first of equal ones. Other
    confidences belong to the answer that the log calls right or wrong.
    """

    document: str  # identifier of the question
    sample: int = 0  # number of the answer to the same question: an epoch, or a repetition
    correct: float = math.nan  # 1 if the log calls the answer right, 0 if wrong, NaN if neither
    right: tuple[int, ...] = ()  # indices of the right options
    log_probs: dict[str, list[float]] = field(default_factory=dict)
    probs: dict[str, list[float]] = field(default_factory=dict)
    confidences: dict[str, float] = field(default_factory=dict)
    stated: dict[str, Stated] = field(default_factory=dict)  # confidences whose scale follows from all answers
    truth: float = math.nan  # log-probability of the right answer, if the log contains no other
    text: str | None = None  # the response
    short: str | None = None  # the answer in it, if the log contains it separately
    voted: tuple[str, float] | None = None  # the answer that was selected among several, and whether it is right


class Log(ABC):
    """Log of an evaluation in one file, or rows in memory.

    `answers` and `blocks` read it anew in each call, and `counts` then describes it.
    """

    kind: ClassVar[str]
    """Name of the program that wrote the log, and the form."""

    stated: ClassVar[tuple[str, ...]] = ("stated", "reported")
    """Sources of stated confidences. Of several in one answer, benchmarks publish the last."""

    def __init__(
        self,
        path: Path,
        chosen: str | None = None,
        rows: Rows | None = None,
        words: Mapping[str, float] | None = None,
    ) -> None:
        self.path = path  # of rows in memory, their type
        self.rows = rows
        self.chosen = chosen  # the filter or scorer to read; None for the first
        self.words = {word.strip().lower(): p for word, p in (words or {}).items()}  # confidences in words
        self.counts: Counter[str] = Counter()  # rows that were left out, by reason, and other findings
        self.alternatives: dict[str, None] = {}  # names of filters or scorers, in the order of the file

    @classmethod
    @abstractmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True if an object, the first line of a file or its header, belongs to a log of this kind."""

    def answers(self) -> Iterator[Answer]:
        """Yield the answers in the order of the file.

        Raises:
            InputError: for a damaged file, and for values that cannot be log-probabilities or probabilities.
        """
        self.counts.clear()
        with reading(str(self.path), "log"):
            yield from self.read()

    def blocks(self, size: int, with_texts: bool = False) -> Iterator[Block]:
        """Yield the answers as columns, in blocks of about `size` answers; see `Block.is_full`.

        Raises:
            InputError: see `answers`.
        """
        self.counts.clear()
        with reading(str(self.path), "log"):
            block = Block(with_texts)
            for part in self.parts(min(size, _GROUP)):
                block.add(part)
                if block.is_full(size):
                    yield block
                    block = Block(with_texts)
            if len(block):
                yield block

    @abstractmethod
    def read(self) -> Iterator[Answer]:
        """Yield the answers, and add to `counts`; see `answers`."""

    def parts(self, n: int) -> Iterator[Answer | Columns]:
        """Yield the answers, some of them as columns of n answers."""
        del n
        return self.read()

    def selects(self, name: str) -> bool:
        """Return True if the answers under this filter or scorer are read: the given one, or the first."""
        self.alternatives.setdefault(name)
        return name == (next(iter(self.alternatives)) if self.chosen is None else self.chosen)

    def log_prob(self, value: Any, place: str) -> float:
        """Return a logged log-probability, which may be text, as a float in [-inf, 0]."""
        number = _number(value)
        if math.isnan(number) or number > MOST_LOG_PROB:
            raise InputError(
                f"`{self.path}` must contain log-probabilities, which are at most 0, got {shown(value)} in {place}. "
                "Check whether probabilities were logged."
            )
        return min(number, 0.0)

    def add_reported(self, answer: Answer, value: Any, place: str) -> None:
        """Add the confidence in a field of the log, if there is one."""
        if value is None or value == "":
            self.counts["answer without a reported confidence"] += 1
            return
        try:
            found = stated_by(value, self.words)
        except (TypeError, ValueError, OverflowError):
            found = Stated(math.nan)
        if found is not None and not 0 <= found.value <= MOST:
            raise InputError(
                f"`{self.path}` must contain confidences in [0, 1] or [0, 100], got {shown(value)} in the confidence "
                f"of {place}. Correct the value, or remove it if it is missing."
            )
        if found is None:
            self.counts["confidence in words without a number (see `words`)"] += 1
        else:
            answer.stated["reported"] = found

    def candidates(self, token: Mapping[str, Any], place: str) -> list[tuple[str, float]]:
        """Return the logged candidates for a token, with their log-probabilities."""
        logged = token.get("top_logprobs") or ()
        return [(str(each["token"]), self.log_prob(each["logprob"], place)) for each in logged]

    def probability(self, value: Any, place: str) -> float:
        """Return a logged probability as a float in [0, 1]."""
        number = _number(value)
        if not 0 <= number <= 1:
            raise InputError(
                f"`{self.path}` must contain probabilities in [0, 1], got {shown(value)} in {place}. "
                "Divide percentages by 100."
            )
        return number


class RowLog(Log):
    """Log with a line or a row for each answer, or for a few of them.

    `answers_of` defines the answers of a row. `columns_of` returns the same answers for many rows of the most frequent
    form. It is only faster: `answers_of` reads all other rows, and rows with impossible values.
    """

    def read(self) -> Iterator[Answer]:
        """Yield the answers of each row."""
        for group in self._groups(1):
            yield from self._answers(group)

    def parts(self, n: int) -> Iterator[Answer | Columns]:
        """Yield the answers, those of n rows as columns if these rows have the most frequent form."""
        for group in self._groups(n):
            try:
                columns = self.columns_of(group)
            # A key is missing, or a value has another type.
            except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
                yield from self._answers(group)
            else:
                self.counts.update({reason: n for reason, n in columns.counts.items() if n})
                yield columns

    @abstractmethod
    def answers_of(self, row: Mapping[str, Any], index: int, place: str) -> Iterable[Answer]:
        """Return the answers of a row, which is number `index` of the log, and add to `counts`."""

    def columns_of(self, group: RowGroup) -> Columns:
        """Return the answers of many rows, or raise any error."""
        del group
        raise IrregularError

    def _groups(self, n: int) -> Iterator[RowGroup]:
        return lines_of(self.path, n) if self.rows is None else self.rows.groups(n)

    def _answers(self, group: RowGroup) -> Iterator[Answer]:
        for number, row, place in group.numbered():
            yield from self.answers_of(row, number, place)


class IrregularError(ValueError):
    """Rows must be read one at a time."""


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def correctness(value: Any) -> float:
    """Return 1 for right, 0 for wrong, and NaN for values that are neither, such as a partial score."""
    number = _RIGHT.get(value.strip().upper()) if isinstance(value, str) else None
    number = _number(value) if number is None else number
    return number if number in (0.0, 1.0) else math.nan


def all_correctness(values: Sequence[Any]) -> Array:
    """Return the `correctness` of several values, float64 `(n,)`."""
    if {*map(type, values)} == {float} and {*values} <= {0.0, 1.0}:
        return np.array(values)
    return np.array(list(map(correctness, values)))


def option_index(target: str, options: Sequence[str]) -> int | None:
    """Return the index of the option that a text names: by its text, or else by its letter; None if it names none."""
    wanted, texts = target.strip(), [option.strip() for option in options]
    if texts.count(wanted) == 1:
        return texts.index(wanted)
    upper = wanted.upper()
    letter = ord(upper) - ord("A") if len(upper) == 1 else -1
    return letter if 0 <= letter < len(texts) else None


def first_token_options(candidates: Iterable[tuple[str, float]], options: Sequence[str]) -> list[float] | None:
    """Return the probabilities of options among the candidates for the first token, divided by their sum.

    Candidates are tokens with their log-probabilities. The same option can occur as several tokens, with and without a
    space before it. Their probabilities add up. None if an option is missing, because logs contain the most probable
    candidates only.
    """
    totals = dict.fromkeys(options, 0.0)
    for token, log_prob in candidates:
        option = token.strip()
        if option in totals:
            totals[option] += math.exp(log_prob)
    total = math.fsum(totals.values())
    return [each / total for each in totals.values()] if all(totals.values()) else None


def add_token_confidences(answer: Answer, log_probs: Sequence[float]) -> None:
    """Add the confidences that follow from the log-probabilities of the tokens of an answer."""
    if log_probs:
        total = math.fsum(log_probs)
        answer.confidences |= {
            "raw": math.exp(total),
            "per_token": math.exp(total / len(log_probs)),
            "first_token": math.exp(log_probs[0]),
        }


def add_stated_confidence(answer: Answer) -> None:
    """Add the confidence that the text of an answer states, if there is one."""
    stated = None if answer.text is None else stated_in(answer.text)
    if stated is not None:
        answer.stated["stated"] = stated
