"""Metrics that need no bins against their slow loops, and their arguments."""

from functools import partial

import pytest
import torch
from cases import CASES, cox_part, spiegelhalter_part
from helpers.binless import F64, calibrated
from helpers.refusals import assert_refused
from oracles import binless as oracle
from oracles.ranked import events

import torchcalib as tc

LOOPS = {tc.SmECE: oracle.smece, tc.Spiegelhalter: oracle.spiegelhalter, tc.Cox: oracle.cox, tc.ICI: oracle.ici}
OF_LOOP = ("component", "bandwidth", "eps", "span", "degree")
BAD = [
    (tc.smece, {"bandwidth": 0.001}, "`bandwidth` must be from 0.00195312 to 1, got 0.001"),
    (tc.smece, {"bandwidth": "wide"}, "`bandwidth` must be a number or None, got 'wide'"),
    (tc.cox, {"eps": 0.5}, "`eps` must be above 0 and below 0.5, got 0.5"),
    (tc.cox, {"eps": True}, "`eps` must be a number or None, got True"),
    (tc.ici, {"span": 0}, "`span` must be above 0 and at most 1, got 0"),
    (tc.ici, {"span": None}, "`span` must be a number, got None"),
    (tc.ici, {"degree": 3}, "`degree` must be at most 2, got 3"),
    (tc.ici, {"n_points": 1}, "`n_points` must be at least 2, got 1"),
    (tc.ici, {"component": "mean"}, "`component` must be one of 'ici', 'e50', 'e90', 'emax', got 'mean'"),
    (tc.ks, {"norm": "l2"}, "`norm` must be one of 'max', 'range', got 'l2'"),
]


def test_bad_arguments_are_named():
    preds, target = calibrated(5)
    classes = {tc.smece: tc.SmECE, tc.spiegelhalter: tc.Spiegelhalter, tc.cox: tc.Cox, tc.ici: tc.ICI, tc.ks: tc.KS}
    bad_task = "`task` must be one of 'binary', 'multiclass', 'multilabel', got 'bin'"
    wrong = [*BAD, *((function, {"task": "bin"}, bad_task) for function in classes)]
    calls = [(partial(f, preds, target), options, said) for f, options, said in wrong]
    calls += [(classes[f], options, said) for f, options, said in wrong]
    calls += [(cls, {"component": "none"}, "`component` must be one of") for cls in (tc.Cox, tc.Spiegelhalter)]
    calls.append((partial(tc.smece_width, preds, target), {"task": "bin"}, bad_task))
    assert_refused(
        (said, partial(call, **{"task": "binary"} | options), (TypeError, ValueError), [said])
        for call, options, said in calls
    )


def looped(case, preds, target, weights=None):
    if case.options.get("from_logits"):
        preds = preds.softmax(-1) if case.task == "multiclass" else preds.sigmoid()
    columns = events(case.task, case.options.get("reduction"), preds.tolist(), target.tolist())
    given = {name: case.options[name] for name in OF_LOOP if name in case.options}
    ones = [1.0] * len(target) if weights is None else weights.tolist()
    values = [LOOPS[case.cls](confidence, outcome, ones, **given) for confidence, outcome in columns]
    apart = case.cls in (tc.Cox, tc.Spiegelhalter) or case.options.get("average", "macro") is None
    return torch.tensor(values if apart else [sum(values) / len(values)], dtype=F64)


@pytest.mark.parametrize("case", [case for case in CASES if case.cls in LOOPS], ids=str)
def test_slow_loop_value(case):
    preds, target = case.data(n=35, seed=4)
    for weights in (None, case.weights(35)):
        expected = looped(case, preds, target, weights)
        found = case.call(preds, target, weights=weights).reshape(expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_tests_take_labels_only():
    preds, _ = calibrated(5)
    for function in (spiegelhalter_part, cox_part):
        with pytest.raises(TypeError, match="`target` must be integer labels where labels are counted"):
            function(preds, preds, task="binary")
