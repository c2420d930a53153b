"""Errors as one line, with the names of command line options."""

import re
import sys

from torchcalib.io.errors import printable

_OPTIONS = {
    r"Pass from_logits=True": "Pass --from-logits",
    r"Divide every row by its sum: preds / .*?\)\.": "Pass --normalize.",
    r"Pass class_axis=(\d+) for class-first input": r"Move axis \1 to the end before saving",
    r"nan_policy='drop'": "--nan-policy drop",
    r"ignore_index=(-?\d+)": r"--ignore-index \1",
    r"task='(\w+)'": r"--task \1",
    r"`n_bins`": "`--n-bins`",
    r"`epochs`": "`--epochs`",
}
"""Command line options for Python arguments in messages."""


def line_of(error: Exception) -> str:
    """Return the message of an error in one line."""
    expected = isinstance(error, ValueError | TypeError | ImportError | OSError)
    message = str(error) or type(error).__name__ if expected else f"{type(error).__name__}: {error}"
    for argument, option in _OPTIONS.items():
        message = re.sub(argument, option, message)
    return " ".join(message.split())


def fail(line: str) -> int:
    """Print an error and return the exit code for bad input."""
    print(f"torchcalib: error: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201
    return 2


def warn(line: str) -> None:
    """Print a warning."""
    if sys.stderr is not None:
        print(f"torchcalib: warning: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201
