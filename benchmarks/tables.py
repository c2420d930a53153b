"""Tables of the source papers, recomputed and printed beside the published numbers.

    python -m benchmarks.tables                 all tables
    python -m benchmarks.tables tce-2 epsr-1    some tables; --help lists them
    python -m benchmarks.tables --save          all tables, also written to benchmarks/results/tables.json

Simulated tables use `benchmarks.simulate`. Tables of real systems, and recorded numbers, require the data in
$TORCHCALIB_DATA (or ../shared/data) and are left out without them. A number agrees if it rounds to the published one.
If a paper has only a figure, or its data are not available, the number was recorded from the authors' code or from
numpy loops, and is marked. The exit code is 1 if a number disagrees without a note.

NCE is the normalised cross-entropy, RCL the relative calibration loss, NLL the negative log-likelihood.
"""

import argparse
import datetime
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import simulate
from torchcalib.calibration.calibrator import Calibrator

DATA = Path(os.environ.get("TORCHCALIB_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
SAVED = Path(__file__).parent / "results" / "tables.json"


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        row: row of the table.
        column: column of the table.
        value: recomputed value, or None.
        published: published number with its printed digits, or None.
        recorded: True if `published` was computed by other code instead of printed.
        tolerance: accepted difference in addition to rounding.
        note: reason why the value is missing or may disagree.
    """

    row: str
    column: str
    value: float | None
    published: str | None
    recorded: bool = False
    tolerance: float = 0.0
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether the value rounds to the published number; None if one is missing."""
        if self.value is None or self.published is None:
            return None
        exponent = Decimal(self.published).as_tuple().exponent
        if not isinstance(exponent, int):
            return self.value == float(self.published)
        return abs(self.value - float(self.published)) <= 10.0**exponent / 2 * (1 + 1e-6) + self.tolerance

    @property
    def wrong(self) -> bool:
        """Whether the value disagrees without a note."""
        return self.agrees is False and not self.note


def arrays(name: str) -> dict[str, Tensor]:
    with np.load(DATA / name, allow_pickle=False) as loaded:
        return {key: torch.from_numpy(array) for key, array in loaded.items()}


@cache
def recorded_answers() -> list[dict]:
    """Return all recorded answers, or an empty list without the data."""
    path = DATA / "expected.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def recorded_answer(file: str | None, case: str) -> Any:
    found = (entry["value"] for entry in recorded_answers() if (entry["file"], entry["case"]) == (file, case))
    return next(found, None)


# [ECD] Table I ------------------------------------------------------------------------------------------------------

ECD_1_ECE = {0.0: None, 0.5: "0.170", 2.0: "0.404"}


def ecd_1() -> Iterator[Cell]:
    """[ECD] Table I: ten bins of simulated data with noise of sigma 0, 0.5 and 2 on the log-odds.

    The printed columns for 0.5 and 2 do not follow from the text of sec. V-A. Only their ECE is available. The
    recorded numbers follow the text, and were computed by numpy loops.
    """
    for sigma, printed in ECD_1_ECE.items():
        preds, target = simulate.noisy_evidence(sigma)
        given = {"preds": preds, "target": target, "task": "binary"}
        answer = recorded_answer("sim_ecd.npz", f"ecd/fixture/{sigma:g}".replace(".", "p"))
        whole = {
            "ECE": F.ece(**given, n_bins=10).item(),
            "ESCE": F.esce(**given, n_bins=10).item(),
            "ECD": F.ecd(**given).item(),
        }
        if printed is not None:
            yield Cell(f"sigma {sigma:g}", "ECE", whole["ECE"], printed, note="does not follow from the text")
        for name, value in whole.items():
            yield Cell(f"sigma {sigma:g}", name, value, answer and f"{answer[name]:.8f}", recorded=True)
        table = F.calibration_curve(**given, n_bins=10).to_dict()
        for b in range(10):
            for name, column, key in (("n", "n", "cnt"), ("ESCE", "gap", "esce"), ("ECD", "ecd", "ecd")):
                row = f"sigma {sigma:g}, bin {b / 10:.1f}-{(b + 1) / 10:.1f}"
                number = answer and (str(answer[key][b]) if key == "cnt" else f"{answer[key][b]:.8f}")
                yield Cell(row, name, float(table[column][b]), number, recorded=True)


# [TCE] Tables 1, 2 and 5 --------------------------------------------------------------------------------------------

TCE_1 = {  # options of the bins; total error and mean error within bins
    "PAVA": ({"bins": "pava"}, "0.040", "0.132"),
    "PAVA-BC": ({"bins": "pava_bc"}, "0.042", "0.077"),
    "equal mass": ({"bins": "equal_mass", "n_bins": 10}, "0.048", "0.047"),
}
TCE_2 = {  # TCE, TCE(Q), ECE, ACE
    (0.50, 0.50): ("7.28", "10.88", "0.0138", "0.0150"),
    (0.50, 0.40): ("96.10", "96.47", "0.0963", "0.0951"),
    (0.50, 0.60): ("98.83", "98.93", "0.1097", "0.1096"),
    (0.01, 0.01): ("3.40", "0.18", "0.0017", "0.0031"),
    (0.01, 0.00): ("95.50", "68.73", "0.0094", "0.0094"),
    (0.01, 0.02): ("92.32", "89.73", "0.0139", "0.0139"),
}
TCE_5 = {  # TCE, ECE, ACE, MCE, MCE(Q)
    "alexnet": ("42.74", "0.0070", "0.0070", "0.1496", "0.0528"),
    "resnet18": ("29.93", "0.0042", "0.0042", "0.2368", "0.0350"),
}


def published(preds: Tensor, target: Tensor) -> dict[str, float]:
    """Return the six metrics of [TCE]. Ties are split between bins, as in the published code."""
    given = {"preds": preds, "target": target, "task": "binary"}
    split = {**given, "ties": "split"}
    values = {
        "TCE": F.tce(**split),
        "TCE(Q)": F.tce(**split, bins="equal_mass", n_bins=10),
        "ECE": F.ece(**given, n_bins=10),
        "ACE": F.ace(**split, n_bins=10),
        "MCE": F.mce(**given, n_bins=10),
        "MCE(Q)": F.mce(**given, n_bins=10, bins="equal_mass"),
    }
    return {name: value.item() for name, value in values.items()}


@cache
def random_forest() -> tuple[Tensor, Tensor]:
    """Return predictions and labels of a random forest for 1,931 test samples, one tenth of them positive.

    The data are simulated, with the size of the satimage data. The forest and the split are those of the published
    code.
    """
    features, labels = make_classification(6_435, 36, n_informative=12, weights=[0.9], random_state=0)
    train, test, train_target, target = train_test_split(features, labels, test_size=0.3, random_state=0)
    forest = RandomForestClassifier(max_depth=10, random_state=0).fit(train, train_target)
    return torch.from_numpy(forest.predict_proba(test)[:, 1]), torch.from_numpy(target)


def tce_1() -> Iterator[Cell]:
    """[TCE] Table 1 in kind: estimation errors of three kinds of bins, for the predictions of a random forest.

    The satimage data of the paper are not available. The data are simulated instead, with the same forest, split and
    bins. The numbers are not comparable with the printed ones, but their order is the same.
    """
    preds, target = random_forest()
    for row, (bins, *printed) in TCE_1.items():
        for column, norm, number in zip(("total", "within bins"), ("l1", "mean"), printed, strict=True):
            value = F.estimation_error(preds, target, task="binary", ties="split", norm=norm, **bins).item()
            yield Cell(row, column, value, None, note=f"{number} is printed, for satimage")


def tce_2() -> Iterator[Cell]:
    """[TCE] Table 2: logistic fit, tested with another frequency of positives."""
    for (train, test), printed in TCE_2.items():
        sample = simulate.gaussian_discriminant(train, test)
        values = published(sample.preds, sample.target)
        for name, number in zip(("TCE", "TCE(Q)", "ECE", "ACE"), printed, strict=True):
            yield Cell(f"{train:.0%} vs {test:.0%}", name, values[name], number)


def tce_5() -> Iterator[Cell]:
    """[TCE] Table 5: dogs of ImageNet. The predictions of two of its five networks are available."""
    for model, printed in TCE_5.items():
        file = f"imagenet_dogs_{model}.npz"
        data = arrays(file)
        values = published(data["probs"], data["targets"])
        for name, number in zip(("TCE", "ECE", "ACE", "MCE", "MCE(Q)"), printed, strict=True):
            yield Cell(model, name, values[name], number)
        yield Cell(model, "TCE(Q)", values["TCE(Q)"], f"{recorded_answer(file, 'tceq'):.3f}", recorded=True)
    for model in ("vgg19", "resnet50", "resnet152"):
        yield Cell(model, "all", None, None, note="predictions not available")


# [EPSR] -------------------------------------------------------------------------------------------------------------

SYSTEMS = ("cal", "mcs", "mcp", "mcps")
EPSR_1 = {  # 100 (NCE - semi-empirical NCE) / NCE, for 200, 2,000 and 20,000 samples of each system
    "true": ("-3 -5 -2", "-7 -10 -5", "4 -2 0", "4 -2 0"),
    "affcaltt": ("0 0 0", "0 0 0", "0 0 0", "0 0 0"),
    "affcalxv": ("1 0 0", "1 0 0", "1 0 0", "0 0 0"),
    "temcaltt": ("1 -1 0", "1 -1 0", "29 28 28", "29 28 28"),
    "temcalxv": ("1 -1 0", "2 -1 0", "29 28 28", "29 28 28"),
    "hiscaltt": ("-6 -8 -9", "-153 -143 -132", "-19 -21 -17", "-62 -84 -82"),
    "hiscalxv": ("-2 -8 -9", "-171 -144 -132", "-15 -21 -17", "-62 -83 -82"),
}

CALIBRATORS: dict[str, Calibrator] = {
    "aff": tc.AffineScaling(),
    "tem": tc.TemperatureScaling(),
    "his": tc.HistogramBinning(n_bins=15, right=True, empty="zero"),
}


@cache
def published_folds(num_classes: int, n: int) -> dict[tuple[str, str], Tensor]:
    """Return the folds of the published experiments, by system and calibrator.

    scikit-learn drew all folds from numpy's global generator with seed 0, after the features. The experiments had two
    more systems, whose folds are drawn but not used. Histogram binning is for two classes.
    """
    target = simulate.mismatched_systems(num_classes, n).target.numpy()
    generator = np.random.RandomState(0)
    generator.standard_normal((len(target), num_classes))
    folds = {}
    for system in ("cal", "mcp", "mc1", "mc1p", "mcs", "mcps"):
        for calibrator in ("aff", "tem", "his") if num_classes == 2 else ("aff", "tem"):
            at = torch.zeros(len(target), dtype=torch.int64)
            split = StratifiedKFold(5, shuffle=True, random_state=generator).split(target, target)
            for fold, (_, inside) in enumerate(split):
                at[inside] = fold
            folds[system, calibrator] = at
    return folds


def calibration(log_q: Tensor, target: Tensor, calibrator: str, **trained: Any) -> dict[str, Any]:
    """Return arguments of `cross_val_calibrate`. Histogram binning gets the log-odds of the second class."""
    preds, task = (log_q[:, 1] - log_q[:, 0], "binary") if calibrator == "his" else (log_q, "multiclass")
    given = {"preds": preds, "target": target, "task": task, "from_logits": True}
    return given | {"calibrator": CALIBRATORS[calibrator], **trained}


def nce(preds: Tensor, target: Tensor, **given: Any) -> float:
    """Return the normalised cross-entropy of logits; with a calibrator as `reference` the semi-empirical one."""
    return tc.expected_score(
        preds, target, **{"task": "multiclass", "from_logits": True, **given}, normalize="prior"
    ).item()


def epsr_1() -> Iterator[Cell]:
    """[EPSR] Table 1: difference of the empirical and the semi-empirical NCE, in percent of the empirical NCE.

    Each is normalised by its own priors: class frequencies of the labels, or means of the reference posteriors.
    The references are the true posteriors, and affine, temperature and histogram calibration, fitted to the test data
    (tt) or cross-validated (xv).
    """
    of_size = {n: simulate.mismatched_systems(2, n) for n in (200, 2_000, 20_000)}
    for row, printed in EPSR_1.items():
        for system, numbers in zip(SYSTEMS, printed, strict=True):
            for (n, systems), number in zip(of_size.items(), numbers.split(), strict=True):
                log_q = getattr(systems, system)
                empirical = nce(log_q, systems.target)
                if row == "true":
                    semi_empirical = nce(log_q, systems.cal.exp())
                else:
                    folds = published_folds(2, n)[system, row[:3]]
                    semi_empirical = score(f"semiemp_ce_{row[:3]}_{row[-2:]}", log_q, systems.target, folds)
                yield Cell(row, f"{system} {n}", 100 * (empirical - semi_empirical) / empirical, number)


def epsr_curves() -> Iterator[Cell]:
    """[EPSR] sec. 3.1: scores of 100,000 samples as areas under their Bayes-risk curves."""
    answers = {e["case"].split("|")[1]: e["value"] for e in recorded_answers() if "sec3.1|" in e["case"]}
    settings = {
        "cal": ("cal", {}),
        "mcs-o": ("mcs", {"scale": 2.0}),
        "mcs-u": ("mcs", {"scale": 0.48}),
        "cal-h": ("cal", {"variance": 0.19}),
    }
    for name, (system, given) in settings.items():
        systems = simulate.mismatched_systems(2, 100_000, prior=0.6, **given)
        log_q = getattr(systems, system)
        scores = {"task": "binary", "from_logits": True}
        log_odds, prior_log_odds = log_q[:, 1] - log_q[:, 0], torch.tensor([0.6, 0.4], dtype=log_q.dtype).logit()[1]
        for column, weight in (("nce", "uniform"), ("nbs", "beta22")):
            area = F.bayes_risk_area(log_odds, systems.target, weight=weight, **scores)
            naive = F.bayes_risk_area(prior_log_odds.expand_as(log_odds), systems.target, weight=weight, **scores)
            wanted = f"{answers[name][column]:.6f}"
            yield Cell(name, column, (area / naive).item(), wanted, recorded=True, tolerance=1e-6)


def costs(name: str, num_classes: int) -> tc.CostMatrix:
    """Return one of the three cost matrices of [EPSR] sec. 3."""
    if name == "imb":
        return tc.CostMatrix.imbalanced(num_classes)
    matrix = tc.CostMatrix.zero_one(num_classes)
    return matrix.with_reject(0.1) if name == "01r" else matrix


EPSRS = {"NRisk-01": "nrisk01", "NRisk-01r": "nrisk01r", "NRisk-im": "nriskimb", "NCE": "nce", "NBS": "nbs"}
ECES = {"ECEmc": "eceMC15", "ECEbin": "eceBIN15"}


def scores_of(
    systems: Mapping[str, Tensor], target: Tensor, names: Mapping[str, str] = EPSRS
) -> dict[str, dict[str, float]]:
    """Return scores of several systems by the names of [EPSR] sec. 3, as in fig. 5, fig. 8 and Table 2.

    Args:
        systems: log-posteriors `(N, C)` by the name of the system.
        target: labels `(N,)`.
        names: `EPSRS`, or `ECES` for the calibration errors in percent. ECEbin is for two classes.
    """
    return {system: {name: score(of, log_q, target) for name, of in names.items()} for system, log_q in systems.items()}


def relative_losses_of(systems: Mapping[str, Tensor], target: Tensor) -> dict[str, dict[str, float]]:
    """Return the relative calibration losses (RCL) of [EPSR] fig. 6 in percent for several systems.

    Names such as "CE, aff, xv" contain the score (cross-entropy CE, Brier score BS), the calibrator (affine,
    temperature or, for two classes, histogram) and the training (xv: cross-validated; tt: on the test data).
    """
    found = {}
    for system, log_q in systems.items():
        kinds = list(CALIBRATORS)[: 3 if log_q.shape[-1] == 2 else 2]
        found[system] = {
            f"{of.upper()}, {kind}, {how}": score(f"rcl_{of}_{kind}_{how}", log_q, target)
            for of, kind, how in product(SCORES, kinds, ("xv", "tt"))
        }
    return found


def stages_of(log_q: Tensor, target: Tensor, folds: Tensor | str = "stratified") -> dict[str, Tensor]:
    """Return the log-posteriors of the systems of [EPSR] Table 2: raw, cal, calt and, for two classes, calp."""
    kinds = ("raw", "cal", "calt", "calp") if log_q.shape[-1] == 2 else ("raw", "cal", "calt")
    return {kind: calibrated_system(kind, log_q, target, folds) for kind in kinds}


def score(name: str, log_q: Tensor, target: Tensor, folds: Tensor | str = "stratified") -> float:
    """Return a score by its name in the recorded answers.

    `rcl_ce_aff_xv` is the relative calibration loss (or `semiemp`: the semi-empirical NCE) of the cross-entropy (or
    `bs`: Brier score) and affine calibration (`tem`, `his`), cross-validated (or `tt`: fitted to the test data).
    """
    if match := re.fullmatch(r"(rcl|semiemp)_(ce|bs)_(aff|tem|his)_(xv|tt)", name):
        what, of, calibrator, how = match.groups()
        trained = {"train_on_test": True} if how == "tt" else {"folds": folds}
        given = calibration(log_q, target, calibrator, **trained)
        if what == "rcl":
            return tc.relative_calibration_loss(**given, score=SCORES[of]).item()
        return nce(reference=given.pop("calibrator"), **given)
    given = {"preds": log_q, "target": target, "task": "multiclass", "from_logits": True}
    if match := re.fullmatch(r"nrisk(01r?|imb)", name):
        return F.bayes_risk(**given, cost=costs(match[1], log_q.shape[-1]), normalize="prior").item()
    if name == "nce":
        return nce(log_q, target)
    if name == "nbs":
        return F.brier_score(**given, normalize="prior").item()
    if match := re.fullmatch(r"eceMC(\d+)", name):
        return 100 * F.ece(**given, n_bins=int(match[1]), right=True).item()
    if match := re.fullmatch(r"eceBIN(\d+)", name):
        probs = log_q.log_softmax(-1)[:, 1].exp()
        return 100 * F.ece(probs, target, task="binary", n_bins=int(match[1]), right=True).item()
    raise KeyError(name)


SCORES = {"ce": "nll", "bs": "brier"}
FLOAT32_FIT = 0.02  # tolerance in percent for the published RCL, whose float32 fits stop early


def epsr_scores() -> Iterator[Cell]:
    """[EPSR] sec. 3.2 and 3.3, fig. 5 and 6 (app. for C = 10): scores of the four systems, and their RCL in percent.

    aff, tem and his are affine, temperature and histogram calibration, cross-validated (xv) or fitted to the test data
    (tt). semiemp is the semi-empirical NCE. The numbers are from the authors' code, because the paper has figures.
    """
    for entry in recorded_answers():
        match = re.fullmatch(r"ferrer/synthetic/K(\d+)\|(cal|mcp|mcs|mcps)", entry["case"])
        if match is None:
            continue
        classes, system = int(match[1]), match[2]
        systems = simulate.mismatched_systems(classes)
        log_q, target = getattr(systems, system), systems.target
        for name, wanted in entry["value"].items():
            kind = name.split("_")[0]
            folds = published_folds(classes, 200 * classes)[system, name.split("_")[2]] if "_" in name else ""
            value = score(name, log_q, target, folds)
            tolerance = {"rcl": FLOAT32_FIT, "semiemp": 5e-4}.get(kind, 2e-4)
            yield Cell(f"C = {classes}, {system}", name, value, f"{float(wanted):.4f}", True, tolerance)


def calibrated_system(kind: str, log_q: Tensor, target: Tensor, folds: Tensor | str) -> Tensor:
    """Return log-posteriors of a system, raw or after affine, temperature or isotonic calibration (on the test set)."""
    given = {"target": target, "from_logits": True}
    if kind == "calp":
        log_odds = log_q[:, 1] - log_q[:, 0]
        after = tc.cross_val_calibrate(
            log_odds, task="binary", calibrator=tc.IsotonicCalibration(), train_on_test=True, **given
        )
        return torch.nn.functional.logsigmoid(torch.stack((-after, after), -1))
    if kind == "raw":
        return log_q
    calibrator = {"cal": tc.AffineScaling(), "calt": tc.TemperatureScaling()}[kind]
    return tc.cross_val_calibrate(log_q, task="multiclass", calibrator=calibrator, folds=folds, **given)


def epsr_systems() -> Iterator[Cell]:
    """[EPSR] sec. 3.5, fig. 8 and Table 2, for the available systems: raw and calibrated.

    cal and calt are affine and temperature calibration, cross-validated. calp is isotonic, fitted to the test data.
    rcl_ce_dxv is the RCL of affine calibration. ECE and RCL are in percent.
    """
    systems: dict[tuple[str, str], Tensor] = {}
    for entry in recorded_answers():
        saved = re.fullmatch(r"notebook saved output: (-?[\d.]+)", entry["note"])
        if entry["file"] is None or saved is None:
            continue
        kind, name = entry["case"].split("/")
        data = arrays(entry["file"])
        # The published softmax has the precision of the file.
        log_q, target = data.get("logits", data.get("log_probs")).log_softmax(-1).double(), data["targets"].long()
        if name == "rcl_ce_dxv":
            value = tc.relative_calibration_loss(
                log_q, target, task="multiclass", from_logits=True, folds=data["fold_seed0"]
            ).item()
        else:
            key = entry["file"], kind
            if key not in systems:
                systems[key] = calibrated_system(kind, log_q, target, data["fold_seed0"])
            value = score(name, systems[key], target)
        yield Cell(f"{entry['file'].removesuffix('.npz')}, {kind}", name, value, saved[1], tolerance=2e-6)
    yield Cell("other systems of Table 2", "all", None, None, note="predictions not available")


# --------------------------------------------------------------------------------------------------------------------

TITLES = {
    "ecd-1": "ECD, Table I: ten bins of simulated data",
    "tce-1": "TCE, Table 1: estimation errors of bins, for other data",
    "tce-2": "TCE, Table 2: logistic regression with another class frequency",
    "tce-5": "TCE, Table 5: dogs of ImageNet",
    "epsr-1": "EPSR, Table 1: empirical and semi-empirical cross-entropy",
    "epsr-curves": "EPSR, section 3.1: areas under Bayes-risk curves",
    "epsr-scores": "EPSR, sections 3.2 and 3.3: scores of simulated systems",
    "epsr-systems": "EPSR, section 3.5 and Table 2: scores of real systems",
}
FUNCTIONS = (ecd_1, tce_1, tce_2, tce_5, epsr_1, epsr_curves, epsr_scores, epsr_systems)
TABLES: dict[str, Callable[[], Iterator[Cell]]] = dict(zip(TITLES, FUNCTIONS, strict=True))
NEEDS_DATA = ("tce-5", "epsr-curves", "epsr-scores", "epsr-systems")


def show(table: Callable[[], Iterator[Cell]]) -> list[Cell]:
    print(f"\n{table.__doc__}")
    cells = list(table())
    for cell in cells:
        value = "-" if cell.value is None else f"{cell.value:.5g}"
        source = "recorded" if cell.recorded and cell.published else ""
        verdict = "DIFFERS" if cell.agrees is False else ""
        print(
            f"{cell.row:32} {cell.column:16} {value:>10} {cell.published or '-':>12} {source:8} {verdict} {cell.note}"
        )
    compared = [cell.agrees for cell in cells if cell.agrees is not None]
    print(f"{sum(compared)} of {len(compared)} numbers agree")
    return cells


def save(cells: dict[str, list[Cell]]) -> None:
    """Write tables, the version and the date to `SAVED`."""
    content = {
        "torchcalib": tc.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tables": {name: [_compact(cell) for cell in table] for name, table in cells.items()},
    }
    SAVED.write_text(json.dumps(content, indent=None, separators=(",", ":")).replace("],[", "],\n[") + "\n")


def saved() -> tuple[str, dict[str, list[Cell]]]:
    """Return the date and the tables of `SAVED`."""
    content = json.loads(SAVED.read_text(encoding="utf-8"))
    return content["date"], {name: [Cell(*cell) for cell in table] for name, table in content["tables"].items()}


def _compact(cell: Cell) -> list[Any]:
    value = cell.value
    if value is not None and math.isfinite(value):
        value = float(f"{value:.10g}")
    return [cell.row, cell.column, value, cell.published, cell.recorded, cell.tolerance, cell.note]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help=", ".join(TABLES))
    parser.add_argument(
        "--save", action="store_true", help=f"write all tables to {SAVED.name}, if the data is available"
    )
    chosen = parser.parse_args()
    names = chosen.tables or list(TABLES)
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    if chosen.save and (len(names) < len(TABLES) or not (DATA / "expected.json").is_file()):
        parser.error("--save must have all tables and their data")
    cells = {}
    for name in names:
        if name in NEEDS_DATA and not (DATA / "expected.json").is_file():
            print(f"\n{name}: left out, because its data is not in {DATA}; set TORCHCALIB_DATA")
            continue
        cells[name] = show(TABLES[name])
    if chosen.save:
        save(cells)
    return int(any(cell.wrong for table in cells.values() for cell in table))


if __name__ == "__main__":
    sys.exit(main())
