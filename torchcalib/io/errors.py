"""Errors about files, and text that is safe to print. Imports nothing that takes time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten


class InputError(ValueError):
    """A file that cannot be read as predictions. The message names the problem and a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NoSamplesError(InputError):
    """Files without samples. With several processes, one of them may have such files only."""

    def __init__(self, label: object) -> None:
        super().__init__(f"`{label}` must hold predictions, but holds no samples. Check the program that wrote it.")


@contextmanager
def reading(label: str, file_format: str) -> Iterator[None]:
    """Turn any error of a parser into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"`{label}` must be read with the package {error.name}, which is not installed. "
            "Run pip install 'torchcalib[data]'."
        ) from error
    # Six parsers raise a dozen kinds of errors on damaged bytes: zlib.error, KeyError, struct.error, ArrowInvalid ...
    except Exception as error:
        details = shorten(str(error), 160, placeholder=" ...") or "no details"
        raise InputError(
            f"`{label}` must be a complete, readable {file_format} file, got {type(error).__name__}: "
            f"{details.rstrip('.')}. Check that the file is complete and that its suffix is right."
        ) from error


def printable(text: str) -> str:
    """Replace control characters. Names and parser messages from a file could otherwise control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def quoted(names: Iterable[object], most: int = 12) -> str:
    """List the first names for a message."""
    shown = [f"`{name}`" for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "nothing") + rest
