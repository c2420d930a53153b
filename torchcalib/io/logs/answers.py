"""Answers of a language model to questions, as logs of evaluations contain them."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from torchcalib.io.errors import InputError, quoted, reading, shown
from torchcalib.io.logs.blocks import Answer, AnswerColumns, Block
from torchcalib.io.logs.fields import Names, correctness, id_of, in_words, number_of
from torchcalib.io.logs.objects import RowGroup, RowObjects
from torchcalib.io.logs.stated import MOST, Array, Stated, stated_by, stated_in
from torchcalib.io.names import MISSING, key_of

_AROUND = " \t\n*()[].:,'\"`"  # letters of options may be within these
_ANSWER = re.compile(r"answer\s*(?:is)?\s*:?", re.IGNORECASE)
START = 200
"""Rows from which the roles of fields follow."""
NEITHER = "answer that the log calls neither right nor wrong"
UNNAMED = "target that names no option"
"""Findings of several kinds of logs."""
MOST_LOG_PROB = 1e-3
"""Largest log-probability: a sum of rounded ones of a certain text can be slightly above 0."""


@dataclass(frozen=True)
class LogOptions:
    """How to read a log; see `torchcalib.audit`."""

    chosen: str | None = None  # the filter or scorer to read; None for the first
    words: Mapping[str, float] = field(default_factory=dict)  # confidences in words, in lower case
    fields: Mapping[str, str] = field(default_factory=dict)  # field by role, as the caller names them
    by: str | None = None  # field whose values divide a log into parts
    gold: Mapping[str, Any] | None = None  # right answers by question, from a second file


class Log(ABC):
    """Log of an evaluation in one file, in a file for each task, or in rows in memory.

    `answers` and `blocks` read it anew in each call, and `counts` then describes it.
    """

    kind: ClassVar[str]
    """Name of the program that wrote the log, and the form."""

    names: ClassVar[Names] = {}
    """Names of the fields."""

    stated: ClassVar[tuple[str, ...]] = ("stated", "reported", "forecast")
    """Sources of stated confidences. Of several in one answer, benchmarks publish the last."""

    at_once: ClassVar[int] = 2**7
    """Rows that are read at once: with more, the garbage collector often traverses their objects."""

    takes: ClassVar[tuple[str, ...]] = ()
    """Options beyond those of all logs: "by", "gold" and "fields"."""

    def __init__(self, path: Path, rows: Mapping[str, RowObjects], options: LogOptions) -> None:
        self.path = path  # name of the log; of rows in memory, their type
        self.rows, self.has_tasks = rows, len(rows) > 1  # by task; "" for a log of one task
        self.options, self.chosen = options, options.chosen
        self.words = {word.strip().lower(): p for word, p in options.words.items()}
        self.part = ""  # of the row that is read: its value of the field `by`, or its task
        self.counts_of: dict[str, Counter[str]] = {}  # by part
        self.alternatives: dict[str, None] = {}  # names of filters or scorers, in the order of the file
        self.with_contents = False  # whether columns need the contents of questions
        self.systems: dict[str, dict[str, set[Any]]] = {}  # by part: values of fields that name systems, such as models
        self.fields = in_words(self.names)
        self.advice = ""  # how to add what no field contains, as a sentence
        self.target = ""  # field of the right answers, if no caller named it
        self.found: tuple[str, ...] = ()  # all fields, if names of callers are possible
        self.has_outcomes = True  # whether a field calls answers right or wrong
        self.unnamed: tuple[Any, Sequence[str]] | None = None  # first right answer that is no option, and the options
        self.unmatched = ""  # first id without a right answer in the second file
        for name, given in (("by", options.by), ("gold", options.gold), ("fields", options.fields)):
            if given and name not in self.takes:
                name = next(iter(options.fields)) if name == "fields" else name
                raise InputError(
                    f"`{name}` must be None for {self.kind}, whose fields are known, got a value. Omit it."
                )

    @classmethod
    @abstractmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True if an object, the first line of a file or its header, belongs to a log of this kind."""

    @property
    def counts(self) -> Counter[str]:
        """Rows of the current part that were left out, by reason, and other findings."""
        return self.counts_of.setdefault(self.part, Counter())

    def answers(self) -> Iterator[Answer]:
        """Yield the answers in the order of the file.

        Raises:
            InputError: for a damaged file, and for values that cannot be log-probabilities or probabilities.
        """
        self.counts_of.clear()
        with reading(str(self.path), "log"):
            yield from self.read()

    def blocks(self, size: int, with_texts: bool = False) -> Iterator[Block]:
        """Yield the answers as columns, in blocks of about `size` answers of one part; see `Block.is_full`.

        Raises:
            InputError: see `answers`.
        """
        self.counts_of.clear()
        self.with_contents = with_texts
        blocks: dict[str, Block] = {}
        with reading(str(self.path), "log"):
            for some in self.parts(min(size, self.at_once)):
                block = blocks.get(self.part)
                if block is None:
                    block = blocks[self.part] = Block(with_texts, self.part)
                block.add(some)
                if block.is_full(size):
                    yield blocks.pop(self.part)
            yield from (block for block in blocks.values() if len(block))

    def enter(self, row: Mapping[str, Any]) -> None:
        """Count findings for the part to which a row belongs."""
        if self.options.by is not None:
            self.part = part_of(row, self.options.by)

    @abstractmethod
    def read(self) -> Iterator[Answer]:
        """Yield the answers, and add to `counts`; see `answers`."""

    def parts(self, n: int) -> Iterator[Answer | AnswerColumns]:
        """Yield the answers, some of them as columns of n answers."""
        del n
        return self.read()

    def selects(self, name: str) -> bool:
        """Return True if the answers under this filter or scorer are read: the given one, or the first."""
        self.alternatives.setdefault(name)
        return name == (next(iter(self.alternatives)) if self.chosen is None else self.chosen)

    def log_prob(self, value: Any, place: str) -> float:
        """Return a logged log-probability, which may be text, as a float in [-inf, 0]."""
        number = number_of(value)
        if math.isnan(number) or number > MOST_LOG_PROB:
            raise InputError(
                f"`{self.path}` must contain log-probabilities, which are at most 0, got {shown(value)} in {place}. "
                "Check whether probabilities were logged."
            )
        return min(number, 0.0)

    def add_reported(self, answer: Answer, value: Any, place: str, source: str = "reported") -> None:
        """Add the confidence in a field of the log, if there is one."""
        word = value.strip().lower() if isinstance(value, str) else ""
        if value is None or (isinstance(value, str) and word in MISSING and word not in self.words):
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
            answer.stated[source] = found

    def count_neither(self, answer: Answer, reason: str = NEITHER) -> None:
        """Count an answer that is neither right nor wrong."""
        if math.isnan(answer.correct):
            self.counts[reason] += 1

    def count_unnamed(self, gold: Any, options: Sequence[str], reason: str = UNNAMED) -> None:
        """Count a right answer that is no option."""
        self.counts[reason] += 1
        self.unnamed = self.unnamed or (gold, options)

    def candidates(self, token: Mapping[str, Any], place: str) -> list[tuple[str, float]]:
        """Return the logged candidates for a token, with their log-probabilities."""
        logged = token.get("top_logprobs") or ()
        return [(str(each["token"]), self.log_prob(each["logprob"], place)) for each in logged]

    def probability(self, value: Any, place: str) -> float:
        """Return a logged probability as a float in [0, 1]."""
        number = number_of(value)
        if not 0 <= number <= 1:
            raise InputError(
                f"`{self.path}` must contain probabilities in [0, 1], got {shown(value)} in {place}. "
                "Divide percentages by 100."
            )
        return number


class RowLog(Log):
    """Log with a line or a row for each answer, or for a few of them.

    `answers_of` defines the answers of a row. `columns_of` returns the same answers for many rows of the most frequent
    form. It is only faster, 5 to 8 times: `answers_of` reads all other rows, and rows with impossible values.
    """

    takes: ClassVar[tuple[str, ...]] = ("by",)

    def __init__(self, path: Path, rows: Mapping[str, RowObjects], options: LogOptions) -> None:
        super().__init__(path, rows, options)
        if options.by is not None:
            names = {key_of(name): name for row in start_of(self.groups(START)) for name in self.names_of(row)}
            by = options.by if options.by in names.values() else names.get(key_of(options.by))
            if by is None:
                raise InputError(
                    f"`by` must be a field of `{self.path}`, got {shown(options.by)}. Fields are "
                    f"{quoted(names.values(), 20)}."
                )
            self.options = replace(options, by=by)

    @staticmethod
    def names_of(row: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of the fields of a row that may divide a log."""
        for place in (row, row.get("doc"), row.get("metadata")):
            if isinstance(place, Mapping):
                yield from (name for name in place if isinstance(name, str))

    def read(self) -> Iterator[Answer]:
        """Yield the answers of each row."""
        for group in self.groups(1):
            yield from self._answers(group)

    def parts(self, n: int) -> Iterator[Answer | AnswerColumns]:
        """Yield the answers, those of n rows as columns if these rows have the most frequent form."""
        for group in self._divided(n):
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

    def columns_of(self, group: RowGroup) -> AnswerColumns:
        """Return the answers of many rows, or raise any error."""
        del group
        raise IrregularError

    def document_of(self, *names: Any) -> str:
        """Return the identifier of a question from its names that are known, such as its task, or that of the file."""
        known = [id_of(name) for name in names if name is not None]
        return "/".join(known if len(known) > 1 or not self.has_tasks else [self.part, *known])

    def documents_of(self, names: Sequence[Any]) -> list[str]:
        """Return `document_of` for each of several names."""
        return list(map(self.document_of if self.has_tasks or None in names else id_of, names))

    def groups(self, n: int) -> Iterator[RowGroup]:
        """Yield n rows at once. `part` is then the task of their file, if there are several."""
        for task, rows in self.rows.items():
            self.part = task if self.options.by is None else self.part
            yield from rows.groups(n)

    def _divided(self, n: int) -> Iterator[RowGroup]:
        """Yield n rows of one part at once."""
        for group in self.groups(n):
            if self.options.by is None:
                yield group
                continue
            places: dict[str, list[int]] = {}
            for place, (_, row, _) in enumerate(group.numbered()):
                places.setdefault(part_of(row, self.options.by), []).append(place)
            for self.part, some in places.items():
                yield group.some(some)

    def _answers(self, group: RowGroup) -> Iterator[Answer]:
        for number, row, place in group.numbered():
            self.enter(row)
            yield from self.answers_of(row, number, place)


class IrregularError(ValueError):
    """Rows must be read one at a time."""


def rows_in(groups: Iterable[RowGroup]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of groups."""
    return (row for group in groups for _, row, _ in group.numbered())


def start_of(groups: Iterable[RowGroup]) -> list[Mapping[str, Any]]:
    """Return the first rows."""
    return list(islice(rows_in(groups), START))


def part_of(row: Mapping[str, Any], by: str) -> str:
    """Return the value of a field of a row, of its document or of its metadata, as text."""
    for place in (row, row.get("doc"), row.get("metadata")):
        if isinstance(place, Mapping) and place.get(by) is not None:
            return str(place[by])
    return "no value"


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
    if are_letters(texts):
        return texts.index(upper) if upper in texts else None
    letter = ord(upper) - ord("A") if len(upper) == 1 else -1
    return letter if 0 <= letter < len(texts) else None


def are_letters(options: Iterable[str]) -> bool:
    """Return True if all options are letters, such as A, B and C."""
    return all(len(option) == 1 and "A" <= option <= "Z" for option in options)


def first_token_options(candidates: Iterable[tuple[str, float]], options: Sequence[str]) -> list[float] | None:
    """Return the probabilities of options among the candidates for the first token, divided by their sum.

    Candidates are tokens with their log-probabilities. The same option can occur as several tokens, with and without a
    space before it. Their probabilities add up. None if an option is missing, because logs contain the most probable
    candidates only.
    """
    totals = dict.fromkeys(options, 0.0)
    for token, log_prob in candidates:
        option = token.strip() if token.strip() in totals else token.strip(_AROUND)
        if option in totals:
            totals[option] += math.exp(log_prob)
    total = math.fsum(totals.values())
    return [each / total for each in totals.values()] if all(totals.values()) else None


def options_of_answer(
    log: Log, tokens: Sequence[Mapping[str, Any]], options: Sequence[str], answer: str | None, place: str
) -> list[float] | None:
    """Return the probabilities of options at the token of the answer; None, which is counted, if it is not known.

    The answer is the first token, or else the last token after "answer:" or of all that is an option, and the parsed
    answer if the log contains it.
    """
    texts = [str(token.get("token", "")) for token in tokens]
    wanted = {answer} if answer in options else {*options}
    named = [k for k, text in enumerate(texts) if text.strip() in wanted or text.strip(_AROUND) in wanted]
    ends = [match.end() for match in _ANSWER.finditer("".join(texts))]
    starts = [*accumulate(map(len, texts), initial=0)]
    after = [k for k in named if ends and starts[k + 1] > ends[-1]]
    if not named and texts[0]:
        log.counts["answer whose option is no token"] += 1
        return None
    place_of_answer = 0 if not texts[0] or (0 in named[:1] and not after) else (after[:1] or named[-1:])[0]
    found = first_token_options(log.candidates(tokens[place_of_answer], place), options)
    if found is None:
        log.counts["answer without a logged probability of each option"] += 1
    return found


def add_lengths(
    answer: Answer,
    scores: Sequence[float],
    lengths: Mapping[str, Sequence[int] | None],
    unconditional: Sequence[float] | None = None,
) -> None:
    """Add the log-probabilities of options, and their normalisations: by length, and minus those without a question."""
    answer.log_probs["choices"] = list(scores)
    for name, sizes in lengths.items():
        if sizes is not None:
            answer.log_probs[f"choices_per_{name}"] = [s / max(1, n) for s, n in zip(scores, sizes, strict=True)]
    if unconditional is not None and -math.inf not in unconditional:
        pairs = zip(scores, unconditional, strict=True)
        answer.log_probs["choices_unconditional"] = [score - without for score, without in pairs]


def lengths_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the lengths of the texts of options by unit; none without texts."""
    units = {"character": [*map(len, texts)], "byte": [len(text.encode()) for text in texts]}
    return units if texts else {}


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
