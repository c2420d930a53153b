"""Lines or rows with one answer each: responses of chat interfaces, and tables with confidences or probabilities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from torchcalib.io.errors import InputError
from torchcalib.io.logs.answers import (
    Answer,
    IrregularError,
    Log,
    RowLog,
    add_stated_confidence,
    add_token_confidences,
    all_correctness,
    correctness,
    first_token_options,
    option_index,
)
from torchcalib.io.logs.blocks import NONE, Array, Columns
from torchcalib.io.logs.objects import RowGroup, whole_file
from torchcalib.io.logs.stated import MOST

_IDS = ("custom_id", "item_id", "doc_id", "question_id", "query_id", "id")
_RIGHT = ("gold", "target", "truth", "expected", "answer", "label")  # keys of the right option
_CHOSEN = ("pred", "prediction", "choice", "decision", "chosen", "model_answer")  # keys of the chosen option
_TEXTS = ("response", "output", "completion", "text")  # keys of a response
_CONFIDENCES = ("confidence", "stated_confidence", "verbalized_confidence", "conf")
_PROBS = ("probs", "probabilities", "distribution")
_CORRECT = ("correct", "is_correct")
_OPTION = ("value", "label", "option")  # keys of an option in a list of objects
_NEITHER = "answer that the log calls neither right nor wrong"
_UNNAMED = "right option without a probability"
_STEMS = ("prob", "p", "probability")  # of columns with the probability of an option, such as `prob_a`


class _Lines(RowLog):
    """Reader of lines with the keys above, whose names other programs use too."""

    def answers_of(self, row: Mapping[str, Any], index: int, place: str) -> Iterator[Answer]:
        """Yield the answer of a line."""
        document = _first(row, _IDS)
        answer = Answer(str(index if document is None else document), correct=correctness(_first(row, _CORRECT)))
        if row.get("valid") is False:
            self.counts["answer marked as invalid"] += 1
            return
        self.complete(answer, row, place)
        if math.isnan(answer.correct) and not answer.right:
            self.counts[_NEITHER] += 1
        yield answer

    @abstractmethod
    def complete(self, answer: Answer, row: Mapping[str, Any], place: str) -> None:
        """Add the confidences of a line to its answer."""


class Responses(_Lines):
    """Reader of responses with log-probabilities of tokens, of the chat and the older interface."""

    kind = "chat responses"

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for a response, alone or below the keys of a batch."""
        choices = _response_of(start).get("choices")
        return isinstance(choices, list) and bool(choices) and isinstance(choices[0], Mapping)

    def complete(self, answer: Answer, row: Mapping[str, Any], place: str) -> None:
        """Add confidences from tokens, and whether the text is the right one."""
        choices = _response_of(row).get("choices") or []
        if not choices:
            self.counts["line without a response"] += 1
            return
        choice = choices[0]
        answer.text = str((choice.get("message") or {}).get("content") or choice.get("text") or "")
        logged = choice.get("logprobs") or {}
        if None in (logged.get("token_logprobs") or ()):  # the first token of a prompt has no probability
            raise InputError(
                f"`{self.path}` must contain the tokens of answers only, got a prompt in {place}. Request responses "
                "with echo=False."
            )
        tokens = logged.get("content") or _older_tokens(logged)
        add_token_confidences(answer, [self.log_prob(token["logprob"], place) for token in tokens])
        add_stated_confidence(answer)
        gold = _first(row, _RIGHT)
        if gold is not None and math.isnan(answer.correct):
            answer.correct = float(answer.text.strip().rstrip(".") == str(gold).strip())
        answer.short = answer.text
        if tokens and isinstance(row.get("options"), list | Mapping):
            options = [str(option) for option in row["options"]]
            found = first_token_options(self.candidates(tokens[0], place), options)
            right = None if gold is None else option_index(str(gold), options)
            if found is not None and right is not None:
                answer.probs["first_token_options"], answer.right = found, (right,)


class Decisions(_Lines):
    """Reader of answers with a probability for each option, a confidence, or a text that states one."""

    kind = "answers with confidences"

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for a line with confidences, and the right answer or whether it was given."""
        keys = start.keys()
        has_confidence = bool(keys & {*_CONFIDENCES, *_PROBS} or _probabilities_of(start))
        has_right = bool(keys & {*_RIGHT, *_CORRECT})
        return has_right and (has_confidence or bool(keys & {*_CORRECT} and keys & {*_TEXTS}))

    def complete(self, answer: Answer, row: Mapping[str, Any], place: str) -> None:
        """Add the probabilities, and the confidence that the line reports."""
        options = _probabilities_of(row)
        if options:
            answer.probs["probabilities"] = [self.probability(p, place) for p in options.values()]
        elif row.keys() & {*_PROBS}:
            self.counts["answer without probabilities"] += 1
        gold, chosen = _first(row, _RIGHT), _first(row, _CHOSEN)
        if gold is not None:
            right = _right_option(gold, list(options))
            answer.right = () if right is None else (right,)
            if right is None and options:
                self.counts[_UNNAMED] += 1
        if math.isnan(answer.correct) and gold is not None and chosen is not None:
            answer.correct = float(str(gold) == str(chosen))
        text, confidence = _first(row, _TEXTS), _first(row, _CONFIDENCES)
        answer.short = None if chosen is None else str(chosen)
        answer.text = text if isinstance(text, str) else None
        add_stated_confidence(answer)
        if confidence is not None or (not options and not answer.stated):
            self.add_reported(answer, confidence, place)

    def columns_of(self, group: RowGroup) -> Columns:
        """Return the answers of lines with the same keys and without texts, whose confidences are numbers."""
        rows: list[Mapping[str, Any]] = list(group.rows())
        keys = list(rows[0])
        if any(list(row) != keys for row in rows) or _values(rows, _TEXTS) or False in _values(rows, ("valid",)):
            raise IrregularError
        gold, chosen, logged = _values(rows, _RIGHT), _values(rows, _CHOSEN), _values(rows, _CORRECT)
        correct = all_correctness(logged) if logged else np.full(len(rows), math.nan)
        if gold and chosen:
            agrees = [str(a) == str(b) for a, b in zip(gold, chosen, strict=True)]
            correct = np.where(np.isnan(correct), agrees, correct)
        options, probs = _probabilities_of_all(rows)
        confidence = _values(rows, _CONFIDENCES)
        # Numbers as text may have a percent sign. Lines without any confidence are counted.
        if not {*map(type, confidence)} <= {int, float} or not (options or confidence):
            raise IrregularError
        right = _right_options(gold, options) if gold and options else np.full(len(rows), NONE)
        has_none = right == NONE
        return Columns(
            documents=list(map(str, _values(rows, _IDS) or range(group.first, group.first + len(rows)))),
            correct=correct,
            right=right,
            sizes=np.array(list(map(len, options))),
            probs={"probabilities": probs} if options else {},
            stated={"reported": _between(confidence, MOST)} if confidence else {},
            texts=list(map(str, chosen)),
            counts={
                _UNNAMED: int(has_none.sum()) if gold and options else 0,
                _NEITHER: int((has_none & np.isnan(correct)).sum()),
            },
        )


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the value of the first key that has one; None without any."""
    for key in keys:
        if (value := row.get(key)) is not None:
            return value
    return None


def _values(rows: Sequence[Mapping[str, Any]], keys: tuple[str, ...]) -> list[Any]:
    """Return the value of the first key that has one in each of several rows with the same keys; empty without any."""
    for key in keys:
        if key in rows[0]:
            values = [row[key] for row in rows]
            if None not in values:
                return values
            if any(value is not None for value in values):
                raise IrregularError
    return []


def _between(values: Sequence[Any], largest: float) -> Array:
    """Return values in [0, largest] as float64."""
    numbers = np.array(list(map(float, values)))
    if not ((numbers >= 0) & (numbers <= largest)).all():
        raise IrregularError
    return numbers


def _response_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a line that contains the choices: itself, or below `response` and `body`."""
    for key in ("response", "body"):
        if isinstance(row.get(key), Mapping):
            row = row[key]
    return row


def _older_tokens(logged: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens of the older interface in the form of the newer one."""
    log_probs = logged.get("token_logprobs") or []
    candidates = logged.get("top_logprobs") or [{}] * len(log_probs)
    return [
        {"logprob": p, "top_logprobs": [{"token": token, "logprob": q} for token, q in (among or {}).items()]}
        for p, among in zip(log_probs, candidates, strict=True)
    ]


def _probabilities_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probability of each option, from a mapping or a list of objects such as `{value, probability}`."""
    given = _first(row, _PROBS)
    if isinstance(given, Mapping):
        return {str(option): p for option, p in given.items()}
    if isinstance(given, list) and all(isinstance(each, Mapping) and "probability" in each for each in given):
        return {str(_first(each, _OPTION)): each["probability"] for each in given}
    return {} if given is not None else {option: row[name] for option, name in _columns_of(row).items()}


def _columns_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the column with the probability of each option: `A`, `B`, ..., `prob_a`, ... or `prob_0`."""
    letters = _letters_of(row)
    if "A" in letters and all(_is_number(row[name]) for name in letters.values()):
        return letters
    named = {name: name.rpartition("_") for name in row}
    found = {name: option for name, (stem, _, option) in named.items() if stem in _STEMS and option}
    return {(option.upper() if len(option) == 1 else option): name for name, option in found.items()}


def _letters_of(row: Mapping[str, Any]) -> dict[str, str]:
    return {name.strip(): name for name in row if len(name.strip()) == 1 and name.strip().isalpha()}


def _probabilities_of_all(rows: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, ...]], Array]:
    """Return the options of each row, empty without probabilities, and the probabilities of all, in turn."""
    if given := _values(rows, _PROBS):
        found = [each if type(each) is dict else _probabilities_of(row) for each, row in zip(given, rows, strict=True)]
        names = list(map(tuple, found))
        if not all(names) or any(type(name) is not str for each in {*names} for name in each):
            raise IrregularError
        return names, _between([p for each in found for p in each.values()], 1)
    columns = _columns_of(rows[0])
    if any(key in rows[0] for key in _PROBS) or not _letters_of(rows[0]).items() <= columns.items():
        raise IrregularError  # in other rows, columns with a letter as name may be numbers
    names = [tuple(columns)] * len(rows) if columns else []
    return names, _between([row[name] for row in rows for name in columns.values()], 1)


def _right_option(gold: Any, options: Sequence[str]) -> int | None:
    """Return the index of the right option, from its text, its letter or a number; None if it has no probability."""
    right = option_index(str(gold), options)
    return gold if right is None and isinstance(gold, int) and 0 <= gold < len(options) else right


def _right_options(gold: Sequence[Any], options: Sequence[tuple[str, ...]]) -> Array:
    """Return the index of the right option of each answer, or `NONE`."""
    keys = list(zip(gold, map(type, gold), options, strict=True))
    known = {key: _right_option(key[0], key[2]) for key in dict.fromkeys(keys)}
    return np.array([NONE if (right := known[key]) is None else right for key in keys])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


class Judged(Log):
    """Reader of answers with the verdict of a judge, as HLE writes them: a file with an object by question."""

    kind = "judged answers"

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for objects by question that contain a verdict."""
        return any(isinstance(each, Mapping) and "judge_response" in each for each in islice(start.values(), 100))

    def read(self) -> Iterator[Answer]:
        """Yield the judged answers."""
        for name, entry in whole_file(self.path).items():
            verdict = entry.get("judge_response")
            if not isinstance(verdict, Mapping):
                self.counts["answer without a verdict"] += 1
                continue
            answer = Answer(str(name), correct=correctness(verdict.get("correct")))
            answer.short = str(verdict.get("model_answer", ""))
            self.add_reported(answer, verdict.get("confidence"), f"question {name}")
            yield answer
