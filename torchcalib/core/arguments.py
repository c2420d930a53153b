"""Types and checks for options that are not tensors."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from numbers import Integral
from typing import Any, Literal, TypedDict, TypeGuard, TypeVar, Unpack, cast

from torch import Tensor

from torchcalib.io.errors import short_name, shown
from torchcalib.io.names import TASKS
from torchcalib.io.names import Task as Task
from torchcalib.io.names import task_of as task_of

F = TypeVar("F", bound=Callable[..., Any])
Average = Literal["macro", "none"]
Reduction = Literal["mean", "none"]
NanPolicy = Literal["raise", "drop"]
Options = TypeVar("Options", bound=Mapping[str, Any])


class InputOptions(TypedDict, total=False):
    """Input options, which every metric accepts as keyword arguments.

    Example:
        >>> import torch
        >>> from torchcalib.functional import InputOptions, nll
        >>> options: InputOptions = {"from_logits": True, "ignore_index": -1}
        >>> nll(torch.tensor([0.0, 2.0]), torch.tensor([1, -1]), task="binary", **options)
        tensor(0.6931)
    """

    from_logits: bool
    """`preds` are logits (default False). This is never inferred from the values. Values that look like probabilities
    cause a warning."""

    weights: Tensor | None
    """Non-negative weights with the shape of the samples (default None). Weight k equals k copies of a row, and 0
    removes it. An additional leading axis, `(R, ..., N)`, contains R replicate weights of each sample. Results then
    have this leading axis too."""

    ignore_index: int | None
    """Rows with this target are ignored (default None). The class remains in the softmax."""

    positive_classes: Sequence[int] | None
    """Treat multi-class input as binary (default None): these classes against all others. P(y=1) is the sum over these
    classes, and P(y=0) the sum over all other classes. Rows are not normalised. Log scores use the sum for the outcome
    that occurred; the Brier score uses the sum for the outcome that did not occur."""

    class_axis: int | None
    """Axis of classes or labels in `preds`, and in soft or multi-label targets. None (default) selects the last axis or
    axis 1, whichever agrees with the shape of the target. If both agree, streaming metrics use the class axis of their
    first batch, and functions raise an error.

    Integer targets with a class axis, `(..., N, C)`, are annotator counts. Binary and multi-label annotator counts have
    a last axis for no and yes: `(..., N, 2)` and `(..., N, L, 2)`. A row without annotators raises an error, or is
    ignored if `nan_policy="drop"`. `ignore_index` applies to labels only."""

    batch_dims: int
    """Number of leading batch axes (default 0). Results have one value for each batch element. All other axes except
    the class axis are samples."""

    num_classes: int | None
    """Number of classes (default None). It is checked against `preds`, and implies the task."""

    num_labels: int | None
    """Number of labels (default None). It is checked against `preds`, and implies the task."""

    validate_args: bool
    """Check the values and raise an error for invalid ones (default True). Under `torch.compile` and `vmap` an invalid
    row makes the result NaN instead. False skips the checks. This saves less than 10% of the time in most calls, and at
    most 25%, because one pass checks the values and computes the result."""

    nan_policy: NanPolicy
    """Handling of missing predictions and soft targets: NaN, infinite probabilities, and rows of logits that are all
    -inf (a logit of +inf is valid). `"raise"` (default) raises an error. `"drop"` ignores the row, with gradient 0;
    metric classes count ignored rows in `n_dropped`. In multi-label input only the entry is ignored. Other invalid
    values still raise. `"drop"` also works with `validate_args=False`, `torch.compile` and `vmap`."""


INPUT_DEFAULTS: InputOptions = {
    "from_logits": False,
    "weights": None,
    "ignore_index": None,
    "positive_classes": None,
    "class_axis": None,
    "batch_dims": 0,
    "num_classes": None,
    "num_labels": None,
    "validate_args": True,
    "nan_policy": "raise",
}


def with_input_options(shown: Signature) -> Signature:
    """Return a signature with `InputOptions` by name instead of `**options`, for `help` and interactive sessions."""
    own = [p for p in shown.parameters.values() if p.annotation != Unpack[InputOptions]]
    if len(own) == len(shown.parameters):
        return shown
    taken = {p.name for p in own}
    by_name = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in INPUT_DEFAULTS.items()
        if name not in taken
    ]
    return shown.replace(parameters=[*own, *by_name])


class StreamOptions(TypedDict, total=False):
    """Input options that all objects with several metrics pass to their metrics; see `InputOptions`."""

    positive_classes: Sequence[int] | None
    class_axis: int | None
    validate_args: bool
    nan_policy: NanPolicy


_ADVICE = {
    "norm": "Omit it for ECE, which has the l1 norm. Use rmsce for the l2 norm, and mce for the maximum.",
    "top_k": "Pass mode=torchcalib.TopK(k).",
    "threshold": "Calibration metrics have no threshold.",
    "strategy": "Use ace for bins of equal mass.",
    "class_names": "Pass class indices as `target`: pandas.Categorical(labels, categories=class_names).codes.",
    "per_class": "Pass mode='classwise' and average=None.",
    "level": "Use torchcalib.inference.bootstrap, or the method test() of a metric class.",
    "groups": "Pass them to by_group(function, preds, target, groups), report or ByGroup.",
    "weights": "Pass weights=... in the call, with each batch.",
    "include_background": "Pass per_image=Images(include_background=False) with mode='classwise'.",
    "multidim_average": "Pass batch_dims to functions and batch_shape to classes.",
}


def unknown_argument(name: str, known: Collection[str], where: str) -> TypeError:
    """Return the error for an argument that `where` does not accept, with a suggestion from its `known` arguments."""
    from torchcalib._bridges import ARGUMENTS, nearest

    similar = nearest(name, known, 0.7, table=ARGUMENTS)
    meant = ARGUMENTS.get(name, name)
    advice = None if meant == similar else _ADVICE.get(meant)
    if name in ("top_k", "per_class") and "mode" not in known:
        advice = None
    if name == "strategy" and "bins" in known:
        advice = "Pass bins='equal_mass'."
    hint = f"Did you mean `{similar}`?" if similar else f"Known arguments are {', '.join(sorted(known))}."
    return TypeError(f"`{short_name(name, 60)}` must be an argument of {where}, got an unknown one. {advice or hint}")


def only_task_by_position(value: object) -> TypeError:
    """Return the error for a positional argument after `task`."""
    return TypeError(
        f"options other than `task` must be given by name, got {shown(value)} by position. "
        "Pass it by name, as in n_bins=10."
    )


def weights_from(weights: Any, sample_weight: Any) -> Any:
    """Return `weights`, or its scikit-learn alias `sample_weight`. Raise TypeError if both are given."""
    if sample_weight is None:
        return weights
    return with_own_names({"weights": weights, "sample_weight": sample_weight})["weights"]


def with_task(options: Mapping[str, Any], task: Any, *others: Any) -> dict[str, Any]:
    """Return options with the task that was passed by position; raise TypeError for further positional arguments."""
    if others or options.get("task") is not None:
        raise only_task_by_position(others[0] if others else task)
    return {**options, "task": task}


SCIKIT_LEARN_NAMES = {"sample_weight": "weights", "y_true": "target", "y_proba": "preds"}
"""Arguments of data, by their names in scikit-learn, which all functions of data accept."""


def with_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the names of scikit-learn replaced by those of torchcalib. Raise TypeError for both names."""
    found = dict(options)
    for name, own in SCIKIT_LEARN_NAMES.items():
        value = found.pop(name, None)
        if value is None:
            continue
        if found.get(own) is not None:
            raise TypeError(f"`{name}` must be omitted if `{own}` is given, got both. Pass one of them.")
        found[own] = value
    return found


def task_by_position(function: F) -> F:
    """Return a function of data that accepts no other option than `task` by position, and names of scikit-learn.

    Its errors for missing and for further arguments state their order.
    """
    positional = [p for p in signature(function).parameters.values() if p.kind == Parameter.POSITIONAL_OR_KEYWORD]
    most, required = len(positional), [p.name for p in positional if p.default is Parameter.empty]

    @wraps(function)
    def call(*data: Any, **options: Any) -> Any:
        if len(data) > most:
            raise only_task_by_position(data[most])
        if any(name in options for name in SCIKIT_LEARN_NAMES):
            options = with_own_names(options)
        if missing := [name for name in required[len(data) :] if name not in options]:
            order = ", ".join(name for name in required if name not in ("cls", "self"))
            raise TypeError(
                f"`{missing[0]}` must be given, got no such argument. Call {function.__qualname__}({order})."
            )
        return function(*data, **options)

    vars(call)["__signature__"] = with_input_options(signature(function))
    return cast(F, call)


def advising(advice: str) -> Callable[[F], F]:
    """Return a decorator that checks the number of positional arguments, with advice, and the names of the others."""

    def decorate(function: F) -> F:
        known = signature(function).parameters
        most = sum(p.kind == Parameter.POSITIONAL_OR_KEYWORD for p in known.values())

        @wraps(function)
        def call(*data: Any, **options: Any) -> Any:
            if len(data) > most:
                raise TypeError(
                    f"`{function.__name__}` must be called with at most {most} positional arguments, got {len(data)}. "
                    f"{advice} Pass options such as task= by name."
                )
            if unknown := [name for name in options if name not in known]:
                raise unknown_argument(unknown[0], known, function.__name__)
            return function(*data, **options)

        return cast(F, call)

    return decorate


def with_resolved_task(task: Task | None, options: Options) -> tuple[Task, Options]:
    """Return the given or implied task (see `task_of`), and the options with own names (see `with_own_names`)."""
    found = with_own_names(options)
    return task_of(task, **found), cast(Options, found)


def check_task(task: object) -> None:
    """Raise ValueError unless `task` is "binary", "multiclass" or "multilabel"."""
    if is_int(task):
        raise ValueError(
            f"`task` must be one of {', '.join(map(repr, TASKS))}, got {task}. Pass n_bins={task} by name."
        )
    check_choice("task", task, TASKS)


def task_read_as(task: Task | None, options: Mapping[str, Any]) -> Task:
    """Return the task of the converted predictions: binary if `positive_classes` is given, else as by `task_of`."""
    if options.get("positive_classes") is not None:
        return "binary"
    return task_of(task, options.get("num_classes"), options.get("num_labels"))


def check_positive_classes(task: Task, classes: object) -> tuple[int, ...]:
    """Return `positive_classes` as a tuple. Raise an error unless they are distinct class indices."""
    if task != "multiclass":
        raise ValueError(f"`positive_classes` must be None for task={task!r}, got {shown(classes)}.")
    if isinstance(classes, str) or not isinstance(classes, Sequence) or not all(is_int(k) for k in classes):
        raise TypeError(
            f"`positive_classes` must be a list of ints, got {shown(classes)}. Convert a tensor with .tolist()."
        )
    chosen = tuple(classes)
    if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
        raise ValueError(f"`positive_classes` must be one or more distinct class indices, got {shown(list(chosen))}.")
    return chosen


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless `value` is one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {shown(value)}.")


def check_choice_or_function(name: str, value: object, allowed: Sequence[str], arguments: str) -> None:
    """Raise ValueError unless `value` is one of the allowed names, or a function; `arguments` describes it."""
    if not callable(value) and value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"`{name}` must be one of {names}, or a function {arguments}, got {shown(value)}.")


def check_result(name: str, value: object, shape: Sequence[int], meaning: str, advice: str) -> Tensor:
    """Return the result of the function that is the argument `name`. Raise ValueError unless it has the shape."""
    if not isinstance(value, Tensor) or value.shape != shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"`{name}` must return a tensor with {meaning}, shape {tuple(shape)}, got {found}. {advice}")
    return value


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}.")


def check_count(name: str, value: int, at_least: int = 1, at_most: int | None = None) -> None:
    """Raise an error unless `value` is an int from `at_least` to `at_most`."""
    if not is_int(value):
        raise TypeError(f"`{name}` must be an int, got {shown(value)}.")
    if value < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, got {shown(value)}.")
    if at_most is not None and value > at_most:
        raise ValueError(f"`{name}` must be at most {at_most:,}, got {short_name(format(value, ','), 60)}.")


def check_positive(name: str, value: object, at_least: float = 0.0) -> None:
    """Raise an error unless `value` is a finite number above 0, and at least `at_least`."""
    if not is_number(value):
        raise TypeError(f"`{name}` must be a number, got {shown(value)}.")
    if not (0 < value < math.inf and value >= at_least):
        rule = f"at least {at_least:g}" if at_least else "above 0"
        raise ValueError(f"`{name}` must be finite and {rule}, got {value}.")


def check_level(level: object, n_replicates: int | None = None) -> None:
    """Raise an error unless `level` is in (0, 1), and at least one replicate is expected beyond each end."""
    if not is_number(level):
        raise TypeError(f"`level` must be a number, got {shown(level)}. A 95% interval has level 0.95.")
    if not 0 < level < 1:
        raise ValueError(f"`level` must be between 0 and 1, got {shown(level)}. A 95% interval has level 0.95.")
    if n_replicates is None:
        return
    # The factor 1 - 1e-9 prevents rounding errors from increasing the ceiling.
    least = math.ceil(2 / (1 - level) * (1 - 1e-9)) - 1
    if n_replicates < least:
        raise ValueError(
            f"`n_replicates` must be at least {least} for level={level}, got {n_replicates}. Increase "
            "n_replicates, or decrease level."
        )


def check_seed(seed: object) -> None:
    """Raise an error unless `seed` is a signed 64-bit int."""
    if not is_int(seed):
        raise TypeError(f"`seed` must be an int, got {shown(seed)}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"`seed` must fit in 64 bits, got {shown(seed)}.")


_WITHOUT = {
    "groups": "Use group -1 for rows without a group.",
    "clusters": "Use distinct identifiers for independent rows.",
    "ids": "Give each row its own id.",
}


def check_in_all_batches(name: str, before: bool | None, now: bool) -> None:
    """Raise ValueError if only some batches have an argument such as `clusters`; `before` is None for the first."""
    if before not in (None, now):
        raise ValueError(
            f"`{name}` must be passed with all batches or with none, got batches with and without {name}. "
            f"{_WITHOUT[name]}"
        )


def check_average(average: object, has_outputs: bool) -> bool:
    """Return whether to average over the class or label axis of values. Raise ValueError for an invalid `average`.

    It must be "macro", or "none" or None if values have such an axis (`has_outputs`).
    """
    if average not in ("macro", "none", None):
        raise ValueError(
            f"`average` must be 'macro' or None, got {shown(average)}. None returns a value for each class or label. "
            "For the top-label error of all samples pass mode='top_label' to a multi-class metric."
        )
    if average != "macro" and not has_outputs:
        raise ValueError(
            "`average` must be 'macro' for a metric with a single value, got None. For values per label pass "
            "task='multilabel'. For values per class pass mode='classwise', if the metric supports it."
        )
    return has_outputs and average == "macro"


def count_of_outputs(task: Task, num_classes: int | None, num_labels: int | None) -> int | None:
    """Return the number of classes or labels, or None. Raise ValueError if a number does not apply to the task."""
    wrong = {
        "binary": {"num_classes", "num_labels"},
        "multiclass": {"num_labels"},
        "multilabel": {"num_classes"},
    }
    for name, value in (("num_classes", num_classes), ("num_labels", num_labels)):
        if value is not None and name in wrong.get(task, ()):
            raise ValueError(f"`{name}` must be None for task={task!r}, got {shown(value)}.")
    return num_labels if task == "multilabel" else num_classes


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: object) -> TypeGuard[int]:
    """Return whether `value` is an int, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
