"""Public names that are imported when they are first used, so that importing the package costs little."""

import ast
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package from the imports in its stub file, `__init__.pyi`.

    The stub is the one list of public names: type checkers and editors read it, too.

    Args:
        package: name of the package.
        file: its `__file__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = sorted(module_of)

    def find(name: str) -> Any:
        if name not in module_of:
            raise unknown_name(package, name, names)
        module = module_of[name]
        return import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)

    return names, find, lambda: names


_NAMESPACES = ("functional", "calibration", "inference", "losses", "plots")

_ELSEWHERE = {
    "CalibrationError": "ECE",
    "BinaryCalibrationError": "ECE",
    "MulticlassCalibrationError": "ECE",
    "ExpectedCalibrationError": "ECE",
    "AdaptiveCalibrationError": "ACE",
    "MaximumCalibrationError": "MCE",
    "Brier": "BrierScore",
    "MetricCollection": "CalibrationCollection",
    "calibration_error": "functional.ece",
    "expected_calibration_error": "functional.ece",
    "adaptive_calibration_error": "functional.ace",
    "maximum_calibration_error": "functional.mce",
    "brier": "functional.brier_score",
    "brier_score_loss": "functional.brier_score",
    "log_loss": "functional.nll",
    "CalibrationDisplay": "plots.reliability_diagram",
    "ReliabilityDiagram": "plots.reliability_diagram",
    "CalibratedClassifierCV": "calibration.cross_val_calibrate",
    "LogisticCalibration": "calibration.AffineScaling",
    "PlattScaling": "calibration.AffineScaling",
    "VectorScaling": "calibration.AffineScaling",
    "IsotonicRegression": "calibration.IsotonicCalibration",
}
"""Names in torchmetrics, scikit-learn and netcal, and the place of the same thing in torchcalib."""


def unknown_name(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """Return the error for a name that a module does not have, with the place of the one that was probably meant."""
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python and its tools ask for many of these
        return AttributeError(message)
    meant = _ELSEWHERE.get(name) or next(_places_of(name), None)
    if meant is None and (close := get_close_matches(name, known, 1, 0.75)):
        meant = f"{module}.{close[0]}".removeprefix("torchcalib.")
    return AttributeError(f"{message}. Did you mean `torchcalib.{meant}`?" if meant else message)


def _places_of(name: str) -> Iterator[str]:
    """Yield the places of a name in the package."""
    for namespace in ("", *_NAMESPACES):
        try:
            found = import_module(f"torchcalib.{namespace}".rstrip("."))
        except ImportError:  # an extra is missing
            continue
        if name in found.__all__:
            yield f"{namespace}.{name}".lstrip(".")
