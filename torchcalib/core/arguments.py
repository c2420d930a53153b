"""Options that are not tensors, and their checks."""

import math
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, TypeGuard, get_args

from torch import Tensor

Task = Literal["binary", "multiclass", "multilabel"]
Average = Literal["macro"]
Reduction = Literal["mean", "none"]
NanPolicy = Literal["raise", "drop"]
TASKS: tuple[Task, ...] = get_args(Task)


class InputOptions(TypedDict, total=False):
    """Options of the input, which every metric takes as keywords.

    - `from_logits` (default False): `preds` are logits. This is never guessed from the values.
    - `weights` (default None): non-negative, of the shape of the samples. Weight k equals k copies of the row, 0
      removes it. A further leading axis, `(R, ..., N)`, is one of R replicates; results have it in front.
    - `ignore_index` (default None): rows with this target are dropped; the class stays in the softmax.
    - `positive_classes` (default None): multi-class input is treated as binary: this set of classes against the rest.
      P(y=1) is the sum over the set, and P(y=0) the sum over the other classes, so that both are precise. Rows are not
      normalised: log scores use the sum over the side that occurred, the Brier score the sum over the other side.
    - `class_axis` (default None): axis of classes or labels in `preds`, and in soft or multi-label targets. None is the
      last axis or axis 1, whichever agrees with the shape of the target; if both do, it must be given. Integer targets
      with that axis in multi-class input, `(..., N, C)`, are annotator counts; binary and multi-label counts,
      for no and yes, have a last axis, `(..., N, 2)` and `(..., N, L, 2)`. A row without annotators is an error, or
      missing under `nan_policy="drop"`. `ignore_index` applies to labels only.
    - `batch_dims` (default 0): number of leading axes to keep apart; results have these axes. All other axes but the
      class axis are samples.
    - `num_classes`, `num_labels` (default None): number of classes or labels, which is checked, and implies the task.
    - `validate_args` (default True): check the values and raise an error for bad ones. Under `torch.compile` and `vmap`
      a bad row makes the result NaN instead. False trusts the input.
    - `nan_policy` (default "raise"): for missing rows, whose predictions or soft targets hold NaN or an infinity that
      leaves no distribution (infinite probabilities, logits that are all -inf; a logit of +inf is valid). "raise" is an
      error. "drop" gives the row weight 0 and gradient 0; classes count such rows (`n_dropped`). In multi-label input
      the entry is dropped, not the row. Other bad values stay errors. "drop" also works with `validate_args=False`,
      `torch.compile` and `vmap`.
    """

    from_logits: bool
    weights: Tensor | None
    ignore_index: int | None
    positive_classes: Sequence[int] | None
    class_axis: int | None
    batch_dims: int
    num_classes: int | None
    num_labels: int | None
    validate_args: bool
    nan_policy: NanPolicy


_ELSEWHERE = {
    "num_bins": "n_bins",
    "bins": "n_bins",
    "nbins": "n_bins",
    "sample_weights": "weights",
    "weight": "weights",
    "y_true": "target",
    "targets": "target",
    "labels": "target",
    "y_prob": "preds",
    "y_score": "preds",
    "y_pred": "preds",
    "probs": "preds",
    "n_classes": "num_classes",
    "n_labels": "num_labels",
    "ignore_idx": "ignore_index",
    "multidim_average": "batch_dims",
}
"""Names of arguments in torchmetrics, scikit-learn and netcal."""


_INSTEAD = {
    "norm": "Use rmsce for the l2 norm, and mce for the maximum.",
    "top_k": "Pass mode=TopK(k).",
    "threshold": "Calibration needs no threshold.",
}


def unknown_argument(name: str, known: Collection[str], where: str) -> TypeError:
    """Return the error for an argument that `where` does not have, with the one that was probably meant."""
    meant = _ELSEWHERE.get(name)
    if meant not in known:
        meant = next(iter(get_close_matches(name, [*known, "sample_weight"], 1)), None)
    advice = _INSTEAD.get(name) or (f"Did you mean `{meant}`?" if meant else f"It has {', '.join(sorted(known))}.")
    return TypeError(f"`{name}` must be an argument of {where}, got an unknown one. {advice}")


def only_task_by_position(value: object) -> TypeError:
    """Return the error for a second option that is given by position."""
    return TypeError(f"options other than `task` must be given by name, got {value!r} by position. Write n_bins=10.")


def task_of(task: Task | None, num_classes: int | None, num_labels: int | None) -> Task:
    """Return the task, which follows from the number of classes or labels if only that is given."""
    if task is None and (num_classes is None) != (num_labels is None):
        return "multilabel" if num_classes is None else "multiclass"
    if task is None:
        raise TypeError(
            "`task` must be 'binary', 'multiclass' or 'multilabel', got None. Pass task=..., num_classes or num_labels."
        )
    return task


def check_task(task: object) -> None:
    """Raise unless `task` is one of the three."""
    check_choice("task", task, TASKS)


def task_read_as(task: Task, options: Mapping[str, Any]) -> Task:
    """Return the task of the predictions: binary for a set of classes against the rest."""
    return task if options.get("positive_classes") is None else "binary"


def check_positive_classes(task: Task, classes: object) -> tuple[int, ...]:
    """Return the classes of a set, or raise."""
    if task != "multiclass":
        raise ValueError(f"`positive_classes` must be None for task={task!r}, got {classes!r}.")
    if isinstance(classes, str) or not isinstance(classes, Sequence) or not all(is_int(k) for k in classes):
        raise TypeError(f"`positive_classes` must be a list of ints, got {classes!r}. Convert a tensor with .tolist().")
    chosen = tuple(classes)
    if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
        raise ValueError(f"`positive_classes` must be different class indices, at least one, got {list(chosen)}.")
    return chosen


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_count(name: str, value: int, at_least: int = 1, at_most: int | None = None) -> None:
    """Raise unless `value` is an int from `at_least` to `at_most`."""
    if not is_int(value):
        raise TypeError(f"`{name}` must be an int, got {value!r}.")
    if value < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, got {value}.")
    if at_most is not None and value > at_most:
        raise ValueError(f"`{name}` must be at most {at_most:,}, got {value:,}.")


def check_positive(name: str, value: object, at_least: float = 0.0) -> None:
    """Raise unless `value` is a finite number above 0, and of at least `at_least`."""
    if not is_number(value):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not (0 < value < math.inf and value >= at_least):
        rule = f"at least {at_least:g}" if at_least else "above 0"
        raise ValueError(f"`{name}` must be finite and {rule}, got {value}.")


def check_level(level: object, n_replicates: int) -> None:
    """Raise unless `level` is in (0, 1), and some of the replicates lie outside the interval on either side."""
    if not is_number(level):
        raise TypeError(f"`level` must be a number, got {level!r}. A 95 % interval has level 0.95.")
    if not 0 < level < 1:
        raise ValueError(f"`level` must be between 0 and 1, got {level!r}. A 95 % interval has level 0.95.")
    least = math.ceil(2 / (1 - level) * (1 - 1e-9)) - 1  # the small number keeps 2 / 0.05 whole
    if n_replicates < least:
        raise ValueError(
            f"`n_replicates` must be at least {least} for level={level}, got {n_replicates}. None of so few would lie "
            "outside."
        )


def check_seed(seed: object) -> None:
    """Raise unless `seed` is an int of 64 bits."""
    if not is_int(seed):
        raise TypeError(f"`seed` must be an int, got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"`seed` must fit in 64 bits, got {seed}.")


def check_average(average: object, has_outputs: bool) -> None:
    """Raise unless `average` is "macro", or None if there is an axis of classes or labels."""
    if average not in ("macro", None):
        raise ValueError(f"`average` must be 'macro' or None, got {average!r}.")
    if average is None and not has_outputs:
        raise ValueError(
            "`average` must be 'macro' where there is a single value, got None. Values per class come from "
            "mode='classwise', values per label from task='multilabel'."
        )


def count_of_outputs(task: Task, num_classes: int | None, num_labels: int | None) -> int | None:
    """Return the number of classes or labels, from the argument that the task takes."""
    wrong = {
        "binary": {"num_classes", "num_labels"},
        "multiclass": {"num_labels"},
        "multilabel": {"num_classes"},
    }
    for name, value in (("num_classes", num_classes), ("num_labels", num_labels)):
        if value is not None and name in wrong.get(task, ()):
            raise ValueError(f"`{name}` must be None for task={task!r}, got {value!r}.")
    return num_labels if task == "multilabel" else num_classes


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
