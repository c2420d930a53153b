"""Roles of the arrays in a file, by their names, dtypes and shapes, never by their values."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torchcalib.io.errors import InputError, quoted
from torchcalib.io.readers import FLOATS, MAX_RESIDENT, NUMBERED, TEXT, WHOLE, Reader

Task = Literal["binary", "multiclass", "multilabel"]

_LOG_PROBS = ("log_probs", "logprobs", "log_prob", "log_probabilities")
_LOGITS = ("logits", "logit", *_LOG_PROBS)  # the softmax of log-probabilities is the probabilities
_PROBS = ("probs", "prob", "probabilities", "probability", "softmax", "y_prob", "p")
_NEUTRAL = ("preds", "pred", "predictions", "scores", "score", "outputs", "output", "y_pred", "y_score")


class Role(NamedTuple):
    """Requirements of an array with a role."""

    names: tuple[str, ...]  # common names, by which it is found
    dtypes: frozenset[str]
    rule: str
    advice: str


_NUMBERS = (
    FLOATS | WHOLE,
    "hold numbers",
    "Store numbers (class indices as targets), or name another array with --target or --weights.",
)
ROLES = {
    "preds": Role(
        (*_LOGITS, *_PROBS, *_NEUTRAL),
        FLOATS,
        "be floating-point predictions",
        "Store logits or probabilities (1.0, not 1), or name another array with --preds.",
    ),
    "target": Role(("targets", "target", "labels", "label", "y_true", "y", "gt"), *_NUMBERS),
    "weights": Role(("weights", "weight", "sample_weight"), *_NUMBERS),
    "groups": Role(
        (), WHOLE | TEXT, "hold whole numbers or text as groups", "Store an integer or a name for every sample."
    ),
}
_SHAPES = {
    "binary": "(N,) or maps (N, H, ...), with targets of that shape or vote counts (..., 2) for no and yes",
    "multiclass": "(N, ..., C) and class indices (N, ...), or vote counts, one-hot labels or shares (N, ..., C)",
    "multilabel": "(N, ..., L) and targets (N, ..., L), or vote counts (N, ..., L, 2) for no and yes",
}


def find_roles(reader: Reader, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the names of the arrays by role, found by the given names or else by common names."""
    found = {role: _find(reader, role, given[role]) for role in ROLES}
    if reader.format == "npy" and len(reader.arrays) == 2:
        # Any file names will do: one floating-point and one whole-number array have a single interpretation.
        found["preds"] = found["preds"] or _only(reader, FLOATS)
        found["target"] = found["target"] or _only(reader, WHOLE)
    for role, kind, known in (
        ("preds", "predictions", "logits, probs, preds"),
        ("target", "targets", "targets, labels, y"),
    ):
        if found[role] is None:
            raise InputError(
                f"`{reader.label}` must hold {kind} under a known name ({known} ...), got {_held(reader)}. "
                "Pass --preds NAME --target NAME."
            )
    roles = {role: name for role, name in found.items() if name is not None}
    if len(set(roles.values())) < len(roles):
        raise InputError(
            f"`{reader.label}` must hold predictions, targets, weights and groups apart, got {quoted(roles.values())}. "
            "Pass --preds NAME --target NAME."
        )
    return roles


def _find(reader: Reader, role: str, given: str | None) -> str | None:
    if given in reader.arrays:
        return given
    keys = ROLES[role].names if given is None else (given.strip().lower().removesuffix(".npy"),)
    found = [name for key in keys for name, array in reader.arrays.items() if array.key == key]
    if given is not None and not found:
        raise InputError(
            f"--{role} must name an array of `{reader.label}`, got `{given}` beside {_held(reader)}. Choose one."
        )
    if len(found) > 1:
        raise InputError(
            f"`{reader.label}` must hold one array for --{role}, got {quoted(found)}. Choose with --{role} NAME."
        )
    return found[0] if found else None


def _only(reader: Reader, dtypes: frozenset[str]) -> str | None:
    fitting = [name for name, array in reader.arrays.items() if array.dtype in dtypes]
    return fitting[0] if len(fitting) == 1 else None


def _held(reader: Reader) -> str:
    members = {column for array in reader.arrays.values() for column in array.columns}
    return quoted(name for name in reader.arrays if name not in members)


def check_arrays(reader: Reader, roles: Mapping[str, str]) -> int:
    """Check the number of rows and the dtypes of the arrays, and return the number of rows.

    Dtypes of a file without rows mean nothing: text without rows has none.
    """
    preds = reader.arrays[roles["preds"]]
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
        if array.dtype not in TEXT and (0 in array.shape or array.row_bytes > MAX_RESIDENT):
            raise InputError(
                f"{where} must have rows that are not empty and need at most 2 GiB, "
                f"got shape {array.shape} of {array.dtype}. Check the program that wrote it."
            )
    return preds.shape[0]


def infer_task(reader: Reader, roles: Mapping[str, str], task: Task | None) -> tuple[Task, tuple[int, ...]]:
    """Infer the task from shapes, or check the one that is given. Also return the shape of one prediction."""
    preds, target = reader.arrays[roles["preds"]], reader.arrays[roles["target"]]
    scores, labels, soft = preds.shape[1:], target.shape[1:], target.dtype in FLOATS
    found = f"predictions {preds.shape} and {target.dtype} targets {target.shape} in `{reader.label}`"
    if task not in (None, *_SHAPES):
        raise InputError(f"The task must be one of {quoted(_SHAPES)}, got `{task}`. Pass one of them with --task.")
    if task in (None, "binary") and scores == (1,) and labels in ((), (1,), (2,), (1, 2)):
        scores, labels = (), labels[1:] if labels[:1] == (1,) else labels
    per_class = labels == scores
    no_and_yes = labels == (*scores, 2) and target.dtype in WHOLE - {"bool"}
    if task is None and scores and per_class:
        one_class = "shares or vote counts" if soft else "one-hot labels or vote counts"
        maps = ", or --task binary (probabilities of 1)" if len(scores) > 1 else ""
        raise InputError(
            f"The task must be given if shapes are ambiguous, got {found}. "
            f"Pass --task multilabel, or --task multiclass ({one_class}){maps}."
        )
    if task is None and no_and_yes:
        raise InputError(
            f"The task must be given if targets may be vote counts, got {found}. "
            f"Pass --task {'multilabel' if scores else 'binary'} for counts of no and yes, or name one target "
            "with --target."
        )
    task = task or ("multiclass" if scores else "binary")
    if task == "multiclass":
        fits = scores != () and (labels == scores[:-1] or per_class)
    else:
        # Two columns of binary predictions are probably P(y=0) and P(y=1), which would count every row twice.
        fits = (per_class or no_and_yes) and (len(scores) != 1 if task == "binary" else scores != ())
    if not fits and len(scores) > 1 and labels == scores[1:]:
        raise InputError(
            f"Classes must be the last axis in files, got {found}, which may be (N, C, H, W). "
            "Move the class axis to the end before saving: np.moveaxis(preds, 1, -1)."
        )
    if not fits:
        raise InputError(
            f"Shapes must be {_SHAPES[task]} for a {task} task, got {found}. "
            "Check the program that wrote them, and the option --task."
        )
    if task == "multiclass" and per_class and target.dtype == "bool":
        raise InputError(
            f"Targets with a class axis must be whole numbers (vote counts, one-hot labels) or floating (shares), "
            f"got {found}. Save them as integers, or save class indices."
        )
    if task == "multiclass" and soft and not per_class:
        raise InputError(
            f"Targets must be integer class indices where predictions have a class axis, got {found}. "
            "Save them as integers, or votes in an array shaped like the predictions."
        )
    return task, scores


def check_per_sample(reader: Reader, roles: Mapping[str, str], task: Task, sample_shape: tuple[int, ...]) -> None:
    """Check that there is one weight and one group per sample. `sample_shape` is the shape of one prediction."""
    preds = reader.arrays[roles["preds"]].shape
    fitting = {(preds[0], *(sample_shape if task == "binary" else sample_shape[:-1]))}
    if task == "binary" and sample_shape == () and len(preds) > 1:
        fitting.add(preds)  # columns, (N, 1), of both
    for role, kind in (("weights", "weight"), ("groups", "group")):
        if role not in roles:
            continue
        name = roles[role]
        array = reader.arrays[name]
        if array.shape not in fitting:
            raise InputError(
                f"`{name}` in `{reader.label}` must be one {kind} per sample, got shape {array.shape} "
                f"for predictions {preds}. Save one per sample, or rename the array if it holds something else."
            )
        if array.dtype in TEXT and len(array.shape) > 1:
            raise InputError(
                f"`{name}` in `{reader.label}` must have one axis if it holds text, got shape {array.shape}. "
                "Save whole numbers, or flatten all arrays."
            )


def infer_from_logits(reader: Reader, roles: Mapping[str, str], task: Task) -> bool:
    """Infer from the name of the predictions whether they are logits."""
    preds, where = reader.arrays[roles["preds"]], f"`{roles['preds']}` in `{reader.label}`"
    numbered = NUMBERED.fullmatch(preds.key)
    stem = numbered[1] if numbered else preds.key
    if stem not in (*_LOGITS, *_PROBS):
        raise InputError(
            f"{where} must be declared as logits or as probabilities, got a name that means neither. "
            "Pass --from-logits or --from-probs."
        )
    if stem in _LOG_PROBS and task != "multiclass":
        raise InputError(
            f"{where} must hold every class if it holds log-probabilities, got {task} predictions {preds.shape}, "
            "and log p is not the logit of p. Store probabilities or logits."
        )
    return stem in _LOGITS
