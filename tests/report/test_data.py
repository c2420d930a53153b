"""A report is a mapping that compares, prints, and is strict JSON."""

import json
import math

import pytest
import torch
from helpers.reports import QUICK, as_json, calibrated

import torchcalib as tc


def test_a_report_is_a_mapping_that_compares_and_prints():
    preds, target = torch.tensor([0.2, 0.9]), torch.tensor([0, 1])
    report, again = (tc.report(preds, target, task="binary", **QUICK) for _ in range(2))
    assert report == again
    assert "nll" in report
    assert "loss" not in report
    assert dict(report)["nll"] == report["nll"]
    assert len(list(report)) == len(report) == len(report.lines)
    assert repr(report) == str(report)
    assert report.main_table != again.main_table, "tables compare by identity"


def test_json_is_strict_and_complete():
    report = tc.report(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1, 0, 1]), task="binary", n_bins=3)
    content = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    lines = {line["key"]: line for line in content["lines"]}
    assert lines["nll"]["value"] == "inf"
    assert lines["brier"]["value"] == pytest.approx((1 + 0.25 + 0) / 3)
    assert set(lines["ece/top_label"]) == {
        *("key", "name", "group", "value", "unit", "perfect", "naive", "question", "source", "interval"),
        *("noise_floor", "p_value"),
    }
    assert content["tables"]["positive_class"]["n"] == [1, 1, 1]
    assert content["tables"]["positive_class"]["upper"] == [1 / 3, 2 / 3, 1]
    assert math.isinf(report["nll"])
    assert str(report).startswith(report.sentence)


def test_the_report_prints_and_keeps_the_recommendation():
    report = calibrated("binary")
    assert report.recommendation.text in str(report)
    content = json.loads(report.to_json())["calibration"]
    assert content["recommendation"]["text"] == report.recommendation.text
    assert content["calibrator"] == "Temperature()"
    raw = {"NLL": report["nll"], "Brier score": report["brier"]}
    assert content["raw"] == pytest.approx(raw, rel=1e-12)
    assert [gain["rcl"] for gain in content["gains"]] == [as_json(gain.rcl) for gain in report.calibration.gains]
