"""Values of other packages for the same predictions: `python -m benchmarks.other_packages`.

Every installed package is called, and `docs/studies/recorded.json` is updated with its values, its version and the
date. Values of packages that are not installed are kept. Install the packages in an environment of their own:

    pip install torch torchmetrics scikit-learn netcal relplot uncertainty-calibration torch-uncertainty probmetrics
    pip install torcheval mapie scoringrules

The page `docs/studies/plot_02_what_other_packages_report.py` shows the values.
"""

import argparse
import contextlib
import datetime
import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import version_of

RECORDED = Path(__file__).resolve().parents[1] / "docs" / "studies" / "recorded.json"
Value = float | str
"""Value of a metric, or the error message of a package."""


# Predictions --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Predictions and options of one comparison. `preds` are probabilities, except for a temperature."""

    preds: Tensor
    target: Tensor
    n_bins: int = 10
    ignore_index: int | None = None

    @property
    def arrays(self) -> tuple[Any, Any]:
        return self.preds.numpy(), self.target.numpy()

    @property
    def multiclass(self) -> bool:
        return self.preds.ndim == 2


def binary(n: int = 2_000, scale: float = 1.5, dtype: torch.dtype = torch.float32) -> Case:
    """Return predictions whose log-odds are `scale` times too large."""
    rng = np.random.default_rng(0)
    log_odds = 1.5 * rng.standard_normal(n)
    target = rng.random(n) < 1 / (1 + np.exp(-log_odds))
    return Case(torch.from_numpy(scale * log_odds).sigmoid().to(dtype), torch.from_numpy(target).long())


def with_ones() -> Case:
    """Return under-confident predictions, of which 200 are replaced by 1.0 and 200 by 0.92.

    The predictions of 1.0 are right in 90%, and those of 0.92 in all cases.
    """
    preds, target, *_ = binary(scale=0.7)
    preds[:200], target[:200] = 1.0, (torch.arange(200) % 10 > 0).long()
    preds[200:400], target[200:400] = 0.92, 1
    return Case(preds, target)


def on_edges() -> Case:
    """Return 100 predictions of each multiple of 0.1, alternately 0.1 too low and 0.1 too high, in float64."""
    tenths = torch.arange(11)
    positives = 10 * tenths + 10 * (1 - 2 * (tenths % 2))  # of 100 samples
    target = torch.arange(100) < positives.unsqueeze(-1)
    return Case((tenths.double() / 10).repeat_interleave(100), target.flatten().long())


def above_one() -> Case:
    """Return the ordinary predictions, with one value one float32 step above 1."""
    preds, target, *_ = binary()
    preds[0] = 1 + torch.finfo(torch.float32).eps
    return Case(preds, target)


def tied() -> Case:
    """Return five values, 40 times each, with all positives of a value before its negatives."""
    values = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    positives = torch.tensor([2, 16, 20, 24, 38])
    target = torch.arange(40) < positives.unsqueeze(-1)
    return Case(values.repeat_interleave(40), target.flatten().long(), n_bins=15)


def reversed_order(case: Case) -> Case:
    return case._replace(preds=case.preds.flip(0), target=case.target.flip(0))


def logits(n: int = 2_000, scale: float = 1.5, dtype: torch.dtype = torch.float32) -> Case:
    """Return logits of three classes that are `scale` times too large."""
    rng = np.random.default_rng(1)
    z = 1.5 * rng.standard_normal((n, 3))
    target = (z + rng.gumbel(size=(n, 3))).argmax(-1)
    return Case(torch.from_numpy(scale * z).to(dtype), torch.from_numpy(target))


def multiclass() -> Case:
    case = logits()
    return case._replace(preds=case.preds.softmax(-1))


def two_labels() -> Case:
    """Return the rows of the multi-class predictions whose target is 0 or 1."""
    preds, target, *_ = multiclass()
    return Case(preds[target < 2], target[target < 2])


def ignored() -> Case:
    """Return the multi-class predictions, where every fifth target is -1."""
    case = multiclass()
    return case._replace(target=torch.where(torch.arange(2_000) % 5 > 0, case.target, -1), ignore_index=-1)


CASES: dict[tuple[str, str], Callable[[], Case]] = {
    ("ECE", "binary"): binary,
    ("ECE", "200 probabilities of 1"): with_ones,
    ("ECE", "probabilities on bin edges"): on_edges,
    ("ECE", "one value of 1.0000001"): above_one,
    ("ECE", "70,000 rows in half precision"): lambda: binary(70_000, dtype=torch.float16),
    ("ECE", "three classes"): multiclass,
    ("ECE", "three classes, two in the labels"): two_labels,
    ("ECE", "three classes, ignored rows"): ignored,
    ("MCE", "binary"): binary,
    ("MCE", "200 probabilities of 1"): with_ones,
    ("ACE", "binary"): binary,
    ("ACE", "ties"): tied,
    ("ACE", "ties, rows reversed"): lambda: reversed_order(tied()),
    ("Brier score", "binary"): binary,
    ("Brier score", "three classes"): multiclass,
    ("smECE", "binary"): binary,
    ("smECE", "three classes"): multiclass,
    ("MCB", "binary"): binary,
    ("MCB", "ties"): tied,
    ("MCB", "ties, rows reversed"): lambda: reversed_order(tied()),
    ("temperature", "three classes, float64"): lambda: logits(dtype=torch.float64),
    ("temperature", "three classes, float32"): logits,
    ("mean prediction / mean outcome", "binary"): binary,
}
"""Metrics and predictions. ECE, MCE, ACE and smECE: expected, maximum, adaptive and smooth calibration error.

MCB: miscalibration component of the Brier score after isotonic regression.
"""


# Packages -----------------------------------------------------------------------------------------------------------


def torchcalib(metric: str, case: Case) -> float:
    given: dict[str, Any] = {"task": "multiclass" if case.multiclass else "binary"}
    if metric == "temperature":
        from torchcalib.calibration import TemperatureScaling

        return TemperatureScaling().fit(case.preds, case.target, from_logits=True, **given).temperature.item()
    if metric == "mean prediction / mean outcome":
        return (case.preds.double().mean() / case.target.double().mean()).item()
    if metric == "MCB":
        return F.corp(case.preds, case.target, **given).mcb.item()
    function = {"ECE": F.ece, "MCE": F.mce, "ACE": F.ace, "Brier score": F.brier_score, "smECE": F.smece}[metric]
    if metric in ("ECE", "MCE", "ACE"):
        given["n_bins"] = case.n_bins
    if case.ignore_index is not None:
        given["ignore_index"] = case.ignore_index
    return function(case.preds, case.target, **given).item()


def torchmetrics(metric: str, case: Case) -> float:
    ece = peers.torchmetrics_ece if case.multiclass else peers.torchmetrics_binary_ece
    options = {"norm": {"ECE": "l1", "MCE": "max"}[metric], "ignore_index": case.ignore_index}
    return ece(case.preds, case.target, case.n_bins, **options).item()


def torch_uncertainty(metric: str, case: Case) -> float:
    from torch_uncertainty.metrics import classification as metrics
    from torch_uncertainty.post_processing import TemperatureScaler

    given = {"task": "multiclass", "num_classes": 3} if case.multiclass else {"task": "binary"}
    if metric == "temperature":
        scaler = TemperatureScaler()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(case.preds, case.target), batch_size=2_000)
        scaler.fit(loader, progress=False)
        return scaler.temperature[0].item()
    if metric == "Brier score":
        return float(metrics.BrierScore(num_classes=3 if case.multiclass else 1)(case.preds, case.target))
    if metric == "smECE":
        return float(metrics.SmoothCalibrationError()(case.preds, case.target))
    norm = "max" if metric == "MCE" else "l1"
    options = {"num_bins": case.n_bins, "norm": norm, "adaptive": metric == "ACE", "ignore_index": case.ignore_index}
    return float(metrics.CalibrationError(**given, **options)(case.preds, case.target))


def netcal(metric: str, case: Case) -> float:
    from netcal.metrics import ECE, MCE
    from netcal.scaling import TemperatureScaling

    p, y = case.arrays
    if metric == "temperature":
        scaling = TemperatureScaling()
        scaling.fit(case.preds.softmax(-1).numpy(), y)
        return 1 / float(np.asarray(scaling.temperature).item())
    if metric == "ACE":
        return float(ECE(case.n_bins, equal_intervals=False).measure(p, y))
    return float({"ECE": ECE, "MCE": MCE}[metric](case.n_bins).measure(p, y))


def relplot(metric: str, case: Case) -> float:
    from relplot.metrics import multiclass_logits_to_confidences

    p, y = case.preds, case.target
    if case.multiclass:
        p, y = map(torch.from_numpy, multiclass_logits_to_confidences(*case.arrays, probs=True))
    return peers.relplot_ece(p, y, case.n_bins) if metric == "ECE" else peers.relplot_smece(p, y)


def uncertainty_calibration(metric: str, case: Case) -> float:
    from calibration import get_ece, get_ece_em

    p, y = case.arrays
    return float({"ECE": get_ece, "ACE": get_ece_em}[metric](p, y, num_bins=case.n_bins))


def probmetrics(metric: str, case: Case) -> float:
    from probmetrics.metrics import Metrics

    if metric == "temperature":
        return 1 / peers.temperature_by_bisection(case.preds, case.target)
    names = {"ECE": f"ece-{case.n_bins}", "MCE": f"mce-{case.n_bins}", "Brier score": "brier", "smECE": "smece"}
    metrics = Metrics.from_names([names[metric]])
    probs = case.preds if case.multiclass else torch.stack((1 - case.preds, case.preds), -1)
    (value,) = metrics.compute_all_from_labels_probs(case.target, probs).values()
    return float(value)


def mapie(metric: str, case: Case) -> float:
    from mapie.metrics.calibration import expected_calibration_error

    assert metric == "ECE"
    p, y = case.arrays
    correct = (p.argmax(-1) == y).astype(int) if case.multiclass else y  # the argument is called `y_true`
    return float(expected_calibration_error(correct, p, num_bins=case.n_bins))


def scikit_learn(metric: str, case: Case) -> float:
    from sklearn.metrics import brier_score_loss

    p, y = case.arrays
    if metric == "temperature":
        from sklearn.base import BaseEstimator, ClassifierMixin
        from sklearn.calibration import CalibratedClassifierCV
        from sklearn.frozen import FrozenEstimator

        class Logits(ClassifierMixin, BaseEstimator):
            """Classifier whose features are its logits."""

            def fit(self, x: Any, y: Any) -> "Logits":
                self.classes_, self.n_features_in_ = np.unique(y), x.shape[1]
                return self

            def decision_function(self, x: Any) -> Any:
                return x

            def predict(self, x: Any) -> Any:
                return x.argmax(-1)

        calibrated = CalibratedClassifierCV(FrozenEstimator(Logits().fit(p, y)), method="temperature").fit(p, y)
        return 1 / float(calibrated.calibrated_classifiers_[0].calibrators[0].beta_)
    assert metric == "Brier score"
    return float(brier_score_loss(y, p))


def scoringrules(metric: str, case: Case) -> float:
    from scoringrules.visualization.reliability import corp_reliability, corp_score_decomposition

    assert metric == "MCB"
    p, y = case.arrays
    calibrated, raw, _ = corp_score_decomposition(*corp_reliability(y.astype(float), p.astype(float)))
    return float(raw - calibrated)


def torcheval(metric: str, case: Case) -> float:
    from torcheval.metrics.functional import weighted_calibration

    assert metric == "mean prediction / mean outcome"
    return float(weighted_calibration(case.preds, case.target))


BINNED = ("ECE", "MCE")
PACKAGES: dict[str, tuple[Callable[[str, Case], float], tuple[str, ...]]] = {
    "torchcalib": (torchcalib, tuple(dict.fromkeys(metric for metric, _ in CASES))),
    "torchmetrics": (torchmetrics, BINNED),
    "torch-uncertainty": (torch_uncertainty, (*BINNED, "ACE", "Brier score", "smECE", "temperature")),
    "netcal": (netcal, (*BINNED, "ACE", "temperature")),
    "relplot": (relplot, ("ECE", "smECE")),
    "uncertainty-calibration": (uncertainty_calibration, ("ECE", "ACE")),
    "probmetrics": (probmetrics, (*BINNED, "Brier score", "smECE", "temperature")),
    "MAPIE": (mapie, ("ECE",)),
    "scikit-learn": (scikit_learn, ("Brier score", "temperature")),
    "scoringrules": (scoringrules, ("MCB",)),
    "torcheval": (torcheval, ("mean prediction / mean outcome",)),
}
"""Call of each package, and the metrics that it has."""
WITHOUT_IGNORE_INDEX = ("netcal", "relplot", "uncertainty-calibration", "probmetrics", "MAPIE")


# --------------------------------------------------------------------------------------------------------------------


def value_of(package: str, metric: str, case: Case) -> Value:
    """Return the value of a package, or the first line of its error.

    Raises:
        ImportError: if the package or one of its requirements is not installed.
    """
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            value = PACKAGES[package][0](metric, case)
    except ImportError:
        raise
    except Exception as error:  # any error of another package is a result
        text = str(error).strip()
        return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    return value if math.isfinite(value) else str(value)


def values_of(package: str) -> dict[str, dict[str, Value]]:
    """Return the values of a package by metric and case."""
    found: dict[str, dict[str, Value]] = {}
    for (metric, name), make in CASES.items():
        case = make()
        if metric not in PACKAGES[package][1]:
            continue
        if case.ignore_index is not None and package in WITHOUT_IGNORE_INDEX:
            continue
        found.setdefault(metric, {})[name] = value_of(package, metric, case)
    return found


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}


def all_values(packages: Collection[str] = tuple(PACKAGES)) -> dict[str, dict[str, Any]]:
    """Return version, date and values of every package, computed now for those of `packages` that are installed.

    The date of computed values is None. Other packages have their recorded values.
    """
    known = recorded()
    for package in packages:
        if package != "torchcalib" and version_of(package) is None:
            continue
        with contextlib.suppress(ImportError):  # of a requirement
            known[package] = {"version": version_of(package), "date": None, "values": values_of(package)}
    return {package: known[package] for package in PACKAGES if package in known}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", choices=(*PACKAGES, []), metavar="package", help=", ".join(PACKAGES))
    found = all_values(parser.parse_args().packages or PACKAGES)
    found.pop("torchcalib", None)  # always computed when the page is built
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for package, entry in found.items():
        entry["date"] = entry["date"] or today
        print(f"{package} {entry['version']}, {entry['date']}")
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
