"""Conversion of arrays, pandas objects, lists and class names to tensors."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.linear_logits import LinearLogits
from torchcalib.io.errors import first_of, quoted, shown
from torchcalib.io.names import outcome_names, percent_in

_SHARED = frozenset(map(np.dtype, (np.float32, np.float64, np.int64)))
"""Dtypes of arrays whose memory a tensor shares."""
_DTYPES = {"b": np.bool_, "i": np.int64, "u": np.int64}
"""Conversion dtype for each numpy dtype kind, because torch does not support all dtypes of these kinds."""
_KINDS = {"U": "text", "S": "bytes", "O": "objects"}


_ADVICE = {
    "preds": " If these are labels, pass the predictions first. For scorers of scikit-learn, use "
    "torchcalib.sklearn.get_scorer.",
    "target": " Pass class indices in the order of the class axis, for example "
    "pandas.Categorical(labels, categories=class_names).codes.",
}


def are_plain(values: Iterable[Any]) -> bool:
    """Return whether all values are tensors that `as_tensor` returns unchanged."""
    is_compiling = torch.compiler.is_compiling()
    for x in values:
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_complex():
            return False
        if not is_compiling and x.is_neg():  # torch.compile cannot trace it, and needs no check
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
    if name == "preds" and column_names(x):
        return class_table(name, x)[0].to(device)
    return as_array_tensor(name, x, device)


def as_array_tensor(name: str, x: Any, device: torch.device | None = None) -> Tensor:
    """Convert an array or a list to a tensor, whose columns keep their order; see `as_tensor`."""
    if is_foreign_array(x):
        return torch.utils.dlpack.from_dlpack(x).to(device)  # shares memory: numpy cannot read arrays on a GPU
    if starts_with_tensor(x):
        return _stacked(name, x, device)
    mask = getattr(x, "mask", None)  # of a masked array; `np.ma` itself would be imported by its first use
    if isinstance(mask, np.ndarray) and mask.any():
        raise TypeError(f"`{name}` must have no masked values, got {int(mask.sum())} of them. Remove these rows.")
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
    """Return whether data is a DataFrame of pandas or polars, a table of pyarrow, or a dict of columns."""
    is_table = hasattr(data, "columns") and (hasattr(data, "dtypes") or hasattr(data, "column_names"))
    return is_table or isinstance(data, dict)


def check_columns(names: Mapping[str, Any], omitted: Mapping[str, Any]) -> None:
    """Raise TypeError unless all `names` are text or None, and all `omitted` None, for a DataFrame with all columns."""
    remedy = "or pass predictions and targets as separate arguments."
    for argument, given in names.items():
        if not isinstance(given, str | None):
            rule = f"`{argument}` must be the name of a column of the DataFrame"
            raise TypeError(f"{rule}, got {shown(given)}. Pass names, {remedy}")
    for argument, given in omitted.items():
        if given is not None:
            rule = f"`{argument}` must be None for a DataFrame with all columns"
            raise TypeError(f"{rule}, got {shown(given)}. Omit it, {remedy}")


def column_names(data: Any) -> tuple[str, ...]:
    """Return the names of several columns of a frame, or of rows that are dicts, if all are text or numbers.

    Repeated names raise a ValueError.
    """
    if type(data) in (Tensor, np.ndarray):
        return ()
    if isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
        names = tuple(data[0])
    else:
        names = tuple(getattr(data, "column_names", getattr(data, "columns", data))) if is_frame(data) else ()
    are_names = len(names) > 1 and all(isinstance(name, str | int | float | np.generic) for name in names)
    found = tuple(map(str, names)) if are_names else ()
    if repeated := [name for name, n in Counter(found).items() if n > 1]:
        raise ValueError(f"A frame must have unique column names, got {quoted(repeated)} several times. Rename them.")
    return found


_CELLS = ("object", "str", "large_str", "struct")
"""Beginnings of the names of dtypes, in lower case, of columns whose cells may have several values."""


def rows_in_cells(preds: Any) -> Any:
    """Return a column of vectors, of objects of label -> probability, or of their texts, as a list of rows.

    Lists of objects with a label and a score are objects too; see `cells.scores_in`. Other predictions are unchanged.
    """
    if type(preds) is np.ndarray and preds.dtype in _SHARED:
        return preds
    kind = str(getattr(preds, "dtype", getattr(preds, "type", ""))).lower()
    values = preds
    are_cells = kind.startswith((*_CELLS, "<u")) or (kind.startswith("list") and "struct" in kind)
    if are_cells and not isinstance(preds, Tensor):
        convert = next(filter(None, (getattr(preds, name, None) for name in ("to_pylist", "to_list", "tolist"))))
        values = convert()
    first = values[0] if isinstance(values, list) and values else None
    if isinstance(first, Mapping):
        return values
    if not (isinstance(first, str) or (isinstance(first, list) and first and isinstance(first[0], Mapping))):
        return preds
    from torchcalib.io.cells import vector_in

    if vector_in(first) is None:
        return preds
    rows = list(map(vector_in, values))
    if None in rows:
        raise TypeError(f"`preds` must contain numbers in every cell, got {shown(values[rows.index(None)])}.")
    return rows


def class_table(name: str, data: Any, labels: Any = None, wanted: Sequence[str] = ()) -> tuple[Tensor, tuple[str, ...]]:
    """Return columns of classes as a tensor, in the order of the classes, and the names of the classes.

    `labels` are targets, which may be text, and `wanted` given class names. Data without named columns have no names.
    """
    columns, are_in_order = column_names(data), True
    if isinstance(data, list | tuple) and columns:
        row = next((k for k, row in enumerate(data) if row.keys() != data[0].keys()), None)
        if row is not None:
            raise ValueError(
                f"`{name}` must have the same classes in every row, got {first_of(columns)} in row 0 and "
                f"{first_of(list(map(str, data[row])))} in row {row} (counted from 0). Give every row all classes."
            )
        are_in_order = all(tuple(map(str, row)) == columns for row in data)
        data = [[*map(row.get, data[0])] for row in data]
    elif isinstance(data, dict):
        data = np.stack([np.asarray(column) for column in data.values()], -1)
    values = as_array_tensor(name, data)
    if not columns:
        return values, ()
    from torchcalib.io.columns import check_order, class_columns

    texts = None if labels is None or isinstance(labels, Tensor) or column_names(labels) else _objects(labels)
    known = () if texts is None else {str(text).strip() for text in texts.flat if isinstance(text, str)}
    found = class_columns(columns, known, wanted)
    if len(set(found.classes)) < len(found.classes):
        raise ValueError(f"`{name}` must have columns of different classes, got {first_of(columns)}. Rename one.")
    if not are_in_order and texts is None:
        check_order("`target`", found.classes)
    order = [columns.index(column) for column in found.columns]
    return (values if order == [*range(len(columns))] else values[:, order]), found.classes


def label_tensor(values: Any, classes: Sequence[str], device: torch.device, ignore_index: int | None = None) -> Tensor:
    """Return targets as a tensor, in which labels that name classes are replaced by the positions of these classes.

    See `io.columns.positions`. Without classes, texts such as "no" and "yes" are outcomes; see `outcome_names`.
    `ignore_index` marks ignored rows, before and after.
    """
    is_numeric = isinstance(values, Tensor) or (type(values) is np.ndarray and values.dtype in _SHARED)
    is_numeric = is_numeric or values is None or starts_with_tensor(values)
    labels = None if is_numeric else _objects(values)
    if labels is None or not any(isinstance(label, str) for label in labels.flat):
        target = as_tensor("target", values, device)
        is_column = target.dim() == 1 or target.shape[1:] == (1,)
        return _named_labels(target, classes, ignore_index) if classes and is_column and not target.is_meta else target
    from torchcalib.io.reader import Text
    from torchcalib.io.text import class_indices

    row = next((k for k, label in enumerate(labels.flat) if not isinstance(label, str)), None)
    if row is not None:
        raise ValueError(
            f"`target` must contain a class name in every row, got "
            f"{shown(labels.flat[row])} in row {row} (counted from 0). "
            "Add the name, or remove the row."
        )
    unique, inverse = np.unique(labels.astype(str), return_inverse=True)
    classes = classes or outcome_names(unique.tolist())
    if not classes:
        raise ValueError(
            f"`target` must contain numbers if classes have no names, got text: {first_of(unique.tolist())}. "
            "Pass class indices, for example pandas.Categorical(labels, categories=class_names).codes, or class_names "
            "to a report."
        )
    texts = Text(unique.tolist(), torch.from_numpy(inverse.reshape(labels.shape)))
    return class_indices(texts, classes, "`target`", 0).to(device)


def _named_labels(target: Tensor, classes: Sequence[str], ignore_index: int | None) -> Tensor:
    """Return the positions of the classes that whole labels name; other numbers are unchanged."""
    from torchcalib.io.columns import ignored, shown_classes
    from torchcalib.io.text import class_positions

    if not shown_classes(classes):
        return target
    if target.is_floating_point() and bool((target != target.round())[~target.isnan()].any()):
        return target
    found = class_positions(target, classes, "`target`", ignore_index)
    is_moved = found is not target and ignored(ignore_index, classes) != ignore_index
    if ignore_index is not None and is_moved and bool(torch.eq(target, ignore_index).any()):
        raise ValueError(
            f"`ignore_index` must be no class and no position of a class if columns are numbered, got {ignore_index} "
            f"for the classes {first_of(classes)}. Replace this label by -1, and pass ignore_index=-1."
        )
    return found if found.isnan().any() or found is target else found.long()


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
