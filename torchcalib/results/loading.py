"""Reports and comparisons from the JSON that they save: the inverse of `torchcalib.results.base.plain`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.saving import CLASSES
from torchcalib.core.bins import BinTable
from torchcalib.core.saved import check_is_file, loading
from torchcalib.io.errors import shown
from torchcalib.io.paths import format_of
from torchcalib.results.history import History

T = TypeVar("T")


def load(kind: type[T], path: str | Path, name: str, version: int) -> T:
    """Load an object of a data class from a JSON file, or from the file `name` in a folder."""
    if not isinstance(path, str | PathLike):
        raise TypeError(f"`path` must be a str or a pathlib.Path, got {shown(path)}. Pass the path of a saved file.")
    place = Path(path)
    if not place.suffix and not place.exists():
        raise FileNotFoundError(f"`{place}` must be a folder or a file, got a path that does not exist.")
    file = place / name if place.is_dir() else place
    if file.suffix.lower() != ".json":
        advice = f"Pages and tables contain rounded numbers: load {name}."
        if format_of(file) is not None:
            advice = "Report.from_files reads predictions."
        raise ValueError(f"`path` must be a folder or a .json file, got {shown(str(path))}. {advice}")
    with loading(kind.__name__, str(path), "the method `save`"):
        check_is_file(file)
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["schema_version"] != version:
            raise ValueError(f"`schema_version` must be {version}, got {shown(saved['schema_version'])}")
        known: Any = fields(kind)  # type: ignore[arg-type]  # a data class
        required = [each.name for each in known if each.default is each.default_factory is MISSING]
        if missing := [name for name in required if name not in saved]:
            raise ValueError(f"an object without `{missing[0]}`. Reports and comparisons are loaded by their own class")
        found: T = restored(kind, saved)
        return found


def restored(kind: Any, value: Any) -> Any:
    """Return the value of an annotated type from its plain value. Raise an error if it has another type."""
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        options = [each for each in arguments if each is not NoneType]
        return value if len(options) > 1 else restored(options[0], value)  # several types are simple ones
    if kind is Any:
        return value
    if kind is float:
        return float(value)  # also of "nan", "inf" and "-inf"
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"a value must be one of {arguments}, got {shown(value)}")
        return value
    if issubclass(origin, BinTable):
        return origin(**{each.name: restored_column(value[each.name]) for each in fields(origin)})
    if issubclass(origin, History):
        return origin.from_dict(value)
    if issubclass(origin, Calibrator):
        return CLASSES[value.removesuffix("()")]()  # not fitted
    if is_dataclass(origin):
        types = get_type_hints(origin)
        known = [each.name for each in fields(origin) if each.name in value]  # an older file may lack new fields
        return kind(**{name: restored(types[name], value[name]) for name in known})
    if issubclass(origin, Mapping):
        return {key: restored(arguments[1], item) for key, item in value.items()}
    if issubclass(origin, tuple) and arguments[-1] is not Ellipsis:
        return tuple(restored(each, item) for each, item in zip(arguments, value, strict=True))
    if issubclass(origin, Sequence) and origin is not str:
        return tuple(restored(arguments[0], item) for item in value)
    if not isinstance(value, origin):
        raise TypeError(f"a value must be {origin.__name__}, got {shown(value)}")
    return value


def restored_column(values: Any) -> torch.Tensor:
    """Return a column of bins as float64, from nested lists of numbers and of "nan", "inf" and "-inf"."""

    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else float(value)

    return torch.tensor(numbers(values), dtype=torch.float64)
