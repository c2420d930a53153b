"""Wrong calls of the order-based metrics, and what their messages must say: which argument, and the rule."""

import math
from functools import partial

import pytest
import torch
from helpers.refusals import assert_named

import torchcalib as tc

P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9]), torch.tensor([0, 1, 0, 1])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
BINARY = {"preds": P, "target": Y, "task": "binary"}
MULTI = {"preds": Q, "target": torch.tensor([1, 0, 2, 1]), "task": "multiclass"}
LABELS = {"preds": Q, "target": (Q > 0.3).long(), "task": "multilabel"}
SOFT = {"target": torch.tensor([0.0, 0.5, 0.25, 1.0])}


def gap(b):
    return b.gap.abs()


def gce(**options):
    return tc.gce(**{"loss": gap, **options})


def massed(function):
    return lambda **options: function(bins="equal_mass", **options)


TCE = [tc.tce, tc.tce_table]
BINS = [*TCE, gce, tc.mce, tc.rmsce]
TIES = [*TCE, tc.ace]
VALUES = [tc.tce, tc.ace, gce, tc.ks, tc.corp]
ALL = [*VALUES, tc.tce_table]
MASSED = [tc.ace, *map(massed, (tc.tce, tc.mce, tc.rmsce, gce))]


def assert_wrong(functions, given, **wrong):
    for function in functions:
        assert_named(partial(function, **given), wrong)


def test_wrong_bins_and_tests():
    falling, repeated, late, short = [0, 0.6, 0.4, 1], [0, 0.5, 0.5, 1], [0.1, 0.5, 1], [0, 0.5, 0.9]
    assert_wrong(BINS, BINARY, bins=["quantile", [0.0], falling, repeated, late, short, [0, math.nan, 1]])
    assert_wrong(MASSED, BINARY, n_bins=[0, 2.5, 2**20 + 1])
    assert_wrong(TIES, BINARY, ties=["first"])
    crossed = {"n_min": 3, "n_max": 2}
    assert_wrong(TCE, BINARY, n_min=[crossed, {"n_min": 4, "n_max": 9}, 0, 1.0], n_max=[0], variant=["v2"])
    assert_wrong(TCE, BINARY, right=[{"bins": "equal_width", "right": "no"}])
    assert_wrong(TCE, BINARY, alpha=[0.0, 1.0, math.nan, "5%", True], test=["z"])
    assert_wrong([gce], BINARY, n_min=[{"bins": "pava_bc", **crossed}], loss=["gap"])
    assert_wrong([tc.tce, gce], BINARY, norm=["l3"])


def test_wrong_samples_and_reductions():
    assert_wrong([*ALL, *MASSED], BINARY, weights=[P])
    assert_wrong(TIES, BINARY, weights=[{"weights": 2 * Y, "ties": "split"}])
    assert_wrong(VALUES, BINARY, weights=[torch.full((4,), 2**52)], average=[None])  # more than can be counted
    assert_wrong(TCE, BINARY, target=[SOFT])
    assert_wrong([gce], BINARY, target=[SOFT | {"bins": bins} for bins in ("pava", "pava_bc")])
    assert_wrong(ALL, BINARY, positive_classes=[[1]])
    assert_wrong(ALL, MULTI, positive_classes=[[], [0, 3], [-1], [1, 1], [0.5]])
    assert_wrong(ALL, MULTI, reduction=["max", {"positive_classes": [1], "reduction": "classwise"}])
    assert_wrong(VALUES, LABELS, average=["micro"])
    assert_wrong([tc.corp], BINARY, score=["crps"])
    for function in ALL:
        with pytest.raises(TypeError, match="levels"):
            function(**BINARY, levels=3)


def test_wrong_ranked_metrics():
    massed_classes = [partial(cls, bins="equal_mass") for cls in (tc.MCE, tc.RMSCE)]
    classes, binary = [partial(tc.GCE, loss=gap), tc.ACE, tc.TCE, tc.KS, tc.CORP, *massed_classes], {"task": "binary"}
    assert_wrong(
        classes,
        binary,
        resolution=[0, -5, 64.0, True, "fine", 10**9],
        task=["regression"],
        average=[None],
        reduction=["max"],
    )
    assert_wrong([tc.CORP], binary, component=[None])
    assert_wrong([tc.MCE], binary, resolution=[64])  # of bins of equal width
    assert_wrong([tc.ACE(**binary).update], {"preds": P, "target": Y}, weights=[P])


def test_too_few_samples_for_the_bounds_are_found_at_the_end():
    """How many samples there will be is not known before `compute`."""
    metric = tc.TCE(task="binary", n_min=4, n_max=9)
    metric.update(P[:2], Y[:2])
    metric.update(P[2:], Y[2:])
    with pytest.raises(ValueError, match=r"`n_min` must .*4"):
        metric.compute()
    metric.update(P, Y)  # eight now
    assert 0 <= metric.compute().item() <= 100
