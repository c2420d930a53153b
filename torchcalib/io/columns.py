"""Columns of a table that belong together, such as one probability for each class, as one array."""

from collections import defaultdict
from collections.abc import Sequence
from os.path import commonprefix

import numpy as np

from torchcalib.io.errors import quoted
from torchcalib.io.names import LOGITS, NEUTRAL, PROBS, TARGETS, WEIGHTS, class_of, numbered
from torchcalib.io.reader import FLOATS, WHOLE, Array


def with_composed(arrays: list[Array]) -> list[Array]:
    """Append one combined array per common stem of columns, such as `prob_0`, `prob_1` or `prob_cat`, `prob_dog`."""
    by_number, by_class = defaultdict(list), defaultdict(list)
    known = {*LOGITS, *PROBS, *NEUTRAL, *TARGETS, *WEIGHTS}
    keys = {array.key for array in arrays}
    for array in arrays:
        if len(array.shape) > 1:
            continue
        if parts := numbered(array.key):
            by_number[parts[0]].append((parts[1], array.name, array))
        elif array.key not in known and (named := class_of(array.name)) and named[0] not in {"y", *keys}:
            by_class[named[0]].append(array)
    together = []
    for stem, members in by_number.items():
        ordered = sorted(members)
        numbers = tuple(number for number, _, _ in ordered)
        problem = ""
        if numbers[0] > 1 or numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
            found = ", ".join(map(str, numbers[:12]))
            problem = f"must be numbered from 0 or 1 without gaps, got {found}. Add the missing columns."
        if len(members) > 1:
            together.append(joined([array for _, _, array in ordered], stem, problem, is_numbered=True))
    for stem, columns in by_class.items():
        dtypes = {column.dtype for column in columns}
        are_numbers = dtypes <= WHOLE if stem in TARGETS and dtypes & WHOLE else bool(dtypes & FLOATS)
        if len(columns) > 1 and dtypes <= FLOATS | WHOLE and are_numbers:
            together.append(joined(columns, stem))
    return arrays + together


def joined(columns: Sequence[Array], stem: str, problem: str = "", is_numbered: bool = False) -> Array:
    """Combine columns, one per class, into one array, with class names unless the columns are numbered."""
    names = tuple(column.name for column in columns)
    dtypes = {column.dtype for column in columns}
    # In text files, a column without decimal points has an integer dtype.
    dtype = np.result_type(*dtypes).name if dtypes <= FLOATS | WHOLE else " and ".join(sorted(dtypes))
    if lists := [column.name for column in columns if len(column.shape) > 1]:
        problem = f"must be columns with one number per row, got lists in {quoted(lists)}. Name one column."
    shape = (*columns[0].shape, len(columns))
    return Array(
        f"{names[0]}..{names[-1]}", dtype, shape, problem, names, stem, () if is_numbered else _classes(names, stem)
    )


def _classes(names: Sequence[str], stem: str) -> tuple[str, ...]:
    """Return the class names: column names without the stem, or without common prefix and suffix. () for numbers."""
    parts = [name.strip()[len(stem) + 1 :] for name in names] if stem else [name.strip() for name in names]
    if not stem:
        start = len(commonprefix(parts))  # noqa: RUF071 - names are not paths
        while start and parts[0][start - 1] not in "_.:- ":
            start -= 1
        parts = [part[start:] for part in parts]
        end = len(commonprefix([part[::-1] for part in parts]))  # noqa: RUF071
        while end and parts[0][len(parts[0]) - end] not in "_.:- ":
            end -= 1
        parts = [part[: len(part) - end] for part in parts]
    return () if all(part.isdecimal() for part in parts) else tuple(parts)
