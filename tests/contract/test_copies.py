"""Pickled and deeply copied results are equal. States are tested in test_laws_of_states.py."""

import copy
import pickle

from helpers import fits

import torchcalib as tc

X, Y = fits.data(60)
B, YB = fits.single(60)


def copies(x):
    return pickle.loads(pickle.dumps(x)), copy.deepcopy(x)


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
