"""Lines or rows with one answer each: responses of chat interfaces, and tables with confidences or probabilities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torchcalib.io.errors import InputError
from torchcalib.io.logs.answers import (
    Answer,
    Log,
    add_stated_confidence,
    add_token_confidences,
    correctness,
    first_token_options,
    option_index,
)
from torchcalib.io.logs.objects import whole_file

_IDS = ("custom_id", "item_id", "doc_id", "question_id", "query_id", "id")
_RIGHT = ("gold", "target", "truth", "expected", "answer", "label")  # keys of the right option
_CHOSEN = ("pred", "prediction", "choice", "decision", "chosen", "model_answer")  # keys of the chosen option
_TEXTS = ("response", "output", "completion", "text")  # keys of a response
_CONFIDENCES = ("confidence", "stated_confidence", "verbalized_confidence", "conf")
_PROBS = ("probs", "probabilities", "distribution")
_CORRECT = ("correct", "is_correct")
_OPTION = ("value", "label", "option")  # keys of an option in a list of objects
_STEMS = ("prob", "p", "probability")  # of columns with the probability of an option, such as `prob_a`


class _Lines(Log):
    """Reader of lines with the keys above, whose names other programs use too."""

    def read(self) -> Iterator[Answer]:
        """Yield one answer for each line."""
        for number, (place, row) in enumerate(self.objects(), 1):
            document = _first(row, _IDS)
            answer = Answer(str(number if document is None else document), correct=correctness(_first(row, _CORRECT)))
            if row.get("valid") is False:
                self.counts["answer marked as invalid"] += 1
                continue
            self.complete(answer, row, place)
            if math.isnan(answer.correct) and not answer.right:
                self.counts["answer that the log calls neither right nor wrong"] += 1
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
            right = option_index(str(gold), list(options))
            if right is None and isinstance(gold, int) and 0 <= gold < len(options):
                right = gold
            answer.right = () if right is None else (right,)
            if right is None and options:
                self.counts["right option without a probability"] += 1
        if math.isnan(answer.correct) and gold is not None and chosen is not None:
            answer.correct = float(str(gold) == str(chosen))
        text, confidence = _first(row, _TEXTS), _first(row, _CONFIDENCES)
        answer.short = None if chosen is None else str(chosen)
        answer.text = text if isinstance(text, str) else None
        add_stated_confidence(answer)
        if confidence is not None or (not options and not answer.stated):
            self.add_reported(answer, confidence, place)


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the value of the first key that has one; None without any."""
    for key in keys:
        if (value := row.get(key)) is not None:
            return value
    return None


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
    return {} if given is not None else _columns_of(row)


def _columns_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probabilities in a column for each option: `A`, `B`, ..., `prob_a`, ... or `prob_0`, ..."""
    letters = {name.strip(): p for name, p in row.items() if len(name.strip()) == 1 and name.strip().isalpha()}
    found = {letter: p for letter, p in letters.items() if _is_number(p)}
    if "A" in found and len(found) == len(letters):
        return found
    named = {name: name.rpartition("_") for name in row}
    found = {name: row[name] for name, (stem, _, option) in named.items() if stem in _STEMS and option}
    return {(option.upper() if len(option := name.rpartition("_")[2]) == 1 else option): p for name, p in found.items()}


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
