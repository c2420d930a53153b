"""Predictions for reports, cached reports, and comparisons of reports."""

from dataclasses import replace
from functools import cache, partial
from operator import attrgetter

import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.reporting.building import ReportBuilder

TASKS = ("binary", "multiclass", "multilabel")
# Modes with rank-based lines, the main mode first, and names of these lines
MODES = {"binary": ("positive", "top_label"), "multiclass": ("top_label",), "multilabel": ("classwise",)}
IN_ORDER = ("ace", "tce", "ks", "atb", "mcb", "dsc", "unc")
# Functions of selective prediction, by key in a report
SELECTIVE_NAMES = ("aurc", "eaurc", "augrc", "correctness_auroc", "accuracy_at_coverage", "coverage_at_risk")
SELECTIVE = {name: getattr(F, name) for name in SELECTIVE_NAMES}
# Functions of scores, by key in a report
SCORES = {"nll": F.nll, "brier": F.brier_score, "ecd": F.ecd, "accuracy": F.accuracy}
SCORES |= {"nce": partial(F.nll, normalize="prior"), "nbs": partial(F.brier_score, normalize="prior")}
QUICK = {"with_calibration": False, "with_intervals": False}
QUICK_COMMAND = ("--no-calibration", "--no-intervals")
# Sums of n float64 numbers in two orders differ by at most n eps sum |x|: 2e-13 of the mean for n = 1,000.
SUMS = {"rel": 1e-12, "abs": 1e-12}


def predictions(task, n=200, seed=0):
    """Return logits of 5 classes or labels, and targets that are independent of them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n,) if task == "binary" else (n, 5), generator=generator, dtype=torch.float64)
    shape = (n, 5) if task == "multilabel" else (n,)
    return logits, torch.randint(0, 5 if task == "multiclass" else 2, shape, generator=generator)


def realistic(task, n=300, scale=2.5, seed=0):
    """Return logits that are `scale` times too large, and targets."""
    logits, _ = predictions(task, n, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if task == "multiclass":
        target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    else:
        target = torch.bernoulli(logits.sigmoid(), generator=generator).long()
    return scale * logits, target


def relabelled(target, num_classes, rate=0.2):
    """Replace a fraction `rate` of labels by uniform random labels."""
    g = torch.Generator().manual_seed(2)
    noise = torch.randint(0, num_classes, target.shape, generator=g)
    return torch.where(torch.rand(target.shape, generator=g) < rate, noise, target)


@cache
def miscalibrated_data(task):
    """Return miscalibrated probabilities, for 12 classes or 3 labels, and targets."""
    g = torch.Generator().manual_seed(1)
    if task == "multiclass":
        probs = torch.rand(400, 12, generator=g, dtype=torch.float64).softmax(-1)
        return probs, torch.randint(0, 12, (400,), generator=g)
    probs = torch.rand((400,) if task == "binary" else (400, 3), generator=g, dtype=torch.float64)
    return probs, (torch.rand(probs.shape, generator=g) < probs**2).long()


@cache
def full_report(task):
    """Return a report of `miscalibrated_data` with all sections: calibrators, intervals, a source."""
    builder = ReportBuilder(task=task, n_bins=10)
    builder.update(*miscalibrated_data(task))
    return builder.report(source={"file": "held_out.npz", "preds": "probs"})


@cache
def quick_report(task):
    """Return a report of `predictions` without calibrators and intervals."""
    return tc.report(*predictions(task), task=task, from_logits=True, **QUICK)


@cache
def calibrated_report(task):
    """Return a report of `realistic` with calibrators only."""
    return tc.report(*realistic(task), task=task, from_logits=True, with_intervals=False)


def bare(report, **changes):
    """Return a copy with the table of the main mode only, because figures are slow to draw."""
    main = next(iter(report.tables))
    return replace(report, **{"tables": {main: report.tables[main]}, "tests": {}, **changes})


def assert_values(report, expected, keys=None):
    """Compare values with another report or a dictionary, by default for all keys."""
    for key in expected if keys is None else keys:
        assert report[key] == pytest.approx(expected[key], **SUMS, nan_ok=True), key


def rank_based_values(preds, target, n_bins=15, names=IN_ORDER, **given):
    """Return the values of the rank-based functions, by key in a report."""
    values = {}
    for mode in MODES[given["task"]]:
        of = {**given, "mode": mode}
        found = {"ace": F.ace(preds, target, n_bins=n_bins, **of), "ks": F.ks(preds, target, **of)}
        found["atb"] = F.atb(preds, target, **of)
        if "tce" in names:
            parts = F.corp(preds, target, **of)
            found |= {"tce": F.tce(preds, target, **of), "mcb": parts.mcb, "dsc": parts.dsc, "unc": parts.unc}
        values |= {f"{name}/{mode}": value.item() for name, value in found.items()}
    if "tce" in names:  # targets are labels
        values |= {key: function(preds, target, **given).item() for key, function in SELECTIVE.items()}
    return values


def rank_based_lines(report):
    return {key: report[key] for key in report if key.split("/")[0] in (*IN_ORDER, *SELECTIVE)}


def assert_equal_stages(found, expected):
    """Compare the calibration sections of two reports on the same rows.

    A fit ends when a step changes its loss only by rounding, so that scores agree to about 1e-12. A gain is 100 times
    (1 - ratio of scores), so that gains agree to 1e-9. The tolerance has one more digit.
    """
    for mine, theirs in zip(found.lines, expected.lines, strict=True):
        assert (mine.calibrator, mine.parameters) == (theirs.calibrator, theirs.parameters)
        for name in ("accuracy", "nll", "brier_score", "ece", *["gain"] * (mine is not found.raw)):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-8, abs=1e-8), name
    assert found.raw.nll == pytest.approx(expected.raw.nll, **SUMS)
    for name in ("recommendation.text", "name", "notes", "n_folds", "seed"):
        assert attrgetter(name)(found) == attrgetter(name)(expected), name
