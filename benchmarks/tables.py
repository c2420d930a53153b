"""The tables of the source papers, computed here, beside the numbers that were printed.

    python -m benchmarks.tables                 all of them
    python -m benchmarks.tables tce-2 epsr-1    some; --help names them

Simulated tables come from `torchcalib.simulate`; those of real systems from the recorded data in $TORCHCALIB_DATA (or
../shared/data), and are left out, in words, where it is missing. A number agrees if it rounds to what was printed. The
exit code is 1 if one does not agree that should.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from torchcalib import simulate

DATA = Path(os.environ.get("TORCHCALIB_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


@dataclass(frozen=True)
class Cell:
    """One number.

    Attributes:
        row: what it is of.
        column: what it is.
        value: computed here; None where it cannot be yet.
        printed: with the digits that were printed; None where none are at hand.
        tolerance: how far a number may be off beyond its rounding.
        note: why there is no value, or why it need not agree.
    """

    row: str
    column: str
    value: float | None
    printed: str | None
    tolerance: float = 0.0
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether the value rounds to what was printed; None if there is nothing to compare."""
        if self.value is None or self.printed is None:
            return None
        unit = 10.0 ** int(Decimal(self.printed).as_tuple().exponent)
        return abs(self.value - float(self.printed)) <= unit / 2 * (1 + 1e-6) + self.tolerance

    @property
    def wrong(self) -> bool:
        """Whether it does not agree, and nothing says why."""
        return self.agrees is False and not self.note


def arrays(name: str) -> dict[str, Tensor]:
    """Recorded arrays."""
    with np.load(DATA / name, allow_pickle=False) as loaded:
        return {key: torch.from_numpy(array) for key, array in loaded.items()}


def recorded_answers() -> list[dict]:
    return json.loads((DATA / "expected.json").read_text())


# [ECD] Table I ------------------------------------------------------------------------------------------------------

ECD_1_ECE = {0.0: None, 0.5: "0.170", 2.0: "0.404"}


def ecd_1() -> Iterator[Cell]:
    """[ECD] Table I: ten bins of a simulation, for noise of sigma 0, 0.5 and 2 on the log-odds.

    The printed columns for 0.5 and 2 cannot be reproduced from the text of sec. V-A, which is read literally here; of
    the printed numbers only their ECE are at hand.
    """
    for sigma, printed in ECD_1_ECE.items():
        preds, target = simulate.noisy_evidence(sigma)
        given = {"preds": preds, "target": target, "task": "binary"}
        note = "not to be had from the text" if printed else ""
        yield Cell(f"sigma {sigma:g}", "ECE", tc.ece(**given, n_bins=10).item(), printed, note=note)
        yield Cell(f"sigma {sigma:g}", "ESCE", tc.esce(**given, n_bins=10).item(), None)
        yield Cell(f"sigma {sigma:g}", "ECD", tc.ecd(**given).item(), None)
        table = tc.bin_table(**given, n_bins=10).to_dict()
        for b in range(10):
            name = f"sigma {sigma:g}, bin {b / 10:.1f}-{(b + 1) / 10:.1f}"
            yield Cell(name, "n", float(table["n"][b]), None)
            yield Cell(name, "ESCE", float(table["gap"][b]), None)
            yield Cell(name, "ECD", float(table["ecd"][b]), None)


# [TCE] Tables 2 and 5 -----------------------------------------------------------------------------------------------

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
    """The six metrics of [TCE], ties as in the published code, which parts them."""
    given = {"preds": preds, "target": target, "task": "binary"}
    split = {**given, "ties": "split"}
    values = {
        "TCE": tc.tce(**split),
        "TCE(Q)": tc.tce(**split, bins="equal_mass", n_bins=10),
        "ECE": tc.ece(**given, n_bins=10),
        "ACE": tc.ace(**split, n_bins=10),
        "MCE": tc.mce(**given, n_bins=10),
        "MCE(Q)": tc.mce(**given, n_bins=10, bins="equal_mass"),
    }
    return {name: value.item() for name, value in values.items()}


def tce_2() -> Iterator[Cell]:
    """[TCE] Table 2: a logistic fit tested on another share of positives."""
    for (train, test), printed in TCE_2.items():
        sample = simulate.gaussian_discriminant(train, test)
        values = published(sample.preds, sample.target)
        for name, number in zip(("TCE", "TCE(Q)", "ECE", "ACE"), printed, strict=True):
            yield Cell(f"{train:.0%} vs {test:.0%}", name, values[name], number)


def tce_5() -> Iterator[Cell]:
    """[TCE] Table 5: dogs of ImageNet; two of its five networks are at hand."""
    for model, printed in TCE_5.items():
        data = arrays(f"imagenet_dogs_{model}.npz")
        values = published(data["probs"], data["targets"])
        for name, number in zip(("TCE", "ECE", "ACE", "MCE", "MCE(Q)"), printed, strict=True):
            yield Cell(model, name, values[name], number)
    for model in ("vgg19", "resnet50", "resnet152"):
        yield Cell(model, "all", None, None, note="the predictions are not at hand")


# [EPSR] -------------------------------------------------------------------------------------------------------------

SYSTEMS = ("cal", "mcs", "mcp", "mcps")
EPSR_1 = {  # 100 (NCE - semi-empirical NCE) / NCE, for 200, 2,000 and 20,000 samples of each of the systems
    "true": ("-3 -5 -2", "-7 -10 -5", "4 -2 0", "4 -2 0"),
    "affcaltt": ("0 0 0", "0 0 0", "0 0 0", "0 0 0"),
    "affcalxv": ("1 0 0", "1 0 0", "1 0 0", "0 0 0"),
    "temcaltt": ("1 -1 0", "1 -1 0", "29 28 28", "29 28 28"),
    "temcalxv": ("1 -1 0", "2 -1 0", "29 28 28", "29 28 28"),
    "hiscaltt": ("-6 -8 -9", "-153 -143 -132", "-19 -21 -17", "-62 -84 -82"),
    "hiscalxv": ("-2 -8 -9", "-171 -144 -132", "-15 -21 -17", "-62 -83 -82"),
}

Reference = Callable[[simulate.MismatchedSystems, str], Tensor]
REFERENCES: dict[str, Reference | None] = {
    "true": lambda systems, _: systems.cal,
    # To be filled with what takes the systems and the name of one to its calibrated log-posteriors.
    **dict.fromkeys(("affcaltt", "affcalxv", "temcaltt", "temcalxv", "hiscaltt", "hiscalxv")),
}
NEEDS_CALIBRATOR = "needs a calibrator"


def epsr_1() -> Iterator[Cell]:
    """[EPSR] Table 1: how far the semi-empirical NCE, against reference posteriors, is off the empirical, in percent.

    Each is normalised by its own priors: the empirical by those of the labels, the semi-empirical by the mean of the
    reference posteriors.
    """
    of_size = {n: simulate.mismatched_systems(2, n) for n in (200, 2_000, 20_000)}
    for row, printed in EPSR_1.items():
        reference = REFERENCES[row]
        for system, numbers in zip(SYSTEMS, printed, strict=True):
            for (n, systems), number in zip(of_size.items(), numbers.split(), strict=True):
                name = f"{system} {n}"
                if reference is None:
                    yield Cell(row, name, None, number, note=NEEDS_CALIBRATOR)
                    continue
                given = {"preds": getattr(systems, system), "task": "multiclass"}
                given |= {"from_logits": True, "normalize": "prior"}
                empirical = tc.nll(target=systems.target, **given).item()
                expected = tc.nll(target=reference(systems, system).exp(), **given).item()
                yield Cell(row, name, 100 * (empirical - expected) / empirical, number)


def epsr_curves() -> Iterator[Cell]:
    """[EPSR] sec. 3.1: the systems of its Bayes-risk curves, 100,000 samples; the area of a curve is its score."""
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
            area = tc.bayes_risk_area(log_odds, systems.target, weight=weight, **scores)
            naive = tc.bayes_risk_area(prior_log_odds.expand_as(log_odds), systems.target, weight=weight, **scores)
            yield Cell(name, column, (area / naive).item(), f"{answers[name][column]:.6f}", tolerance=1e-6)


def costs(name: str, num_classes: int) -> tc.CostMatrix:
    """The three cost matrices of [EPSR] sec. 3."""
    if name == "imb":
        return tc.CostMatrix.imbalanced(num_classes)
    matrix = tc.CostMatrix.zero_one(num_classes)
    return matrix.with_reject(0.1) if name == "01r" else matrix


def score(name: str, log_q: Tensor, target: Tensor) -> float | None:
    """A score by the name that the recorded answers give it; None for one that needs a calibrator."""
    given = {"preds": log_q, "target": target, "task": "multiclass", "from_logits": True}
    if match := re.fullmatch(r"nrisk(01r?|imb)", name):
        return tc.bayes_risk(**given, cost=costs(match[1], log_q.shape[-1]), normalize="prior").item()
    if name == "nce":
        return tc.nll(**given, normalize="prior").item()
    if name == "nbs":
        return tc.brier_score(**given, normalize="prior").item()
    if match := re.fullmatch(r"eceMC(\d+)", name):
        return 100 * tc.ece(**given, n_bins=int(match[1]), right=True).item()
    if match := re.fullmatch(r"eceBIN(\d+)", name):
        probs = log_q.log_softmax(-1)[:, 1].exp()
        return 100 * tc.ece(probs, target, task="binary", n_bins=int(match[1]), right=True).item()
    return None


def epsr_scores() -> Iterator[Cell]:
    """[EPSR] sec. 3.2 and 3.3, fig. 5 and 6 (app. for C = 10): scores of the four systems, and their RCL."""
    for entry in recorded_answers():
        if match := re.fullmatch(r"ferrer/synthetic/K(\d+)\|(cal|mcp|mcs|mcps)", entry["case"]):
            classes, system = int(match[1]), match[2]
            systems = simulate.mismatched_systems(classes)
            for name, wanted in entry["value"].items():
                value = score(name, getattr(systems, system), systems.target)
                printed = f"{wanted:.4f}" if isinstance(wanted, float) else None
                note = NEEDS_CALIBRATOR if value is None else ""
                yield Cell(f"C = {classes}, {system}", name, value, printed, tolerance=2e-4, note=note)


def epsr_systems() -> Iterator[Cell]:
    """[EPSR] sec. 3.5, fig. 8 and Table 2, for the systems at hand: as given, and calibrated."""
    for entry in recorded_answers():
        saved = re.fullmatch(r"notebook saved output: (-?[\d.]+)", entry["note"])
        if entry["file"] is None or saved is None:
            continue
        data = arrays(entry["file"])
        kind, name = entry["case"].split("/")
        log_q = data["logits"] if "logits" in data else data["log_probs"]
        value = score(name, log_q, data["targets"]) if kind == "raw" else None
        note = NEEDS_CALIBRATOR if value is None else ""
        yield Cell(f"{entry['file'].removesuffix('.npz')}, {kind}", name, value, saved[1], tolerance=2e-6, note=note)


# --------------------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], Iterator[Cell]]] = {
    "ecd-1": ecd_1,
    "tce-2": tce_2,
    "tce-5": tce_5,
    "epsr-1": epsr_1,
    "epsr-curves": epsr_curves,
    "epsr-scores": epsr_scores,
    "epsr-systems": epsr_systems,
}
NEEDS_DATA = ("tce-5", "epsr-curves", "epsr-scores", "epsr-systems")


def show(table: Callable[[], Iterator[Cell]]) -> list[Cell]:
    """Print a table and return its cells."""
    print(f"\n{table.__doc__}")
    cells = list(table())
    widths = [max(len(text) for text in column) for column in zip(*((c.row, c.column) for c in cells), strict=True)]
    print(f"{'':{widths[0]}}  {'':{widths[1]}}  {'here':>10}  {'printed':>10}")
    for cell in cells:
        value = "-" if cell.value is None else f"{cell.value:.5g}"
        said = {True: "", False: "DIFFERS", None: ""}[cell.agrees]
        line = f"{cell.row:{widths[0]}}  {cell.column:{widths[1]}}  {value:>10}  {cell.printed or '-':>10}"
        print(f"{line}  {said} {cell.note}".rstrip())
    compared = [cell for cell in cells if cell.agrees is not None]
    left = sum(cell.value is None for cell in cells)
    print(f"{sum(bool(cell.agrees) for cell in compared)} of {len(compared)} agree, {left} are not computed")
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help=", ".join(TABLES))
    names = parser.parse_args().tables or list(TABLES)
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    wrong = 0
    for name in names:
        if name in NEEDS_DATA and not (DATA / "expected.json").is_file():
            print(f"\n{name}: left out, its recorded data is not in {DATA}; set TORCHCALIB_DATA")
            continue
        wrong += sum(cell.wrong for cell in show(TABLES[name]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
