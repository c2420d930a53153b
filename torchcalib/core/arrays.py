"""Conversion of arrays, pandas objects, lists and class names to tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.arguments import weights_from
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.io.errors import first_of, shown
from torchcalib.io.names import outcome_names, percent_in

_SHARED = frozenset(map(np.dtype, (np.float32, np.float64, np.int64)))
"""Dtypes of arrays whose memory a tensor shares."""
_DTYPES = {"b": np.bool_, "i": np.int64, "u": np.int64}
"""Conversion dtype for each numpy dtype kind, because torch does not support all dtypes of these kinds."""
_PREFIXES = ("prob_", "proba_", "probs_", "p_", "logit_", "logits_", "score_", "pred_")
"""Prefixes that are removed from the column names of predictions."""
_KINDS = {"U": "text", "S": "bytes", "O": "objects"}


_ADVICE = {
    "preds": " If these are labels, pass the predictions first. For scorers of scikit-learn, use "
    "torchcalib.sklearn.get_scorer.",
    "target": " Pass class indices in the order of the class axis, for example "
    "pandas.Categorical(labels, categories=class_names).codes.",
}


def as_tensors(
    preds: Any, target: Any, weights: Any = None, sample_weight: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return predictions, targets and weights as tensors. Converted values are moved to the device of `preds`.

    `sample_weight` is an alias of `weights`. If `preds` is a DataFrame, text labels are replaced by the indices of the
    columns with these names.
    """
    weights = weights_from(weights, sample_weight)
    names = column_names(preds)
    preds = as_tensor("preds", preds)
    target = label_tensor(target, names, preds.device)
    return preds, target, None if weights is None else as_tensor("weights", weights, preds.device)


def are_plain(values: Iterable[Any]) -> bool:
    """Return whether all values are tensors that `as_tensor` returns unchanged."""
    for x in values:
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_complex():
            return False
        if not torch.compiler.is_compiling() and x.is_neg():  # torch.compile cannot trace it, and needs no check
            return False
    return True


def as_tensor(name: str, x: Any, device: torch.device | None = None) -> Tensor:
    """Convert an array, a pandas Series or DataFrame, or a list to a tensor; a plain tensor is returned unchanged.

    Python numbers become float64 or int64. Predictions may be text with a percent sign: "70%" is 0.7. Without
    conversion, the tensor shares memory with a writable array. A list of tensors is stacked, which keeps gradients.
    Other values, and unsupported tensors such as sparse ones, raise TypeError.
    """
    if isinstance(x, Tensor):
        return x if are_plain((x,)) else _plain(name, x)
    if type(x) is np.ndarray and x.dtype in _SHARED and x.flags.carray:  # the most common array, without conversion
        shared = torch.from_numpy(x)
        return shared if device is None or device.type == "cpu" else shared.to(device)
    if x is None:
        raise TypeError(f"`{name}` must be a tensor, an array or a list of numbers, got None.")
    if is_foreign_array(x):
        return torch.utils.dlpack.from_dlpack(x).to(device)  # shares memory: numpy cannot read arrays on a GPU
    if starts_with_tensor(x):
        return _stacked(name, x, device)
    if isinstance(x, np.ma.MaskedArray) and x.mask.any():
        raise TypeError(f"`{name}` must have no masked values, got {int(x.mask.sum())} of them. Remove these rows.")
    try:
        array = np.asarray(x)
        if array.dtype == object and array.size:
            array = np.asarray(array.tolist(), dtype=np.float64 if _has_missing(array) else None)
    except (TypeError, ValueError, RuntimeError) as error:
        if "inhomogeneous" in str(error):
            advice = (
                " Pad missing choices with probability 0, or here logit -inf: torch.nn.utils.rnn.pad_sequence("
                "[torch.tensor(row) for row in preds], batch_first=True, padding_value=-torch.inf)."
            )
            advice = advice if name == "preds" else ""
            raise TypeError(
                f"`{name}` must have rows of equal length, got rows of different lengths.{advice}"
            ) from error
        raise TypeError(
            f"`{name}` must be a tensor, an array or a list of numbers, got {type(x).__name__}: "
            f"{str(error).rstrip('.')}. Convert it to a tensor with torch.as_tensor."
        ) from error
    if name == "preds" and array.dtype.kind in "UT" and None not in (numbers := list(map(percent_in, array.flat))):
        array = np.array(numbers, np.float64).reshape(array.shape) / 100
    if array.dtype.kind not in "biuf":
        found = _KINDS.get(array.dtype.kind, array.dtype.name)
        example = f" such as {shown(array.reshape(-1)[:1].tolist()[0])}" if array.size else ""
        raise TypeError(f"`{name}` must contain numbers, got {found}{example}.{_ADVICE.get(name, '')}")
    wide = array.dtype.newbyteorder("=") if array.dtype.kind == "f" else _DTYPES[array.dtype.kind]
    if array.dtype.itemsize > 8:
        wide = np.float64
    array = np.ascontiguousarray(array, wide)
    return torch.as_tensor(array if array.flags.writeable else array.copy(), device=device)


def check_has_values(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor on the meta device."""
    if x.is_meta:
        raise ValueError(f"`{name}` must have values, got a tensor on the meta device. Move it to another device.")


def _plain(name: str, x: Tensor) -> Tensor:
    """Convert a subclass, or a view with negated memory, to a plain tensor. Raise TypeError for other kinds."""
    if isinstance(x, LinearLogits) and name == "preds":
        return x
    if x.is_nested:
        raise TypeError(
            f"`{name}` must be a dense tensor, got a nested tensor. Pass its parts, or torch.cat(x.unbind())."
        )
    if x.layout != torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor, got layout {x.layout}. Call .to_dense() on it.")
    if x.is_quantized:
        raise TypeError(f"`{name}` must be a floating or integer tensor, got {x.dtype}. Call .dequantize() on it.")
    if x.is_complex():
        raise TypeError(f"`{name}` must be real, got {x.dtype}. Pass real probabilities or logits.")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # has no memory of its own, as FakeTensor
        if torch.compiler.is_compiling():
            return x
        raise TypeError(
            f"`{name}` must be a tensor with values in memory, got {type(x).__name__}. Convert it to a plain tensor "
            "(DTensor: full_tensor() or to_local())."
        )
    return x.as_subclass(Tensor).resolve_neg()


def starts_with_tensor(x: Any) -> bool:
    """Return whether the first element of a list, or of the first list in it, is a tensor."""
    while isinstance(x, list | tuple) and x:
        x = x[0]
        if isinstance(x, Tensor):
            return True
    return False


def _stacked(name: str, rows: Sequence[Any], device: torch.device | None) -> Tensor:
    """Stack the elements of a list of tensors. NumPy cannot convert all kinds of tensors."""
    tensors = [as_tensor(name, row, device) for row in rows]
    # Conversion gives a number an axis.
    tensors = [x.squeeze() if isinstance(row, int | float) else x for x, row in zip(tensors, rows, strict=True)]
    try:
        return torch.stack(tensors).to(device)
    except RuntimeError as error:
        shapes = " and ".join(str(shape) for shape in list(dict.fromkeys(tuple(x.shape) for x in tensors))[:2])
        raise TypeError(
            f"`{name}` must have tensors of equal shape and device in a list, got shapes {shapes}. Pass one tensor."
        ) from error


def _has_missing(array: np.ndarray[Any, Any]) -> bool:
    return any(x is None or type(x).__name__ == "NAType" for x in array.reshape(-1))


def is_foreign_array(x: Any) -> bool:
    """Return whether an object is an array of another library with the array API, such as CuPy or JAX."""
    return hasattr(x, "__array_namespace__") and hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray | np.generic)


def is_frame(data: Any) -> bool:
    """Return whether data is a DataFrame of pandas or polars, or a table of pyarrow."""
    return hasattr(data, "columns") and (hasattr(data, "dtypes") or hasattr(data, "column_names"))


def column_names(preds: Any) -> tuple[str, ...]:
    """Return the column names of a DataFrame with several columns if all names are text, else `()`.

    A common prefix is removed: the columns `prob_cat` and `prob_dog` have the names `cat` and `dog`.
    """
    columns = () if isinstance(preds, Tensor) else tuple(getattr(preds, "columns", ()))
    if len(columns) < 2 or not all(isinstance(name, str) for name in columns):
        return ()
    names = tuple(map(str, columns))
    for prefix in _PREFIXES:
        rest = tuple(name.removeprefix(prefix) for name in names)
        if all(name.startswith(prefix) for name in names) and all(x and not x.isdigit() for x in rest):
            return rest
    return names


def label_tensor(values: Any, class_names: Sequence[str], device: torch.device) -> Tensor:
    """Return targets as a tensor, with class names replaced by their indices in `class_names`.

    Without names, texts such as "no" and "yes" are outcomes; see `outcome_names`.
    """
    is_numeric = isinstance(values, Tensor) or (type(values) is np.ndarray and values.dtype in _SHARED)
    is_numeric = is_numeric or values is None or starts_with_tensor(values)
    labels = None if is_numeric else _objects(values)
    if labels is None or not any(isinstance(label, str) for label in labels.flat):
        return as_tensor("target", values, device)
    row = next((k for k, label in enumerate(labels.flat) if not isinstance(label, str)), None)
    if row is not None:
        raise ValueError(
            f"`target` must contain a class name in every row, got "
            f"{shown(labels.flat[row])} in row {row} (counted from 0). "
            "Add the name, or remove the row."
        )
    unique, inverse = np.unique(labels.astype(str), return_inverse=True)
    class_names = class_names or outcome_names(unique.tolist())
    if not class_names:
        raise ValueError(
            f"`target` must contain numbers if classes have no names, got text: {first_of(unique.tolist())}. "
            "Pass class indices, for example pandas.Categorical(labels, categories=class_names).codes, or class_names "
            "to a report."
        )
    index = {name: k for k, name in enumerate(class_names)}
    unknown = [str(label) for label in unique if label not in index]
    if unknown:
        raise ValueError(
            f"`target` must contain the class names {first_of(class_names)}, got {first_of(unknown)}. "
            "Check the spelling, or pass class_names with all classes in the order of the class axis."
        )
    numbers = torch.tensor([index[str(label)] for label in unique])
    return numbers[torch.from_numpy(inverse.reshape(labels.shape))].to(device)


def names_of_outcomes(target: Any) -> tuple[str, ...]:
    """Return the texts in `target` that stand for the outcomes 0 and 1, or `()` for other targets."""
    labels = None if isinstance(target, Tensor) or starts_with_tensor(target) else _objects(target)
    if labels is None or not all(isinstance(label, str) for label in labels.flat):
        return ()
    return outcome_names({str(label) for label in labels.flat})


def _objects(values: Any) -> NDArray[Any] | None:
    """Return values as an object array if they may contain text, else None."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # `as_tensor` later raises TypeError with the cause
        return None
    return array.astype(object) if array.dtype.kind in "OUT" else None


def single_axis(longer: Sequence[int], shorter: Sequence[int]) -> int | None:
    """Return the axis of size 1 that only `longer` has, -1 or 1, as in `(N, 1)` and `(N,)`; None for other shapes."""
    if len(longer) != len(shorter) + 1:
        return None
    for axis in (-1, 1):
        if longer[axis:][:1] == (1,) and (*longer[:axis], *(longer[axis:][1:])) == tuple(shorter):
            return axis
    return None
