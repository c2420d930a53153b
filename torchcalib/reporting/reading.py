"""Read prediction files into a `ReportBuilder`, with error messages for Python instead of the command line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchcalib.io.errors import InputError
from torchcalib.io.opening import open_predictions
from torchcalib.reporting.building import ReportBuilder

_PIECE_BYTES = 4 * 2**20
"""Bytes of predictions in a chunk. Class-wise bins need about 40 bytes for each float32 prediction."""

_ARGUMENTS = {
    r"--from-logits": "from_logits=True",
    r"--from-probs": "from_logits=False",
    r"--task (\w+)": r"task='\1'",
    r"--preds NAME --target NAME": "preds='NAME' and target='NAME'",
    r"--(preds|target|weights|groups|clusters) NAME": r"\1='NAME'",
    r"--(\w+)-(\w+)": r"\1_\2",
    r"--(\w+)": r"\1",
}
"""Python arguments for command line options in error messages, as pairs of a pattern and its replacement."""


def builder_of(paths: Sequence[Any], opening: Mapping[str, Any], **settings: Any) -> ReportBuilder:
    """Return a builder that contains the predictions in files.

    Args:
        paths: paths of the files, or one list of paths.
        opening: arguments of `open_predictions`.
        **settings: other arguments of `ReportBuilder`.
    """
    if len(paths) == 1 and isinstance(paths[0], list | tuple):
        paths = paths[0]
    with _errors_in_python():
        files = open_predictions(paths, **opening, class_names=settings.pop("class_names", None))
        source = files.source
        settings |= {"from_logits": source.from_logits, "class_axis": -1, "class_names": source.class_names or None}
        builder = ReportBuilder(task=files.task, source=source, **settings)
        for rows in files.chunks(_PIECE_BYTES):
            builder.update(**vars(rows))
    return builder


@contextmanager
def _errors_in_python() -> Iterator[None]:
    """Replace command line options in error messages by Python arguments."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for option, argument in _ARGUMENTS.items():
            message = re.sub(option, argument, message)
        raise InputError(message) from error
