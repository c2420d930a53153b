"""Conversion of arrays, pandas objects and lists to tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {"b": np.bool_, "i": np.int64, "u": np.int64}
"""Target dtypes for numpy dtype kinds that torch supports only partly."""
_KINDS = {"U": "text", "S": "bytes", "O": "objects"}


def as_tensors(preds: Any, target: Any, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return predictions, targets and weights as tensors. Converted values go to the device of `preds`."""
    preds = as_tensor("preds", preds)
    target = as_tensor("target", target, preds.device)
    return preds, target, None if weights is None else as_tensor("weights", weights, preds.device)


def as_tensor(name: str, x: Any, device: torch.device | None = None) -> Tensor:
    """Convert an array, a pandas Series or DataFrame, or a list to a tensor; a tensor is returned unchanged.

    Python numbers become float64 or int64. The tensor shares memory with a writable array.

    Raises:
        TypeError: if `x` does not contain numbers.
    """
    if isinstance(x, Tensor):
        return x
    if x is None:
        raise TypeError(f"`{name}` must be a tensor, an array or a list of numbers, got None.")
    try:
        array = np.asarray(x)
        if array.dtype == object and array.size:
            array = np.asarray(array.tolist(), dtype=np.float64 if _holds_missing(array) else None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be a tensor, an array or a list of numbers, got {type(x).__name__}: {error}. "
            "Rows must have equal lengths."
        ) from error
    if array.dtype.kind not in "biuf":
        found = _KINDS.get(array.dtype.kind, array.dtype.name)
        example = f" such as {array.reshape(-1)[:1].tolist()[0]!r}" if array.size else ""
        advice = " Pass class indices: numpy.searchsorted(class_names, labels)." if name == "target" else ""
        raise TypeError(f"`{name}` must contain numbers, got {found}{example}.{advice}")
    wide = array.dtype.newbyteorder("=") if array.dtype.kind == "f" else _DTYPES[array.dtype.kind]
    if array.dtype.itemsize > 8:
        wide = np.float64
    array = np.ascontiguousarray(array, wide)
    return torch.as_tensor(array if array.flags.writeable else array.copy(), device=device)


def _holds_missing(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an object array contains None or `pandas.NA`."""
    return any(x is None or type(x).__name__ == "NAType" for x in array.reshape(-1))
