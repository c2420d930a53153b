"""Lines or rows with one answer each: responses of chat interfaces, and tables with confidences or probabilities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from torchcalib.io.cells import scores_in
from torchcalib.io.columns import WHOLE, numbers_of, positions
from torchcalib.io.errors import InputError, shown
from torchcalib.io.logs.answers import (
    NEITHER,
    START,
    IrregularError,
    Log,
    LogOptions,
    RowLog,
    add_stated_confidence,
    add_token_confidences,
    all_correctness,
    are_letters,
    option_index,
    options_of_answer,
    start_of,
)
from torchcalib.io.logs.blocks import NONE, Answer, AnswerColumns
from torchcalib.io.logs.fields import GRADES, JUDGED, MOST_SYSTEMS, Roles, abstention, correctness, id_of, roles_of
from torchcalib.io.logs.objects import RowGroup, RowObjects, whole_file
from torchcalib.io.logs.stated import MOST, Array

_UNRESOLVED = "resolution that is neither yes nor no"
_UNNAMED = "right option without a probability"
_UNMATCHED = "answer without a right answer in the second file"


class Lines(RowLog):
    """Reader of lines whose fields have roles; see `roles_of`."""

    takes = ("by", "gold", "fields")

    def __init__(
        self, path: Path, rows: Mapping[str, RowObjects], options: LogOptions, roles: Roles | None = None
    ) -> None:
        super().__init__(path, rows, options)
        if roles is None:
            roles = roles_of(start_of(self.groups(START)), options.fields, str(self.path), options.gold is not None)
        self.roles = roles
        self.fields = roles.in_words()
        if options.gold is not None:
            self.fields["right answer"] = f"second file, by `{roles.id}`"
        elif not roles.has_outcome:
            self.advice = "Pass target='NAME' for the right answer, or gold='FILE' for a file with right answers."
        self.found, self._known = roles.found, {*roles.found}
        self._orders: dict[frozenset[str], tuple[str, ...]] = {}  # of options
        self._letters: set[str] = set()  # that are options of any row
        self._permutations: dict[tuple[str, ...], tuple[int, ...] | None] = {}
        self.has_outcomes = roles.correct is not None
        if roles.target is not None and "target" not in roles.named and options.gold is None:
            self.target = roles.target

    def answers_of(self, row: Mapping[str, Any], index: int, place: str) -> Iterator[Answer]:
        """Yield the answer of a line."""
        self._note([row], place)
        gold, document = self._gold_of(row), self._document_of(row, index)
        answer = Answer(document, content=self._content_of(row, gold))
        if row.get("valid") is False:
            self.counts["answer marked as invalid"] += 1
            return
        logged = None if self.roles.correct is None else row.get(self.roles.correct)
        answer.correct = GRADES.get(str(logged), math.nan) if self.roles.has_grades else correctness(logged)
        self.complete(answer, row, gold, place)
        self._count_abstention(answer, row, gold, logged)
        yield answer

    @abstractmethod
    def complete(self, answer: Answer, row: Mapping[str, Any], gold: Any, place: str) -> None:
        """Add the confidences of a line to its answer."""

    def _note(self, rows: Sequence[Mapping[str, Any]], place: str) -> None:
        """Note the systems of rows, and check that none has a new field that changes the roles of the others."""
        for name in self.roles.systems:
            values = self.systems.setdefault(self.part, {}).setdefault(name, set())
            if len(values) <= MOST_SYSTEMS:
                values.update(row[name] for row in rows if row.get(name) is not None)
        if new := rows[0].keys() - self._known:
            self._known |= new
            # Without names of the caller, which decide in any case
            gold = roles_of([dict.fromkeys((*self.roles.found, *new), "x")], {}, "row").target
            if gold in new and self.roles.target not in (None, gold) and "target" not in self.roles.named:
                raise InputError(
                    f"`{self.path}` must have the same fields in all rows, got `{gold}` first in {place}, after "
                    f"`{self.roles.target}`. Pass target='NAME' for the right answer."
                )

    def _document_of(self, row: Mapping[str, Any], index: int) -> str:
        roles = self.roles
        value = None if roles.id is None else row.get(roles.id)
        name = id_of(value) if value is not None else str(index) if roles.id is None else f"row {index}"
        return self.document_of(*(row.get(each) for each in roles.data_sets), name)

    def _content_of(self, row: Mapping[str, Any], gold: Any) -> str:
        text = None if self.roles.content is None else row.get(self.roles.content)
        return "\n".join(str(each) for each in (text, gold) if each is not None)

    def _gold_of(self, row: Mapping[str, Any]) -> Any:
        """Return the right answer of a row, or of the second file; None without one."""
        gold = self.options.gold
        if gold is None:
            return None if self.roles.target is None else row.get(self.roles.target)
        name = "" if self.roles.id is None else id_of(row.get(self.roles.id))
        found = next((gold[x] for x in (self._document_of(row, 0), name) if x in gold), None)
        if found is None:
            self.counts[_UNMATCHED] += 1
            self.unmatched = self.unmatched or name
        return found

    def _count_abstention(self, answer: Answer, row: Mapping[str, Any], gold: Any, logged: Any) -> None:
        """Count an answer that the model did not give, which is wrong unless the log leaves it out."""
        name = abstention(logged) if isinstance(logged, str) else None
        name = "NOT_ATTEMPTED" if self.roles.has_grades and logged == "C" else name
        if name is not None and math.isnan(answer.correct):
            self.counts[f"abstention ({name}), left out"] += 1
            return
        if self.roles.pred is not None and answer.correct != 1 and (gold is not None or answer.correct == 0):
            name = abstention(row.get(self.roles.pred))
            if name is not None:
                answer.correct = 0.0
                self.counts[f"abstention ({name}), counted as wrong"] += 1
                return
        if not answer.right:
            self.count_neither(answer, self._neither)

    @property
    def _neither(self) -> str:
        return _UNRESOLVED if self.roles.has_forecasts else NEITHER

    def in_order(self, options: Mapping[str, Any], gold: Any, place: str) -> tuple[tuple[str, ...], list[Any]]:
        """Return options and their values in an order that does not depend on the row: letters are sorted."""
        names = tuple(options)
        order = self._permutation(names)
        if order is None:
            return names, list(options.values())
        if not are_letters(names) and _is_index(gold) and option_index(str(gold), names) is None:
            raise InputError(
                f"`{self.path}` must name right answers by the text of an option, got the index {shown(gold)} in "
                f"{place}, and options in another order than before. Write the text, or the same order in all rows."
            )
        values = list(options.values())
        return tuple(names[k] for k in order), [values[k] for k in order]

    def _permutation(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the indices of names in the order of all rows; None if they have this order."""
        if names in self._permutations:
            return self._permutations[names]
        known = self._orders.setdefault(frozenset(names), names)
        self._letters |= {*names} if are_letters(names) else set()
        found = tuple(names.index(each) for each in (sorted(names) if are_letters(names) else known))
        order = None if found == tuple(range(len(names))) else found
        if len(self._permutations) < 2**12:
            self._permutations[names] = order
        return order

    def right_option(self, gold: Any, options: Sequence[str], place: str) -> int | None:
        """Return the index of the right option; None if it has no probability.

        A label names an option by the rules of `io.columns.positions`. It may also differ in case, be a letter, or be
        an index from 0 of options that have no numbers. With a list of choices, numbers are indices.
        """
        if self.roles.choices is None or not _is_index(gold):
            with suppress(ValueError):
                if (found := positions([gold], options)) is not None:
                    return found[gold]
        texts, wanted = [option.strip().casefold() for option in options], str(gold).strip().casefold()
        if texts.count(wanted) == 1:
            return texts.index(wanted)
        if not isinstance(gold, bool) and (right := option_index(str(gold), options)) is not None:
            return right
        whole = WHOLE.fullmatch(wanted)
        if whole is None or not options or numbers_of(options) is not None:
            return None
        names: Sequence[str] = options
        if are_letters(options):  # some of A to the last letter of any row
            names = [chr(code) for code in range(ord("A"), ord(max({*options, *self._letters})) + 1)]
        index, n = int(whole[1]), len(names)
        if not 0 <= index < n:
            raise InputError(
                f"`{self.path}` must have indices of right answers from 0 to {n - 1} (0 for {names[0]}), got {index} "
                f"in {place}. Write letters or texts, or subtract 1 from all indices if they count from 1."
            )
        return options.index(names[index]) if names[index] in options else None


class Responses(Lines):
    """Reader of responses with log-probabilities of tokens, of all interfaces of OpenAI."""

    kind = "chat responses"

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for a response, alone or below the keys of a batch."""
        response = _response_of(start)
        choices, output = response.get("choices"), response.get("output")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            return bool(choices[0].keys() & {"message", "text", "logprobs"})
        return isinstance(output, list) and any(isinstance(each, Mapping) and "content" in each for each in output)

    def complete(self, answer: Answer, row: Mapping[str, Any], gold: Any, place: str) -> None:
        """Add confidences from tokens, and whether the text is the right one."""
        found = _text_and_tokens(_response_of(row))
        if found is None:
            self.counts["line without a response"] += 1
            return
        answer.text, tokens = found
        if any(token["logprob"] is None for token in tokens):  # the first token of a prompt has no probability
            raise InputError(
                f"`{self.path}` must contain the tokens of answers only, got a prompt in {place}. Request responses "
                "with echo=False."
            )
        add_token_confidences(answer, [self.log_prob(token["logprob"], place) for token in tokens])
        add_stated_confidence(answer)
        if gold is not None and math.isnan(answer.correct):
            answer.correct = float(_agree(str(gold), answer.text.strip().rstrip(".")))
        answer.short = answer.text
        options = None if self.roles.choices is None else row.get(self.roles.choices)
        if tokens and isinstance(options, list | Mapping):
            names = [str(option) for option in options]
            found_options = options_of_answer(self, tokens, names, None, place)
            right = None if gold is None else self.right_option(gold, names, place)
            if found_options is not None and right is not None:
                answer.probs["first_token_options"], answer.right = found_options, (right,)


class Decisions(Lines):
    """Reader of answers with a probability for each option, a confidence, or a text that states one."""

    kind = "answers with confidences"

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for a row with confidences, and the right answer or whether it was given."""
        roles = roles_of([start], {}, "row")
        return roles.has_confidence and roles.has_outcome

    def complete(self, answer: Answer, row: Mapping[str, Any], gold: Any, place: str) -> None:
        """Add the probabilities, and the confidence that the line reports."""
        roles, source = self.roles, "probabilities"
        options = self._options_of(row)
        names: Sequence[str] = ()
        if options:
            names, values = self.in_order(options, gold, place)
            if roles.are_logs:
                answer.log_probs[source] = [self.log_prob(p, place) for p in values]
            else:
                answer.probs[source] = [
                    self.probability(p, place if roles.probs else f"column `{roles.columns[name]}` of {place}")
                    for name, p in zip(names, values, strict=True)
                ]
        elif roles.probs is not None or roles.columns:
            self.counts["answer without probabilities"] += 1
        if gold is not None:
            right = self.right_option(gold, names, place)
            answer.right = () if right is None else (right,)
            if right is None and options:
                self.count_unnamed(gold, names, _UNNAMED)
        chosen, text, confidence = (
            None if name is None else row.get(name) for name in (roles.pred, roles.response, roles.confidence)
        )
        is_logged = roles.correct is not None and row.get(roles.correct) is not None
        if math.isnan(answer.correct) and gold is not None and chosen is not None and not is_logged:
            answer.correct = float(_agree(str(gold), str(chosen)))
        answer.short = None if chosen is None else str(chosen)
        answer.text = text if isinstance(text, str) else None
        add_stated_confidence(answer)
        if confidence is not None or (not options and not answer.stated):
            self.add_reported(answer, confidence, place, self._reported)

    @property
    def _reported(self) -> str:
        return "forecast" if self.roles.has_forecasts else "reported"

    def columns_of(self, group: RowGroup) -> AnswerColumns:
        """Return the answers of lines with the same keys and without texts, whose confidences are numbers."""
        rows: list[Mapping[str, Any]] = list(group.rows())
        keys, roles = list(rows[0]), self.roles
        if any(map(keys.__ne__, map(list, rows))) or _values(rows, roles.response) or False in _values(rows, "valid"):
            raise IrregularError
        if self.options.gold is not None or roles.has_grades or roles.are_logs:
            raise IrregularError
        self._note(rows, f"row {group.numbers[0]}")
        gold, chosen, logged = (_values(rows, name) for name in (roles.target, roles.pred, roles.correct))
        correct = all_correctness(logged) if logged else np.full(len(rows), math.nan)
        if any(isinstance(value, str) and abstention(value) is not None for value in {*logged}):
            raise IrregularError
        abstained: dict[str, int] = {}
        if chosen and gold and not logged:
            correct = np.array(list(map(_agree, map(str, gold), map(str, chosen))), np.float64)
        if chosen and (gold or logged):
            names = {value: name for value in {*chosen} if (name := abstention(value)) is not None}
            if names:
                wrong = [names[x] for x, y in zip(chosen, correct.tolist(), strict=True) if x in names and y == 0]
                abstained = {f"abstention ({name}), counted as wrong": n for name, n in Counter(wrong).items()}
        elif roles.pred is not None and not chosen:
            raise IrregularError
        options, probs = self._options_of_all(rows, gold)
        confidence = _values(rows, roles.confidence)
        # Numbers as text may have a percent sign. Lines without any confidence are counted.
        if not {*map(type, confidence)} <= {int, float} or not (options or confidence):
            raise IrregularError
        right = self._right_options(gold, options) if gold and options else np.full(len(rows), NONE)
        has_none = right == NONE
        numbers = _values(rows, roles.id) if roles.id is not None else group.numbers
        if not numbers:
            raise IrregularError
        documents = self.documents_of(numbers)
        if roles.data_sets:
            documents = [self._document_of(row, n) for row, n in zip(rows, group.numbers, strict=True)]
        return AnswerColumns(
            documents=documents,
            correct=correct,
            right=right,
            sizes=np.fromiter(map(len, options), np.int64, len(options)),
            probs={"probabilities": probs} if options else {},
            stated={self._reported: _between(confidence, MOST)} if confidence else {},
            texts=list(map(str, chosen)) if self.with_contents else (),
            contents=[self._content_of(row, self._gold_of(row)) for row in rows] if self.with_contents else (),
            counts={
                _UNNAMED: int(has_none.sum()) if gold and options else 0,
                self._neither: int((has_none & np.isnan(correct)).sum()),
                **abstained,
            },
        )

    def _options_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the probability of each option, from columns, a mapping, a list, or a text with one of them."""
        if self.roles.probs is None:
            return {option: row[name] for option, name in self.roles.columns.items() if name in row}
        given = row.get(self.roles.probs)
        found = None if isinstance(given, str) and len(given) > _MOST_TEXT else scores_in(given)
        if isinstance(found, list):
            texts = None if self.roles.choices is None else row.get(self.roles.choices)
            if isinstance(texts, list) and len({*map(str, texts)}) == len(found):
                return dict(zip(map(str, texts), found, strict=True))
            return {chr(ord("A") + k): p for k, p in enumerate(found[:26])}
        return found or {}

    def _options_of_all(
        self, rows: Sequence[Mapping[str, Any]], gold: Sequence[Any]
    ) -> tuple[list[tuple[str, ...]], Array]:
        """Return the options of each row, empty if no field has them, and the probabilities of all, in turn."""
        if self.roles.probs is None and not self.roles.columns:
            return [], np.empty(0)
        found = list(map(self._options_of, rows))
        if not all(found):
            raise IrregularError
        names = list(map(tuple, found))
        if {*map(self._permutation, dict.fromkeys(names))} == {None}:  # in the order of the rows
            return names, _between(list(chain.from_iterable(map(dict.values, found))), 1)
        ordered = [self.in_order(each, y, "a row") for each, y in zip(found, gold or repeat(None), strict=False)]
        return [each for each, _ in ordered], _between(list(chain.from_iterable(values for _, values in ordered)), 1)

    def _right_options(self, gold: Sequence[Any], options: Sequence[tuple[str, ...]]) -> Array:
        """Return the index of the right option of each answer, or `NONE`."""
        keys = list(zip(gold, map(type, gold), options, strict=True))
        indices = {}
        for key in dict.fromkeys(keys):
            right = self.right_option(key[0], key[2], "a row")
            indices[key] = NONE if right is None else right
            if right is None and self.unnamed is None:
                self.unnamed = key[0], key[2]
        return np.fromiter(map(indices.__getitem__, keys), np.int64, len(keys))


_MOST_TEXT = 2**16  # letters of a text with probabilities


@lru_cache(2**10)
def _agree(gold: str, chosen: str) -> bool:
    """Return True for the same answer: the same text or number, or the letter with the index of the other."""
    a, b = (text.strip().rstrip(".").rstrip() for text in (gold, chosen))
    if a.casefold() == b.casefold():
        return True
    index, letter = (a, b) if _is_index(a) else (b, a)
    if not _is_index(index):
        return False
    if _is_index(letter):
        return float(index) == float(letter)
    return len(letter) == 1 and letter.isalpha() and ord(letter.upper()) - ord("A") == float(index)


def _is_index(value: Any) -> bool:
    """Return True for a number without decimals that is not negative, also as text."""
    text = str(value).strip().removesuffix(".0")
    return text.isdecimal() and not isinstance(value, bool)


def _values(rows: Sequence[Mapping[str, Any]], key: str | None) -> list[Any]:
    """Return the value of a key in each of several rows with the same keys; empty without any."""
    if key is None or key not in rows[0]:
        return []
    values = [row[key] for row in rows]
    if None in values:
        if any(value is not None for value in values):
            raise IrregularError
        return []
    return values


def _between(values: Sequence[Any], largest: float) -> Array:
    """Return values in [0, largest] as float64."""
    numbers = np.array(values, np.float64)
    if not ((numbers >= 0) & (numbers <= largest)).all():
        raise IrregularError
    return numbers


def _response_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a line that contains the choices: itself, or below `response` and `body`."""
    for key in ("response", "body"):
        if isinstance(row.get(key), Mapping):
            row = row[key]
    return row


def _text_and_tokens(response: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]] | None:
    """Return the text of a response and its tokens; None without a response."""
    if choices := response.get("choices"):
        choice = choices[0]
        logged = choice.get("logprobs") or {}
        text = str((choice.get("message") or {}).get("content") or choice.get("text") or "")
        return text, logged.get("content") or _older_tokens(logged)
    parts = [
        part
        for item in response.get("output") or ()
        for part in item.get("content") or ()
        if isinstance(part, Mapping) and part.get("type", "output_text") == "output_text"
    ]
    if not parts:
        return None
    text = "".join(str(part.get("text", "")) for part in parts)
    return text, [token for part in parts for token in part.get("logprobs") or ()]


def _older_tokens(logged: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tokens of the older interface in the form of the newer one."""
    log_probs = logged.get("token_logprobs") or []
    candidates = logged.get("top_logprobs") or [{}] * len(log_probs)
    texts = logged.get("tokens") or [""] * len(log_probs)
    return [
        {"token": text, "logprob": p, "top_logprobs": [{"token": t, "logprob": q} for t, q in (among or {}).items()]}
        for text, p, among in zip(texts, log_probs, candidates, strict=True)
    ]


class Judged(Log):
    """Reader of answers with the verdict of a judge, as HLE writes them: a file with an object by question."""

    kind = "judged answers"
    names = JUDGED

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
            answer = Answer(str(name), correct=correctness(verdict.get(JUDGED["correct"][0])))
            answer.short = str(verdict.get(JUDGED["pred"][0], ""))
            self.add_reported(answer, verdict.get(JUDGED["confidence"][0]), f"question {name}")
            yield answer
