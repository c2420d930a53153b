"""Answers of a log as columns of numbers: an audit of many answers needs no object for each of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from torchcalib.io.logs.stated import Array, Stated

Numbers = Sequence[float] | Sequence[int] | Array

_MAX_SCORES, _MAX_LETTERS = 2**20, 2**24  # in a block

NONE, SEVERAL = -1, -2
"""Numbers in the place of the index of the right option, for answers without one and with several."""


def only(right: Sequence[int]) -> int:
    """Return the index of the only right option, or `NONE` or `SEVERAL`."""
    return NONE if not right else right[0] if len(right) == 1 else SEVERAL


@dataclass(slots=True)
class Answer:
    """One answer to one question, with every confidence in it that a log contains.

    Options have a score from each source: a log-probability, not normalised, in `log_probs`, or a probability in
    `probs`. The chosen option of a source is the one with the greatest score, the first of equal ones. Other
    confidences belong to the answer that the log calls right or wrong.
    """

    document: str  # identifier of the question, with its data set
    content: str = ""  # what answers to the same question have in common, such as its text
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


@dataclass
class AnswerColumns:
    """Consecutive answers whose confidences are all from the same sources; see `Answer`."""

    documents: list[str]
    correct: Array
    right: Array  # see `only`
    sizes: Array  # numbers of options
    log_probs: dict[str, Array] = field(default_factory=dict)  # scores of the options of all answers, in turn
    probs: dict[str, Array] = field(default_factory=dict)
    stated: dict[str, Array] = field(default_factory=dict)  # numbers without a percent sign
    texts: Sequence[str] = ()
    contents: Sequence[str] = ()  # see `Answer.content`
    counts: dict[str, int] = field(default_factory=dict)  # findings, as in `Log.counts`, or 0


class Scores(NamedTuple):
    """Scores of options from one source, for the answers of a block that have them."""

    is_log: bool  # whether they are log-probabilities, not normalised, or probabilities
    rows: array[int]  # index of each of these answers in the block
    sizes: array[int]  # their numbers of options
    values: array[float]  # scores of the options of all of them, in turn


class Confidences(NamedTuple):
    """Confidences from one source, for the answers of a block that have them."""

    rows: array[int]  # index of each of these answers in the block
    values: array[float]
    signs: array[int]  # 1 for numbers with a percent sign, else 0


class Block:
    """Consecutive answers of a log; see `Answer` for the meaning of the columns.

    Args:
        with_texts: store the texts of answers and questions, which need much more memory than the numbers.
        part: the part of the log to which all answers belong; see `Log.part`.
    """

    def __init__(self, with_texts: bool = False, part: str = "") -> None:
        self.part = part
        self.documents: list[str] = []
        self.contents: list[str] = []  # see `Answer.content`; empty without texts
        self.correct, self.truth = array("d"), array("d")
        self.right = array("q")  # see `only`
        self.scores: dict[str, Scores] = {}
        self.confidences: dict[str, Confidences] = {}
        self.stated: dict[str, Confidences] = {}  # numbers whose scale follows from all answers
        self.with_texts = with_texts
        self.texts: dict[int, str] = {}  # the short answer or else the response, by index of the answer
        self.n_letters = 0  # in these texts
        self.voted: dict[int, tuple[str, float]] = {}  # by index of the answer

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def questions(self) -> list[str]:
        """Identifiers that rows with other contents do not share; see `Answer.content`."""
        return [f"{name}\n{content}" for name, content in zip(self.documents, self.contents, strict=True)]

    def is_full(self, size: int) -> bool:
        """Return True for `size` answers, or for fewer with many options or long texts."""
        n_scores = sum(len(each.values) for each in self.scores.values())
        return len(self) >= size or n_scores >= _MAX_SCORES or self.n_letters >= _MAX_LETTERS

    def add(self, part: Answer | AnswerColumns) -> None:
        """Add an answer, or several."""
        if isinstance(part, AnswerColumns):
            self._add_columns(part)
        else:
            self._add_answer(part)

    def _add_columns(self, columns: AnswerColumns) -> None:
        rows = np.arange(len(self), len(self) + len(columns.documents))
        self.documents += columns.documents
        _extend(self.correct, columns.correct)
        _extend(self.right, columns.right)
        _extend(self.truth, np.full(len(rows), np.nan))
        for is_log, sources in ((True, columns.log_probs), (False, columns.probs)):
            for source, scores in sources.items():
                self._add_scores(source, is_log, rows, columns.sizes, scores)
        for source, values in columns.stated.items():
            _add_to(self.stated, source, rows, values, np.zeros(len(rows)))
        if self.with_texts:
            self.contents += columns.contents or [""] * len(rows)
        if self.with_texts and columns.texts:
            self.texts.update(zip(rows.tolist(), columns.texts, strict=True))
            self.n_letters += sum(map(len, columns.texts))

    def _add_answer(self, answer: Answer) -> None:
        row = len(self)
        self.documents.append(answer.document)
        if self.with_texts:
            self.contents.append(answer.content)
        self.correct.append(answer.correct)
        self.right.append(only(answer.right))
        self.truth.append(answer.truth)
        for is_log, sources in ((True, answer.log_probs), (False, answer.probs)):
            for source, scores in sources.items():
                self._add_scores(source, is_log, [row], [len(scores)], scores)
        for source, confidence in answer.confidences.items():
            _add_to(self.confidences, source, [row], [confidence], [0])
        for source, stated in answer.stated.items():
            _add_to(self.stated, source, [row], [stated.value], [stated.is_percent])
        text = answer.text if answer.short is None else answer.short
        if self.with_texts and text:
            self.texts[row] = text
            self.n_letters += len(text)
            if answer.voted is not None:
                self.voted[row] = answer.voted

    def _add_scores(self, source: str, is_log: bool, rows: Numbers, sizes: Numbers, values: Numbers) -> None:
        scores = self.scores.setdefault(source, Scores(is_log, array("q"), array("q"), array("d")))
        _extend(scores.rows, rows)
        _extend(scores.sizes, sizes)
        _extend(scores.values, values)


def _add_to(sources: dict[str, Confidences], source: str, rows: Numbers, values: Numbers, signs: Numbers) -> None:
    found = sources.setdefault(source, Confidences(array("q"), array("d"), array("b")))
    _extend(found.rows, rows)
    _extend(found.values, values)
    _extend(found.signs, signs)


def _extend(column: array[Any], values: Numbers) -> None:
    column.frombytes(np.asarray(values, column.typecode).tobytes())
