"""What a `Monitor` says of every epoch is what the functions say, over ranks too; and when it warns."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import torchcalib as tc
from torchcalib.monitoring import History, HistoryRow, crossings, usual_metrics
from torchcalib.plots import DARK, to_svg, training_curve

TASKS = {"binary": {}, "multiclass": {"num_classes": 3}, "multilabel": {"num_labels": 3}}
FUNCTIONS = {
    "accuracy": tc.accuracy,
    "nll": tc.nll,
    "brier": tc.brier_score,
    "ecd": tc.ecd,
    "ece": tc.ece,
    "esce": tc.esce,
    "mce": tc.mce,
}


def data(task, seed=0, n=40):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n,) if task == "binary" else (n, 3), generator=g, dtype=torch.float64)
    target = torch.randint(0, 3 if task == "multiclass" else 2, (n,) if task != "multilabel" else (n, 3), generator=g)
    return logits, target


@pytest.mark.parametrize("task", TASKS)
def test_every_epoch_has_the_values_of_the_functions_and_nothing_of_the_one_before(task):
    monitor = tc.Monitor(task=task, **TASKS[task], from_logits=True, threshold=math.inf, prefix="a/", postfix="/b")
    for epoch in (1, 2):
        logits, target = data(task, epoch)
        for part in (slice(0, 7), slice(7, 40)):
            monitor.update(logits[part], target[part])
        values = monitor.end_epoch()
        for name, function in FUNCTIONS.items():
            expected = float(function(logits, target, task=task, from_logits=True))
            assert values[f"a/{name}/b"] == pytest.approx(expected, abs=1e-12), name
        nce = float(tc.nll(logits, target, task=task, from_logits=True, normalize="prior"))
        assert values["a/nce/b"] == pytest.approx(nce, abs=1e-12)
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
    logits, target = data("multiclass")
    monitor = tc.Monitor(task="multiclass", num_classes=3, from_logits=True, nan_policy="drop")
    for n_dropped in (3, 0):
        bad = torch.where((torch.arange(40) < n_dropped).unsqueeze(-1), torch.nan, logits)
        monitor.update(bad, target)
        values = monitor.end_epoch()
        assert values["val/n_dropped"] == n_dropped
        expected = tc.nll(logits[n_dropped:], target[n_dropped:], task="multiclass", from_logits=True)
        assert values["val/nll"] == pytest.approx(expected.item(), abs=1e-12)
    assert monitor.history.column("n_dropped") == (3, 0)


def test_without_data_values_are_nan_and_nothing_is_said():
    monitor = tc.Monitor(task="binary")
    assert all(math.isnan(value) for value in monitor.end_epoch().values())
    assert monitor.history.best is None


@pytest.mark.parametrize(
    ("ecd", "expected"),
    [
        ([-0.5, -0.2, 0.1, 0.11], [0, 0, 0, 1]),  # from 0 on, whatever was below, and beyond the threshold
        ([0.3, 0.35, 0.41], [0, 0, 1]),  # above the least so far
        ([0, 0.2, 0.3, 0.1, 0.2], [0, 1, 0, 0, 0]),  # told once: more than half of the threshold was left
        ([0, 0.2, 0.04, 0.2], [0, 1, 0, 1]),  # and again
        ([math.nan, 0, math.nan, 0.2], [0, 0, 0, 1]),
        ([0, math.inf, math.inf], [0, 1, 0]),
        ([math.inf, math.inf], [0, 0]),
        ([], []),
    ],
)
def test_over_confidence_is_told_of_when_it_has_grown_beyond_the_threshold(ecd, expected):
    assert crossings(ecd, 0.1) == [bool(told) for told in expected]


def epochs_of(scales, threshold=0.1, metrics=None, right=30):
    """A monitor of a model that is right in 3 of 4 samples and becomes surer by these scales of its logits."""
    monitor = tc.Monitor(task="binary", from_logits=True, threshold=threshold, metrics=metrics)
    target = (torch.arange(40) < right).long()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for scale in scales:
            monitor.update(torch.full((40,), float(scale)), target)
            monitor.end_epoch()
    return monitor, [str(warning.message) for warning in told]


def test_the_warning_has_numbers_epochs_and_advice():
    monitor, told = epochs_of([0.2, 1.0, 2.5, 3.0])  # log 3 is what calibration asks for
    (row,) = monitor.history.warnings
    assert [*told] == [row.warning[:1].upper() + row.warning[1:]]
    assert row.epoch == 3
    p, log_odds = 1 / (1 + math.exp(-2.5)), 2.5
    by_hand = 0.75 * (p - 1) * log_odds + 0.25 * p * log_odds
    assert f"in epoch 3 the outcomes surprise the model by {by_hand:.3g} nats more" in row.warning
    assert "(val/ecd), against" in row.warning
    assert "in epoch 2. Its NLL was least in epoch 2" in row.warning
    assert row.warning.endswith("and its accuracy has not risen since: keep the model of epoch 2 (early stopping).")


def test_the_advice_follows_nll_and_accuracy():
    monitor = tc.Monitor(task="multiclass", num_classes=2, from_logits=True)
    target = torch.arange(40) % 2

    def epoch(sure, n_right):
        wrong = torch.arange(40) >= n_right
        label = torch.where(wrong, 1 - target, target)
        monitor.update(sure * torch.nn.functional.one_hot(label, 2).float(), target)
        monitor.end_epoch()

    epoch(0.5, 20)
    still_falls = (
        r"It claims to be right with 88.1% on average and is right in 80.0% of samples. "
        r"Its NLL still falls: train on, and calibrate"
    )
    with pytest.warns(tc.OverConfidenceWarning, match=still_falls):
        epoch(2.0, 32)
    epoch(1.4, 32)
    rises = (
        r"Its NLL was least in epoch 3, .*, while its accuracy has risen from 80.0% to 82.5%: "
        r"keep the model of epoch 3 \(early stopping\), or calibrate this one"
    )
    with pytest.warns(tc.OverConfidenceWarning, match=rises):
        epoch(5.0, 33)
    _, told = epochs_of([0, 3], metrics={"ecd": tc.ECD(task="binary", from_logits=True)})
    assert told[0].endswith("Calibrate the model (torchcalib.Temperature).")
    assert epochs_of([0, 3], threshold=math.inf)[1] == []


def test_history_goes_through_a_checkpoint_and_a_training_that_goes_back():
    monitor, _ = epochs_of([0.2, 1.1, 2.5])
    again = tc.Monitor(task="binary", from_logits=True)
    again.load_state_dict(monitor.state_dict())
    assert again.history == monitor.history
    back = monitor.history.with_row(HistoryRow(2, 2, {"nll": 0.1}))
    assert [row.epoch for row in back.rows] == [1, 2], "what was seen after it is of another model"
    assert back.column("ece")[-1:] != back.column("nll")[-1:] == (0.1,)
    assert back.best.epoch == 2
    with pytest.raises(ValueError, match="must be a history of version 1, got 2"):
        History.from_dict({**monitor.state_dict(), "version": 2})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"task": "multiclass"}, "`num_classes` must be given for task='multiclass', got None"),
        ({"task": "multilabel"}, "`num_labels` must be given for task='multilabel', got None"),
        ({"task": "binary", "threshold": -1.0}, "`threshold` must be a number of nats of at least 0, got -1.0"),
        ({"task": "binary", "threshold": math.nan}, "`threshold` must be"),
        ({"task": "ternary"}, "`task` must be one of"),
    ],
)
def test_bad_arguments(given, error):
    with pytest.raises(ValueError, match=error):
        tc.Monitor(**given)
    with pytest.raises(TypeError, match="`metrics` must be metrics by their names, got list"):
        tc.Monitor(task="binary", metrics=[tc.ECE(task="binary")])


def test_the_curve_holds_the_history_and_marks_what_matters():
    monitor, _ = epochs_of([0.2, 1.1, 2.5, 3.0])
    ax = training_curve(monitor.history, title="title")
    lines = {line.get_label(): line for panel in ax.child_axes for line in panel.lines}
    for name, key in (("NLL", "nll"), ("ECD", "ecd"), ("accuracy", "accuracy"), ("ECE", "ece")):
        assert tuple(lines[name].get_xdata()) == (1, 2, 3, 4)
        assert tuple(lines[name].get_ydata()) == monitor.history.column(key)
    said = [text.get_text() for panel in ax.child_axes for text in panel.texts]
    assert "least NLL, epoch 2" in said
    assert "warning, epoch 3" in said
    assert to_svg(ax) == to_svg(training_curve(monitor.history, title="title"))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [HistoryRow(1, 1, {"nll": 0.5, "ecd": 0.1})],
        [HistoryRow(1, 1, {"nll": math.inf, "ecd": math.inf}), HistoryRow(2, 2, {"nll": 1.0, "ecd": math.nan})],
        [HistoryRow(0, 10, {"ece": 0.1}), HistoryRow(0, 20, {"ece": 0.2}, "so many words")],
        [HistoryRow(1, 1, {"other": 1.0})],
        [HistoryRow(k, k, {"nll": 1 / (1 + k), "accuracy": 0.5, "confidence": 0.6}) for k in range(100)],
    ],
)
def test_odd_histories_are_drawn_without_warnings(rows):
    ax = training_curve(History(tuple(rows)), style=DARK)
    assert "<svg" in to_svg(ax)
    assert bool(ax.texts) == (not rows or "other" in rows[0].values)
    if len(rows) == 2 and rows[0].epoch == 0:
        assert ax.child_axes[-1].get_xlabel() == "step"
        assert "warning, step 20" in [text.get_text() for text in ax.child_axes[0].texts]


def test_a_report_carries_the_history_to_its_page_and_its_json(tmp_path):
    logits, target = data("multiclass")
    report = tc.report(logits, target, task="multiclass", from_logits=True, with_intervals=False)
    assert report.to_dict()["history"] is None
    bad = {"nll": math.inf, "ecd": math.nan, "<b>": 0.25}
    history = History((HistoryRow(1, 1, {"nll": 0.5}), HistoryRow(2, 2, bad, "words <script>")))
    with_it = replace(report, history=history)
    assert with_it.to_dict()["history"]["rows"][1]["values"] == {"nll": "inf", "ecd": "nan", "<b>": 0.25}
    files = {path.name: path for path in tc.save_report(with_it, tmp_path)}
    assert {"training.png", "training.svg"} <= set(files)
    page = files["report.html"].read_text()
    assert "Words &lt;script&gt;" in page
    assert "&lt;b&gt;" in page
    assert "<script>" not in page
    assert page.count('class="light"') == page.count('class="dark"')
