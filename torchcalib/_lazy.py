"""Import public names at their first use, which makes `import torchcalib` faster."""

import ast
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package whose stub file lists the public names.

    The imports in the stub, `__init__.pyi`, are the only list of public names. Type checkers also read this file.

    Args:
        package: name of the package.
        file: `__file__` of the package.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = sorted(module_of)

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise unknown_name(package, name, names)
        module = module_of[name]
        return import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)

    return names, import_name, lambda: names


_NAMESPACES = ("functional", "calibration", "inference", "losses", "plots", "integrations")

_SYNONYMS = {
    "accuracy_score": "functional.accuracy",
    "adaptive_calibration_error": "functional.ace",
    "adaptive_ece": "functional.ace",
    "AdaptiveCalibrationError": "ACE",
    "AdaptiveECE": "ACE",
    "BinaryCalibrationError": "ECE",
    "binary_calibration_error": "functional.ece",
    "Brier": "BrierScore",
    "brier": "functional.brier_score",
    "brier_score_loss": "functional.brier_score",
    "CalibratedClassifier": "calibration.cross_val_calibrate",
    "CalibratedClassifierCV": "calibration.cross_val_calibrate",
    "calibration_error": "functional.ece",
    "CalibrationCallback": "integrations.CalibrationMonitor",
    "CalibrationDisplay": "plots.reliability_diagram",
    "CalibrationError": "ECE",
    "classwise_ece": "functional.ece",
    "ClasswiseECE": "ECE",
    "CrossEntropy": "NLL",
    "cross_entropy": "functional.nll",
    "ece_ci": "inference.bootstrap",
    "expected_calibration_error": "functional.ece",
    "ExpectedCalibrationError": "ECE",
    "IsotonicRegression": "calibration.IsotonicCalibration",
    "log_loss": "functional.nll",
    "LogisticCalibration": "calibration.AffineScaling",
    "LogLoss": "NLL",
    "maximum_calibration_error": "functional.mce",
    "MaximumCalibrationError": "MCE",
    "MetricCollection": "CalibrationCollection",
    "multiclass_calibration_error": "functional.ece",
    "MulticlassCalibrationError": "ECE",
    "negative_log_likelihood": "functional.nll",
    "NegativeLogLikelihood": "NLL",
    "PlattScaling": "calibration.AffineScaling",
    "plot_reliability": "plots.reliability_diagram",
    "plot_reliability_diagram": "plots.reliability_diagram",
    "reliability_curve": "functional.calibration_curve",
    "ReliabilityDiagram": "plots.reliability_diagram",
    "ReliabilityDisplay": "plots.reliability_diagram",
    "SCE": "ECE",
    "smooth_ece": "functional.smece",
    "SmoothECE": "SmECE",
    "test_based_reliability_diagram": "plots.tce_diagram",
    "temperature_scaling": "calibration.TemperatureScaling",
}
"""Names in torchcalib, by the equivalent public name in torchmetrics, scikit-learn or netcal."""

_PENALTIES = "Add a penalty such as `torchcalib.losses.SoftBinnedECELoss` to the training loss."
_SCORER = (
    "Use sklearn.metrics.make_scorer(lambda y, p: float(torchcalib.functional.ece(p, y, task=...)), "
    "response_method='predict_proba', greater_is_better=False)."
)
_ADVICE = {
    "focal_loss": _PENALTIES,
    "FocalLoss": _PENALTIES,
    "make_scorer": _SCORER,
    "MatrixScaling": "torchcalib does not have this calibrator; the closest is "
    "`torchcalib.calibration.StructuredMatrixScaling`: a matrix with ridge penalties.",
    "sklearn": _SCORER,
}


def unknown_name(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """Return the error for an unknown attribute of a module, with a suggestion.

    Args:
        module: name of the module.
        name: the unknown attribute.
        known: public names of the module.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python tools look up many private names, and a search would be slow
        return AttributeError(message)
    if name in _ADVICE:
        return AttributeError(f"{message}. {_ADVICE[name]}")
    similar = _SYNONYMS.get(name) or next(_locations(name), None)
    if similar is None and (close := get_close_matches(name, known, 1, 0.8)):
        similar = f"{module}.{close[0]}".removeprefix("torchcalib.")
    options = " with mode='classwise'" if "classwise" in name.lower() or name == "SCE" else ""
    if name in ("brier_score_loss", "log_loss"):
        options = " (predictions first)"
    return AttributeError(f"{message}. Did you mean `torchcalib.{similar}`{options}?" if similar else message)


def _locations(name: str) -> Iterator[str]:
    """Yield the qualified names of `name` in all namespaces, such as `functional.ece` for `ece`."""
    for namespace in ("", *_NAMESPACES):
        if name in _public_names(namespace):
            yield f"{namespace}.{name}".lstrip(".")


def _public_names(namespace: str) -> set[str]:
    """Parse the public names in the source of a namespace, because importing it would take seconds."""
    base = Path(__file__).parent / namespace
    path = next(p for p in (base / "__init__.pyi", base.with_suffix(".py"), base / "__init__.py") if p.is_file())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}
