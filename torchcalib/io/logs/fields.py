"""What the fields of logs mean: the names in each format, and the fields of rows by role."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from torchcalib.io.cells import scores_in
from torchcalib.io.columns import affixed_columns, class_columns, classes_among, groups_of, split
from torchcalib.io.errors import InputError, quoted, shown
from torchcalib.io.names import (
    CONFIDENCES,
    DATA_SETS,
    FORECASTS,
    LOG_PROBS,
    OF_PREDICTED,
    PROBS,
    key_of,
    outcome_names,
)
from torchcalib.io.rules import Kind, find

Row = Mapping[str, Any]
Names = Mapping[str, tuple[str, ...]]
"""Names of the fields of a format by role. The first name that a log has counts."""

WORDS = {
    "data_set": "data set",
    "id": "question",
    "target": "right answer",  # the text, letter or index of an option
    "pred": "answer of the model",
    "correct": "right or wrong",
    "response": "response",  # text that contains the answer, and possibly a confidence
    "confidence": "confidence",
    "probs": "scores of options",
    "choices": "options",
}
"""Words for the roles of fields. A further role `content` is what answers to the same question have in common."""

LM_EVAL: Names = {
    "id": ("doc_id",), "content": ("doc_hash", "doc"), "target": ("target",), "correct": ("acc", "exact_match"),
    "response": ("resps",), "probs": ("filtered_resps", "resps"), "choices": ("arguments",),
}  # fmt: skip
OLMES: Names = {
    "id": ("doc_id", "native_id"), "content": ("native_id",), "target": ("label", "correct_choice"),
    "response": ("continuation",), "correct": ("primary_score", "exact_match", "exact_match_flex", "acc"),
    "probs": ("sum_logits",),
}  # fmt: skip
LIGHTEVAL: Names = {
    "data_set": ("task_name",), "id": ("id", "doc_id"), "content": ("query", "example", "instruction"),
    "target": ("gold_index", "gold"), "correct": ("acc", "exact_match", "em"), "probs": ("logprobs", "predictions"),
    "choices": ("choices",),
}  # fmt: skip
INSPECT: Names = {
    "id": ("id",), "target": ("target",), "correct": ("score", "correct", "accuracy"), "choices": ("choices",),
    "confidence": ("confidence", "risk_score"), "probs": ("option_probs",),
}  # fmt: skip
HELM: Names = {"id": ("id",), "correct": ("exact_match", "quasi_exact_match"), "choices": ("references",)}
JUDGED: Names = {"pred": ("model_answer",), "correct": ("correct",), "confidence": ("confidence",)}


def in_words(names: Names) -> dict[str, str]:
    """Return the names of fields by role, in words."""
    return {words: " or ".join(f"`{x}`" for x in names[role]) for role, words in WORDS.items() if role in names}


_SYSTEM = re.compile(r"(model|prompt|system|variant|method|strategy|setting|provider|engine|checkpoint)(_.*)?")
_SETTINGS = ("threshold", "temperature", "llm", "shots", "num_fewshot", "n_shots")
_NO_SYSTEM = re.compile(
    r".*(answer|pred|choice|option|letter|label|output|response|text|reason|conf|prob|score|logit|correct|token|cost"
    r"|time|latency|hash|rank).*"
)
_MAX_SHOWN = 20  # names of fields in a description
MOST_SYSTEMS = 100
"""Largest number of values of a field that names systems, such as models."""

_STEMS = {*PROBS, *LOG_PROBS} - {*CONFIDENCES}
_OUTCOMES = {1.0: ("C", "TRUE", "CORRECT", "YES", "RIGHT"), 0.0: ("I", "N", "FALSE", "INCORRECT", "NO", "WRONG")}
_RIGHT = {text: outcome for outcome, texts in _OUTCOMES.items() for text in texts}
GRADES = {"A": 1.0, "B": 0.0, "C": math.nan}
"""Grades of SimpleQA: correct, incorrect and not attempted."""

ABSTENTIONS = {
    **dict.fromkeys(("idk", "i dont know", "dont know", "do not know", "i do not know", "unknown", "unsure"), "IDK"),
    **dict.fromkeys(("abstain", "abstained", "abstention", "no answer", "noanswer", "refused", "refusal"), "abstained"),
    **dict.fromkeys(("not attempted", "notattempted"), "NOT_ATTEMPTED"),
    "": "empty",
}
"""Words for an answer that the model did not give, and the name under which they are counted."""


def abstention(value: Any) -> str | None:
    """Return the name of an abstention; None for other answers."""
    if value is None:
        return ABSTENTIONS[""]
    if not isinstance(value, str) or len(value) > 40:
        return None
    return _abstention(value)


@lru_cache(2**10)
def _abstention(value: str) -> str | None:
    return ABSTENTIONS.get(re.sub(r"[\s_\-]+", " ", re.sub(r"[^\w\s\-]", "", value)).strip().casefold())


def number_of(value: Any) -> float:
    """Return a value, which may be text, as float; NaN if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def correctness(value: Any) -> float:
    """Return 1 for right, 0 for wrong, and NaN for values that are neither, such as a partial score."""
    number = _RIGHT.get(value.strip().upper()) if isinstance(value, str) else None
    number = number_of(value) if number is None else number
    return number if number in (0.0, 1.0) else math.nan


def id_of(value: Any) -> str:
    """Return an id as text. Whole floats are integers, as in tables with missing values."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def first(row: Row, names: Sequence[str]) -> Any:
    """Return the value of the first field that has one; None without any."""
    return next((value for name in names if (value := row.get(name)) is not None), None)


@dataclass(frozen=True)
class Roles:
    """Fields of a log by role; None for roles that no field has. Names are those of the log."""

    id: str | None = None
    content: str | None = None
    target: str | None = None
    pred: str | None = None
    correct: str | None = None
    response: str | None = None
    confidence: str | None = None
    probs: str | None = None
    choices: str | None = None
    data_sets: tuple[str, ...] = ()  # which name a question together with `id`
    columns: Mapping[str, str] = field(default_factory=dict)  # field with the probability of each option
    are_logs: bool = False  # whether these are log-probabilities
    has_grades: bool = False  # whether outcomes are the letters of `GRADES`
    systems: tuple[str, ...] = ()  # fields that may name systems
    named: frozenset[str] = frozenset()  # roles of fields that the caller named
    found: tuple[str, ...] = ()  # all fields

    def in_words(self) -> dict[str, str]:
        """Return the fields by role, and those that are not used, in words."""
        found: dict[str, tuple[str, ...]] = {
            role: (name,) for role in WORDS if (name := getattr(self, role, None)) is not None
        }
        found |= {"data_set": self.data_sets, "probs": (*found.get("probs", ()), *self.columns.values())}
        words = {WORDS[role]: quoted(found[role], _MAX_SHOWN) for role in WORDS if found.get(role)}
        words |= {"same question if equal": f"`{self.content}`"} if self.content is not None else {}
        used = {*self.systems, self.content, *(name for names in found.values() for name in names)}
        others = [name for name in self.found if name not in used]
        return words | ({"not used": quoted(others, _MAX_SHOWN)} if others else {})

    @property
    def has_confidence(self) -> bool:
        """Whether there is a confidence, or a text that may state one."""
        return bool(self.confidence or self.probs or self.columns or (self.response and self.correct))

    @property
    def has_outcome(self) -> bool:
        """Whether there is a right answer, or whether the answer is right."""
        return bool(self.target or self.correct)

    @cached_property
    def has_forecasts(self) -> bool:
        """Whether the confidence is the probability of an event, and not of an answer."""
        return self.correct is not None and key_of(self.correct) in FORECASTS


def roles_of(rows: Sequence[Row], named: Mapping[str, str], label: str, has_gold: bool = False) -> Roles:
    """Return the role of each field, from its name and its values in some rows.

    Args:
        rows: the first rows of a log.
        named: field by role, for the roles that a caller may name.
        label: name of the log, for messages.
        has_gold: whether the right answers are in a second file.

    Raises:
        InputError: for a name that is no field, and for columns of probabilities with other values.
    """
    fields = {name: key_of(name) for row in rows for name in row if isinstance(name, str)}
    by_key = {key: name for name, key in reversed(fields.items())}
    values = {name: [value for row in rows if (value := row.get(name)) is not None] for name in fields}
    given = {
        role: _named(name, by_key, role, label) for role, name in named.items() if not (has_gold and role == "target")
    }
    data_sets = [by_key[key] for key in DATA_SETS if key in by_key]

    def fits(name: str, kind: Kind) -> bool:
        is_option = fields[name] == "p_true" and "p_false" in by_key
        return not is_option and _has_kind(values[name], kind)

    systems = [name for name in fields if name not in given.values() and _may_be_system(fields[name], values[name])]
    several = find(fields, "log", {role: [name] for role, name in given.items()}, {*data_sets, *systems}, fits)
    found = {role: names[0] for role, names in several.items()}
    if "confidence" not in found and "pred" in found and key_of(found.get("correct", "")) in FORECASTS:
        found["confidence"] = found.pop("pred")  # the prediction of an event
    free = [name for name in fields if name not in (*found.values(), *data_sets)]
    others = [name for name in free if re.search(r"(^|_)conf(idence)?(_|$)", fields[name])]
    if "confidence" not in found and len(others) == 1:
        found["confidence"] = others[0]
        free.remove(others[0])
    if not {"pred", "confidence", "correct"} & given.keys():
        _check_event(found, rows, label)
    columns: dict[str, str] = {}
    are_logs = "probs" in found and "log" in key_of(found["probs"])
    if "probs" not in found:
        targets = {str(value) for value in values[found["target"]]} if "target" in found else set()
        columns, are_logs = _columns({name: values[name] for name in free}, len(rows), targets, label)
    if "target" not in found and columns and not has_gold:  # a table without names of columns that pandas wrote
        numbers = [name for name in fields if name.isdecimal() and {*map(str, values[name])} <= columns.keys()]
        found |= {"target": numbers[-1]} if numbers else {}
    return Roles(
        **found,
        data_sets=tuple(data_sets),
        columns=columns,
        are_logs=are_logs,
        has_grades="correct" in found and {*map(str, values[found["correct"]])} <= GRADES.keys(),
        systems=tuple(systems),
        named=frozenset(given),
        found=tuple(fields),
    )


def _check_event(found: Mapping[str, str], rows: Sequence[Row], label: str) -> None:
    """Raise if the confidence is the probability of one of two labels: below 0.5 if the answer is the other one."""
    roles = ("target", "pred", "confidence")
    if not found.keys() >= {*roles} or key_of(found["confidence"]) in (*CONFIDENCES, *OF_PREDICTED):
        return
    read = [[str(row.get(found[role], "")).strip() for role in roles] for row in rows]
    labels = {text for target, pred, _ in read for text in (target, pred)} - {""}
    event = (outcome_names(labels) or sorted(labels) or [""])[-1]
    p = [(pred == event, number_of(each)) for _, pred, each in read]
    if (
        len(labels) == 2
        and all(is_event == (each > 0.5) for is_event, each in p if each != 0.5)
        and any(each < 0.5 for _, each in p)
    ):
        raise InputError(
            f"`{found['confidence']}` in `{label}` must be the confidence of the answer `{found['pred']}`, got the "
            f"probability of `{event}`. Use `report` for the probability of an event, or pass confidence='NAME'."
        )


def looked_for(roles: Roles) -> str:
    """Return the names of fields that were looked for and not found, as a sentence."""
    missing = []
    if not roles.has_confidence:
        missing.append(f"a confidence (such as {quoted(('confidence', 'probs', 'prob_A', 'A'))}; confidence='NAME')")
    if not roles.has_outcome:
        missing.append(
            f"a right answer ({quoted(('correct_answer', 'gold', 'target', 'answer'))}; target='NAME') or whether "
            f"the answer is right ({quoted(('correct', 'is_correct'))}; correct='NAME')"
        )
    elif roles.correct is None and roles.pred is None and not (roles.probs or roles.columns):
        missing.append(f"the model's answer ({quoted(('prediction', 'predicted_answer'))}; pred='NAME')")
    return " and ".join(missing)


def _named(name: str, by_key: Mapping[str, str], role: str, label: str) -> str:
    found = name if name in by_key.values() else by_key.get(key_of(name))
    if found is None:
        fields = quoted(reversed([*by_key.values()]), _MAX_SHOWN)
        raise InputError(f"`{role}` must be a field of `{label}`, got {shown(name)}. Fields are {fields}.")
    return found


def _has_kind(values: Sequence[Any], kind: Kind) -> bool:
    """Return whether values, of which none is missing, are of a kind."""
    if kind == "any":
        return bool(values)
    if kind == "text":
        return any(isinstance(value, str) for value in values)
    if kind == "list":
        return bool(values) and isinstance(values[0], list | Mapping)
    if kind == "scores":
        return bool(values) and all(scores_in(value) is not None for value in values)
    if kind == "labelled scores":  # lists of objects with a label and a score, or their texts
        are_lists = bool(values) and all(isinstance(each, list) or str(each).lstrip()[:1] == "[" for each in values)
        return are_lists and all(isinstance(scores_in(each), dict) for each in values)
    is_single = bool(values) and not any(isinstance(value, list | Mapping) for value in values)
    if kind not in ("outcome", "verdict") or not is_single:
        return is_single
    # Most outcomes call an answer right or wrong, or abstain
    n = sum(correctness(value) == correctness(value) or abstention(value) is not None for value in values)
    if kind == "outcome":
        return 2 * n >= len(values) or not any(isinstance(value, str) for value in values)
    return 2 * n >= len(values) or GRADES.keys() >= {*map(str, values)}


def _may_be_system(name: str, values: Sequence[Any]) -> bool:
    has_name = name in _SETTINGS or (_SYSTEM.fullmatch(name) and not _NO_SYSTEM.fullmatch(name))
    return bool(has_name) and _has_kind(values, "single") and len({*values}) <= MOST_SYSTEMS


def _columns(values: Mapping[str, Sequence[Any]], n: int, golds: set[str], label: str) -> tuple[dict[str, str], bool]:
    """Return the column with the probability of each option, and whether these are log-probabilities.

    Options are classes by the rules of `io.columns`, letters, or columns whose sums are 1.
    """
    numbers: dict[str, list[float]] = {}
    for name, some in values.items():
        with suppress(TypeError, ValueError):  # also for numbers as text
            numbers |= {name: list(map(float, some))} if some else {}
    candidates: list[tuple[dict[str, str], bool | None]] = []  # None if only values show whether they are logarithms
    for stem, columns in groups_of(numbers).items():
        if stem in _STEMS and len(classes_among([(split(name) or name)[1] for name in columns], golds)) > 1:
            named = class_columns(columns, golds)
            candidates.append((dict(zip(named.classes, named.columns, strict=True)), stem.startswith("log")))
    for labels in (golds, ()):
        arrays = affixed_columns(numbers, labels)
        if len(arrays) > 1 and not candidates:
            raise InputError(
                f"`{label}` must have one column for each option, got {quoted(arrays[0].values())} and "
                f"{quoted(arrays[1].values())}. Remove the columns of other systems."
            )
        candidates += [(found, "log" in key_of(next(iter(found.values())))) for found in arrays]
    letters = {name.strip().upper(): name for name in numbers if len(name.strip()) == 1}
    run = [letter for k, letter in enumerate(sorted(letters)) if ord(letter) - ord("A") == k]
    candidates.append(({letters[letter].strip(): letters[letter] for letter in run}, None))
    candidates.append((_of_sum_1(numbers, n, golds), None))
    problem = ""
    for found, is_logarithm in candidates:
        if len(found) < 2:
            continue
        if is_logarithm is not False and all(value <= 0 for name in found.values() for value in numbers[name]):
            return found, True
        outside = {option for option, name in found.items() if not all(0 <= value <= 1 for value in numbers[name])}
        if outside and is_logarithm is False and golds & found.keys():  # some are probabilities, and others may be not
            found = {option: name for option, name in found.items() if option not in outside - golds}
            outside &= golds
        if len(found) > 1 and not outside and not is_logarithm:
            return found, False
        are_percentages = all(98 <= total <= 102 for total in _sums(numbers, found.values()))
        if are_percentages or (outside and is_logarithm is False and golds & found.keys()):
            outer = ((name, x) for name in found.values() for x in numbers[name] if not 0 <= x <= 1)
            name, value = next(outer)
            problem = problem or (
                f"`{label}` must contain probabilities in [0, 1], got {shown(value)} in column `{name}`. "
                "Divide percentages by 100, or rename the column if it is no option."
            )
    if problem:
        raise InputError(problem)
    return {}, False


def _of_sum_1(numbers: Mapping[str, list[float]], n: int, golds: set[str]) -> dict[str, str]:
    """Return the columns that are named after right answers, or all columns of fractions, if their rows sum to 1."""
    fractions = [name for name, each in numbers.items() if len(each) == n and all(0 <= value <= 1 for value in each)]
    for found in ([name for name in fractions if name in golds], fractions):
        if golds and golds <= {*found} and all(abs(total - 1) < 0.02 for total in _sums(numbers, found)):
            return {name: name for name in found}
    return {}


def _sums(numbers: Mapping[str, list[float]], names: Iterable[str]) -> list[float]:
    """Return the sum of the columns in each row."""
    return [math.fsum(each) for each in zip(*(numbers[name] for name in names), strict=False)]
