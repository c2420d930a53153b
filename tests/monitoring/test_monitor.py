"""What a `Monitor` says of every epoch is what the functions say."""

import math
from functools import partial

import pytest
import torch
from helpers.refusals import assert_refused
from helpers.reports import predictions

import torchcalib as tc
from torchcalib.monitoring import usual_metrics

TASKS = {"binary": {}, "multiclass": {"num_classes": 5}, "multilabel": {"num_labels": 5}}
FUNCTIONS = {"brier": tc.brier_score, "nce": partial(tc.nll, normalize="prior")}
FUNCTIONS |= {name: getattr(tc, name) for name in ("accuracy", "nll", "ecd", "ece", "esce", "mce")}


@pytest.mark.parametrize("task", TASKS)
def test_every_epoch_has_the_values_of_the_functions_and_nothing_of_the_one_before(task):
    monitor = tc.Monitor(task=task, **TASKS[task], from_logits=True, threshold=math.inf, prefix="a/", postfix="/b")
    for epoch in (1, 2):
        logits, target = predictions(task, 40, epoch)
        for part in (slice(0, 7), slice(7, 40)):
            monitor.update(logits[part], target[part])
        values = monitor.end_epoch()
        for name, function in FUNCTIONS.items():
            expected = float(function(logits, target, task=task, from_logits=True))
            assert values[f"a/{name}/b"] == pytest.approx(expected, abs=1e-12), name
        assert all(type(value) is float for value in values.values())
        table = tc.bin_table(logits, target, task=task, from_logits=True)
        if task == "multilabel":
            assert monitor.bin_table.n.tolist() == table.n.sum(0).tolist()
        else:
            torch.testing.assert_close(monitor.bin_table.gap, table.gap)
        assert ("a/confidence/b" in values) == (task == "multiclass")
    assert [(row.epoch, row.step) for row in monitor.history.rows] == [(1, 1), (2, 2)]
    assert monitor.history.rows[-1].values == {name[2:-2]: value for name, value in values.items()}


def test_metrics_of_ones_own_are_measured_in_place_of_the_usual():
    own = {**usual_metrics(task="binary"), "ks": tc.KS(task="binary", resolution=64)}
    assert {*tc.Monitor(task="binary", metrics=own).end_epoch()} == {f"val/{name}" for name in own}
    given = tc.Brier(task="binary")
    monitor = tc.Monitor(task="binary", metrics={"brier": given})
    monitor.update(torch.tensor([0.5]), torch.tensor([1]))
    assert monitor.end_epoch() == {"val/brier": 0.25}
    assert given.state.sum() == 0, "it is a copy that is updated"


def test_rows_that_hold_nan_are_dropped_counted_and_shown():
    logits, target = predictions("multiclass", 40)
    monitor = tc.Monitor(task="multiclass", num_classes=5, from_logits=True, nan_policy="drop")
    for n_dropped in (3, 0):
        bad = torch.where((torch.arange(40) < n_dropped).unsqueeze(-1), torch.nan, logits)
        monitor.update(bad, target)
        values = monitor.end_epoch()
        assert values["val/n_dropped"] == n_dropped
        expected = tc.nll(logits[n_dropped:], target[n_dropped:], task="multiclass", from_logits=True)
        assert values["val/nll"] == pytest.approx(expected.item(), abs=1e-12)
    assert monitor.history.column("n_dropped") == (3, 0)


def test_without_data_values_are_nan_and_bad_arguments_are_refused():
    monitor = tc.Monitor(task="binary")
    assert all(math.isnan(value) for value in monitor.end_epoch().values())
    assert monitor.history.best is None
    assert_refused(
        [
            (given, partial(tc.Monitor, **given), TypeError if "metrics" in given else ValueError, [words])
            for given, words in (
                ({"task": "multiclass"}, "`num_classes` must be given for task='multiclass', got None"),
                ({"task": "multilabel"}, "`num_labels` must be given for task='multilabel', got None"),
                ({"task": "binary", "threshold": -1.0}, "`threshold` must be a number of nats of at least 0, got -1.0"),
                ({"task": "binary", "threshold": math.nan}, "`threshold` must be"),
                ({"task": "ternary"}, "`task` must be one of"),
                ({"task": "binary", "metrics": [tc.ECE(task="binary")]}, "must be metrics by their names, got list"),
            )
        ]
    )
