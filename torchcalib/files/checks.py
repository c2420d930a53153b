"""What must hold between the arrays of a file and between files, and what their shapes say about the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torchcalib.files.names import LOG_PROBS, holds_logits, stem_of
from torchcalib.files.reader import FLOATS, MAX_RESIDENT, TEXT, WHOLE, InputError, quoted

if TYPE_CHECKING:
    from torchcalib.files.names import Roles
    from torchcalib.files.reader import Reader

Task = Literal["binary", "multiclass", "multilabel"]

_SHAPES = {
    "binary": "(N,) and (N,)",
    "multiclass": "(N, ..., C) and whole-number targets (N, ...) or floating ones (N, ..., C)",
    "multilabel": "(N, ..., L) and (N, ..., L)",
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
    if task in (None, "binary") and scores == (1,) and labels in ((), (1,)):
        scores = labels = ()
    if task is None:
        if labels == scores != () and (soft or len(scores) > 1):
            raise InputError(
                f"The task must be told where shapes leave it open, got {found}. "
                f"Pass --task multilabel, or {'--task multiclass (votes)' if soft else 'flatten binary maps to (N,)'}."
            )
        task = "binary" if not scores else "multilabel" if labels == scores else "multiclass"
    if task not in _SHAPES:
        raise InputError(f"The task must be one of {quoted(_SHAPES)}, got `{task}`. Pass one of them with --task.")
    per_sample, per_class = labels == scores[:-1], labels == scores
    if task == "binary":
        fits = scores == labels == ()
    else:
        fits = scores != () and (per_class if task == "multilabel" else per_sample or (per_class and soft))
    if not fits and len(scores) > 1 and labels == scores[1:]:
        raise InputError(
            f"Classes must be the last axis in files, got {found}, which looks like (N, C, H, W). "
            "Move the class axis to the end before saving: np.moveaxis(preds, 1, -1)."
        )
    if not fits:
        raise InputError(
            f"Shapes must be {_SHAPES[task]} for a {task} task, got {found}. Check what wrote them, or pass --task."
        )
    if task == "multiclass" and soft and not per_class:
        raise InputError(
            f"Targets must be integer class indices where predictions have a class axis, got {found}. "
            "Save them as integers, or votes in an array shaped like the predictions."
        )
    return task, scores


def check_weights(reader: Reader, roles: Roles, task: Task) -> None:
    """Check that there is one weight per sample, and one group."""
    preds = reader.arrays[roles.preds].shape
    for name, what in ((roles.weights, "weight"), (roles.groups, "group")):
        if name is not None and reader.arrays[name].shape != (preds[:1] if task == "binary" else preds[:-1]):
            raise InputError(
                f"`{name}` in `{reader.label}` must be one {what} per sample, got shape {reader.arrays[name].shape} "
                f"for predictions {preds}. Save one per sample, or rename the array if it holds something else."
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
