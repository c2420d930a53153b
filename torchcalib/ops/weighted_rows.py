"""Rows of a batch that have a weight, for code that reads numpy arrays without compiled loops."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

LEAST_WEIGHT, MOST_WEIGHT = 1e-150, 1e150  # bounds of weights that are not 0; sums of squares are then finite
COMPILED_WEIGHTS = tuple(map(np.dtype, ("float32", "float64", "int64")))  # dtypes that compiled loops read as they are
_FEW_REMOVED = 2**6  # largest number of removed rows between which copying runs of rows is fastest


def kept(keep: Any, places: Any, *columns: Any) -> Sequence[Any]:
    """Return the places, None for all, and the entries of columns where `keep` is True.

    A key that all rows share has another length.
    """
    rows = np.flatnonzero(keep)
    n_removed = len(keep) - len(rows)
    if not n_removed:
        return places, *columns
    places = rows if places is None else places[rows]
    if n_removed > _FEW_REMOVED:
        return places, *(x if x is None or len(x) != len(keep) else x.take(rows, 0) for x in columns)
    runs = [slice(begin + 1, end) for begin, end in pairwise([-1, *np.flatnonzero(~keep).tolist(), len(keep)])]
    copies = (x if x is None or len(x) != len(keep) else np.concatenate([x[run] for run in runs]) for x in columns)
    return places, *copies


def with_weight(weights: Any, places: Any, *columns: Any) -> Sequence[Any] | None:
    """Return the weights as float64, places and entries of columns in the rows whose weight is not 0.

    Return None if a weight is invalid.
    """
    if len(weights):
        least = weights.min().item()  # NaN if a weight is NaN
        if not (least >= 0 and (weights.dtype.kind != "f" or weights.max().item() <= MOST_WEIGHT)):
            return None
        if least < LEAST_WEIGHT:
            places, weights, *columns = kept(weights != 0, places, weights, *columns)  # type: ignore[assignment]
            if len(weights) and weights.min().item() < LEAST_WEIGHT:
                return None
    return weights.astype(np.float64, copy=False), places, *columns
