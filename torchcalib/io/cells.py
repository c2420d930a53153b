"""Numbers in the text of a cell: percentages, vectors, or objects of label -> probability. Does not import torch."""

import ast
import re
from collections.abc import Sequence

from torchcalib.io.names import percent_in

_VECTOR = re.compile(r"(?:(?:np\.)?array|tensor)?\(?\s*\[([^\[\]{}]*)\]\s*(?:,[^\[\]{}]*)?\)?")


def vector_in(text: str) -> list[float] | dict[str, float] | None:
    """Return the numbers in a text such as `[0.1, 0.9]`, `tensor([0.1, 0.9])` or `{"no": 0.1, "yes": 0.9}`, else None.

    The texts are those that pandas, numpy, torch and json write.
    """
    text = text.strip()
    try:
        if match := _VECTOR.fullmatch(text):
            return [float(number) for number in re.split(r"[\s,]+", match[1].strip(" \n\t\r,"))]
        if text.startswith("{"):
            found = ast.literal_eval(text)
            return {str(name).strip(): float(value) for name, value in found.items()} if found else None
    except (ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError):
        pass
    return None


def numbers_in(text: str, classes: Sequence[str], width: int) -> list[float] | None:
    """Return the numbers in a cell, as `width` fractions or in the order of `classes`; None for other cells."""
    percent = percent_in(text)
    if percent is not None:
        return [percent / 100] if width == 1 else None
    found = vector_in(text)
    if isinstance(found, dict):
        found = [found[name] for name in classes] if found.keys() == {*classes} else None
    return found if found is not None and len(found) == width else None
