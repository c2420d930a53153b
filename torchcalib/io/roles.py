"""Find the arrays of a file for each role (predictions, targets, weights, groups), and the task, by name and shape.

Text labels in the targets identify columns that are named after classes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from torchcalib.io.errors import InputError, quoted
from torchcalib.io.limits import MAX_ARRAYS, check_classes, check_samples, row_limit
from torchcalib.io.names import (
    CONFIDENCES,
    CORRECT,
    INDEX,
    LOG_PROBS,
    LOGITS,
    NEUTRAL,
    PROBS,
    TARGETS,
    TASKS,
    WEIGHTS,
    Task,
    are_logits,
    class_of,
    numbered,
    percent_in,
    task_of_shapes,
)
from torchcalib.io.reader import FLOATS, TEXT, WHOLE, Array, Reader, Text
from torchcalib.io.source import Source

_MAX_RATING = 10
"""Largest number of common scales that are not percentages, such as 1 to 5 and 0 to 10."""


class Role(NamedTuple):
    """Common names and valid dtypes of the array for a role, and the text of its dtype error."""

    names: tuple[str, ...]  # common array names
    dtypes: frozenset[str]
    rule: str
    advice: str


ROLES = {
    "preds": Role(
        (*LOGITS, *PROBS, *NEUTRAL),
        FLOATS,
        "be floating-point predictions",
        "Whole numbers are decisions, labels or ratings. Store probabilities (predict_proba in scikit-learn), "
        "divide percentages by 100, or name another array with preds='NAME'.",
    ),
    "target": Role(
        TARGETS, FLOATS | WHOLE | TEXT, "contain numbers or text", "Store class indices or names, or use target='NAME'."
    ),
    "weights": Role(WEIGHTS, FLOATS | WHOLE, "contain numbers", "Name another array with weights='NAME'."),
    "groups": Role((), WHOLE | TEXT, "contain whole numbers or text as groups", "Store one number or name per sample."),
    "clusters": Role(
        (), WHOLE | TEXT, "contain whole numbers or text as clusters", "Store one number or name per sample."
    ),
}
_KINDS = {"preds": "predictions", "target": "targets"}
_SHAPES = {
    "binary": "(N,) or maps (N, H, ...), with targets of this shape or annotator counts (..., 2) for no and yes",
    "multiclass": "(N, ..., C) and class indices (N, ...), or annotator counts or probabilities (N, ..., C)",
    "multilabel": "(N, ..., L) and targets (N, ..., L), or annotator counts (N, ..., L, 2) for no and yes",
}


def find_roles(
    reader: Reader, given: Mapping[str, str | None], task: Task | None = None, from_logits: bool | None = None
) -> dict[str, str]:
    """Return the checked array for each role: the one that `given` selects, or else the one with a common name.

    Confidences that are percentages are marked as such in the reader, unless they are logits.
    """
    if reader.format == "npy" and len(reader.arrays) == 1:
        raise InputError(
            f"`{reader.label}` must be a pair of .npy files, predictions and targets (more with weights or groups), "
            "got 1 file. Name both files, or save shards in another format, such as .npz."
        )
    found = {role: _candidates(reader, role, given[role]) for role in ROLES}
    found["preds"], found["target"] = _fitting(reader, found["preds"], found["target"])
    if reader.format == "npy" and len(reader.arrays) == 2:
        # Two .npy files need no common names: floating-point numbers are predictions, and integers are targets.
        dtypes = {name: array.dtype for name, array in reader.arrays.items()}
        found["preds"] = found["preds"] or _single(name for name in dtypes if dtypes[name] in FLOATS)
        found["target"] = found["target"] or _single(name for name in dtypes if dtypes[name] in WHOLE)
    found["preds"] = found["preds"] or _named_after_a_class(reader)
    if not found["preds"] and len(found["target"]) == 1:
        found["preds"] = _unnamed_classes(reader, found["target"][0], given)
    for role, names in found.items():
        if len(names) > 1:
            systems = ", or compare them: torchcalib compare FILE --preds A --preds B" if role == "preds" else ""
            raise InputError(
                f"`{reader.label}` must contain one array of {_KINDS.get(role, role)}, got {quoted(names)}. "
                f"Choose with {role}='NAME'{systems}."
            )
    for role, known in (("preds", "logits, probs, preds"), ("target", "targets, labels, y")):
        if not found[role]:
            raise InputError(
                f"`{reader.label}` must contain {_KINDS[role]} under a known name ({known} ...), got "
                f"{_listed(reader)}. {reader.advice}"
            )
    roles = {role: names[0] for role, names in found.items() if names}
    if len(set(roles.values())) < len(roles):
        raise InputError(
            f"`{reader.label}` must contain predictions, targets, weights, groups and clusters in different arrays, "
            f"got {quoted(roles.values())}. {reader.advice}"
        )
    preds, target = roles["preds"], roles["target"]
    may_be_confidence = given["preds"] is None and task is None and _key(reader, preds) in CONFIDENCES
    if may_be_confidence and _key(reader, target) not in CORRECT:
        raise InputError(
            f"`{preds}` in `{reader.label}` must have a target column `correct` (1 if the prediction is right, "
            f"else 0), got `{target}`. Add the column: df['correct'] = (df['predicted'] == df['{target}']).astype(int)."
            f" If `{preds}` is P(y=1) and `{target}` is y, pass task='binary'."
        )
    if not from_logits:
        _mark_percentages(reader, reader.arrays[preds], _is_confidence(reader, roles, task))
    _check_arrays(reader, roles)
    return roles


def find_preds(reader: Reader, given: str | None) -> str:
    """Return the checked array of predictions, as `find_roles`. The file may have no targets."""
    preds, targets = _fitting(reader, _candidates(reader, "preds", given), _candidates(reader, "target", None))
    if reader.format == "npy" and not preds:
        preds = _single(name for name, array in reader.arrays.items() if array.dtype in FLOATS)
    preds = preds or _named_after_a_class(reader)
    if not preds and len(targets) == 1:
        preds = _unnamed_classes(reader, targets[0], dict.fromkeys(ROLES))
    if len(preds) != 1:
        found = quoted(preds) if preds else _listed(reader)
        raise InputError(
            f"`{reader.label}` must contain one array of predictions under a known name (logits, probs, preds ...), "
            f"got {found}. Choose with preds='NAME'."
        )
    _check_arrays(reader, {"preds": preds[0]})
    return preds[0]


def source_of(
    reader: Reader, roles: Mapping[str, str], from_logits: bool | None, given_task: Task | None
) -> tuple[Source, Task]:
    """Return the `Source` and the task of a file. Options that are None are inferred from names, dtypes and shapes."""
    task, sample_shape = _task_and_shape(reader, roles, given_task)
    _check_per_sample(reader, roles, task, sample_shape)
    selected = [reader.arrays[name] for name in roles.values()]
    used = {name for array in selected for name in (array.name, *array.columns)}
    source = Source(
        files=tuple(map(str, reader.paths)),
        format=reader.format,
        preds=roles["preds"],
        target=roles["target"],
        weights=roles.get("weights"),
        from_logits=_named_as_logits(reader, roles, task) if from_logits is None else from_logits,
        shape=(selected[0].shape[0], *sample_shape),
        dtype=selected[0].dtype,
        rows=tuple(f"{array.dtype} {array.shape[1:]}" for array in selected),
        ignored=tuple(array.name for array in reader.arrays.values() if not array.columns and array.name not in used),
        groups=roles.get("groups"),
        clusters=roles.get("clusters"),
        class_names=selected[0].classes,
        are_confidences=_is_confidence(reader, roles, given_task),
        are_percentages=bool(selected[0].percent),
    )
    return source, task


def _mark_percentages(reader: Reader, array: Array, is_confidence: bool) -> None:
    """Mark predictions as percentages if the whole column shows it: text with a percent sign, or numbers up to 100.

    Whole numbers cannot be probabilities. Fractions such as 0.7 beside numbers above 1 are ambiguous, as are numbers up
    to 10, which may be ratings. They are not marked, and later raise an error.
    """
    is_named = is_confidence or _key(reader, array.name) in PROBS
    is_single = array.shape[1:] in ((), (1,)) and not array.problem
    if not is_single or not (array.dtype in TEXT or (is_named and array.dtype in WHOLE - {"bool"}) or is_confidence):
        return
    if array.dtype not in TEXT | WHOLE | FLOATS or not array.shape[0]:
        return
    low, high, least = math.inf, -math.inf, math.inf  # smallest and largest number, and the smallest positive one
    for (values,) in reader.stream([array.name], 2**20, allow_missing=True):
        if isinstance(values, Text):
            found = [percent_in(text) for text in values.names if text.strip()]
            if None in found:
                return
            continue
        numbers = values[values.isfinite()].double()
        if numbers.numel():
            low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))
            least = min(least, float(numbers.masked_fill(numbers <= 0, math.inf).min()))
    if array.dtype in TEXT or (low >= 0 and _MAX_RATING < high <= 100 and (least > 1 or array.dtype in WHOLE)):
        reader.arrays[array.name] = replace(array, dtype="float64", percent=array.dtype)


def _key(reader: Reader, name: str) -> str:
    """Return the stem of numbered columns, or the array name in lower case."""
    key = reader.arrays[name].key
    parts = numbered(key)
    return parts[0] if parts else key


def _candidates(reader: Reader, role: str, given: str | None) -> list[str]:
    """Return the names of the arrays that match `given`. If it is None, return the arrays with a common name."""
    by_key = defaultdict(list)
    for name, array in reader.arrays.items():
        by_key[array.key].append(name)
    if given is None:
        return [name for key in ROLES[role].names for name in by_key[key]]
    if given in reader.arrays:
        return [given]
    return by_key[given.strip().lower().removesuffix(".npy")] or [_selected(reader, role, given)]


def _selected(reader: Reader, role: str, given: str) -> str:
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
            found.sort(key=lambda name: (numbered(name) or ("", 0))[1])
        missing = [name for name in found if name not in own]
        if missing or not found:
            raise InputError(
                f"`{role}` must name an array in `{reader.label}`, got `{(missing or [part])[0]}`. "
                f"Name one of {_listed(reader)}, or several columns: a,b or 'prob_*'."
            )
        columns += found
    if len(set(columns)) < len(columns):
        raise InputError(f"`{role}` must name every column once, got {quoted(columns)}. Remove the repetition.")
    return columns[0] if len(columns) == 1 else reader.compose(columns)


def _fitting(reader: Reader, preds: list[str], targets: list[str]) -> tuple[list[str], list[str]]:
    """Choose among several names: floating-point predictions, and confidences together with targets in `CORRECT`."""
    if len(targets) > 1:
        only_confidences = all(_key(reader, name) in CONFIDENCES for name in preds)
        targets = [name for name in targets if (_key(reader, name) in CORRECT) == only_confidences] or targets
    if len(preds) > 1:
        preds = [name for name in preds if reader.arrays[name].dtype in FLOATS] or preds
    if len(preds) > 1:
        are_correct = bool(targets) and _key(reader, targets[0]) in CORRECT
        preds = [name for name in preds if (_key(reader, name) in CONFIDENCES) == are_correct] or preds
    return preds, targets


def _named_after_a_class(reader: Reader) -> list[str]:
    """Return the only binary column such as `prob_dog`; empty for no or several columns."""
    stems = {*LOGITS, *PROBS} - {*CONFIDENCES, "p"}
    columns = [name for name, array in reader.arrays.items() if not array.columns and array.dtype in FLOATS]
    return _single(name for name in columns if (named := class_of(name)) and named[0] in stems)


def _unnamed_classes(reader: Reader, target: str, given: Mapping[str, str | None]) -> list[str]:
    """Combine class columns without a common stem. Return a list with the name of the array, or an empty list."""
    numbered = [name for name, array in reader.arrays.items() if array.columns and not array.stem and not array.problem]
    if numbered:
        return numbered[:1]
    used = {target, given["weights"], given["groups"], given["clusters"]}
    columns = [
        array
        for name, array in reader.arrays.items()
        if name not in used and not array.columns and array.key not in (*INDEX, *WEIGHTS, *TARGETS)
    ]
    if reader.arrays[target].dtype in TEXT:
        labels: set[str] = set()
        for (values,) in reader.stream([target], 2**20, allow_missing=True):
            labels |= {text.strip() for text in values.names} - {""}
            if len(labels) > len(columns):
                break
        columns = [array for array in columns if array.name.strip() in labels and array.dtype in FLOATS]
        fits = len(columns) >= max(2, len(labels))
    else:
        floating = all(array.dtype in FLOATS and len(array.shape) == 1 for array in columns)
        # Columns such as `vit_logit` may belong to models instead of classes.
        fits = len(columns) >= 2 and floating and all(are_logits(array.name) is None for array in columns)
    return [reader.compose([array.name for array in columns])] if fits else []


def _is_confidence(reader: Reader, roles: Mapping[str, str], task: Task | None) -> bool:
    return task == "confidence" or (task is None and _key(reader, roles["target"]) in CORRECT)


def _single(names: Iterable[str]) -> list[str]:
    """Return the names if there is exactly one, else none."""
    found = list(names)
    return found if len(found) == 1 else []


def _listed(reader: Reader) -> str:
    members = {column for array in reader.arrays.values() for column in array.columns}
    return quoted(name for name in reader.arrays if name not in members)


def _check_arrays(reader: Reader, roles: Mapping[str, str]) -> None:
    """Check the row counts, and the dtypes unless there are no rows: empty text files do not determine them."""
    preds = reader.arrays[roles["preds"]]
    most = row_limit(reader.paths)
    for role, name in roles.items():
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
        if array.shape[0] == 0:
            continue
        _, dtypes, rule, advice = ROLES[role]
        if array.dtype not in dtypes:
            raise InputError(f"{where} must {rule}, got {array.dtype}. {advice}")
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
    scores, labels, soft = preds.shape[1:], target.shape[1:], target.dtype in FLOATS
    found = f"predictions {preds.shape} and {target.dtype} targets {target.shape} in `{reader.label}`"
    if _is_confidence(reader, roles, task):
        if not {scores, labels} <= {(), (1,)}:
            raise InputError(
                f"Confidences must be one number per sample with targets 1 (correct) or 0, got {found}. Choose with "
                "preds='NAME' and target='NAME'."
            )
        task = "binary"
    assert task != "confidence"
    if task in (None, "binary") and scores == (1,) and labels in ((), (1,), (2,), (1, 2)):
        scores, labels = (), labels[1:] if labels[:1] == (1,) else labels
    if scores and task in (None, "multiclass") and labels == (*scores[:-1], 1):
        labels = scores[:-1]  # class labels with a class axis of size 1
    per_class = labels == scores
    no_and_yes = labels == (*scores, 2) and target.dtype in WHOLE - {"bool"}
    task = task or task_of_shapes((0, *scores), (0, *labels))
    if task is None and per_class:
        one_class = "probabilities or annotator counts" if soft else "one-hot labels or annotator counts"
        maps = ", or task='binary' (maps of P(y=1))" if len(scores) > 1 else ""
        raise InputError(
            f"The task must be given if shapes are ambiguous, got {found}. "
            f"Pass task='multilabel', or task='multiclass' ({one_class}){maps}."
        )
    if task is None and no_and_yes:
        raise InputError(
            f"The task must be given if targets may be annotator counts, got {found}. "
            f"Pass task='{'multilabel' if scores else 'binary'}' for counts of no and yes, or name one target "
            "with target='NAME'."
        )
    task = task or ("multiclass" if scores else "binary")
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
    """Check that weights, groups and clusters have one value per sample. `sample_shape` is that of one prediction."""
    preds = reader.arrays[roles["preds"]].shape
    fitting = {(preds[0], *(sample_shape if task == "binary" else sample_shape[:-1]))}
    if task == "binary" and sample_shape == () and len(preds) > 1:
        fitting.add(preds)  # predictions and weights may both be columns (N, 1)
    for role, kind in (("weights", "weight"), ("groups", "group"), ("clusters", "cluster")):
        if role not in roles:
            continue
        name = roles[role]
        array = reader.arrays[name]
        of_items = role == "clusters" and array.shape == preds[:1]  # one cluster for all samples of an item
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


def _named_as_logits(reader: Reader, roles: Mapping[str, str], task: Task) -> bool:
    """Return whether predictions are logits, inferred from their name."""
    preds = reader.arrays[roles["preds"]]
    where = f"`{preds.name}` in `{reader.label}`"
    names = preds.columns if preds.columns and not preds.stem else (preds.key,)
    meanings = {are_logits(name) for name in names}
    if len(meanings) > 1 or None in meanings:
        raise InputError(
            f"{where} must be declared as logits or as probabilities, got an ambiguous name. "
            f"{_advice_from_values(reader, preds, task)}"
        )
    if _key(reader, preds.name) in LOG_PROBS and task != "multiclass":
        raise InputError(
            f"{where} must be probabilities or logits for a {task} task, got log-probabilities, "
            "which are not logits. Store probabilities or logits."
        )
    return meanings == {True}


def _advice_from_values(reader: Reader, preds: Array, task: Task) -> str:
    """Return advice on the options for predictions with an ambiguous name, from at most the first 1000 rows."""
    (values,) = next(reader.stream([preds.name], 2**20, allow_missing=True))
    values = values[:1000]
    values = values[~values.isnan().reshape(len(values), -1).any(1)].double()
    if not len(values) or preds.dtype not in FLOATS:
        return "Pass from_logits=True or from_logits=False."
    low, high = (float(end) for end in values.aminmax())
    total = values.sum(-1) if task == "multiclass" else None
    if low < 0:
        return "Some are negative: pass from_logits=True if they are logits or log-probabilities."
    if high <= 1 and (total is None or bool(((total - 1).abs() <= 1e-3).all())):
        return "These look like probabilities: pass from_logits=False."
    if high <= 1 and total is not None and bool(((total - 1).abs() <= 0.005 * preds.shape[-1] + 1e-6).all()):
        return "These look like rounded probabilities: pass from_logits=False, normalize=True."
    return "Pass from_logits=True or from_logits=False."
