"""Buffer of a report builder, its report as a mapping with text, and strict JSON."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.reports import assert_equal_stages, calibrated_report, miscalibrated_data, realistic

import torchcalib as tc
from torchcalib.calibration import AffineScaling
from torchcalib.core.inputs import InputFormat
from torchcalib.reporting.building import ReportBuilder


def test_update_converts_its_rows_once(monkeypatch):
    calls, read = [], InputFormat.read
    monkeypatch.setattr(InputFormat, "read", lambda *args, **given: calls.append(1) or read(*args, **given))
    preds, target = miscalibrated_data("binary")
    builder = ReportBuilder(task="binary")
    builder.update(preds, target, groups=target)
    assert builder.report().calibration is not None
    assert len(calls) == 1


def test_report_is_a_mapping_with_equality_and_text():
    report, again = calibrated_report("binary"), calibrated_report.__wrapped__("binary")
    assert report == again
    assert report != tc.report(*miscalibrated_data("binary"), task="binary", with_intervals=False)
    assert "loss" not in report
    assert dict(report)["nll"] == report["nll"]
    assert len(list(report)) == len(report) == len(report.lines)
    assert repr(report) == str(report)
    assert str(report).startswith(report.sentence)
    assert report.recommendation.text in str(report)
    assert report.main_table != again.main_table, "tables are compared by identity"


def scores_of(line):
    names = ("accuracy", "nll", "brier_score", "ece", *["gain"] * (line.gain is not None))
    return {name: getattr(line, name) for name in names}


def test_json_of_a_report_is_strict_and_complete():
    report = tc.report(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1, 0, 1]), task="binary", n_bins=3)
    content = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    lines = {line["key"]: line for line in content["lines"]}
    assert (lines["nll"]["value"], report["nll"], lines["nll"]["interval"]) == ("inf", math.inf, None)
    assert lines["brier"]["value"] == pytest.approx((1 + 0.25 + 0) / 3)
    names = "key name group value unit perfect naive question source interval noise_floor p_value"
    assert set(lines["ece/top_label"]) == set(names.split())
    assert content["tables"]["positive"]["n"] == [1, 1, 1]
    assert content["tables"]["positive"]["upper"] == [1 / 3, 2 / 3, 1]
    stage, expected = json.loads(calibrated_report("binary").to_json())["calibration"], calibrated_report("binary")
    assert stage["recommendation"]["text"] == expected.recommendation.text
    assert stage["calibrator"] == "TemperatureScaling()"
    for line, found in zip(expected.calibration.lines, stage["lines"], strict=True):
        shown = {name: value if math.isfinite(value) else str(value) for name, value in scores_of(line).items()}
        assert {name: found[name] for name in shown} == shown
        assert (found["calibrator"], found["parameters"]) == (line.calibrator, line.parameters)
    interval = report.decision.interval
    shown = None if interval is None else vars(interval)
    assert content["decision"] == {**vars(report.decision), "interval": shown}


def report_of_batches(*pieces, **given):
    builder = ReportBuilder(**given)
    for piece in pieces:
        builder.update(*piece)
    return builder.report()


def test_without_classes_a_report_has_the_errors_of_the_top_label():
    data, how = miscalibrated_data("multiclass"), {"task": "multiclass", "with_calibration": False}
    whole, part = (report_of_batches(data, **how, with_classes=with_classes) for with_classes in (True, False))
    assert part.lines == tuple(line for line in whole.lines if line.group != "class-wise")
    assert list(part.tables) == list(part.tests) == ["top_label"]
    assert part.decision == whole.decision


def test_errors_of_confidences_are_those_of_the_positive_class():
    of_events, of_confidences = (
        report_of_batches(miscalibrated_data("binary"), task=task, with_calibration=False)
        for task in ("binary", "confidence")
    )
    errors = [line for line in of_events.lines if line.group == "positive class"]
    expected = [replace(line, key=line.key.replace("positive", "top_label"), group="top label") for line in errors]
    assert [line for line in of_confidences.lines if "/" in line.key] == expected
    assert torch.equal(of_confidences.main_table.n, of_events.main_table.n)
    assert list(of_confidences.tables) == list(of_confidences.tests) == ["top_label"]


def assert_same_lines(report, expected, of_errors=True):
    """Compare values, noise floors, p-values and intervals: of all lines, or with `of_errors=False` of scores."""
    assert report.notes == expected.notes
    for line, other in zip(report.lines, expected.lines, strict=True):
        assert (line.key, line.value) == (other.key, pytest.approx(other.value, rel=1e-6))
        if of_errors or line.group == "scores":
            numbers, ends = (
                [[part or 0 for part in parts(each)] for each in (line, other)] for parts in (evidence_of, ends_of)
            )
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9, abs=1e-12, nan_ok=True), line
            # The bias that is subtracted from an interval depends on the value.
            assert ends[0] == pytest.approx(ends[1], rel=1e-6, abs=1e-9, nan_ok=True), line


def evidence_of(line):
    return line.noise_floor, line.p_value


def ends_of(line):
    return tuple(vars(line.interval).values()) if line.interval else ()


def test_batches_with_soft_and_one_hot_targets_equal_one_call():
    preds = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    soft, labels, given = preds.roll(1, 0), torch.arange(10) % 3, {"task": "multiclass"}
    unanimous = torch.nn.functional.one_hot(labels, 3).to(soft)
    whole = tc.report(preds, torch.cat((soft[:20], unanimous)), **given)
    empty, most = (preds[:0], soft[:0]), (preds[:20], soft[:20])
    assert_same_lines(report_of_batches(most, (preds[20:], unanimous), empty, **given), whole)
    rest = preds[5:], torch.cat((soft[5:20], unanimous))
    assert_same_lines(report_of_batches((preds[:5], soft[:5]), empty, rest, **given), whole)
    # Rows with integer labels reduce the noise in any order of batches. Scores are the same.
    certain = report_of_batches(most, (preds[20:], labels), empty, **given)
    assert_same_lines(certain, whole, of_errors=False)
    assert_same_lines(report_of_batches(most, (preds[20:23], labels[:3]), (preds[23:], labels[3:]), **given), certain)


def test_batches_may_have_labels_of_different_dtypes():
    preds, target = realistic("binary", 60)
    given = {"task": "binary", "from_logits": True}
    kinds = (torch.uint16, torch.int64, torch.bool, torch.float16, torch.uint8)
    pieces = zip(preds.split(12), target.split(12), kinds, strict=True)
    report = report_of_batches(*((piece, labels.to(dtype)) for piece, labels, dtype in pieces), **given)
    whole = tc.report(preds, target, **given)
    assert_equal_stages(report.calibration, whole.calibration)
    assert_same_lines(report, whole)
    names = {line.key.split("/")[0] for line in report.lines if line.interval is None}
    assert names == {"atb", "ece_debiased", "ks", "mcb", "mce", "tce"}


def test_calibrator_fitted_to_merged_builders_keeps_the_class_axis():
    preds, target = realistic("multiclass")
    given = {"task": "multiclass", "from_logits": True}
    expected = AffineScaling().fit(preds, target, **given)(preds)
    preds, target = preds.reshape(3, 100, 5).movedim(-1, 1), target.reshape(3, 100)
    for inferred in ({}, {"class_axis": 1}):
        parts = [ReportBuilder(**given, **inferred), ReportBuilder(**given, **inferred)]
        for part, rows in zip(parts, (slice(0, 1), slice(1, None)), strict=True):
            part.update(preds[rows], target[rows])
        found = (parts[0] + parts[1]).fit(AffineScaling())(preds)
        torch.testing.assert_close(found.movedim(1, -1).flatten(0, 1), expected, rtol=1e-9, atol=1e-9)
