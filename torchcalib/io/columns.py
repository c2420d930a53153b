"""Rules for columns: which ones are classes, in which order, under which names, and which class a label names.

Files, frames, tables and functions use these rules. Neither torch nor numpy is imported.

1. Columns with a known stem, such as `prob_cat` and `prob_dog`, are one array. Columns whose names are labels are too,
   alone or in a text that they share, such as `cat_prob` and `P(cat)`.
2. A derived column, such as `prob_max`, is no class, unless a label has its name.
3. Columns whose names are numbers, or numbers in a common text, are ordered by number. Their classes are called by the
   numbers, unless labels are text. Columns A, B, C ... are ordered by letter. Others keep their order.
4. A label names the column of its name. Whole numbers count as names if columns are numbered, else as positions.
5. Given class names select and order the columns of these names. Otherwise they rename the columns.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from os.path import commonprefix
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple

from torchcalib.io.errors import InputError, quoted
from torchcalib.io.names import LOGITS, NEUTRAL, OUTCOMES, PROBS, TARGET_TIERS, are_logits, key_of, outcome_names

_STEMS = "|".join(
    sorted({*LOGITS, *PROBS, *NEUTRAL, *TARGET_TIERS[0], *TARGET_TIERS[1]}, key=lambda stem: (-len(stem), stem))
).replace("_", "[_ ]?")
_LETTER = r"(?<=(?-i:[a-z]))(?-i:([A-Z]))"  # directly after the stem, as in `probA`
_BY_CLASS = re.compile(rf"#?\s*({_STEMS})(?:[_.: ]+(-\d+)|[_.:\- ]+(.*\S)|(\d+)|{_LETTER})", re.IGNORECASE)
WHOLE = re.compile(r"^(-?\d+)(?:\.0+)?$")
"""A whole number as text."""
_NUMBER = re.compile(r"(-?\d+)(?:\.0+)?(\D*)")
_MAX_DIGITS = 6  # longer numbers beside a text are identifiers, such as synsets
_MOST_TEXTS = 20  # texts beside a label that are tried
_MAX_DIGITS_ALONE = 18  # longer numbers do not fit into int64
_WORDS = (
    "max maximum min minimum mean avg average median std stdev sd var variance sum total range gap margin diff "
    "difference delta ratio entropy energy lse logsumexp norm true target label labels class classes gold truth "
    "correct pred predicted prediction preds predictions top second runner scale scaled temperature bias index idx id "
    "ids rank value values val count threshold cutoff weight weights score scores prob probs probability confidence "
    "conf argmax chosen selected type number name loss hash calibrated uncalibrated uncertainty ensemble ens weighted "
    "temp error err lower upper nll brier ece spread iqr quantile skew kurtosis model of in the "
    "best worst highest lowest"
)
_DERIVED = frozenset(_WORDS.split())
"""Words of columns that are computed from the classes, or that describe a row."""
_LAST = ("id", "ids", "idx", "index", "gap", "margin", "entropy", "threshold", "hash")
_RANKED = re.compile(r"top_?k?\d*|(?:top|rank|second|max|min)\d+|q\d{1,3}|p\d{1,3}")


_COUNTED = (("A", "B"), ("0", "1"), ("1", "2"))  # the first two classes that are letters or numbers
_OF_CLASSES = re.compile(r"((.*[_\W])?(class|choice|option|answer|label)[_\W]?)?", re.IGNORECASE)
"""Texts before letters or numbers of classes. After others, they may be those of models, or ranks: `model_1_prob`."""

MATCH_NAMES = "Rename the columns, or pass class_names=[...] with the labels in the order of the columns."
"""Advice for labels that are no class."""


class ClassColumns(NamedTuple):
    """Columns of one array, one per class, in the order of the classes, and the names of the classes."""

    columns: tuple[str, ...]
    classes: tuple[str, ...]


def split(name: str) -> tuple[str, str] | None:
    """Split a name such as `prob_World` or `prob0` into a known stem and the rest; None for other names."""
    match = _BY_CLASS.fullmatch(name.strip())
    return (key_of(match[1]), next(filter(None, match.groups()[1:]))) if match else None


def is_derived(rest: str) -> bool:
    """Return whether the rest of a column name describes a value that is computed from the classes, or an identifier.

    It consists of such words, or ends in a word such as `id`.
    """
    words = re.split(r"[_.:\- ]+", rest.lower())
    if words[-1] in _LAST:
        return True
    return all(word in _DERIVED or _RANKED.fullmatch(word) for word in words)


def classes_among(names: Sequence[str], labels: Collection[str] = ()) -> list[str]:
    """Return the names of classes: all that are not derived, and derived ones that are labels."""
    if {name.lower() for name in names} in map(set, OUTCOMES):
        return list(names)
    return [name for name in names if name.isdecimal() or name in labels or not is_derived(name)]


def numbers_of(names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the whole numbers that distinguish the names, such as `prob_1`, `P(1)` or `1 star`; None for other names.

    The text before and after the number is the same in all names, except for the plural.
    """
    start, end = _shared(names)
    found = [match for name in names if (match := _NUMBER.fullmatch(name[start : len(name) - end]))]
    if len(found) < len(names) or len({match[2].removesuffix("s") for match in found}) != 1:
        return None
    longest = _MAX_DIGITS if start or end or found[0][2] else _MAX_DIGITS_ALONE
    if max(len(match[1]) for match in found) > longest:
        return None
    numbers = tuple(int(match[1]) for match in found)
    return numbers if len(set(numbers)) == len(numbers) else None


def _shared(names: Sequence[str]) -> tuple[int, int]:
    """Return the lengths of the text before and after the numbers in all names. Neither divides a number."""
    before = _common_start(names).rstrip("0123456789")
    if before.endswith("-") and not before[-2:-1].isalnum():  # the sign of all numbers
        before = before[:-1]
    after = _common_start([name[len(before) :][::-1] for name in names])[::-1].lstrip("0123456789")
    return len(before), len(after)


def _common_start(names: Sequence[str]) -> str:
    return commonprefix(list(names))  # noqa: RUF071 - names are not paths


def class_columns(columns: Sequence[str], labels: Collection[str] = (), wanted: Sequence[str] = ()) -> ClassColumns:
    """Return the columns of classes among columns of predictions, in the order of the classes, with their names.

    `labels` are text labels, or none. `wanted` are given class names. With a common stem, derived columns are left out.
    """
    stems = {parts[0] if (parts := split(name)) else None for name in columns}
    if len(stems) == 1 and None not in stems:
        rests = {split(name)[1]: name for name in columns}  # type: ignore[index]
        if len(rests) < len(columns):  # `prob_0` and `prob.0`: readers and functions refuse repeated classes
            return ClassColumns(tuple(columns), tuple(split(name)[1] for name in columns))  # type: ignore[index]
        named = {rest: rests[rest] for rest in classes_among(list(rests), {*labels, *wanted})}
        if len(named) < 2:
            named = {}
    else:
        named = {}
    full = {name.strip(): name for name in columns}
    affixed = affixed_columns(columns, {*labels, *wanted})
    known = [kind for kind in (named, *affixed, full, _between(columns), *affixed_columns(columns)) if kind]
    fits = (kind for kind in known if wanted and {*wanted} <= {*kind})
    if chosen := next(fits, None):
        return ClassColumns(tuple(chosen[name] for name in wanted), tuple(wanted))
    found = next((kind for kind in known if labels and {*labels} <= {*kind}), known[0] if named else known[-1])
    numbers = numbers_of(list(found))
    if numbers is None:
        order = sorted(found) if are_options(found) else list(found)
        return ClassColumns(tuple(found[name] for name in order), tuple(order))
    by_number = sorted(zip(numbers, found, strict=True))
    names = tuple(name if labels else str(number) for number, name in by_number)
    return ClassColumns(tuple(found[name] for _, name in by_number), names)


def affixed_columns(columns: Iterable[str], labels: Collection[str] = ()) -> list[dict[str, str]]:
    """Return arrays of columns of scores by class, whose names are classes within a text that they share.

    Names are such as `cat_prob`, `P(cat)` and `gpt_choiceA_probs`. All labels are classes. Without labels, classes are
    letters or numbers.
    """
    full = {name.strip(): name for name in columns}
    if labels:
        return _affixed(full, labels, re.compile(".*", re.DOTALL))
    return next((found for pair in _COUNTED if (found := _affixed(full, pair, _OF_CLASSES))), [])


def _affixed(full: Mapping[str, str], labels: Collection[str], allowed: re.Pattern[str]) -> list[dict[str, str]]:
    """Return the arrays of `affixed_columns` whose text before the class is `allowed`. `full` has columns by name."""
    label = re.escape(max(labels, key=len))
    word = re.compile(rf"(?:(?<![^\W_])|(?<=[a-z])(?=[A-Z])){label}(?![^\W_])")
    texts = {(name[: match.start()], name[match.end() :]): None for name in full for match in word.finditer(name)}
    arrays = []
    for before, after in islice(texts, _MOST_TEXTS):
        if not allowed.fullmatch(before) or are_logits(re.sub(r"\W", "_", f"{before}_{after}")) is None:
            continue
        named = [x for x in full if x.startswith(before) and x.endswith(after) and len(x) > len(before + after)]
        found = {name[len(before) : len(name) - len(after)]: full[name] for name in named}
        if len(found) > 1 and {*labels} <= found.keys():
            arrays.append({kind: found[kind] for kind in classes_among(list(found), labels)})
    return arrays


def are_options(names: Iterable[str]) -> bool:
    """Return whether the names are the letters A, B, C ... of options."""
    found = sorted(names)
    return len(found) > 1 and "".join(found) in (ascii_uppercase[: len(found)], ascii_lowercase[: len(found)])


def check_order(name: str, classes: Sequence[str]) -> None:
    """Raise if whole numbers cannot name classes: objects of label -> probability had them in different orders."""
    if numbers_of(classes) is None and not are_options(classes):
        raise InputError(
            f"{name} must contain class names, got whole numbers and objects with the classes {quoted(classes)} in "
            "different orders. Write names, or the same order in all rows."
        )


def _between(columns: Sequence[str]) -> dict[str, str]:
    """Return the columns by their names without the text before and after them that all share."""
    parts = [name.strip() for name in columns]
    for _ in range(2):  # the start, then the end, of reversed names
        start = len(_common_start(parts))
        while start and parts[0][start - 1] not in "_.:- ":
            start -= 1
        parts = [part[start:][::-1] for part in parts]
    return dict(zip(parts, columns, strict=True)) if all(parts) and len(set(parts)) == len(columns) else {}


def shown_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return class names to show: none for numbers that are the positions of the classes."""
    are_positions = all(map(str.isdecimal, classes)) and numbers_of(classes) == tuple(range(len(classes)))
    return () if are_positions else tuple(classes)


def agree(classes: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether columns of predictions and of targets are those of the same classes, or only one has names."""
    own, other = numbers_of(classes), numbers_of(others)
    if not classes or not others or tuple(classes) == tuple(others) or (own and own == other):
        return True
    return (own is None) != (other is None) and not (shown_classes(classes) and shown_classes(others))


def check_same_words(predicted: Collection[str], true: Collection[str], where: str) -> None:
    """Raise ValueError if predicted labels are written in another way than true ones, so that all would be wrong.

    They have no label in common. Some differ in upper and lower case only, or only one of both are whole numbers.
    """
    own, other = ({text for text in each if text not in ("", "nan")} for each in (predicted, true))
    if not own or not other or own & other:
        return
    numeric = [all(map(WHOLE.fullmatch, each)) for each in (own, other)]
    if numeric[0] != numeric[1] or {text.lower() for text in own} & {text.lower() for text in other}:
        raise ValueError(
            f"{where} must have the labels of the targets, got {quoted(sorted(own))} and targets "
            f"{quoted(sorted(other))}. Write both in the same way."
        )


_SURE = 10  # rows in which a model that is always right is suspicious


def check_gold(target: str, where: str, n: int, n_right: int, choice: str) -> None:
    """Raise if a column of right answers has the choice of the model in all of many rows, and may be its own answer.

    A column that the caller named is not checked.
    """
    if n_right == n >= _SURE:
        raise InputError(
            f"`{target}` in `{where}` must be the right answer, got {choice} in all {n:,} rows. It may be the "
            f"answer of the model. Name the right answer: target='NAME', also if it is `{target}`."
        )


def positions(labels: Iterable[int | str], classes: Sequence[str]) -> dict[int | str, int] | None:
    """Return the position of the class of each label; None if the labels are whole numbers, and classes are texts.

    Two classes such as "yes" and "no" also have the labels 1 and 0, and labels of another such pair.

    Raises:
        ValueError: with both lists, if a label is no class.
    """
    found = list(labels)
    texts = [WHOLE.sub(r"\1", str(label).strip()) for label in found]
    are_numbers = not any(isinstance(label, str) for label in found)
    index = {WHOLE.sub(r"\1", name): k for k, name in enumerate(classes)}
    if not index.keys() >= set(texts):
        numbers, outcomes = numbers_of(classes), outcome_names(classes) if len(classes) == 2 else ()
        if numbers is not None and all(WHOLE.fullmatch(text) and len(text) <= _MAX_DIGITS_ALONE for text in texts):
            index = {str(number): k for k, number in enumerate(numbers)}
            texts = [str(int(text)) for text in texts]
        elif outcomes and (pair := outcome_names(texts)):
            index = {name: index[outcome] for name, outcome in zip(pair, outcomes, strict=True)}
        elif are_numbers and not any(map(str.isdecimal, classes)):
            return None
    if missing := [text for text in texts if text not in index]:
        few = f", of which {quoted(missing)} {'is' if len(missing) == 1 else 'are'} no class" * (
            len(missing) < len(found)
        )
        raise ValueError(f"labels among the classes {quoted(classes)}, got {quoted(texts)}{few}")
    return {label: index[text] for label, text in zip(found, texts, strict=True)}


def groups_of(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return columns of numbers by their stem: a known one, or any text before a number; "" for numbers only."""
    found = defaultdict(list)
    for name in names:
        if parts := split(name):
            found[parts[0]].append(name)
        elif match := re.fullmatch(r"(.*?)[_.]?(\d{1,9})", name.strip(), re.DOTALL):
            found[match[1].lower()].append(name)
    return found


def ignored(index: int | None, classes: Sequence[str]) -> int | None:
    """Return the value that marks ignored rows after labels were replaced by `positions`: that of the class, or -1."""
    numbers = numbers_of(classes) if index is not None and shown_classes(classes) else None
    if index is None or numbers is None:
        return index
    return numbers.index(index) if index in numbers else -1 if 0 <= index < len(classes) else index
