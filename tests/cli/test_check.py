"""`torchcalib check`, its conditions, and `torchcalib.testing.assert_calibrated`."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.reports import QUICK, quick_report, realistic
from processes import ROOT

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.display.words import ONE_LOOK
from torchcalib.results.conditions import DEFAULT, Condition
from torchcalib.testing import assert_calibrated


@pytest.fixture
def over_confident(tmp_path):
    """Write predictions of an over-confident model, and return the path and the report."""
    logits, target = realistic("multiclass")
    np.savez(tmp_path / "a.npz", logits=logits.numpy(), targets=target.numpy())
    return str(tmp_path / "a.npz"), tc.report(logits, target, from_logits=True, **QUICK)


def test_check_fails_only_if_the_condition_holds(over_confident, capsys):
    path, report = over_confident
    assert main(["check", path]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"FAILED: fail if {DEFAULT}\n")
    assert printed.endswith(f"{ONE_LOOK}\n"), "the condition has a p-value"
    assert report.sentence in printed
    assert main(["check", path, "--fail-if", "p(ece) < 0.01 and ece > 0.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["values"] == {"p(ece)": report.line("ece").p_value, "ece": pytest.approx(report["ece"], abs=1e-12)}
    assert found["sentence"] == report.sentence


TRUE = [
    "ece > 0 and p(ece) <= 1 and floor(ece) >= 0",
    "ece/classwise == ece/classwise",
    "0 < ece/top_label < 1",
    "not (nll < -1 or accuracy > 1)",
    "brier != 2e3",
]


@pytest.mark.parametrize("text", TRUE)
def test_conditions_have_the_value_of_the_expression(text):
    report = quick_report("multiclass")
    condition = Condition.parse(f" {text} ")
    assert condition.outcome(report).holds is True
    assert Condition.parse(f"not ({text})").outcome(report).holds is False
    assert not condition.needs_intervals


def test_values_of_a_condition_are_those_of_the_report():
    report = tc.report(*realistic("binary", n=100), from_logits=True, with_calibration=False)
    condition = Condition.parse("low(ece) > 2 or high(ece) > 2 or floor(ks) > 2 or p(ece/top_label) > 2")
    assert condition.needs_intervals
    line = report.line("ece")
    assert condition.outcome(report).values == {
        "low(ece)": line.interval.low,
        "high(ece)": line.interval.high,
        "floor(ks)": report.line("ks").noise_floor,
        "p(ece/top_label)": report.line("ece/top_label").p_value,
    }


def test_undefined_values_are_an_error_even_if_they_do_not_decide():
    report = quick_report("multiclass")
    lines = tuple(replace(line, value=math.nan) if line.key == "nce" else line for line in report.lines)
    for condition, words in (("ece > 0 or low(ece) > 1", "no such value"), ("ece > 0 or nce > 1", "undefined")):
        with pytest.raises(ValueError, match=words):
            Condition.parse(condition).outcome(replace(report, lines=lines))


FORBIDDEN = [
    "__import__('os').system('true')", "ece", "1", "", "ece >", "ece + 1 > 0", "ece if 1 else 2", "q(ece) > 0",
    "p(ece, nll) > 0", "p(ece=1) > 0", "p(p(ece)) > 0", "p(*ece) > 0", "ece.real > 0", "ece[0] > 0", "ece in (1, 2)",
    "ece is 1", "'a' < 'b'", "True < 2", "(x := 3) > 2", "lambda: 1", "[ece > 0]", "ece > 0 and 1", "ece < 1j",
    "a/b/c > 0", "ece*1 > 0", "ece > 0; nll > 0", "\0", "(" * 900, "not " * 240 + "ece", "x" * 2000, "f'{ece}' > 0",
]  # fmt: skip


@pytest.mark.parametrize("text", FORBIDDEN)
def test_other_syntax_is_an_error(text):
    with pytest.raises(ValueError, match=r"`fail_if` must compare report values, p\(key\)"):
        Condition.parse(text)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_assert_calibrated_needs_a_small_p_value_and_a_large_error(task):
    calibrated, target = realistic(task, scale=1)
    report = assert_calibrated(calibrated, target, task, from_logits=True)
    assert (report.n_rows, report.calibration) == (300, None)
    logits, target = realistic(task)
    with pytest.raises(AssertionError) as caught:
        assert_calibrated(logits, target, task=task, from_logits=True)
    expected = tc.report(logits, target, task, from_logits=True, **QUICK)
    assert str(caught.value).startswith(expected.sentence)
    assert f"The assertion fails if {DEFAULT}, and p(ece) = 0.00100, ece = " in str(caught.value)
    assert_calibrated(logits, target, task=task, from_logits=True, max_ece=0.9)
    assert_calibrated(logits, target, task=task, from_logits=True, alpha=1e-4)  # smaller than any p-value


def test_the_action_runs_the_command_with_pinned_actions_and_its_default_condition():
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    used = [line.strip().removeprefix("- ") for line in text.splitlines() if "uses:" in line]
    assert used
    assert all(line in workflow for line in used), "the versions of actions agree with those of the workflows"
    assert f"default: {DEFAULT}\n" in text
    assert 'torchcalib check $FILES --fail-if "$FAIL_IF"' in text


def test_check_fails_if_the_rows_are_too_few_for_an_error(tmp_path, capsys):
    p = np.random.default_rng(0).random(400)
    np.savez(tmp_path / "a.npz", probs=p, targets=(np.random.default_rng(1).random(400) < p).astype(int))
    path, limits = str(tmp_path / "a.npz"), {"0.5": 0, "0.01": 1}
    for limit, code in limits.items():
        assert main(["check", path, "--require-detectable", limit]) == code
        rule = f"mean errors of 0.0564 are found, {limit} is required"
        assert f"{'too few' if code else 'enough'} rows: {rule}" in capsys.readouterr().out
        assert main(["check", path, "--require-detectable", limit, "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["passed"] is (code == 0)
        assert found["minimum_detectable_error"] == pytest.approx(0.0564, abs=1e-4)
