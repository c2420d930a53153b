"""Pickled and deeply copied objects give the same results, and share no state with the original.

Metrics are tested in test_laws_of_paths.py.
"""

import copy
import pickle

import pytest
import torch
from helpers import fits
from helpers.reports import QUICK

import torchcalib as tc

X, Y = fits.data(60)
B, YB = fits.single(60)


def copies(x):
    return pickle.loads(pickle.dumps(x)), copy.deepcopy(x)


@pytest.mark.parametrize("calibrator", [*fits.ALL, *fits.OF_CLASSES], ids=fits.name)
def test_copies_of_a_calibrator(calibrator):
    given = (X, Y, fits.multi) if calibrator in fits.OF_CLASSES else (B, YB, fits.binary)
    logits, target, options = given
    for unfitted in copies(calibrator):
        fitted = unfitted.fit(logits, target, **options)
        for again in copies(fitted):
            assert torch.equal(again(logits), fitted(logits))
            before = fitted(logits)
            again.fit(logits / 2, target, **options)
            assert torch.equal(fitted(logits), before)


def test_copies_of_collections_builders_and_monitors_continue():
    def updated(x, times):
        for _ in range(times):
            x.update(X, Y)
        return x

    makers = (
        (lambda: tc.CalibrationCollection([tc.ECE(**fits.multi, num_classes=4)]), lambda x: x.compute()["ECE"].item()),
        (lambda: tc.ReportBuilder(**fits.multi, **QUICK), lambda x: (x.report().n, x.report()["ece/top_label"])),
        (lambda: tc.Monitor(**fits.multi, num_classes=4), lambda x: copy.deepcopy(x).end_epoch(1)),
    )
    for make, value in makers:
        original = updated(make(), 1)
        for again in copies(original):
            assert value(again) == value(original)
            assert value(updated(again, 1)) == value(updated(make(), 2))
        assert value(original) == value(updated(make(), 1))


def test_copies_of_results():
    report = tc.report(X, Y, **fits.multi)
    compared = tc.compare({"a": X, "b": 2 * X}, Y, from_logits=True, n_replicates=39)
    metric = tc.ECE(**fits.binary)
    metric.update(B, YB)
    for result in (report, compared):
        for again in copies(result):
            assert repr(again.to_dict()) == repr(result.to_dict())
            assert str(again) == str(result)
    for result in (metric.test(n_replicates=39), metric.bin_table()):
        for again in copies(result):
            assert repr(again) == repr(result)
