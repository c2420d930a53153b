"""Predictions for reports, reports that are made once for all tests, and what of two reports must be equal."""

from functools import cache

import pytest
import torch

import torchcalib as tc
from torchcalib.report import ReportBuilder

TASKS = ("binary", "multiclass", "multilabel")
REDUCTIONS = {"binary": ("positive_class", "top_label"), "multiclass": ("top_label",), "multilabel": ("classwise",)}
"""What is put in order, the main one first."""
IN_ORDER = ("ace", "tce", "ks", "mcb", "dsc", "unc")
"""Names of what is read from the sample in order."""
QUICK = {"with_calibration": False, "with_intervals": False}
QUICK_COMMAND = ("--no-calibration", "--no-intervals")
SUMS = {"rel": 1e-12, "abs": 1e-12}
"""Two sums of n float64 numbers differ by n eps of the sum of their sizes at most: 2e-13 of the mean for n = 1,000."""


def predictions(task, n=200, seed=0):
    """Logits of 5 classes or labels, and targets that have nothing to do with them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n,) if task == "binary" else (n, 5), generator=generator, dtype=torch.float64)
    shape = (n, 5) if task == "multilabel" else (n,)
    return logits, torch.randint(0, 5 if task == "multiclass" else 2, shape, generator=generator)


def realistic(task, n=300, scale=2.5, seed=0):
    """Logits that are `scale` times too large."""
    logits, _ = predictions(task, n, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if task == "multiclass":
        target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    else:
        target = torch.bernoulli(logits.sigmoid(), generator=generator).long()
    return scale * logits, target


@cache
def off(task):
    """Probabilities, of 12 classes or 3 labels, that are too large, and targets."""
    g = torch.Generator().manual_seed(1)
    if task == "multiclass":
        probs = torch.rand(400, 12, generator=g, dtype=torch.float64).softmax(-1)
        return probs, torch.randint(0, 12, (400,), generator=g)
    probs = torch.rand((400,) if task == "binary" else (400, 3), generator=g, dtype=torch.float64)
    return probs, (torch.rand(probs.shape, generator=g) < probs**2).long()


@cache
def full(task):
    """The report of `off` with all there is: calibrators, intervals, a source."""
    builder = ReportBuilder(task=task, n_bins=10)
    builder.update(*off(task))
    return builder.report(source={"file": "held_out.npz", "preds": "probs"})


@cache
def quick(task):
    """The report of `predictions` without calibrators and intervals."""
    return tc.report(*predictions(task), task=task, from_logits=True, **QUICK)


@cache
def calibrated(task):
    """The report of `realistic` with calibrators alone."""
    return tc.report(*realistic(task), task=task, from_logits=True, with_intervals=False)


def values_are(report, expected, keys=None):
    """Hold values of lines, by default all, against those of another report or of a dictionary."""
    for key in expected if keys is None else keys:
        assert report[key] == pytest.approx(expected[key], **SUMS, nan_ok=True), key


def values_in_order(preds, target, n_bins=15, names=IN_ORDER, **given):
    """What the functions of samples in order say, by the keys of a report."""
    values = {}
    for reduction in REDUCTIONS[given["task"]]:
        of = {**given, "reduction": reduction}
        found = {"ace": tc.ace(preds, target, n_bins=n_bins, **of), "ks": tc.ks(preds, target, **of)}
        if "tce" in names:
            parts = tc.corp(preds, target, **of)
            found |= {"tce": tc.tce(preds, target, **of), "mcb": parts.mcb, "dsc": parts.dsc, "unc": parts.unc}
        values |= {f"{name}/{reduction}": value.item() for name, value in found.items()}
    return values


def ordered(report):
    """Its lines that are read from the sample in order, by key."""
    return {key: report[key] for key in report if key.split("/")[0] in IN_ORDER}


def stages_are_equal(found, expected):
    """Hold what calibrators gain against the same, fitted to the same rows that came in another way.

    A fit ends where a step changes its loss by rounding alone, so that scores agree to some 1e-12 and gains, which are
    100 times a difference of their ratio from 1, to 1e-9; a few digits are left to spare.
    """
    assert [(g.score, g.calibrator) for g in found.gains] == [(g.score, g.calibrator) for g in expected.gains]
    assert found.raw == pytest.approx(expected.raw, **SUMS)
    for name in ("value", "rcl"):
        mine, theirs = ([getattr(gain, name) for gain in stage.gains] for stage in (found, expected))
        assert mine == pytest.approx(theirs, rel=1e-8, abs=1e-8)
    assert found.recommendation.text == expected.recommendation.text
    assert (found.calibrator, found.notes) == (expected.calibrator, expected.notes)
    assert (found.n_folds, found.seed) == (expected.n_folds, expected.seed)
