"""Add the entries of shared arguments to docstrings, which the source does not repeat for every metric."""

import inspect
import re
from collections.abc import Iterator
from textwrap import fill
from typing import Any

from sphinx.application import Sphinx

ARGUMENTS = {
    "preds": "Probabilities, or logits with `from_logits=True`: binary `(N,)` or `(N, 1)`, multi-class `(N, C)`, "
    "multi-label `(N, L)`. Further sample axes are possible, as in `(N, C, H, W)` and `(B, T, C)`. A tensor, an "
    "array, a DataFrame or a list.",
    "target": "Labels with the shape of the samples (multi-label: of `preds`), floating soft targets with the shape "
    "of `preds`, or integer annotator counts with a class axis. Multi-class labels may have a class axis of size 1. "
    "Binary and multi-label labels may be floating.",
    "task": '`"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it. '
    "Functions infer it from the data if shapes are not ambiguous.",
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
    "average": '`"macro"` averages class-wise and multi-label values over classes. None or `"none"` returns all: '
    "`(..., C)`.",
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
    "invalid row makes the result NaN instead. False skips the checks. This saves less than 10% of the time in most "
    "calls, and at most 25%, because one pass checks the values and computes the result.",
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

RAISES = ["Raises:", "    TypeError, ValueError: for invalid input.", ""]
"""Section of a docstring about the validation of the input, which all functions of predictions have in common."""

_ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")


def completed(doc: str, names: list[str], others: str = "") -> list[str]:
    """Return the lines of a docstring with an entry in the section "Args" for every argument, in their order.

    A missing entry is taken from the section "Args" of `others`, or from `ARGUMENTS`.

    Args:
        doc: docstring without indentation, in the style of Google.
        names: arguments of the function or class.
        others: docstring with further entries, such as that of the function of a metric class.
    """
    lines = doc.split("\n")
    if "preds" in names and "Returns:" in lines and "Raises:" not in lines:
        after = _next_section(lines, lines.index("Returns:") + 1)
        lines[after:after] = RAISES if after < len(lines) else ["", *RAISES]
    begin, end = _arguments_range(lines)
    own, theirs = (dict(_entries(each)) for each in (lines[begin:end], _section(others)))
    section: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        for entries in (own, theirs):
            if found := next((key for key in entries if name in key), None):
                section.setdefault(found, entries[found])
                break
        else:
            if name in ARGUMENTS:
                section[(name,)] = _filled(name)
    rest = {key: entry for key, entry in own.items() if key not in section}  # such as **options
    entries = [line for entry in (section | rest).values() for line in entry]
    if not entries:
        return lines
    return [*lines[:begin], "Args:", *entries, *([""] if begin == end else []), *lines[end:]]


def _section(doc: str) -> list[str]:
    lines = doc.split("\n")
    begin, end = _arguments_range(lines)
    return lines[begin:end]


def _arguments_range(lines: list[str]) -> tuple[int, int]:
    """Return the range of the lines in the section "Args"; without one, an empty range before the first section."""
    if "Args:" not in lines:
        begin = _next_section(lines, 0)
        return begin, begin
    begin = lines.index("Args:")
    return begin, next((k for k in range(begin, len(lines)) if not lines[k].strip()), len(lines))


def _next_section(lines: list[str], start: int) -> int:
    """Return the index of the first line from `start` on that begins a section, or the number of lines."""
    return next((k for k in range(start, len(lines)) if re.match(r"^[A-Z]\w+:$", lines[k])), len(lines))


def _entries(lines: list[str]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the names and the lines of each entry of a section "Args"."""
    entry: list[str] = []
    for line in lines[1:]:
        if entry and _ENTRY.match(line):
            yield _names(entry), entry
            entry = []
        entry.append(line)
    if entry:
        yield _names(entry), entry


def _names(entry: list[str]) -> tuple[str, ...]:
    found = _ENTRY.match(entry[0])
    return tuple(name.strip(" *") for name in found[1].split(",")) if found else ()


def _filled(name: str) -> list[str]:
    text = f"{name}: {ARGUMENTS[name]}"
    return fill(text, 120, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False).split("\n")


def arguments_of(value: Any) -> tuple[list[str], str]:
    """Return the names of the arguments of a function or class, and a docstring with entries for some of them."""
    names = [name for name in inspect.signature(value).parameters if name != "self"]
    return names, inspect.getdoc(getattr(value, "factory", None)) or ""


def add_entries(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Complete the docstring of a function, method or class."""
    if what in ("function", "method", "class") and lines and callable(obj):
        try:
            names, others = arguments_of(obj)
        except ValueError:  # a built-in class
            return
        lines[:] = completed("\n".join(lines), names, others)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler, which runs before napoleon converts sections; called by Sphinx."""
    app.connect("autodoc-process-docstring", add_entries, priority=300)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
