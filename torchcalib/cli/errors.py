"""Print errors and warnings as one line, with command line options in place of Python arguments."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchcalib.io.errors import limited, printable

_OPTIONS = {
    r"Pass from_logits=True": "Pass --from-logits",
    r"with from_logits=True": "with --from-logits",
    r"Omit from_logits=True": "Pass --from-probs",
    r"Divide every row by its sum: preds / .*?\)\.": "Pass --normalize.",
    r"Pass class_axis=(\d+) for class-first input": r"Move axis \1 to the end before saving",
    r"Pass the shape \(N, C\), or class_axis=0 for \(C, N\)": "Store the arrays with shape (N, C)",
    r"nan_policy='drop'": "--nan-policy drop",
    r"ignore_index=(-?\d+)": r"--ignore-index \1",
    r"task='(\w+)'": r"--task \1",
    r"`n_bins`": "`--n-bins`",
    r"`epochs`": "`--epochs`",
}
"""Regular expressions for Python arguments in messages, and the equivalent command line options."""


def line_of(error: Exception) -> str:
    """Return the message of an error as one line, with command line options."""
    expected = isinstance(error, ValueError | TypeError | ImportError | OSError | UserWarning)
    message = limited(str(error) or type(error).__name__ if expected else f"{type(error).__name__}: {error}")
    for argument, option in _OPTIONS.items():
        message = re.sub(argument, option, message)
    return " ".join(message.split())


def fail(line: str) -> int:
    """Print an error on stderr, and return exit code 2."""
    print(f"torchcalib: error: {limited(line)}", file=sys.stderr, flush=True)  # noqa: T201
    return 2


def warn(line: str) -> None:
    """Print a warning on stderr."""
    if sys.stderr is not None:
        print(f"torchcalib: warning: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print Python warnings within the `with` block as `warn` does."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        warn(line_of(message) if isinstance(message, Warning) else message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
