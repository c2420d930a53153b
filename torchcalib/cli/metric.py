"""The command `torchcalib metric NAME FILE ...`."""

import argparse
import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchcalib
from torchcalib.cli.files import mode_of, print_json, read
from torchcalib.cli.inputs import opened
from torchcalib.cli.messages import output, working
from torchcalib.cli.parser import metrics
from torchcalib.cli.ranks import on_first
from torchcalib.core.arguments import unknown_argument
from torchcalib.io.opening import PredictionFiles
from torchcalib.io.rows import Rows
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.proper_scores import Accuracy

_DECLARED = {"task", "num_classes", "num_labels", "from_logits", "class_axis", "nan_policy", "ignore_index"}
"""Arguments of metrics that follow from the files and from other options."""


@on_first
def metric(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Compute one metric of the predictions in files, and print its value, or its values in lines."""
    kind: type[CalibrationMetric[Any]] = getattr(torchcalib, metrics()[arguments.name])
    computed, files = updated(kind, arguments, paths)
    with working("computing the value"):
        value = computed.compute()
    if arguments.json:
        described = {"metric": arguments.name, "name": computed.name, "unit": computed.unit}
        settings = {name: setting for name, setting in computed.settings.items() if setting is not None}
        print_json({**described, "value": value.tolist(), "rows": files.n_rows, "settings": settings})
    else:
        output("\n".join(f"{number:.6g}" for number in value.flatten().tolist()))


def updated(
    kind: type[CalibrationMetric[Any]], arguments: argparse.Namespace, paths: Sequence[Path]
) -> tuple[CalibrationMetric[Any], PredictionFiles]:
    """Return a metric of the predictions in files, and the files."""
    files = opened(arguments, paths)
    computed = kind(**_options(kind, arguments, files))

    def update(rows: Rows) -> None:
        # The accuracy of confidences is the frequency of correct answers, as if each were predicted to be correct.
        is_frequency = files.source.are_confidences and kind is Accuracy
        preds = torch.ones_like(rows.preds) if is_frequency else rows.preds
        computed.update(preds, rows.target, rows.weights)

    read(arguments, files, update)
    return computed, files


def _options(
    kind: type[CalibrationMetric[Any]], arguments: argparse.Namespace, files: PredictionFiles
) -> dict[str, Any]:
    """Return the arguments of a metric class: from the files, from options with their names, and from --option."""
    source, known = files.source, inspect.signature(kind).parameters
    found: dict[str, Any] = {"task": files.task, "from_logits": source.from_logits, "nan_policy": arguments.nan_policy}
    found |= {"ignore_index": arguments.ignore_index}
    if files.task != "binary":
        found |= {"class_axis": -1, "num_classes" if files.task == "multiclass" else "num_labels": source.shape[-1]}
    for name in ("n_bins", "right"):
        if name in known:
            found[name] = getattr(arguments, name)
    if source.are_confidences and "mode" in known:
        found["mode"] = "positive"  # the confidence is the probability of a correct answer
    given = {} if arguments.mode is None else {"mode": mode_of(arguments.mode)}
    for option in getattr(arguments, "option", None) or ():
        name, equals, text = option.partition("=")
        if not equals:
            raise ValueError(
                f"`--option` must be NAME=VALUE, got {option!r}. Write for example --option bins=equal_mass."
            )
        given[name.strip().replace("-", "_")] = _value(text)
    for name in given:
        if name in _DECLARED or name not in known:
            raise unknown_argument(name, set(known) - _DECLARED, kind.__name__)
    return found | given


def _value(text: str) -> Any:
    """Return a number, list, True, False or None that text represents, or else the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text.strip()
