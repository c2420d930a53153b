"""Print errors and warnings as one line, in terms of the command line, and the progress of long steps on stderr."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torchcalib.display.progress import listening
from torchcalib.display.words import printable
from torchcalib.io.errors import InputError, limited

_INPUTS = "preds|target|weights|groups|clusters|confidence|correct|pred|id|by|gold"
_SETTINGS = "class_names|epochs|fail_if|from_logits|ignore_index|n_bins|nan_policy|normalize|task"
_ARGUMENT = re.compile(rf"\b({_INPUTS}|{_SETTINGS})=(True|False|-?\d+|'[^']*'|\[[^\]]*\])")
_CALL = re.compile(rf"{_ARGUMENT.pattern}(?:(?:, | and ){_ARGUMENT.pattern})*")
_REPLACEMENTS = {
    r"Omit from_logits=True": "Pass --from-probs",
    r"Divide every row by its sum: preds / .*?\)\.": "Pass --normalize.",
    r"Pass class_axis=(\d+) for class-first input": r"Move axis \1 to the end before saving",
    r"Pass the shape \(N, C\), or class_axis=0 for \(C, N\)": "Store the arrays with shape (N, C)",
    r"`other` must": "every part must",
    r"\bthis builder\b": "another part",
    r"Pass `(groups|clusters)` to `update` of both builders": r"Pass --\1 for every part",
    r"Merge each builder once": "Merge each part once",
    r"`ids` must": "`--id` must",
    r"Convert integers with str\(\)": "Write the ids of all files alike",
    r"the questions as `clusters`": "the questions by --clusters",
}
"""Words that differ between a program and the command line, as regular expressions."""


def line_of(error: Exception) -> str:
    """Return the message of an error as one line, with command line options instead of Python arguments."""
    expected = isinstance(error, ValueError | TypeError | ImportError | OSError | UserWarning)
    message = limited(str(error) or type(error).__name__ if expected else f"{type(error).__name__}: {error}")
    for pattern, replacement in _REPLACEMENTS.items():
        message = re.sub(pattern, replacement, message)
    message = _CALL.sub(_options, message)
    # `preds` is an option in errors for files, which name the data by its array, and data in errors for values.
    names = f"{_INPUTS}|{_SETTINGS}" if isinstance(error, InputError) else _SETTINGS
    message = re.sub(rf"`({names})`(?= must)", lambda subject: f"`{_option(subject[1])}`", message)
    return " ".join(message.split())


def _options(call: re.Match[str]) -> str:
    """Return the options for the arguments of a call: `--task binary` for `task='binary'`."""
    words: list[str] = []
    for name, value in _ARGUMENT.findall(call[0]):
        if value in ("True", "[...]"):
            words.append(_option(name))
        elif value == "False":
            words.append("--from-probs")  # the only flag with an opposite
        else:
            items = [item.strip("'\"") for item in value.strip("[]").split(", ")]
            words += [_option(name), ",".join(items)]
    return " ".join(words)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def fail(line: str) -> int:
    """Print an error on stderr, and return exit code 2."""
    print(f"torchcalib: error: {limited(line)}", file=sys.stderr, flush=True)  # noqa: T201
    return 2


def output(text: str) -> None:
    """Print text on stdout. If its reader closes the pipe early, as `head` does, exit with status 0."""
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


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


@contextmanager
def working(description: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Show a step on stderr during the `with` block, if stderr is a terminal: its time, or its percentage of `total`.

    Yield a function that advances the step. Its arguments are a number of parts of `total`, such as rows, and
    optionally a new description.
    """
    bar: Any = None
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(ImportError):  # of the extra `report`; the command itself raises an error if it is needed
            bar = _bar(total is not None)
    if bar is None:
        yield lambda _, description="": None  # noqa: ARG005
        return
    from rich.markup import escape

    with bar:
        task = bar.add_task(escape(printable(description)), total=total)

        def advance(parts: float, description: str = "") -> None:
            words = {"description": escape(printable(description))} if description else {}
            bar.update(task, advance=parts, **words)

        yield advance


@contextmanager
def computing(description: str) -> Iterator[None]:
    """Show a computation, and the percentage and description of the part that it reports, as `working` does."""

    def show(share: float, part: str) -> None:
        advance(share, f"{description}: {part}" if part else "")

    with working(description, 1.0) as advance, listening(show):
        yield


def _bar(has_total: bool) -> Any:
    """Return the display of a step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    of_total = (BarColumn(), TaskProgressColumn()) if has_total else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *of_total, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, emoji=False), transient=True)
