"""Import public names at their first use, which makes `import torchcalib` faster."""

import ast
import sys
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
        found = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, found)  # the next access finds it without this function
        return found

    return names, import_name, lambda: names


_NAMESPACES = ("functional", "calibration", "inference", "losses", "plots", "integrations", "sklearn")

SYNONYMS = {
    "assert_calibrated": "testing.assert_calibrated",
    "accuracy_score": "accuracy",
    "adaptive_calibration_error": "ace",
    "adaptive_ece": "ace",
    "AdaptiveCalibrationError": "ACE",
    "AdaptiveECE": "ACE",
    "BinaryCalibrationError": "torchmetrics.BinaryCalibrationError",
    "binary_calibration_error": "torchmetrics.binary_calibration_error",
    "Brier": "BrierScore",
    "brier": "brier_score",
    "brier_score_loss": "brier_score",
    "CalibratedClassifierCV": "sklearn.CalibratedClassifier",
    "calibration_error": "torchmetrics.calibration_error",
    "CalibrationCallback": "integrations.CalibrationMonitor",
    "CalibrationError": "torchmetrics.CalibrationError",
    "classwise_ece": "ece",
    "ClasswiseECE": "ECE",
    "CrossEntropy": "NLL",
    "cross_entropy": "nll",
    "ece_ci": "bootstrap",
    "expected_calibration_error": "ece",
    "ExpectedCalibrationError": "ECE",
    "IsotonicRegression": "IsotonicCalibration",
    "log_loss": "nll",
    "LogisticCalibration": "AffineScaling",
    "LogLoss": "NLL",
    "maximum_calibration_error": "mce",
    "MaximumCalibrationError": "MCE",
    "MetricCollection": "CalibrationCollection",
    "multiclass_calibration_error": "torchmetrics.multiclass_calibration_error",
    "MulticlassCalibrationError": "torchmetrics.MulticlassCalibrationError",
    "negative_log_likelihood": "nll",
    "NegativeLogLikelihood": "NLL",
    "plot_reliability": "reliability_diagram",
    "plot_reliability_diagram": "reliability_diagram",
    "reliability_curve": "calibration_curve",
    "ReliabilityDiagram": "reliability_diagram",
    "ReliabilityDisplay": "reliability_diagram",
    "SCE": "ECE",
    "smooth_ece": "smece",
    "SmoothECE": "SmECE",
    "temperature_scaling": "TemperatureScaling",
    "test_based_reliability_diagram": "tce_diagram",
}
"""Names in torchcalib, by the equivalent public name in torchmetrics, scikit-learn or netcal."""

_LONG = 6  # smallest length of a name that is compared with similar names
_PENALTIES = "Add a penalty such as `torchcalib.losses.SoftBinnedECELoss` to the training loss."
_REGRESSION = "It is an error of regression models. `torchcalib.nees` measures their consistency."
_ADVICE = {
    "AUROC": "Use `torchcalib.CorrectnessAUROC` for confidences, and torchmetrics.AUROC for classes.",
    "auroc": "Use `torchcalib.correctness_auroc` for confidences, and torchmetrics for classes.",
    "ENCE": _REGRESSION,
    "ence": _REGRESSION,
    "focal_loss": _PENALTIES,
    "FocalLoss": _PENALTIES,
    "soft_ece": _PENALTIES,
    "SoftECE": _PENALTIES,
    "make_scorer": "Use torchcalib.sklearn.get_scorer('neg_ece').",
    "MatrixScaling": "torchcalib does not have this calibrator; the closest is "
    "`torchcalib.StructuredMatrixScaling`: a matrix with ridge penalties.",
}


def unknown_name(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """Return the error for an unknown attribute of a module, with a suggestion. Call it in the module's `__getattr__`.

    Args:
        module: name of the module.
        name: the unknown attribute.
        known: public names of the module.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python tools look up many private names, and a search would be slow
        return AttributeError(message)
    advice = _ADVICE.get(name) or _similar(module, name, known)
    return AttributeError(f"{message}. {advice}" if advice else message)


def _similar(module: str, name: str, known: Sequence[str]) -> str:
    """Return a question that suggests the closest public name, or ""."""
    similar = SYNONYMS.get(name) or next(_locations(name), None)
    # Short names that differ in one letter are other quantities, such as ECE and ENCE.
    if similar is None and len(name) >= _LONG and (close := get_close_matches(name, known, 1, 0.8)):
        similar = f"{module}.{close[0]}".removeprefix("torchcalib.")
    options = " with mode='classwise'" if "classwise" in name.lower() or name == "SCE" else ""
    if name in ("brier_score_loss", "log_loss"):
        options = " (predictions first)"
    return f"Did you mean `torchcalib.{similar}`{options}?" if similar else ""


def _locations(name: str) -> Iterator[str]:
    """Yield the qualified names of `name` in all namespaces, such as `functional.ece` for `ece`."""
    for namespace in ("", *_NAMESPACES):
        if name in public_names(namespace):
            yield f"{namespace}.{name}".lstrip(".")


def public_names(namespace: str) -> set[str]:
    """Parse the public names in the source of a namespace, because importing it would take seconds."""
    base = Path(__file__).parent / namespace
    path = next(p for p in (base / "__init__.pyi", base.with_suffix(".py"), base / "__init__.py") if p.is_file())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}
