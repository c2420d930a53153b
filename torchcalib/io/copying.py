"""Copy prediction files with other predictions, in any format for files of predictions."""

import csv
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.io.errors import InputError, NoSamplesError, quoted
from torchcalib.io.opening import Unconverted
from torchcalib.io.paths import TABLES, format_of
from torchcalib.io.reader import FLOATS, TEXT, WHOLE, Array, Reader, Text

Values = np.ndarray[Any, Any]

_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Copy:
    """Arrays of prediction files, with converted predictions, in the order of the file.

    Attributes:
        preds: name of the predictions.
        arrays: values by name. Text has dtype object.
        columns: names of the columns of the predictions, one per class; empty if the file stores an array.
        stem: name of the predictions in formats without columns, if the file has columns.
        left_out: arrays of other types or shapes, which are not copied.
    """

    preds: str
    arrays: dict[str, Values]
    columns: tuple[str, ...]
    stem: str
    left_out: tuple[str, ...]

    def content(self, path: Path) -> tuple[bytes, tuple[str, ...]]:
        """Return the content of a file with this name, and the arrays that its format cannot store."""
        kind = str(format_of(path))
        kept = {name: values for name, values in self.arrays.items() if _can_store(kind, name == self.preds, values)}
        if kind in TABLES:
            stored = self._in_columns(kept, with_lists=kind not in ("csv", "tsv"))
        else:
            stored = {self.stem if name == self.preds and self.columns else name: each for name, each in kept.items()}
        content = _WRITERS[kind](stored)
        if path.suffix.lower() == ".gz":
            content = gzip.compress(content, mtime=0)
        return content, tuple(name for name in self.arrays if name not in kept)

    def _in_columns(self, arrays: Mapping[str, Values], with_lists: bool) -> dict[str, Values]:
        """Return arrays with two axes as one column per class, or `with_lists` as a column of lists."""
        found: dict[str, Values] = {}
        for name, values in arrays.items():
            named = self.columns if name == self.preds else ()
            if values.ndim == 1 or (with_lists and not named):
                found[name] = values
            elif values.ndim == 2:
                found |= dict(zip(named or [f"{name}_{k}" for k in range(values.shape[1])], values.T, strict=True))
            else:
                raise InputError(
                    f"`{name}` must have at most two axes in a table, got {values.ndim}. Write a .npz file."
                )
        return found


def copy_of(found: Unconverted, convert: Callable[[str, Tensor], Tensor]) -> Copy:
    """Read opened prediction files, and convert the predictions.

    Args:
        found: result of `open_without_targets`.
        convert: function from the name and a chunk of the predictions to predictions of the same shape.

    Raises:
        InputError: if a file is damaged or unsuitable, or if shards have different arrays.
    """
    first = found[0][0].label
    pieces: list[list[Values]] = []
    names: list[str] = []
    for reader, name in found:
        mine = _copied_names(reader, name)
        if names and mine != names:
            raise InputError(
                f"`{reader.label}` must have the arrays of `{first}`, got {quoted(mine)} instead of "
                f"{quoted(names)}. Convert the files separately."
            )
        names = mine
        for chunk in reader.stream(names, _PIECE_BYTES, allow_missing=True):
            given = dict(zip(names, chunk, strict=True))
            given[name] = convert(name, given[name])
            pieces.append([_plain(values) for values in given.values()])
    if not pieces:
        raise NoSamplesError(first)
    reader, name = found[0]
    arrays = {each: np.concatenate(parts) for each, parts in zip(names, zip(*pieces, strict=True), strict=True)}
    own = [array for array in reader.arrays.values() if not array.columns]
    left_out = tuple(array.name for array in own if not _is_copied(array, reader, name))
    return Copy(name, arrays, reader.arrays[name].columns, reader.arrays[name].stem or "preds", left_out)


def _copied_names(reader: Reader, preds: str) -> list[str]:
    """Return the names of the arrays to copy in the order of the file, with the predictions in one array."""
    classes = reader.arrays[preds].columns
    names = [
        preds if name in classes else name
        for name, array in reader.arrays.items()
        if name == preds or (not array.columns and _is_copied(array, reader, preds))
    ]
    return list(dict.fromkeys(names))


def _is_copied(array: Array, reader: Reader, preds: str) -> bool:
    has_rows = array.shape[:1] == reader.arrays[preds].shape[:1]
    return has_rows and 0 not in array.shape and not array.problem and array.dtype in FLOATS | WHOLE | TEXT


def _plain(values: Tensor | Text) -> Values:
    if isinstance(values, Text):
        texts: Values = np.array(values.names, dtype=object)[values.codes.numpy()]
        return texts
    numbers: Values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return numbers


def _can_store(kind: str, are_preds: bool, values: Values) -> bool:
    """Return whether a format can store an array: `.npy` files store predictions only, and tensors have no text."""
    return are_preds or (kind != "npy" and not (values.dtype == object and kind in ("pt", "safetensors")))


def _delimited(columns: Mapping[str, Values], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*map(_texts, columns.values()), strict=True))
    return text.getvalue().encode()


def _texts(values: Values) -> list[str]:
    """Return numbers with the fewest digits that represent them. Missing numbers are empty."""
    if values.dtype == object:
        return list(values)
    texts = np.char.lower(values.astype(str)) if values.dtype == bool else values.astype(str)
    return list(np.where(np.isnan(values), "", texts)) if values.dtype.kind == "f" else list(texts)


def _json(columns: Mapping[str, Values], form: str = "[{}]\n", between: str = ",\n") -> bytes:
    rows = zip(*(map(_without_nan, values.tolist()) for values in columns.values()), strict=True)
    return form.format(between.join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows)).encode()


def _without_nan(value: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if value != value else value


def _parquet(columns: Mapping[str, Values]) -> bytes:
    import pyarrow as pa  # optional dependency
    from pyarrow import parquet

    content = io.BytesIO()
    table = pa.table({name: pa.array(list(values) if values.ndim > 1 else values) for name, values in columns.items()})
    parquet.write_table(table, content)
    return content.getvalue()


def _npz(arrays: Mapping[str, Values]) -> bytes:
    content = io.BytesIO()
    stored: dict[str, Any] = {name: v.astype(str) if v.dtype == object else v for name, v in arrays.items()}
    with zipfile.ZipFile(content, "w") as archive:
        for name, values in stored.items():  # `numpy.savez` has arguments of its own, such as `file`
            info = zipfile.ZipInfo(f"{name}.npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, values, allow_pickle=False)
    return content.getvalue()


def _npy(arrays: Mapping[str, Values]) -> bytes:
    content = io.BytesIO()
    np.save(content, next(iter(arrays.values())))
    return content.getvalue()


def _tensors(arrays: Mapping[str, Values]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}


def _pt(arrays: Mapping[str, Values]) -> bytes:
    content = io.BytesIO()
    torch.save(_tensors(arrays), content)
    return content.getvalue()


def _safetensors(arrays: Mapping[str, Values]) -> bytes:
    from safetensors.torch import save  # only this format needs it

    content: bytes = save(_tensors(arrays))
    return content


_WRITERS: dict[str, Callable[[Mapping[str, Values]], bytes]] = {
    "csv": _delimited,
    "tsv": lambda columns: _delimited(columns, "\t"),
    "json": _json,
    "jsonl": lambda columns: _json(columns, "{}\n", "\n"),
    "parquet": _parquet,
    "npz": _npz,
    "npy": _npy,
    "pt": _pt,
    "safetensors": _safetensors,
}
"""Functions that return the content of a file, by the format of `torchcalib.io.paths.FORMATS`."""
