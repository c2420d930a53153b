"""JSON Schema of `report.json`, from the annotations of the classes of results.

The package contains it as `report.schema.json`. `python tests/report_schema.py` writes this file.
"""

import inspect
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.bins import BinTable
from torchcalib.results.definitions import Definition
from torchcalib.results.history import History
from torchcalib.results.report import Report
from torchcalib.results.schema import PATH, SCHEMA_VERSION

ADDRESS = "https://torchcalib.readthedocs.io/en/latest/report.schema.json"

_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
"""Number as `plain` writes it: JSON has no NaN and no infinite numbers."""
_SIMPLE = {float: {"$ref": "#/$defs/number"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
_SIMPLE |= {str: {"type": "string"}, type(None): {"type": "null"}, Any: {}}

Definitions = dict[str, dict[str, Any]]


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `Report.to_dict`, and thus of `report.json`.

    Later versions of torchcalib may add properties. `SCHEMA_VERSION` increases if a property is renamed or removed, or
    if its type or meaning changes.
    """
    definitions: Definitions = {"number": _NUMBER}
    root = _object(Report, definitions)
    cards = _schema(Mapping[str, Definition], definitions)
    root["properties"] = {"schema_version": {"const": SCHEMA_VERSION}, **root["properties"], "definitions": cards}
    root["required"] = list(root["properties"])
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": ADDRESS}
    return {**heading, "title": "Report of torchcalib", **root, "$defs": definitions}


def _object(cls: Any, definitions: Definitions) -> dict[str, Any]:
    """Return the schema of a data class, as `plain` writes it."""
    if issubclass(cls, BinTable):  # columns
        column = {"type": "array", "items": _SIMPLE[float]}
        properties = {each.name: column for each in fields(cls)}
        if "quantiles" in properties:
            properties["quantiles"] = {"type": "array", "items": column}
    else:
        types_of = get_type_hints(cls)
        properties = {each.name: _schema(types_of[each.name], definitions) for each in fields(cls)}
    if cls is History:
        properties["version"] = {"type": "integer"}
    summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    return {"type": "object", "description": summary, "properties": properties, "required": list(properties)}


def _schema(kind: Any, definitions: Definitions) -> dict[str, Any]:
    """Return the schema of a value with a type annotation, and add those of data classes to `definitions`."""
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, definitions) for each in arguments]}
    name = origin.__name__
    if is_dataclass(origin):
        if name not in definitions:
            definitions[name] = {}  # in case that it contains itself
            definitions[name] = _object(origin, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if issubclass(origin, Calibrator):
        return {"type": "string", "description": "Class of the calibrator, without its parameters."}
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if issubclass(origin, tuple) and arguments[-1] is not Ellipsis:
        items = [_schema(each, definitions) for each in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if issubclass(origin, Sequence):
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    raise TypeError(f"no JSON Schema for {kind}")


if __name__ == "__main__":
    PATH.write_text(json.dumps(report_schema(), indent=1) + "\n", encoding="utf-8")
