"""Wrong calls of the order-based metrics, and what their messages must say: which argument, and the rule."""

import math
from functools import partial

import pytest
import torch
from helpers.refusals import assert_refused

import torchcalib as tc

P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9]), torch.tensor([0, 1, 0, 1])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
BINARY = {"preds": P, "target": Y, "task": "binary"}
SOFT = BINARY | {"target": torch.tensor([0.0, 0.5, 0.25, 1.0])}
MULTI = {"preds": Q, "target": torch.tensor([1, 0, 2, 1]), "task": "multiclass"}
LABELS = {"preds": Q, "target": (Q > 0.3).long(), "task": "multilabel"}
EITHER = (TypeError, ValueError)  # wrong by its kind and by its value


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

# what, functions, input, options, error, the argument that must be otherwise, further parts of the message
CALLS = [
    # bounds of blocks
    ("n_min above n_max", TCE, BINARY, {"n_min": 3, "n_max": 2}, ValueError, "n_min", ["3", "2"]),
    ("n_min above n_max", [gce], BINARY, {"bins": "pava_bc", "n_min": 3, "n_max": 2}, ValueError, "n_min", ["3", "2"]),
    ("n_min of all samples", TCE, BINARY, {"n_min": 4, "n_max": 9}, ValueError, "n_min", ["4"]),
    ("n_min is 0", TCE, BINARY, {"n_min": 0}, ValueError, "n_min", ["got 0"]),
    ("n_min is a float", TCE, BINARY, {"n_min": 1.0}, TypeError, "n_min", []),
    ("n_max is 0", TCE, BINARY, {"n_max": 0}, ValueError, "n_max", ["got 0"]),
    # the test
    ("alpha is 0", TCE, BINARY, {"alpha": 0.0}, ValueError, "alpha", ["got 0"]),
    ("alpha is 1", TCE, BINARY, {"alpha": 1.0}, ValueError, "alpha", ["got 1"]),
    ("alpha is NaN", TCE, BINARY, {"alpha": math.nan}, ValueError, "alpha", ["nan"]),
    ("alpha is text", TCE, BINARY, {"alpha": "5%"}, EITHER, "alpha", ["'5%'"]),
    ("alpha is True", TCE, BINARY, {"alpha": True}, EITHER, "alpha", ["True"]),
    ("unknown test", TCE, BINARY, {"test": "z"}, ValueError, "test", ["'binomial'", "'z'"]),
    ("unknown norm", [tc.tce, gce], BINARY, {"norm": "l3"}, ValueError, "norm", ["'l2'", "'l3'"]),
    # bins
    ("unknown bins", BINS, BINARY, {"bins": "quantile"}, ValueError, "bins", ["'quantile'"]),
    ("one edge", BINS, BINARY, {"bins": [0.0]}, ValueError, "bins", []),
    ("edges fall", BINS, BINARY, {"bins": [0, 0.6, 0.4, 1]}, ValueError, "bins", []),
    ("edges repeat", BINS, BINARY, {"bins": [0, 0.5, 0.5, 1]}, ValueError, "bins", []),
    ("edges start above 0", BINS, BINARY, {"bins": [0.1, 0.5, 1]}, ValueError, "bins", []),
    ("edges end below 1", BINS, BINARY, {"bins": [0, 0.5, 0.9]}, ValueError, "bins", []),
    ("an edge is NaN", BINS, BINARY, {"bins": [0, math.nan, 1]}, ValueError, "bins", []),
    ("no bins", MASSED, BINARY, {"n_bins": 0}, ValueError, "n_bins", ["got 0"]),
    ("half a bin", MASSED, BINARY, {"n_bins": 2.5}, TypeError, "n_bins", ["2.5"]),
    ("unknown variant", TCE, BINARY, {"variant": "v2"}, ValueError, "variant", ["'paper'", "'v2'"]),
    ("unknown ties", TIES, BINARY, {"ties": "first"}, ValueError, "ties", ["'split'", "'first'"]),
    ("right is no bool", TCE, BINARY, {"bins": "equal_width", "right": "no"}, TypeError, "right", ["'no'"]),
    # samples
    ("weights not whole", [*ALL, *MASSED], BINARY, {"weights": P}, ValueError, "weights", ["whole"]),
    ("copies in split ties", TIES, BINARY, {"weights": 2 * Y, "ties": "split"}, ValueError, "weights", ["'split'"]),
    ("soft targets", TCE, SOFT, {}, EITHER, "target", []),
    ("soft targets in PAVA bins", [gce], SOFT, {"bins": "pava"}, EITHER, "target", []),
    ("soft targets in PAVA-BC bins", [gce], SOFT, {"bins": "pava_bc"}, EITHER, "target", []),
    # reductions
    ("no positive class", ALL, MULTI, {"positive_classes": []}, ValueError, "positive_classes", []),
    ("class 3 of 3", ALL, MULTI, {"positive_classes": [0, 3]}, ValueError, "positive_classes", ["3"]),
    ("class -1", ALL, MULTI, {"positive_classes": [-1]}, ValueError, "positive_classes", ["-1"]),
    ("a class twice", ALL, MULTI, {"positive_classes": [1, 1]}, ValueError, "positive_classes", ["1"]),
    ("half a class", ALL, MULTI, {"positive_classes": [0.5]}, EITHER, "positive_classes", ["0.5"]),
    ("classes of a binary task", ALL, BINARY, {"positive_classes": [1]}, ValueError, "positive_classes", []),
    ("classes and a reduction", ALL, MULTI, {"positive_classes": [1], "reduction": "classwise"}, ValueError,
     "reduction", ["'positive_class'", "'classwise'"]),
    ("unknown reduction", ALL, MULTI, {"reduction": "max"}, ValueError, "reduction", ["'max'"]),
    ("average of one value", VALUES, BINARY, {"average": None}, ValueError, "average", []),
    ("unknown average", VALUES, LABELS, {"average": "micro"}, ValueError, "average", ["'micro'"]),
    # others
    ("weights beyond counting", VALUES, BINARY, {"weights": torch.full((4,), 2**52)}, ValueError, "weights",
     ["sum to at most 2^53 where samples are counted, got 1.8"]),
    ("component of none", [tc.CORP], {"task": "binary"}, {"component": None}, ValueError, "component", ["'mcb'"]),
    ("weights of a stream", [tc.ACE(task="binary").update], {"preds": P, "target": Y}, {"weights": P}, ValueError,
     "weights", ["whole"]),
    ("unknown score", [tc.corp], BINARY, {"score": "crps"}, ValueError, "score", ["'brier'", "'crps'"]),
    ("loss is no function", [gce], BINARY, {"loss": "gap"}, TypeError, "loss", ["'gap'"]),
]  # fmt: skip

CLASSES = {
    "ACE": {}, "TCE": {}, "KS": {}, "CORP": {"component": "mcb"}, "GCE": {"loss": gap}, "MCE": {"bins": "equal_mass"},
    "RMSCE": {"bins": "equal_mass"},
}  # fmt: skip
OF_CLASSES = [
    ("resolution is 0", {"resolution": 0}, ValueError, "resolution", ["0"]),
    ("resolution is a float", {"resolution": 64.0}, TypeError, "resolution", ["64.0"]),
    ("unknown task", {"task": "regression"}, ValueError, "task", ["'regression'"]),
    ("average of one value", {"average": None}, ValueError, "average", []),
    ("unknown reduction", {"reduction": "max"}, ValueError, "reduction", ["'max'"]),
]


def test_wrong_ranked_calls():
    assert_refused(
        (f"{what}, {function.__name__}", partial(function, **given | options), error, [f"`{name}` must", *parts])
        for what, functions, given, options, error, name, parts in CALLS
        for function in functions
    )


def test_unknown_option_of_a_ranked_call():
    assert_refused((f.__name__, partial(f, **BINARY, levels=3), TypeError, ["levels"]) for f in ALL)


def test_wrong_ranked_metrics():
    rows = [(name, own, *row) for name, own in CLASSES.items() for row in OF_CLASSES]
    assert_refused(
        (f"{what}, {cls}", partial(getattr(tc, cls), **{"task": "binary", **own, **options}), error,
         [f"`{argument}` must", *parts])
        for cls, own, what, options, error, argument, parts in rows
    )  # fmt: skip


def test_too_few_samples_for_the_bounds_are_found_at_the_end():
    """How many samples there will be is not known before `compute`."""
    metric = tc.TCE(task="binary", n_min=4, n_max=9)
    metric.update(P[:2], Y[:2])
    metric.update(P[2:], Y[2:])
    with pytest.raises(ValueError, match=r"`n_min` must .*4"):
        metric.compute()
    metric.update(P, Y)  # eight now
    assert 0 <= metric.compute().item() <= 100
