"""Tests of each class and of each label in reports."""

import math
import re
from dataclasses import replace
from html import escape

import pytest
import torch
from helpers.reports import QUICK, full_report, miscalibrated_data

import torchcalib as tc
from torchcalib.core.events import NamedMode
from torchcalib.display.tables import to_html
from torchcalib.inference import adjustment, calibration_test
from torchcalib.reporting.render.contents import key_numbers
from torchcalib.results.lines import ClassLine

MODE: NamedMode = "classwise"


def holm(p_values):
    """Adjust p-values: Holm (1979), sec. 3."""
    known = sorted(p for p in p_values if not math.isnan(p))
    adjusted, largest = {}, 0.0
    for rank, p in enumerate(known):
        largest = max(largest, p * (len(known) - rank))
        adjusted[p] = min(1.0, largest)
    return [adjusted.get(p, math.nan) for p in p_values]


@pytest.mark.parametrize("p_values", [[0.01, math.nan, 0.04, 0.03, 0.9], [0.5, 0.5, 0.001], [math.nan], [0.2], []])
def test_p_values_are_adjusted_by_the_method_of_holm(p_values):
    found = adjustment.holm(torch.tensor(p_values, dtype=torch.float64))
    assert found.tolist() == pytest.approx(holm(p_values), nan_ok=True)


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_lines_of_classes_are_those_of_each_class_as_a_binary_task(task):
    """The p-values agree up to the noise of the simulation, because the random numbers differ between classes."""
    preds, target = miscalibrated_data(task)
    lines = full_report(task).class_lines
    p_values = {"p_value": [], "gap_p_value": []}
    for k, line in enumerate(lines):
        outcome = target[:, k] if task == "multilabel" else (target == k).long()
        options = {"preds": preds[:, k], "target": outcome, "n_replicates": 999}
        ece = calibration_test(tc.ECE(task="binary", n_bins=10), **options)
        esce = calibration_test(tc.ESCE(task="binary"), **options)
        assert (line.index, line.n) == (k, 400)
        assert line.frequency == pytest.approx(outcome.double().mean().item(), abs=1e-12)
        assert line.gap == pytest.approx((outcome.double() - preds[:, k]).mean().item(), abs=1e-12)
        assert line.value == pytest.approx(ece.statistic.item(), abs=1e-12)
        # Five standard errors of two means of 999 replicates, whose standard deviation is below their mean
        assert line.noise_floor == pytest.approx(ece.noise_floor.item(), rel=5 * math.sqrt(2 / 999))
        p_values["p_value"].append(ece.p_value.item())
        p_values["gap_p_value"].append(esce.p_value.item())
    m = len(lines)
    for name, expected in p_values.items():
        for line, p in zip(lines, holm(expected), strict=True):
            found = getattr(line, name)
            # Five standard errors of each p-value, times the factor of the adjustment
            assert abs(found - p) <= 5 * m * math.sqrt(2 * p * (1 - p / m) / m / 999) + 2 * m / 1000, (name, line)


def labels(n=1000):
    """Return predictions of five labels: the last two are too high and too low, and the others are calibrated."""
    g = torch.Generator().manual_seed(0)
    true = torch.randn(n, 5, generator=g, dtype=torch.float64) - 1
    target = torch.bernoulli(true.sigmoid(), generator=g).long()
    return (true + torch.tensor([0, 0, 0, 0.8, -0.8], dtype=torch.float64)).sigmoid(), target


def test_directions_are_those_of_the_labels_that_are_off():
    pytest.importorskip("pandas")
    probs, target = labels()
    report = tc.report(probs, target, task="multilabel", **QUICK)
    assert [line.direction for line in report.class_lines] == [*["not significant"] * 3, "too high", "too low"]
    assert [line.p_value < 0.05 for line in report.class_lines] == [False, False, False, True, True]
    frame = report.classes.to_pandas()
    assert set(frame.index[:2]) == {3, 4}
    assert len(frame) == 5
    columns = ["n", "frequency", "mean_probability", "ece", "noise_floor", "p_value", "gap", "gap_p_value", "direction"]
    assert list(frame) == columns
    assert [row["index"] for row in report.to_dict()["class_lines"]] == list(range(5))
    worst = key_numbers(report)[-1]
    assert worst.name == "Worst label"
    assert worst.value == str(frame.index[0])
    assert "expected if calibrated, adjusted p = " in worst.detail


def test_rows_and_labels_are_counted_apart():
    probs, target = labels(100)
    report = tc.report(probs, target, task="multilabel", **QUICK)
    assert (report.n, report.n_rows) == (500, 100)
    assert report.input_line == "multilabel, 100 rows × 5 labels"
    target[:10, 1] = -1
    missing = tc.report(probs, target, task="multilabel", ignore_index=-1, **QUICK)
    assert (missing.n, missing.n_rows) == (490, 100)
    assert missing.input_line == "multilabel, 100 rows × 5 labels, 490 labelled entries"
    assert [line.n for line in missing.class_lines] == [100, 90, 100, 100, 100]
    assert full_report("binary").input_line.endswith("binary, n = 400, 2 classes")


def test_classes_without_data_or_tests_have_no_direction():
    line = ClassLine(0, 10.0, 0.5, 0.1, 0.1)
    assert (line.direction, line.excess) == ("", 0.1)
    assert replace(line, value=math.nan).excess == -math.inf
    assert replace(line, gap_p_value=math.nan).direction == "not significant"
    assert full_report("binary").class_lines == ()
    assert full_report("binary").classes is None


def slow_ece(preds, outcomes, n_bins):
    """ECE of a label: sum over bins of n_b / n |mean outcome - mean confidence|, by a loop over samples."""
    bins = [[0.0, 0.0] for _ in range(n_bins)]
    for p, y in zip(preds.tolist(), outcomes.tolist(), strict=True):
        k = min(int(p * n_bins), n_bins - 1)
        bins[k][0] += p
        bins[k][1] += y
    return sum(abs(outcome - confidence) for confidence, outcome in bins) / len(preds)


def test_multilabel_values_are_those_of_each_label_wherever_they_are_shown():
    plots = pytest.importorskip("torchcalib.plots")
    preds, target = miscalibrated_data("multilabel")
    report = full_report("multilabel")
    stage, labels = report.calibration, range(preds.shape[1])
    eces = [slow_ece(preds[:, k], target[:, k], report.settings["n_bins"]) for k in labels]
    mean = sum(eces) / len(eces)
    assert [line.value for line in report.class_lines] == pytest.approx(eces, abs=1e-12)
    assert (report.main_line.value, stage.raw.ece) == (pytest.approx(mean, abs=1e-12),) * 2
    shown = f"{mean:.3g}"
    assert {number.name: number for number in key_numbers(report)}["ECE"].value.startswith(shown)
    legend = plots.reliability_diagram(report).get_legend().get_texts()[0].get_text()
    assert legend.startswith(f"mean ECE of labels {shown}")

    # Every label has the parameters of a fit to it alone. The accuracy of fits limits that of the numbers in the words.
    page = to_html(report.classes)
    for k in labels:
        words = stage.label_parameters[k]
        alone = type(stage.calibrator)().fit(preds[:, k], target[:, k], task="binary").in_words()
        numbers = [[float(x) for x in re.findall(r"[-+]?\d+\.?\d*", text)] for text in (words, alone)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.01)
        assert escape(words) in page
