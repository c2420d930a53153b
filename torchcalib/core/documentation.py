"""Shared argument descriptions, and functions that add them to signatures and docstrings."""

import re
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, Signature, isclass, signature
from textwrap import dedent, fill, indent
from typing import Any, TypeVar, cast

from torchcalib.core.arguments import Task, completed, with_task

F = TypeVar("F", bound=Callable[..., Any])

ARGUMENTS = {
    "preds": "Probabilities, or logits with `from_logits=True`: binary `(N,)` or `(N, 1)`, multi-class `(N, C)`, "
    "multi-label `(N, L)`. Further sample axes are possible, as in `(N, C, H, W)` and `(B, T, C)`. A tensor, an "
    "array, a DataFrame or a list.",
    "target": "Labels with the shape of the samples (multi-label: of `preds`), floating soft targets with the shape "
    "of `preds`, or integer annotator counts with a class axis. Multi-class labels may have a class axis of size 1. "
    "Binary and multi-label labels may be floating.",
    "task": '`"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.',
    "bins": 'Type of bins: `"equal_width"` over [0, 1], `"equal_mass"` (equally many samples, as in `ace`), `"pava"` '
    'or `"pava_bc"` (isotonic blocks, as in `tce`; labels only), or bin edges that increase from 0 to 1. '
    "All except equal-width bins require whole `weights`.",
    "n_bins": "Number B of equal-width or equal-mass bins.",
    "n_min": "Minimum number of samples in a PAVA-BC block; see `tce`.",
    "n_max": "Maximum number of samples in a PAVA-BC block; see `tce`.",
    "variant": 'Variant of PAVA-BC, `"code"` or `"paper"`; see `tce`.',
    "mode": 'Event whose probability is the confidence. `"positive"` (binary): y = 1. `"top_label"` '
    "(multi-class, binary): the most probable class is the true one; ties go to the first class. "
    '`"classwise"` (multi-class, multi-label): each class or label against the rest. `TopK(k)` (multi-class): the true '
    "class is among the k most probable classes. None selects the first mode in this list that the task supports.",
    "average": '`"macro"` averages class-wise and multi-label values over classes. None returns `(..., C)`.',
    "reduction": '`"mean"` averages over samples. `"none"` returns the score of each sample: `(..., N)`, multi-label '
    "`(..., N, L)`, not multiplied by the weights. Rows with weight 0 are NaN.",
    "right": "Bins are `(a, b]` instead of `[a, b)`. The outer bins contain 0 and 1 in both cases.",
    "ties": '`"pool"` keeps samples with equal confidence together, which makes the result independent of their '
    'order. `"split"` uses the given order.',
    "norm": 'Norm over bins: `"l1"` is the weighted mean, `"l2"` the root of the weighted mean square, `"max"` the '
    "maximum.",
    "chunk": "Number of rows or blocks that are processed at a time, which limits the memory. None selects it "
    "automatically.",
    "from_logits": "`preds` are logits. This is never inferred from the values. Values that look like probabilities "
    "cause a warning.",
    "weights": "Non-negative weights with the shape of the samples. Weight k equals k copies of a row, and 0 removes "
    "it. An additional leading axis, `(R, N)`, contains R replicate weights and returns R values.",
    "ignore_index": "Rows with this target are ignored. The class remains in the softmax.",
    "positive_classes": "Treat multi-class input as binary: these classes against all others.",
    "class_axis": "Axis of classes or labels in `preds`, and in soft or multi-label targets. None selects the last "
    "axis or axis 1, whichever agrees with the shape of the target. If both agree, a stream uses the class axis of "
    "its first batch, and otherwise `class_axis` is required.",
    "batch_dims": "Number of leading batch axes `(...)`. The result has one value for each batch element. All other "
    "axes except the class axis are samples.",
    "validate_args": "Check the values and raise an error for invalid ones. Under `torch.compile` and `vmap` an "
    "invalid row makes the result NaN instead. False skips the checks.",
    "nan_policy": 'Handling of rows with missing (NaN) predictions or soft targets: `"raise"` raises an error, '
    '`"drop"` ignores them.',
    "num_classes": "Number of classes C of a multi-class task. It is checked, and implies the task. Metric classes "
    "with one value per class need it.",
    "num_labels": "Number of labels L of a multi-label task. It is checked, and implies the task. Metric classes "
    "need it.",
    "batch_shape": "Sizes of the leading batch axes. The result has one value for each batch element. All other axes "
    "except the class axis are samples.",
    "resolution": "Number of cells for each unit of log-odds, in a sketch with sums over cells of the score; see "
    "`torchcalib.core.ranked.LogitCells`. None stores every sample.",
    "with_ecd": "Sum the entropic calibration difference (ECD) for the column `ecd` of `bin_table()`. Equal-width bins "
    "only.",
    "persistent": "Include the state in `state_dict` and therefore in checkpoints.",
}
"""Description of each shared argument, by name."""

INPUT_DEFAULTS: dict[str, Any] = {
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
"""Default of each option in `torchcalib.functional.InputOptions`."""

RAISES = ("    Raises:", "        TypeError, ValueError: for invalid input.")
"""Section of a docstring about the validation of the input."""

_ENTRY = re.compile(r"^ {8}(\*{0,2}\w+): ")


def input_parameters(*, without: Iterable[str] = ()) -> list[Parameter]:
    """Return the input options as keyword-only parameters, except those in `without`."""
    omitted = set(without)
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in INPUT_DEFAULTS.items()
        if name not in omitted
    ]


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a function without `self`, `*args` and `**options`."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p for p in signature(function).parameters.values() if p.kind not in kinds and p.name != "self"]


def document(
    function: Any,
    doc: str | None,
    parameters: list[Parameter],
    returns: Any = Parameter.empty,
    entries: str | None = None,
) -> None:
    """Set the signature of a function or class, and a docstring with an "Args" entry for every parameter.

    Entries in the docstring `doc` are kept. Missing entries are taken from the "Args" section of the docstring
    `entries`, if given, or from `ARGUMENTS`. All functions of predictions validate them in the same way. `RAISES` is
    therefore added after a section "Returns", unless there is a section "Raises".

    Args:
        function: function or class to change.
        doc: docstring to complete; None leaves the docstring unchanged.
        parameters: parameters of the signature, which determine the order of entries.
        returns: return annotation.
        entries: docstring with further entries.
    """
    function.__signature__ = Signature(parameters, return_annotation=returns)
    if doc is not None:
        function.__doc__ = _completed(doc, [p.name for p in parameters], entries)


def with_implied_task(parameters: list[Parameter]) -> list[Parameter]:
    """Return parameters in which `task` follows the data and is optional, because other options may imply it."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    task = [p.replace(default=None, kind=kind, annotation=Task | None) for p in parameters if p.name == "task"]
    others = [p for p in parameters if p.name != "task"]
    data = [p for p in others if p.kind == kind]
    return [*data, *task, *others[len(data) :]]


def resolving_task(function: F) -> F:
    """Return a function that also accepts `task` by position.

    If `task` has no default, it may be implied by other options, and `sample_weight` is accepted; see `completed`. A
    class, or a function without the keyword argument `task`, is returned unchanged.
    """
    parameters = signature(function).parameters
    task = parameters.get("task")
    if isclass(function) or task is None or task.kind != Parameter.KEYWORD_ONLY:
        return function
    n_data = sum(p.kind == Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())
    is_required = task.default is Parameter.empty

    @wraps(function)
    def call(*data: Any, **options: Any) -> Any:
        if len(data) > n_data:
            options = with_task(options, *data[n_data:])
        if is_required and (options.get("task") is None or "sample_weight" in options):
            options = completed(options)
        return function(*data[:n_data], **options)

    return cast(F, call)


def documented(function: F, *, without: Iterable[str] = ()) -> F:
    """Add the input options to the signature and docstring of a function or method that accepts `**options`."""
    returns = signature(function).return_annotation
    function = resolving_task(function)
    own = parameters_of(function) if isclass(function) else with_implied_task(parameters_of(function))
    parameters = [*own, *input_parameters(without={*without, *(p.name for p in own)})]
    self_parameter = [p for p in signature(function).parameters.values() if p.name == "self"]
    document(function, function.__doc__, [*self_parameter, *parameters], returns)
    return function


def arguments_section(doc: str | None) -> str | None:
    """Return the "Args" section of a docstring: "" if there is none, and None for the docstring None."""
    if doc is None:
        return None
    lines = doc.split("\n")
    begin, end = _arguments_range(lines)
    return "\n".join(lines[begin:end])


def _arguments_range(lines: list[str]) -> tuple[int, int]:
    """Return the half-open range of the lines in the "Args" section.

    Without this section, the range is empty: before the first section, or at the end.
    """
    begin = next((k for k, line in enumerate(lines) if line == "    Args:"), None)
    if begin is None:
        begin = _next_section(lines)
        return begin, begin
    blank = (k for k in range(begin, len(lines)) if not lines[k].strip())
    return begin, next(blank, len(lines))


def _entries(lines: list[str]) -> dict[str, list[str]]:
    """Return a dict from argument names to the lines of their entries in an "Args" section."""
    entries: dict[str, list[str]] = {}
    name = ""
    for line in lines[1:]:
        if found := _ENTRY.match(line):
            name = found[1]
        entries.setdefault(name, []).append(line)
    return entries


def _completed(doc: str, names: list[str], entries: str | None) -> str:
    summary, _, rest = doc.partition("\n")
    lines = [summary, *indent(dedent(rest), " " * 4).split("\n")]  # the indentation of method docstrings is larger
    lines = _with_raises(lines) if "preds" in names else lines
    begin, end = _arguments_range(lines)
    own = _entries((entries or "").split("\n")) | _entries(lines[begin:end])
    listed = [own.get(name) or [_entry(name)] for name in names if name in own or name in ARGUMENTS]
    section = ["    Args:", *(line for entry in listed for line in entry)]
    gap = [""] if begin == end else []  # blank line before the next section
    return "\n".join((*lines[:begin], *section, *gap, *lines[end:]))


def _with_raises(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with `RAISES` after the section "Returns", unless it has a section "Raises"."""
    if "    Returns:" not in lines or "    Raises:" in lines:
        return lines
    end = _next_section(lines, lines.index("    Returns:") + 1)
    before = lines[:end] if not lines[end - 1].strip() else [*lines[:end], ""]
    return [*before, *RAISES, "", *lines[end:]]


def _next_section(lines: list[str], start: int = 0) -> int:
    """Return the index of the first line from `start` on that begins a section, or of the last line without one."""
    return next((k for k in range(start, len(lines)) if re.match(r"^ {4}[A-Z]\w+:$", lines[k])), len(lines) - 1)


def _entry(name: str) -> str:
    entry = f"{name}: {ARGUMENTS[name]}"
    return fill(entry, 120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
