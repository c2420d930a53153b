"""Arguments that many functions share: their documentation and their place in signatures, from one source."""

import re
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from textwrap import dedent, fill, indent
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ARGUMENTS = {
    "preds": "Probabilities, or logits with `from_logits=True`: binary `(N,)` or `(N, 1)`, multi-class `(N, C)`, "
    "multi-label `(N, L)`, or with further axes of samples, as `(N, C, H, W)` and `(B, T, C)`. A tensor, an array, a "
    "DataFrame or a list.",
    "target": "Labels of the shape of the samples (multi-label: of `preds`). Or soft targets: floating, of the shape "
    "of `preds`. Or integer annotator counts with a class axis.",
    "task": '`"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.',
    "bins": '`"equal_width"` over [0, 1], `"equal_mass"` (equally many samples, as in `ace`), `"pava"`, `"pava_bc"` '
    "(isotonic blocks, as in `tce`; integer labels only), or edges that rise from 0 to 1. All but equal-width bins "
    "need whole `weights`.",
    "n_bins": "Number B of equal-width or equal-mass bins.",
    "n_min": "Least number of samples in a PAVA-BC block; see `tce`.",
    "n_max": "Greatest number of samples in a PAVA-BC block; see `tce`.",
    "variant": 'Variant of PAVA-BC, `"code"` or `"paper"`; see `tce`.',
    "mode": 'Event whose probability is the confidence. `"positive"` (binary): y = 1. `"top_label"` '
    '(multi-class, binary): the most probable class is the true one; the first on ties. `"classwise"` (multi-class, '
    "multi-label): each class or label against the rest. `TopK(k)` (multi-class): the true class is among the k most "
    "probable ones. None is the first that the task offers.",
    "average": '`"macro"` averages class-wise and multi-label values over classes. None returns `(..., C)`.',
    "reduction": '`"mean"` over samples. `"none"` returns the score of every sample: `(..., N)`, multi-label '
    "`(..., N, L)`. Weights are not multiplied in; rows without weight are NaN.",
    "right": "Bins are `(a, b]` instead of `[a, b)`. The outer bins contain 0 and 1 either way.",
    "ties": '`"pool"` keeps samples of equal confidence together, so that the order of the samples does not matter. '
    '`"split"` takes them in the given order.',
    "norm": 'Norm over bins: `"l1"` is the weighted mean, `"l2"` the root of the weighted mean square, `"max"` the '
    "maximum.",
    "chunk": "Rows on a side of a tile of pairs, or blocks, that are held in memory at a time. None chooses.",
    "from_logits": "`preds` are logits. This is never guessed from the values.",
    "weights": "Non-negative weight of each sample, of the shape of the samples. Weight k equals k copies of the row, "
    "0 removes it. A further leading axis, `(R, N)`, gives R replicates of the value.",
    "ignore_index": "Rows with this target are dropped. The class stays in the softmax.",
    "positive_classes": "Multi-class input is treated as binary: the probability of this set of classes against the "
    "rest.",
    "class_axis": "Axis of classes or labels in `preds`, and in soft or multi-label targets. None is the last axis or "
    "axis 1, whichever agrees with the shape of the target; if both do, it must be given.",
    "batch_dims": "Number of leading axes to keep apart, one value each: results are `(...)`, those axes. All other "
    "axes but the class axis are samples.",
    "validate_args": "Check the values and raise an error for bad ones. Under `torch.compile` and `vmap` a bad row "
    "makes the result NaN instead. False trusts the input.",
    "nan_policy": 'For rows whose predictions or soft targets are missing (NaN): `"raise"` is an error, `"drop"` '
    "gives them weight 0.",
    "num_classes": "Number of classes C of a multi-class task, which is checked and implies the task. Metric classes "
    "that keep classes apart need it.",
    "num_labels": "Number of labels L of a multi-label task, which is checked and implies the task. Metric classes "
    "need it.",
    "batch_shape": "Leading axes to keep apart, one value each. All other axes but the class axis are samples.",
    "resolution": "None keeps every sample. A number of cells for each unit of log-odds keeps sums over these instead; "
    "see `torchcalib.core.ranked.LogitCells`.",
    "with_ecd": "Sum the entropic calibration difference, for the column `ecd` of `bin_table()`. Equal-width bins "
    "only.",
    "persistent": "`state_dict` contains the state, so that checkpoints do.",
}

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
"""The options of `torchcalib.functional.InputOptions`, with their defaults."""

_ENTRY = re.compile(r"^ {8}(\*{0,2}\w+): ")


def input_parameters(*, without: Iterable[str] = ()) -> list[Parameter]:
    """Return the input options as keyword parameters."""
    left_out = set(without)
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in INPUT_DEFAULTS.items()
        if name not in left_out
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
    """Give a function or class an explicit signature, and a docstring with an entry for every parameter.

    Entries that the docstring has are kept. The others come from the section "Args" of the docstring `entries`, if
    given, or from `ARGUMENTS`, in the order of the signature.
    """
    function.__signature__ = Signature(parameters, return_annotation=returns)
    if doc is not None:
        function.__doc__ = _completed(doc, [p.name for p in parameters], entries)


def with_implied_task(parameters: list[Parameter]) -> list[Parameter]:
    """Return parameters with `task` first, which may be given by position, and is implied by other options."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    task = [p.replace(default=None, kind=kind) for p in parameters if p.name == "task"]
    return [*task, *(p for p in parameters if p.name != "task")]


def documented(function: F, *, without: Iterable[str] = ()) -> F:
    """Decorate a function or method that takes `**options`: show the input options in its signature and docstring."""
    returns = signature(function).return_annotation
    own = parameters_of(function)
    shown = [*own, *input_parameters(without={*without, *(p.name for p in own)})]
    itself = [p for p in signature(function).parameters.values() if p.name == "self"]
    document(function, function.__doc__, [*itself, *shown], returns)
    return function


def arguments_section(doc: str | None) -> str | None:
    """Return the section "Args" of a docstring alone."""
    if doc is None:
        return None
    lines = doc.split("\n")
    begin, end = _place_of_arguments(lines)
    return "\n".join(lines[begin:end])


def _place_of_arguments(lines: list[str]) -> tuple[int, int]:
    """Return the lines of the section "Args": first and behind the last. An absent one is before the first section."""
    begin = next((k for k, line in enumerate(lines) if line == "    Args:"), None)
    if begin is None:
        sections = (k for k, line in enumerate(lines) if re.match(r"^ {4}[A-Z]\w+:$", line))
        begin = next(sections, len(lines) - 1)
        return begin, begin
    behind = (k for k in range(begin, len(lines)) if not lines[k].strip())
    return begin, next(behind, len(lines))


def _entries(lines: list[str]) -> dict[str, list[str]]:
    """Return the lines of each entry of a section "Args", by name."""
    entries: dict[str, list[str]] = {}
    name = ""
    for line in lines[1:]:
        if found := _ENTRY.match(line):
            name = found[1]
        entries.setdefault(name, []).append(line)
    return entries


def _completed(doc: str, names: list[str], entries: str | None) -> str:
    summary, _, rest = doc.partition("\n")
    lines = [summary, *indent(dedent(rest), " " * 4).split("\n")]  # docstrings of methods are indented further
    begin, end = _place_of_arguments(lines)
    own = _entries((entries or "").split("\n")) | _entries(lines[begin:end])
    listed = [own.get(name) or [_entry(name)] for name in names if name in own or name in ARGUMENTS]
    section = ["    Args:", *(line for entry in listed for line in entry)]
    gap = [""] if begin == end else []  # before the section that follows
    return "\n".join((*lines[:begin], *section, *gap, *lines[end:]))


def _entry(name: str) -> str:
    entry = f"{name}: {ARGUMENTS[name]}"
    return fill(entry, 120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
