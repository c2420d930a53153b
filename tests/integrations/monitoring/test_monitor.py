"""`Monitor` computes the values of the functions in every epoch, keeps a history, and warns about over-confidence."""

import math

import pytest
import torch
from helpers.reports import SCORES, bare, predictions, quick_report
from helpers.trainings import epochs_of

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.integrations.monitoring.over_confidence import crossings
from torchcalib.reporting.render import terminal
from torchcalib.results.history import History, HistoryRow

TASKS = {"binary": {}, "multiclass": {"num_classes": 5}, "multilabel": {"num_labels": 5}}
FUNCTIONS = {name: function for name, function in SCORES.items() if name != "nbs"}
FUNCTIONS |= {name: getattr(F, name) for name in ("ece", "esce", "mce")}


@pytest.mark.parametrize("task", TASKS)
def test_every_epoch_has_the_values_of_its_own_rows(task):
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
        table = F.calibration_curve(logits, target, task=task, from_logits=True)
        if task == "multilabel":
            assert monitor.bin_table.n.tolist() == table.n.sum(0).tolist()
        else:
            torch.testing.assert_close(monitor.bin_table.gap, table.gap)
        assert ("a/confidence/b" in values) == (task == "multiclass")
    assert [(row.epoch, row.step) for row in monitor.history.rows] == [(1, 1), (2, 2)]
    assert monitor.history.rows[-1].values == {name[2:-2]: value for name, value in values.items()}


def test_rows_with_nan_are_dropped_counted_and_shown():
    logits, target = predictions("multiclass", 40)
    monitor = tc.Monitor(task="multiclass", num_classes=5, from_logits=True, nan_policy="drop")
    for n_dropped in (3, 0):
        bad = torch.where((torch.arange(40) < n_dropped).unsqueeze(-1), torch.nan, logits)
        monitor.update(bad, target)
        values = monitor.end_epoch()
        assert values["val/n_dropped"] == n_dropped
        expected = F.nll(logits[n_dropped:], target[n_dropped:], task="multiclass", from_logits=True)
        assert values["val/nll"] == pytest.approx(expected.item(), abs=1e-12)
    assert monitor.history.column("n_dropped") == (3, 0)


def test_given_metrics_are_copied_and_values_without_data_are_nan():
    given = tc.BrierScore(task="binary")
    monitor = tc.Monitor(task="binary", metrics={"brier": given})
    monitor.update(torch.tensor([0.5]), torch.tensor([1]))
    assert monitor.end_epoch() == {"val/brier": 0.25}
    assert given.state.sum() == 0, "the given metric is not updated"
    monitor = tc.Monitor(task="binary")
    assert all(math.isnan(value) for value in monitor.end_epoch().values())
    assert monitor.history.best is None


def test_history_drops_later_epochs_after_a_restart():
    monitor, _ = epochs_of([0.2, 1.1, 2.5])
    back = monitor.history.with_row(HistoryRow(2, 2, {"nll": 0.1}))
    assert [row.epoch for row in back.rows] == [1, 2], "a restart drops later epochs"
    assert back.column("ece")[-1:] != back.column("nll")[-1:] == (0.1,)
    assert back.best.epoch == 2
    with pytest.raises(ValueError, match="must have format version 1, got 2"):
        History.from_dict({**monitor.state_dict(), "version": 2})


def test_history_of_a_report_is_on_its_page_and_in_its_json(tmp_path, capsys):
    bad = {"nll": math.inf, "ecd": math.nan, "<b>": 0.25}
    history = History((HistoryRow(1, 1, {"nll": 0.5}), HistoryRow(2, 2, bad, "words <script>")))
    report = bare(quick_report("multiclass"), history=history)
    assert quick_report("multiclass").to_dict()["history"] is None
    assert report.to_dict()["history"]["rows"][1]["values"] == {"nll": "inf", "ecd": "nan", "<b>": 0.25}
    files = {path.name: path for path in report.save(tmp_path, diagrams=True)}
    assert {"training.png", "training.svg"} <= set(files)
    page = files["report.html"].read_text()
    assert "Warning: words &lt;script&gt;." in page
    assert "&lt;b&gt;" in page
    assert page.count("<script>") == 1, "the script of the page"
    terminal.show_warnings(history)
    assert "words <script>" in capsys.readouterr().out.lower()


def test_summary_describes_the_lowest_nll_of_the_whole_history():
    """Also if a warning was given before that validation."""
    rows = [(1, 1.0, 0.6, ""), (2, 0.7, 0.7, "so"), (3, 0.5, 0.8, ""), (4, 0.9, 0.85, ""), (5, 0.75, 0.75, "")]
    history = History(tuple(HistoryRow(k, k, {"nll": nll, "accuracy": a}, warning) for k, nll, a, warning in rows))
    lowest = "NLL was lowest in epoch 3 of 5: 0.5, accuracy 80.0%."
    assert history.summary == f"{lowest} At the end it is 0.75, and accuracy is 75.0%. Use the model of epoch 3."
    at_four = f"{lowest.replace('5:', '4:')} At the end it is 0.9, and accuracy is 85.0%."
    assert History(history.rows[:4]).summary == f"{at_four} Use the model of epoch 3, or calibrate the last model."
    falling = History(history.rows[:3]).summary
    assert falling.endswith("of 3: 0.5, accuracy 80.0%. It was still falling at the end: training longer may help.")
    assert History(history.rows[:1]).summary == "NLL was lowest in epoch 1 of 1: 1, accuracy 60.0%."
    steps = tuple(HistoryRow(1, 500 * k, {"nll": 1 / k}) for k in (1, 2, 3))
    assert History((*steps, HistoryRow(1, 2000, {}))).summary == (
        "NLL was lowest in step 1,500 of 2,000: 0.333. Use the model of that step."
    )
    assert History((HistoryRow(1, 1, {"ece": 0.1}),)).summary == "The history contains no NLL."


def test_warning_is_given_if_over_confidence_rises_by_more_than_the_threshold():
    cases = (
        ([-0.5, -0.2, 0.1, 0.11], [0, 0, 0, 1]),  # rises from 0 (lower values do not count) to more than the threshold
        ([0.3, 0.35, 0.41], [0, 0, 1]),  # rises by more than the threshold above the minimum
        ([0, 0.2, 0.3, 0.1, 0.2], [0, 1, 0, 0, 0]),  # one warning, because the value stays above half of the threshold
        ([0, 0.2, 0.04, 0.2], [0, 1, 0, 1]),  # a second warning, because the value fell below half of the threshold
        ([math.nan, 0, math.nan, 0.2], [0, 0, 0, 1]),
        ([0, math.inf, math.inf], [0, 1, 0]),
        ([math.inf, math.inf], [0, 0]),
        ([], []),
    )
    for ecd, expected in cases:
        assert [int(crosses) for crosses in crossings(ecd, 0.1)] == expected


def test_warning_contains_numbers_epochs_and_advice():
    monitor, warned = epochs_of([0.2, 1.0, 2.5, 3.0])  # a model with log-odds of log 3 is calibrated
    (row,) = monitor.history.warnings
    assert [*warned] == [row.warning[:1].upper() + row.warning[1:]]
    assert row.epoch == 3
    p, log_odds = 1 / (1 + math.exp(-2.5)), 2.5
    by_hand = 0.75 * (p - 1) * log_odds + 0.25 * p * log_odds
    assert f"in epoch 3 the cross-entropy exceeds the entropy of the predictions by {by_hand:.3g} nats" in row.warning
    assert row.warning.endswith("has not risen since: use the model from epoch 2 (early stopping).")
    (finding,) = monitor.history.findings
    assert row.warning.startswith(finding)
    assert finding.endswith("in epoch 2.")
    assert epochs_of([0, 3], threshold=math.inf)[1] == []


def test_advice_depends_on_nll_and_accuracy():
    monitor = tc.Monitor(task="multiclass", num_classes=2, from_logits=True)
    target = torch.arange(40) % 2

    def epoch(sure, n_right):
        wrong = torch.arange(40) >= n_right
        label = torch.where(wrong, 1 - target, target)
        monitor.update(sure * torch.nn.functional.one_hot(label, 2).float(), target)
        monitor.end_epoch()

    epoch(0.5, 20)
    still_falls = r"Mean confidence is 88.1%, accuracy 80.0%. NLL is still falling: continue training, and cal"
    with pytest.warns(tc.OverConfidenceWarning, match=still_falls):
        epoch(2.0, 32)
    epoch(1.4, 32)
    rises = r"NLL was lowest in epoch 3 .*, while accuracy has risen from 80.0% to 82.5%: .* or calibrate the current"
    with pytest.warns(tc.OverConfidenceWarning, match=rises):
        epoch(5.0, 33)
    _, warned = epochs_of([0, 3], metrics={"ecd": tc.ECD(task="binary", from_logits=True)})
    assert warned[0].endswith("Calibrate the model (torchcalib.calibration.TemperatureScaling).")
