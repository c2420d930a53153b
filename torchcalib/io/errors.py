"""Errors for unreadable files, and formatting of their messages. Importing this module does not import torch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten


class InputError(ValueError):
    """Error for a file that cannot be read as predictions. The message contains the problem and a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


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


def printable(text: str) -> str:
    """Replace non-printable characters by "?", because text from a file could control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def short_name(name: str, most: int = 28) -> str:
    """Return a name without control characters, shortened in the middle to `most` characters."""
    shown, start = printable(name), most // 2
    return shown if len(shown) <= most else f"{shown[:start]}…{shown[start + 1 - most :]}"


def quoted(names: Iterable[object], most: int = 12) -> str:
    """Join the first `most` names in backquotes, and append the number of omitted names."""
    shown = [f"`{name}`" for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "nothing") + rest
