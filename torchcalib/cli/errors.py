"""Errors in one line, in the words of the command line."""

import re
import sys

from torchcalib.io.reader import printable


def line_of(error: Exception) -> str:
    """Return what an error says, in one line."""
    expected = isinstance(error, ValueError | TypeError | ImportError | OSError)
    # Too large a number, no memory: whatever it is, it is one line.
    said = str(error) or type(error).__name__ if expected else f"{type(error).__name__}: {error}"
    return _as_options(" ".join(said.split()))


def fail(line: str) -> int:
    """Print the line and return the exit code for input that cannot be used."""
    print(f"torchcalib: error: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201
    return 2


def _as_options(message: str) -> str:
    """Name the command's options where a message advises Python's keywords."""
    for keyword, option in (
        (r"Pass from_logits=True", "Pass --from-logits"),
        (r", class_axis=1 for class-first input,", ""),
        (r"ignore_index=(-?\d+)", r"--ignore-index \1"),
        (r"task='(\w+)'", r"--task \1"),
        (r"`n_bins`", "`--n-bins`"),
        (r"`epochs`", "`--epochs`"),
    ):
        message = re.sub(keyword, option, message)
    return message
