"""What must hold between the arrays of a file and between files, and what their shapes say about the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torchcalib.io.names import LOG_PROBS, holds_logits, stem_of
from torchcalib.io.reader import FLOATS, MAX_RESIDENT, TEXT, WHOLE, InputError, quoted

if TYPE_CHECKING:
    from torchcalib.io.names import Roles
    from torchcalib.io.reader import Reader

Task = Literal["binary", "multiclass", "multilabel"]

_COUNTS = WHOLE - {"bool"}
_SHAPES = {
    "binary": "(N,) or maps (N, H, ...), with targets of that shape or vote counts (..., 2) for no and yes",
    "multiclass": "(N, ..., C) and class indices (N, ...), or vote counts, one-hot labels or shares (N, ..., C)",
    "multilabel": "(N, ..., L) and targets (N, ..., L), or vote counts (N, ..., L, 2) for no and yes",
}


def check_rows(reader: Reader, roles: Roles) -> None:
    """Check that the chosen arrays can be read, and have one row per sample."""
    preds = reader.arrays[roles.preds]
    for name in roles.names:
        array = reader.arrays[name]
        if array.problem:
            raise InputError(f"`{name}` in `{reader.label}` {array.problem}")
        if not array.shape:
            raise InputError(
                f"`{name}` in `{reader.label}` must be an array, got a single number. Check what wrote it."
            )
        if array.shape[:1] != preds.shape[:1]:
            raise InputError(
                f"`{roles.preds}` and `{name}` in `{reader.label}` must have one row per sample, "
                f"got shapes {preds.shape} and {array.shape}. Check what wrote them."
            )


def check_numbers(reader: Reader, roles: Roles) -> None:
    """Check that predictions are floating, with rows of a credible size, and that the rest are numbers."""
    for name in roles.names:
        array, where = reader.arrays[name], f"`{name}` in `{reader.label}`"
        if name == roles.groups:
            if array.dtype not in WHOLE | TEXT:
                raise InputError(
                    f"{where} must hold whole numbers or text to tell groups, got {array.dtype}. "
                    "Store an integer or a name for every sample."
                )
            continue
        if name == roles.preds and array.dtype not in FLOATS:
            raise InputError(
                f"{where} must be floating-point predictions, got {array.dtype}. "
                "Store logits or probabilities (1.0, not 1), or name another array with --preds."
            )
        if array.dtype not in FLOATS | WHOLE:
            raise InputError(
                f"{where} must hold numbers, got {array.dtype}. Store numbers (class indices as targets), "
                "or name another array with --target or --weights."
            )
        if 0 in array.shape or array.row_bytes > MAX_RESIDENT:
            raise InputError(
                f"{where} must have rows that are not empty and take at most 2 GiB, "
                f"got shape {array.shape} of {array.dtype}. Check what wrote it."
            )


def check_alike(reader: Reader, first: Reader, roles: Roles) -> None:
    """Check that two shards agree in the dtypes and shapes of their rows."""
    for name in roles.names:
        here, there = reader.arrays[name], first.arrays[name]
        if (here.dtype, here.shape[1:]) != (there.dtype, there.shape[1:]):
            raise InputError(
                f"`{name}` must be alike in all files, got {there.dtype} {there.shape} in `{first.label}` and "
                f"{here.dtype} {here.shape} in `{reader.label}`. Read the files apart, or write them alike."
            )


def infer_task(reader: Reader, roles: Roles, task: Task | None) -> tuple[Task, tuple[int, ...]]:
    """Tell the task from shapes alone, or check the one that is given; also return the shape of one prediction."""
    preds, target = reader.arrays[roles.preds], reader.arrays[roles.target]
    scores, labels, soft = preds.shape[1:], target.shape[1:], target.dtype in FLOATS
    found = f"predictions {preds.shape} and {target.dtype} targets {target.shape} in `{reader.label}`"
    if task not in (None, *_SHAPES):
        raise InputError(f"The task must be one of {quoted(_SHAPES)}, got `{task}`. Pass one of them with --task.")
    if task in (None, "binary") and scores == (1,) and labels in ((), (1,), (2,), (1, 2)):
        scores, labels = (), labels[1:] if labels[:1] == (1,) else labels
    per_class = labels == scores
    no_and_yes = target.dtype in _COUNTS and labels == (*scores, 2)
    guessed = task is None
    if task is None:
        if scores and per_class:
            one_class = "shares or vote counts" if soft else "one-hot labels or vote counts"
            maps = ", or --task binary (probabilities of 1)" if len(scores) > 1 else ""
            raise InputError(
                f"The task must be told where shapes leave it open, got {found}. "
                f"Pass --task multilabel, or --task multiclass ({one_class}){maps}."
            )
        if no_and_yes:
            raise InputError(
                f"The task must be given where targets may be vote counts, got {found}. "
                f"Pass --task {'multilabel' if scores else 'binary'} for counts of no and yes, or name one target "
                "with --target."
            )
        task = "multiclass" if scores else "binary"
    if task == "multiclass":
        fits = scores != () and (labels == scores[:-1] or per_class)
    else:
        # Two columns of binary predictions are most likely P(y=0) and P(y=1), which would count every row twice.
        fits = (per_class or no_and_yes) and (len(scores) != 1 if task == "binary" else scores != ())
    if not fits and len(scores) > 1 and labels == scores[1:]:
        raise InputError(
            f"Classes must be the last axis in files, got {found}, which looks like (N, C, H, W). "
            "Move the class axis to the end before saving: np.moveaxis(preds, 1, -1)."
        )
    if not fits:
        advice = "Check what wrote them, or pass --task." if guessed else "Check what wrote them."
        raise InputError(f"Shapes must be {_SHAPES[task]} for a {task} task, got {found}. {advice}")
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


def check_per_sample(reader: Reader, roles: Roles, task: Task, sample_shape: tuple[int, ...]) -> None:
    """Check that there is one weight and one group per sample. `sample_shape` is the shape of one prediction."""
    preds = reader.arrays[roles.preds].shape
    fitting = {(preds[0], *(sample_shape if task == "binary" else sample_shape[:-1]))}
    if task == "binary" and sample_shape == () and len(preds) > 1:
        fitting.add(preds)  # a column beside a column
    for name, what in ((roles.weights, "weight"), (roles.groups, "group")):
        if name is None:
            continue
        array = reader.arrays[name]
        if array.shape not in fitting:
            raise InputError(
                f"`{name}` in `{reader.label}` must be one {what} per sample, got shape {array.shape} "
                f"for predictions {preds}. Save one per sample, or rename the array if it holds something else."
            )
        if array.dtype in TEXT and len(array.shape) > 1:
            raise InputError(
                f"`{name}` in `{reader.label}` must have one axis if it holds text, got shape {array.shape}. "
                "Save whole numbers, or flatten all arrays."
            )


def declares_logits(reader: Reader, roles: Roles, task: Task) -> bool:
    """Tell from the name of the predictions whether they are logits."""
    preds, where = reader.arrays[roles.preds], f"`{roles.preds}` in `{reader.label}`"
    logits = holds_logits(preds)
    if logits is None:
        raise InputError(
            f"{where} must be declared as logits or as probabilities, got a name that tells neither. "
            "Pass --from-logits or --from-probs."
        )
    if stem_of(preds) in LOG_PROBS and task != "multiclass":
        raise InputError(
            f"{where} must hold every class to be read as log-probabilities, got {task} predictions {preds.shape}, "
            "and log p is not the logit of p. Store probabilities or logits."
        )
    return logits
