"""Errors for unreadable files, formatting of messages, and warnings. Importing this module does not import torch."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten

FILL_IN = "Fill it in, or pass nan_policy='drop' to drop rows with missing values."
"""Advice for a missing value."""
_MAX_MESSAGE = 500  # characters of a message
_NAME_LENGTHS = (200, 100, 60, 28)  # lengths of names that are tried in turn
_OTHERS = ("torchcalib", "torch", "torchmetrics")
"""Packages whose frames are not the caller of a warning."""


class InputError(ValueError):
    """Error for a file that cannot be read as predictions. The message contains the problem and a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(limited(message))


class NoSamplesError(InputError):
    """Error for files without samples. A process without samples ignores it if other processes have samples."""

    def __init__(self, label: object) -> None:
        super().__init__(f"`{label}` must contain at least one sample, got none. Check the program that wrote it.")


@contextmanager
def reading(label: str, file_format: str) -> Iterator[None]:
    """Context manager that converts every error of a file parser to an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"`{label}` must be read with the package {error.name}, which is not installed. "
            "Run pip install 'torchcalib[data]'."
        ) from error
    # Parsers raise many error types on damaged bytes, such as zlib.error, KeyError, struct.error and ArrowInvalid.
    except Exception as error:
        details = shorten(str(error), 160, placeholder=" ...") or "no details"
        raise InputError(
            f"`{label}` must be a complete, readable {file_format} file, got {type(error).__name__}: "
            f"{details.rstrip('.')}. Check that the file is complete and that its suffix matches its format."
        ) from error


def limited(message: str) -> str:
    """Return a message of at most 500 printable characters. Long names in backquotes are shortened in the middle."""
    from torchcalib.display.words import printable

    for most in _NAME_LENGTHS:
        if len(message) <= _MAX_MESSAGE:
            break
        parts = message.split("`")  # every second part is a name
        parts[1::2] = [short_name(name, most) for name in parts[1::2]]
        message = "`".join(parts)
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE - 4]} ..."
    return printable(message)


def short_name(name: str, most: int = 28) -> str:
    """Return a name without control characters, shortened in the middle to `most` characters."""
    from torchcalib.display.words import printable

    shown, start = printable(name), most // 2
    return shown if len(shown) <= most else f"{shown[:start]}…{shown[start + 1 - most :]}"


def shown(value: object, most: int = 60) -> str:
    """Return a value as Python code in one line, shortened in the middle to `most` characters.

    A numpy scalar is shown as the number or text that it holds.
    """
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # type: ignore[attr-defined]
    return short_name(" ".join(repr(value).split()), most)


def first_of(values: Iterable[object], most: int = 5) -> str:
    """Return the first `most` values as shortened Python code, followed by the number of omitted values."""
    texts = [shown(value, 28) for value in values]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def quoted(names: Iterable[object], most: int = 12) -> str:
    """Join the first `most` names in backquotes, and append the number of omitted names."""
    shown = [f"`{short_name(str(name), 60)}`" for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "nothing") + rest


def warn(message: str) -> None:
    """Issue a warning at the first caller outside torch, torchmetrics and this package, once for each call site."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
