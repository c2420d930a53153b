"""Find the arrays of a file for each role (predictions, targets, weights, groups), and the task, by name and shape.

Text labels in the targets identify columns that are named after classes.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

from torchcalib.io.cells import vector_in
from torchcalib.io.columns import (
    affixed_columns,
    agree,
    check_order,
    class_columns,
    classes_among,
    groups_of,
    shown_classes,
    split,
)
from torchcalib.io.errors import InputError, quoted, short_name, shown
from torchcalib.io.limits import MAX_ARRAYS, check_classes, check_samples, row_limit
from torchcalib.io.names import (
    CONFIDENCES,
    CORRECT,
    INDEX,
    LOG_PROBS,
    LOGITS,
    NEUTRAL,
    OF_PREDICTED,
    PREDICTED,
    PROBS,
    TARGETS,
    TASKS,
    WEIGHTS,
    Shapes,
    Task,
    are_logits,
    is_numeral,
    key_of,
    named_as_logits,
    numbered,
    outcome_names,
    percent_in,
    task_of,
)
from torchcalib.io.paths import TABLES
from torchcalib.io.reader import FLOATS, TEXT, WHOLE, Array, Reader, Text
from torchcalib.io.rules import Kind, find
from torchcalib.io.source import Source

_MAX_RATING = 10
"""Largest number of common scales that are not percentages, such as 1 to 5 and 0 to 10."""


class Role(NamedTuple):
    """Valid dtypes of the array for a role, and the text of its dtype error."""

    dtypes: frozenset[str]
    rule: str
    advice: str


ROLES = {
    "preds": Role(
        FLOATS,
        "be floating-point predictions",
        "Whole numbers are decisions, labels or ratings. Store probabilities (predict_proba in scikit-learn), "
        "divide percentages by 100, or name another array with preds='NAME'.",
    ),
    "target": Role(
        FLOATS | WHOLE | TEXT, "contain numbers or text", "Store class indices or names, or use target='NAME'."
    ),
    "weights": Role(FLOATS | WHOLE, "contain numbers", "Name another array with weights='NAME'."),
    "groups": Role(
        FLOATS | WHOLE | TEXT, "contain whole numbers or text as groups", "Store one number or name per sample."
    ),
    "pred": Role(FLOATS | WHOLE | TEXT, "contain predicted labels", "Store numbers or text, as in the targets."),
    "clusters": Role(WHOLE | TEXT, "contain whole numbers or text as clusters", "Store one number or name per sample."),
    "ids": Role(WHOLE | TEXT, "contain whole numbers or text as ids", "Store one id per row, without missing ones."),
}
_KINDS = {"preds": "predictions", "target": "targets"}
_SHAPES = {
    "binary": "(N,) or maps (N, H, ...), with targets of this shape or annotator counts (..., 2) for no and yes",
    "multiclass": "(N, ..., C) and class indices (N, ...), or annotator counts or probabilities (N, ..., C)",
    "multilabel": "(N, ..., L) and targets (N, ..., L), or annotator counts (N, ..., L, 2) for no and yes",
}


def find_roles(
    reader: Reader,
    given: Mapping[str, str | None],
    task: Task | None = None,
    from_logits: bool | None = None,
    class_names: Sequence[str] = (),
) -> dict[str, str]:
    """Return the checked array for each role: the one that `given` selects, or else the one with a common name.

    Confidences that are percentages are marked as such in the reader, unless they are logits.
    """
    if reader.format == "npy" and len(reader.arrays) == 1:
        raise InputError(
            f"`{reader.label}` must be a pair of .npy files, predictions and targets (more with weights or groups), "
            "got 1 file. Name both files, or save shards in another format, such as .npz."
        )
    named = _search(reader, given)
    own = ("weights", "groups", "clusters", "ids")
    roles = {role: _one(reader, role, named.get(role, [])) for role in own}
    target, labels = named["target"], _labels_in(reader, named["target"])
    roles["preds"] = _one(reader, "preds", _preds_of(reader, given["preds"], named, labels, class_names))
    if roles["preds"] is not None:
        _read_texts(reader, roles["preds"], labels, class_names)
    if len(target) > 1 and roles["preds"] is not None:  # outcomes belong to one confidence, labels to classes
        is_confidence = _key(reader, roles["preds"]) in CONFIDENCES
        target = [name for name in target if (_key(reader, name) in CORRECT) == is_confidence] or target
    roles["target"] = _one(reader, "target", target)
    if roles["preds"] is None:  # an array with another role
        roles["preds"] = next(
            (name for name in roles.values() if name and _key(reader, name) in (*LOGITS, *PROBS, *NEUTRAL)), None
        )
    for role in ("preds", "target"):
        if roles[role] is None:
            raise _missing(reader, role, reader.advice)
    found = {role: name for role in ("preds", "target", *own) if (name := roles[role])}
    if len(set(found.values())) < len(found):
        raise InputError(
            f"`{reader.label}` must contain predictions, targets, weights, groups, clusters and ids in different "
            f"arrays, got {quoted(found.values())}. {reader.advice}"
        )
    if reader.arrays[found["preds"]].is_unordered and reader.arrays[found["target"]].dtype in FLOATS | WHOLE:
        check_order(f"`{found['target']}` in `{reader.label}`", reader.arrays[found["preds"]].classes)
    found["target"] = _aligned(reader, found["preds"], found["target"], class_names)
    _check_lengths(reader, found)
    if pred := _predicted(reader, found, named.get("pred", []), given["pred"] is not None, task):
        found["pred"] = pred
    if not from_logits:
        _mark_percentages(reader, reader.arrays[found["preds"]], _is_confidence(reader, found, task))
    _check_arrays(reader, found)
    return found


def _read_texts(reader: Reader, name: str, labels: Collection[str], class_names: Sequence[str]) -> None:
    """Mark a column of text as numbers: percentages, vectors, or objects of label -> probability."""
    array = reader.arrays[name]
    if array.dtype not in TEXT or len(array.shape) != 1 or array.problem:
        return
    shape: tuple[int, ...] = array.shape
    classes: tuple[str, ...] = ()
    is_unordered = False
    for (values,) in reader.stream([name], 2**20, allow_missing=True):
        texts = [text for text in values.names if text.strip()]
        if texts and (first := vector_in(texts[0])) is not None:
            keys = {f"{array.key}.{key}": key for key in first} if isinstance(first, dict) else {}
            if keys:
                classes = tuple(keys[column] for column in class_columns(list(keys), labels, class_names).columns)
                is_unordered = any(list(vector_in(text) or ()) != list(first) for text in texts)
            shape = (*array.shape, len(classes or first))
            break
        if None in map(percent_in, texts):
            return
    if shape != array.shape or array.shape[0]:
        reader.arrays[name] = replace(
            array, dtype="float64", stored=array.dtype, shape=shape, classes=classes, is_unordered=is_unordered
        )


def find_preds(reader: Reader, given: str | None) -> str:
    """Return the checked array of predictions, as `find_roles`. The file may have no targets."""
    named = _search(reader, {"preds": given})
    labels = _labels_in(reader, named["target"])
    preds = _one(reader, "preds", _preds_of(reader, given, named, labels, ()))
    if preds is None:
        raise _missing(reader, "preds", "Pass preds='NAME'.")
    _read_texts(reader, preds, labels, ())
    _check_arrays(reader, {"preds": preds})
    return preds


def _missing(reader: Reader, role: str, advice: str) -> InputError:
    """Return the error for predictions or targets that are not found."""
    columns = [name for name, array in reader.arrays.items() if array.dtype not in FLOATS | WHOLE]
    columns = [name for name in columns if (parts := split(name)) and parts[0] in (*LOGITS, *PROBS)]
    if role == "preds" and columns:  # such as `prob_cat`, without numbers
        return _wrong_dtype(reader, role, columns[0])
    known = "logits, probs, preds" if role == "preds" else "targets, labels, y"
    return InputError(
        f"`{reader.label}` must contain {_KINDS[role]} under a known name ({known} ...), got {_listed(reader)}. "
        f"{advice}"
    )


def _one(reader: Reader, role: str, names: Sequence[str]) -> str | None:
    """Return the only name for a role, or None. Raise if there are several."""
    if len(names) > 1:
        kind = "set of columns" if reader.arrays[names[0]].columns else "array"
        systems = ", or compare them: torchcalib compare FILE --preds A --preds B" if role == "preds" else ""
        raise InputError(
            f"`{reader.label}` must contain one {kind} of {_KINDS.get(role, role)}, got {quoted(names)}. "
            f"Choose one, such as {role}='{short_name(names[0], 60)}'{systems}."
        )
    return names[0] if names else None


def _search(reader: Reader, given: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the arrays of each role: those that are given, except for predictions, or have a common name.

    Targets include outcomes.
    """
    arrays = reader.arrays

    def fits(name: str, kind: Kind) -> bool:
        if kind == "score":
            return not _are_labels(arrays[name])
        return kind != "label" or arrays[name].dtype in TEXT | WHOLE

    wanted = {role: name for role, name in given.items() if name is not None}
    named = {role: _named(reader, role, name) for role, name in wanted.items() if role != "preds"}
    members = [column for name in named.get("groups", ()) for column in arrays[name].columns]
    found = find({x: array.key for x, array in arrays.items()}, "table", named, {*wanted.values(), *members}, fits)
    if "target" in named:
        return found
    target, correct = found.get("target", []), found.get("correct", [])
    if reader.format == "npy" and len(arrays) == 2 and not (target or correct):
        # Two .npy files need no common names: floating-point numbers are predictions, and integers are targets.
        target = _single(name for name, array in arrays.items() if array.dtype in WHOLE)
    single = [name for name in target if not arrays[name].columns]
    return {**found, "target": [*(single or target), *correct]}


def _are_labels(array: Array) -> bool:
    """Return whether an array has predicted labels by its name, which may also be one of predictions."""
    return array.dtype in TEXT | WHOLE and array.key in PREDICTED


def _preds_of(
    reader: Reader,
    given: str | None,
    known: Mapping[str, Sequence[str]],
    labels: Collection[str],
    class_names: Sequence[str],
) -> list[str]:
    """Return the predictions: those that are given, class columns, columns named like labels, or a single column."""
    arrays, target = reader.arrays, known["target"]
    if given is not None:
        found = _named(reader, "preds", given, labels, class_names)
        return [_with_labels(reader, name, labels, class_names) for name in found]
    used = {name for role, names in known.items() if role not in ("preds", "confidence") for name in names}
    used |= {column for name in known.get("groups", ()) for column in arrays[name].columns}
    free = {name: array for name, array in arrays.items() if name not in used and not _are_labels(array)}
    candidates = list(known.get("preds", ()))
    for name in candidates:
        _read_texts(reader, name, labels, class_names)
    candidates = [name for name in candidates if arrays[name].dtype in FLOATS] or candidates
    several = [name for name in candidates if len(arrays[name].shape) > 1]
    if several:
        if len(several) < len(candidates) and reader.format in (*TABLES, "DataFrame"):
            candidates = several  # beside classes, a column such as `confidence` is derived
        return [_with_labels(reader, name, labels, class_names) for name in candidates]
    columns = [name for name, array in free.items() if not array.columns and array.shape[1:] == ()]
    numbers = [name for name in columns if arrays[name].dtype in FLOATS | WHOLE]
    named = [name for name in numbers if name.strip() in {*labels, *class_names}]
    if len(named) >= max(2, len(class_names or labels)):
        return [reader.compose(named, labels, class_names)]
    systems = (class_names and affixed_columns(numbers, class_names)) or (labels and affixed_columns(numbers, labels))
    if systems or (not candidates and (systems := affixed_columns(numbers))):
        return [reader.compose(list(each.values()), labels, class_names) for each in systems]
    if len(candidates) > 1:
        is_correct = bool(target) and _key(reader, target[-1]) in CORRECT
        candidates = [name for name in candidates if (_key(reader, name) in CONFIDENCES) == is_correct] or candidates
    if reader.format == "npy" and not candidates:
        candidates = _single(name for name, array in free.items() if array.dtype in FLOATS)
    candidates = candidates or list(known.get("confidence", ()))
    if not candidates and reader.format in (*TABLES, "DataFrame"):
        candidates = _named_after_a_class(reader, columns) or _unnamed_classes(reader, free, labels)
    return candidates or _single(name for name in arrays if name not in target and _key(reader, name) in PREDICTED)


def _with_labels(reader: Reader, name: str, labels: Collection[str], class_names: Sequence[str]) -> str:
    """Return the array of class columns for text labels and given class names, which may be names such as `max`."""
    array = reader.arrays[name]
    if not array.columns or not array.stem or array.problem or not (labels or class_names):
        return name
    columns = (other.name for other in reader.arrays.values() if not other.columns and len(other.shape) == 1)
    return reader.compose(groups_of(columns)[array.stem], labels, class_names)


def _aligned(reader: Reader, preds: str, target: str, class_names: Sequence[str]) -> str:
    """Return the array of targets with a column for each class, in the order of the predictions."""
    own, other = reader.arrays[preds].classes, reader.arrays[target].classes
    if class_names or agree(own, other):
        return target
    if set(own) == set(other):
        return reader.compose(reader.arrays[target].columns, wanted=own)
    raise InputError(
        f"`{target}` in `{reader.label}` must have the classes of `{preds}`, {quoted(own)}, got {quoted(other)}. "
        "Rename the columns, or pass class_names=[...] for columns in the same order."
    )


def _labels_in(reader: Reader, target: Sequence[str]) -> set[str]:
    """Return the distinct text labels of the only target; none for numbers, and for several targets."""
    found: set[str] = set()
    if len(target) == 1 and (array := reader.arrays[target[0]]).dtype in TEXT and len(array.shape) == 1:
        for (values,) in reader.stream(target, 2**20, allow_missing=True):
            found |= {text.strip() for text in values.names} - {""}
            if len(found) > MAX_ARRAYS:
                break
    return found


_OTHER_KIND = (
    "Pass task='confidence' if it is the probability of the predicted class, or task='binary' if it is P(y=1)."
)


def _predicted(
    reader: Reader, roles: Mapping[str, str], names: Sequence[str], is_given: bool, task: Task | None
) -> str | None:
    """Return the column of predicted labels for one probability of the prediction in each row; None for P(y=1).

    For two labels, probabilities of predictions are at least 0.5. P(y=1) exceeds 0.5 in rows that predict 1.
    """
    preds, target = (reader.arrays[roles[role]] for role in ("preds", "target"))
    is_one = preds.shape[1:] in ((), (1,)) and not preds.columns and preds.dtype not in TEXT
    if not (is_given or (is_one and task in (None, "confidence"))) or _key(reader, target.name) in CORRECT:
        return None
    names = [name for name in names if name not in roles.values()]
    is_named = _key(reader, preds.name) in (*CONFIDENCES, *OF_PREDICTED)
    if not names:
        if task is None and is_named:
            raise InputError(
                f"`{preds.name}` in `{reader.label}` must have a target column `correct` (1 if the prediction is "
                f"right, else 0), got `{target.name}`, and no column of predicted labels (pred_label, predicted ...). "
                f"Name it with pred='NAME'. If `{preds.name}` is P(y=1) and `{target.name}` is y, pass task='binary'."
            )
        return None
    pred = _one(reader, "pred", names)
    if is_given or task == "confidence" or _key(reader, preds.name) in CONFIDENCES:
        return pred
    low, right, wrong, labels = math.inf, False, False, set()
    for values, predicted, true in reader.stream([preds.name, str(pred), target.name], 2**20, allow_missing=True):
        p = values.reshape(len(predicted)).double()
        low = min(low, float(p.nan_to_num(1.0).min())) if len(p) else low
        codes, texts = codes_of(predicted)
        labels |= {*texts, *codes_of(true)[1]}
        if len(labels) > 2:
            return pred
        ordered = outcome_names(labels) or tuple(sorted(labels))
        is_one = _is_label(codes, texts, ordered[-1])
        right |= bool((is_one == (p > 0.5))[p != 0.5].any())
        wrong |= bool((is_one != (p > 0.5))[p != 0.5].any())
    if low >= 0.5:
        return pred
    if not wrong:
        return None
    raise InputError(
        f"`{preds.name}` in `{reader.label}` must be the probability of `{pred}`, or of the class 1, got values below "
        f"0.5 that agree with neither. {_OTHER_KIND}"
    )


def codes_of(values: Any) -> tuple[Any, list[str]]:
    """Return the index of the label of each row, and the labels as text."""
    if isinstance(values, Text):
        return values.codes, [text.strip() for text in values.names]
    distinct, codes = values.reshape(len(values)).unique(return_inverse=True)
    return codes, [f"{float(label):g}" for label in distinct]


def _is_label(codes: Any, texts: Sequence[str], label: str) -> Any:
    return codes == texts.index(label) if label in texts else codes < 0


def source_of(
    reader: Reader, roles: Mapping[str, str], from_logits: bool | None, given_task: Task | None
) -> tuple[Source, Task, bool | None]:
    """Return the `Source` of a file, its task, and whether predictions are logits; None if their name is ambiguous.

    Options that are None are inferred from names, dtypes and shapes.
    """
    task, sample_shape = _task_and_shape(reader, roles, given_task)
    from_logits = _named_as_logits(reader, roles, task) if from_logits is None else from_logits
    _check_per_sample(reader, roles, task, sample_shape)
    selected = [reader.arrays[name] for name in roles.values()]
    used = {name for array in selected for name in (array.name, *array.columns)}
    source = Source(
        files=tuple(map(str, reader.paths)),
        format=reader.format,
        preds=roles["preds"],
        target=roles["target"],
        weights=roles.get("weights"),
        from_logits=bool(from_logits),
        shape=(selected[0].shape[0], *sample_shape),
        dtype=selected[0].dtype,
        rows=tuple(f"{array.dtype} {array.shape[1:]}" for array in selected),
        ignored=tuple(array.name for array in reader.arrays.values() if not array.columns and array.name not in used),
        groups=roles.get("groups"),
        clusters=roles.get("clusters"),
        ids=roles.get("ids"),
        pred=roles.get("pred"),
        class_names=shown_classes(selected[0].classes),
        are_confidences=_is_confidence(reader, roles, given_task),
        are_percentages=bool(selected[0].stored) and len(selected[0].shape) == 1,
    )
    return source, task, from_logits


def set_kind_of_predictions(reader: Reader, earlier: Source) -> None:
    """Read whole numbers as probabilities or logits, or as percentages, if the predictions of earlier rows were."""
    array = reader.arrays.get(earlier.preds)
    if array is not None and array.dtype in WHOLE | FLOATS and not array.stored:
        stored = array.dtype if earlier.are_percentages else ""
        reader.arrays[earlier.preds] = replace(array, dtype=earlier.dtype, stored=stored)


def _mark_percentages(reader: Reader, array: Array, is_confidence: bool) -> None:
    """Mark predictions as percentages if the whole column shows it.

    Whole numbers cannot be probabilities. Fractions such as 0.7 beside numbers above 1 are ambiguous, as are numbers up
    to 10, which may be ratings. They are not marked, and later raise an error.
    """
    is_named = is_confidence or _key(reader, array.name) in PROBS
    is_single = array.shape[1:] in ((), (1,)) and not array.problem
    if not is_single or array.stored or not ((is_named and array.dtype in WHOLE - {"bool"}) or is_confidence):
        return
    if array.dtype not in WHOLE | FLOATS or not array.shape[0]:
        return
    low, high, least = math.inf, -math.inf, math.inf  # smallest and largest number, and the smallest positive one
    for (values,) in reader.stream([array.name], 2**20, allow_missing=True):
        numbers = values[values.isfinite()].double()
        if numbers.numel():
            low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))
            least = min(least, float(numbers.masked_fill(numbers <= 0, math.inf).min()))
    if low >= 0 and _MAX_RATING < high <= 100 and (least > 1 or array.dtype in WHOLE):
        reader.arrays[array.name] = replace(array, dtype="float64", stored=array.dtype)


def _key(reader: Reader, name: str) -> str:
    """Return the stem of numbered columns, or the key of the array."""
    key = reader.arrays[name].key
    parts = numbered(key)
    return parts[0] if parts else key


def _named(
    reader: Reader, role: str, given: str, labels: Collection[str] = (), class_names: Sequence[str] = ()
) -> list[str]:
    """Return the names of the arrays that match `given`."""
    if given in reader.arrays:
        return [given]
    key = key_of(given.removesuffix(".npy"))
    found = [name for name, array in reader.arrays.items() if array.key == key]
    return found or [_selected(reader, role, given, labels, class_names)]


def _selected(
    reader: Reader, role: str, given: str, labels: Collection[str] = (), class_names: Sequence[str] = ()
) -> str:
    """Return the name of an array of several columns, from a list `a,b`, a pattern `prob_*` or a range `0..3`."""
    columns: list[str] = []
    own = dict.fromkeys(name for name, array in reader.arrays.items() if not array.columns)
    for part in map(str.strip, given.split(",")):
        first, dots, last = part.partition("..")
        start, stop = numbered(first), numbered(last)
        if part in own:
            found = [part]
        elif dots and start and stop and stop[0] in ("", start[0]):
            stem = first.rstrip("0123456789")
            found = [f"{stem}{k}" for k in range(start[1], min(stop[1], start[1] + MAX_ARRAYS) + 1)]
        else:
            found = [name for name in own if fnmatchcase(name, part)] if re.search(r"[*?\[]", part) else []
        missing = [name for name in found if name not in own]
        if missing or not found:
            raise InputError(
                f"`{role}` must name an array in `{reader.label}`, got `{(missing or [part])[0]}`. "
                f"Name one of {_listed(reader)}, or several columns: a,b or 'prob_*'."
            )
        columns += found
    if len(set(columns)) < len(columns):
        raise InputError(f"`{role}` must name every column once, got {quoted(columns)}. Remove the repetition.")
    if len(columns) == 1:
        return columns[0]
    return _groups_of(reader, columns) if role == "groups" else reader.compose(columns, labels, class_names)


def _groups_of(reader: Reader, columns: Sequence[str]) -> str:
    """Return the name of an array of groups that are the combinations of several columns."""
    role, name = ROLES["groups"], ",".join(columns)
    shape = reader.arrays[columns[0]].shape
    for column in columns:
        array, where = reader.arrays[column], f"`{column}` in `{reader.label}`"
        if array.problem or array.dtype not in role.dtypes:
            raise InputError(f"{where} {array.problem or f'must {role.rule}, got {array.dtype}. {role.advice}'}")
        if array.shape != shape or len(shape) != 1:
            raise InputError(f"{where} must be one group per sample, got shape {array.shape}. Save one per sample.")
    reader.arrays[name] = Array(name, "string", shape, columns=tuple(columns), stem=name)
    return name


def _named_after_a_class(reader: Reader, columns: Sequence[str]) -> list[str]:
    """Return the only binary column such as `prob_dog`; empty for no or several columns."""
    stems = {*LOGITS, *PROBS} - {*CONFIDENCES, "p"}
    floats = [name for name in columns if reader.arrays[name].dtype in FLOATS]
    return _single(name for name in floats if (parts := split(name)) and parts[0] in stems and classes_among(parts[1:]))


def _unnamed_classes(reader: Reader, free: Mapping[str, Array], labels: Collection[str]) -> list[str]:
    """Combine class columns without a known stem. Return a list with the name of the array, or an empty list."""
    numbers = [array for array in free.values() if array.columns and not array.stem and not array.problem]
    if numbers:  # of which the caller may have named some as targets
        own = [name for name in numbers[0].columns if name in free]
        if len(own) == len(numbers[0].columns):
            return [numbers[0].name]
        return own if len(own) < 2 else [reader.compose(own)]
    if labels:
        return []
    columns = [
        array
        for array in free.values()
        if not array.columns and array.key not in (*INDEX, *WEIGHTS, *TARGETS, *CORRECT)
    ]
    floating = all(array.dtype in FLOATS and len(array.shape) == 1 for array in columns)
    # Columns such as `vit_logit` may belong to models instead of classes.
    if len(columns) < 2 or not floating or any(are_logits(array.name) is not None for array in columns):
        return []
    return [reader.compose([array.name for array in columns])]


def _is_confidence(reader: Reader, roles: Mapping[str, str], task: Task | None) -> bool:
    return task == "confidence" or "pred" in roles or (task is None and _key(reader, roles["target"]) in CORRECT)


def _single(names: Iterable[str]) -> list[str]:
    """Return the names if there is exactly one, else none."""
    found = list(names)
    return found if len(found) == 1 else []


def _wrong_dtype(reader: Reader, role: str, name: str) -> InputError:
    """Return the error for an array whose dtype does not fit its role. The error for texts shows one of them."""
    array, (_, rule, advice) = reader.arrays[name], ROLES[role]
    found = array.dtype
    if found in TEXT and len(array.shape) == 1 and not array.columns:
        (values,) = next(reader.stream([name], 2**16, allow_missing=True))
        texts = [text for text in values.names if not is_numeral(text.strip().removesuffix("%"))] or values.names
        found = f"the text {shown(next(filter(None, texts), ''), 28)}"
        if role == "preds":
            advice = (
                "Write numbers with a decimal point, lists of them, or objects of label -> probability, and divide "
                "percentages by 100."
            )
    return InputError(f"`{name}` in `{reader.label}` must {rule}, got {found}. {advice}")


def _listed(reader: Reader) -> str:
    members = {column for array in reader.arrays.values() for column in array.columns}
    return quoted(name for name in reader.arrays if name not in members)


def _check_lengths(reader: Reader, roles: Mapping[str, str]) -> None:
    """Check that all arrays have the same number of rows."""
    preds = reader.arrays[roles["preds"]]
    for name in roles.values():
        array, where = reader.arrays[name], f"`{name}` in `{reader.label}`"
        if array.problem:
            raise InputError(f"{where} {array.problem}")
        if not array.shape:
            raise InputError(f"{where} must be an array, got a single number. Check the program that wrote it.")
        if array.shape[:1] != preds.shape[:1]:
            raise InputError(
                f"`{preds.name}` and `{name}` in `{reader.label}` must have one row per sample, "
                f"got shapes {preds.shape} and {array.shape}. Check the program that wrote them."
            )


def _check_arrays(reader: Reader, roles: Mapping[str, str]) -> None:
    """Check the row counts, and the dtypes unless there are no rows: empty text files do not determine them."""
    _check_lengths(reader, roles)
    most = row_limit(reader.paths)
    for role, name in roles.items():
        array, where = reader.arrays[name], f"`{name}` in `{reader.label}`"
        if array.shape[0] == 0:
            continue
        if array.dtype not in ROLES[role].dtypes:
            raise _wrong_dtype(reader, role, name)
        if 0 in array.shape or array.row_bytes > most:
            raise InputError(
                f"{where} must have non-empty rows of at most {most:,} bytes, "
                f"got shape {array.shape} of {array.dtype}. Check the program that wrote it."
            )


def _task_and_shape(reader: Reader, roles: Mapping[str, str], task: Task | None) -> tuple[Task, tuple[int, ...]]:
    """Return the given or inferred task and the shape of one prediction, after a check of all shapes."""
    if task not in (None, "confidence", *TASKS):
        raise InputError(f"The task must be one of {quoted(TASKS)} or `confidence`, got `{task}`. Pass one of them.")
    preds, target = reader.arrays[roles["preds"]], reader.arrays[roles["target"]]
    scores, labels = preds.shape[1:], target.shape[1:]
    found = f"predictions {preds.shape} and {target.dtype} targets {target.shape} in `{reader.label}`"
    if _is_confidence(reader, roles, task):
        if not {scores, labels} <= {(), (1,)}:
            raise InputError(
                f"Confidences must be one number per sample with targets 1 (correct) or 0, got {found}. Choose with "
                "preds='NAME' and target='NAME'."
            )
        task = "binary"
    counts = target.dtype in WHOLE - {"bool"}
    try:
        task = task_of(task, shapes=Shapes(preds.shape, target.shape, counts, found))
    except ValueError as error:
        raise InputError(str(error)) from None
    if task == "binary" and scores == (1,) and labels in ((), (1,), (2,), (1, 2)):
        scores, labels = (), labels[1:] if labels[:1] == (1,) else labels
    if scores and task == "multiclass" and labels == (*scores[:-1], 1):
        labels = scores[:-1]  # class labels with a class axis of size 1
    per_class = labels == scores
    no_and_yes = counts and labels == (*scores, 2)
    sample_axes = scores if task == "binary" else scores[:-1]
    if task != "binary" and scores:
        check_classes(scores[-1], reader.paths, reader.label, cost=3 if task == "multilabel" else 1)
    check_samples(preds.shape[0] * prod(sample_axes), reader.paths, reader.label)
    if task == "multiclass":
        fits = scores != () and (labels == scores[:-1] or per_class)
    else:
        # Two columns of binary predictions are probably P(y=0) and P(y=1), which would count every row twice.
        fits = (per_class or no_and_yes) and (len(scores) != 1 if task == "binary" else scores != ())
    if not fits and len(scores) > 1 and labels == scores[1:]:
        if scores[0] == 1:
            raise InputError(
                f"Binary predictions must have the shape of the targets, got {found}. "
                "Remove the axis of size 1 before saving: preds.squeeze(1)."
            )
        raise InputError(
            f"Classes must be the last axis in files, got {found}, which may be (N, C, H, W). "
            "Move the class axis to the end before saving: np.moveaxis(preds, 1, -1)."
        )
    if not fits:
        raise InputError(
            f"Shapes must be {_SHAPES[task]} for a {task} task, got {found}. "
            "Check the program that wrote them, and the task."
        )
    if target.dtype in TEXT and (task == "multilabel" or per_class == (task == "multiclass")):
        raise InputError(f"Targets must be numbers, or one class name per sample, got {found}. Store numbers.")
    return task, scores


def _check_per_sample(reader: Reader, roles: Mapping[str, str], task: Task, sample_shape: tuple[int, ...]) -> None:
    """Check that columns such as weights have one value per sample. `sample_shape` is that of one prediction."""
    preds = reader.arrays[roles["preds"]].shape
    fitting = {(preds[0], *(sample_shape if task == "binary" else sample_shape[:-1]))}
    if task == "binary" and sample_shape == () and len(preds) > 1:
        fitting.add(preds)  # predictions and weights may both be columns (N, 1)
    for role, kind in (("weights", "weight"), ("groups", "group"), ("clusters", "cluster"), ("ids", "id")):
        if role not in roles:
            continue
        name = roles[role]
        array = reader.arrays[name]
        of_items = role in ("clusters", "ids") and array.shape == preds[:1]  # one for all samples of an item
        if array.shape not in fitting and not of_items:
            raise InputError(
                f"`{name}` in `{reader.label}` must be one {kind} per sample, got shape {array.shape} "
                f"for predictions {preds}. Save one per sample, or rename the array if it contains other data."
            )
        if array.dtype in TEXT and len(array.shape) > 1:
            raise InputError(
                f"`{name}` in `{reader.label}` must have one axis if it contains text, got shape {array.shape}. "
                "Save whole numbers, or flatten all arrays."
            )


def _named_as_logits(reader: Reader, roles: Mapping[str, str], task: Task) -> bool | None:
    """Return whether predictions are logits by their name; None for an ambiguous name."""
    preds = reader.arrays[roles["preds"]]
    names = preds.columns if preds.columns and not preds.stem else (preds.key,)
    found = named_as_logits(names, f"`{preds.name}` in `{reader.label}`")
    if _key(reader, preds.name) in LOG_PROBS and task != "multiclass":
        raise InputError(
            f"`{preds.name}` in `{reader.label}` must be probabilities or logits for a {task} task, got "
            "log-probabilities, which are not logits. Store probabilities or logits."
        )
    return found
