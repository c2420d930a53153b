"""The command `torchcalib metric NAME FILE ...`."""

import argparse
import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torchcalib.functional
from torchcalib.cli.commands import metrics
from torchcalib.cli.files import mode_of, print_json, read
from torchcalib.cli.inputs import opened
from torchcalib.cli.messages import output, working
from torchcalib.core.arguments import INPUT_DEFAULTS, unknown_argument
from torchcalib.functional.estimator import declaration_of, stream_factory_of, stream_parameters
from torchcalib.functional.proper_scores import accuracy
from torchcalib.functional.stream import Stream
from torchcalib.io.opening import PredictionFiles
from torchcalib.io.rows import Rows

_DECLARED = {"task", "num_classes", "num_labels", "from_logits", "class_axis", "nan_policy", "ignore_index"}
"""Arguments of metrics that follow from the files and from other options."""


def metric(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Compute one metric of the predictions in files, and print its value, or its values in lines."""
    function = getattr(torchcalib.functional, arguments.name)
    stream, settings, files = streamed(function, arguments, paths)
    with working("computing the value"):
        value = stream.compute()
    if arguments.json:
        declaration = declaration_of(function)
        described = {"metric": arguments.name, "name": declaration.name, "unit": declaration.unit}
        settings = {name: setting for name, setting in settings.items() if setting is not None}
        print_json({**described, "value": value.tolist(), "rows": files.n_rows, "settings": settings})
    else:
        output("\n".join(f"{number:.6g}" for number in value.flatten().tolist()))


def streamed(
    function: Callable[..., Any], arguments: argparse.Namespace, paths: Sequence[Path]
) -> tuple[Stream[Any], dict[str, Any], PredictionFiles]:
    """Return a stream with the predictions in files, the settings of the metric, and the files."""
    files = opened(arguments, paths)
    options = _options(function, arguments, files)
    factory, of_stream = stream_factory_of(function), declaration_of(function).stream_options
    num_outputs = None if files.task == "binary" else files.source.shape[-1]
    given = {name: options[name] for name in of_stream if name in options}
    estimator = factory(**{name: option for name, option in options.items() if name not in of_stream})
    stream = Stream(estimator.streamed(num_outputs, **given))

    def update(rows: Rows) -> None:
        # The accuracy of confidences is the frequency of correct answers, as if each were predicted to be correct.
        is_frequency = files.source.are_confidences and function is accuracy
        preds = torch.ones_like(rows.preds) if is_frequency else rows.preds
        stream.update(preds, rows.target, rows.weights)

    read(arguments, files, update)
    return stream, {**{p.name: p.default for p in stream_parameters(factory)}, **options}, files


def _options(function: Callable[..., Any], arguments: argparse.Namespace, files: PredictionFiles) -> dict[str, Any]:
    """Return the options of a metric: from the files, from options with their names, and from --option."""
    source, of_stream = files.source, declaration_of(function).stream_options
    own = {p.name for p in stream_parameters(stream_factory_of(function))}
    known = {*own, *of_stream, *INPUT_DEFAULTS, "num_classes", "num_labels"}
    found: dict[str, Any] = {"task": files.task, "from_logits": source.from_logits, "nan_policy": arguments.nan_policy}
    found |= {"ignore_index": files.ignore_index}
    if files.task != "binary":
        found["class_axis"] = -1
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
            raise unknown_argument(name, known - _DECLARED, metrics()[function.__name__])
    return found | given


def _value(text: str) -> Any:
    """Return a number, list, True, False or None that text represents, or else the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text.strip()
