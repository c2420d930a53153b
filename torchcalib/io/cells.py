"""Scores in a cell: percentages, vectors, or objects of label -> probability. Does not import torch."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchcalib.io.names import percent_in

_VECTOR = re.compile(r"(?:(?:np\.)?array|tensor)?\(?\s*\[([^\[\]{}]*)\]\s*(?:,[^\[\]{}]*)?\)?")
_OF_NUMPY = re.compile(r"np\.float\d+\(([^()]*)\)")
_NUMBER = r"-?\d*(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)"
_PLAIN = re.compile(rf"{_NUMBER}(?:(?:\s*[,;]\s*|\s+){_NUMBER})+", re.IGNORECASE)
"""Numbers without brackets. They have a decimal point: `0,7` is a number."""
_STARTS = frozenset("[{(ant-.0123456789")  # first characters of vectors and objects
LABEL_KEYS = ("label", "value", "option", "letter", "text")
SCORE_KEYS = ("score", "probability", "prob", "p", "logprob")
"""Keys of the label and the score of an option in a list of objects."""


def parsed(text: str) -> Any:
    """Return the value of a text in the notation of JSON, Python, numpy or torch; None for another text."""
    text = _OF_NUMPY.sub(r"\1", text.strip())
    text = f"[{text}]" if _PLAIN.fullmatch(text) else re.sub(r"^\((.*)\)$", r"[\1]", text, flags=re.DOTALL)
    for parse in (json.loads, ast.literal_eval, _numbers_of_array):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _numbers_of_array(text: str) -> list[float] | None:
    """Return the numbers of a text such as `[0.1 0.9]` or `tensor([0.1, 0.9], device='cuda:0')`."""
    match = _VECTOR.fullmatch(text)
    return match and [float(number) for number in re.split(r"[\s,;]+", match[1].strip(" \n\t\r,"))]


def scores_in(cell: Any) -> list[Any] | dict[str, Any] | None:
    """Return the scores in a cell, in turn or by label; None for other cells.

    A cell is a list, an object of label -> score, a list of objects such as `{"label": "cat", "score": 0.9}`, which
    pipelines of Hugging Face return, or the text of one of them.
    """
    found = parsed(cell) if isinstance(cell, str) and cell.strip()[:1] in _STARTS else cell
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
        labels, scores = ([_first(each, keys) for each in found] for keys in (LABEL_KEYS, SCORE_KEYS))
        found = None if None in (*labels, *scores) else dict(zip(labels, scores, strict=True))
    if isinstance(found, Mapping):
        return {str(label).strip(): score for label, score in found.items()}
    return found if isinstance(found, list) else None


def _first(option: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((option[key] for key in keys if key in option), None)


def vector_in(cell: Any) -> list[float] | dict[str, float] | None:
    """Return the numbers in a cell, in turn or by label; None for other cells. See `scores_in`."""
    found = scores_in(cell)
    try:
        if isinstance(found, dict):
            return {label: float(score) for label, score in found.items()} or None
        return [float(number) for number in found or ()] or None
    except (TypeError, ValueError, OverflowError):
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
