"""Intervals of a report equal those of `bootstrap` and of calibration tests, on the page, in files and as text."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.reports import SCORES, SELECTIVE, predictions

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.display.words import significant
from torchcalib.inference import bootstrap, calibration_test
from torchcalib.reporting import buffer, testing
from torchcalib.reporting.render import terminal
from torchcalib.results.lines import Line, LineInterval


def data(task):
    logits, target = predictions(task, 120)
    return (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()), target


def corp_part(*args, part, **options):
    return getattr(F.corp(*args, **options), part)


FUNCTIONS = SCORES | SELECTIVE | {part: partial(corp_part, part=part) for part in ("dsc", "unc")}
ERRORS = {name: getattr(tc, name.upper()) for name in ("ece", "esce", "mce", "rmsce", "ace", "tce", "ks", "atb")}
ERRORS |= {"ece_debiased": partial(tc.ECE, debiased=True), "rmsce_debiased": partial(tc.RMSCE, debiased=True)}
ERRORS["mcb"] = tc.CORP
WITHOUT_INTERVAL = ("ece_debiased", "mce", "tce", "ks", "atb", "mcb")
REPLICATES = 99


def near(*expected):
    """Compare up to rounding of sums in another order."""
    return pytest.approx([float(value) for value in expected], abs=1e-9, nan_ok=True)


def ends(line):
    return [math.nan, math.nan] if line.interval is None else [line.interval.low, line.interval.high]


@pytest.mark.parametrize(
    ("task", "n_errors", "n_scores"), [("binary", 22, 16), ("multiclass", 16, 14), ("multilabel", 11, 14)]
)
def test_scores_have_bootstrap_intervals_and_errors_have_calibration_tests(task, n_errors, n_scores, monkeypatch):
    monkeypatch.setattr(testing, "_REPLICATES", (REPLICATES,) * 4)
    monkeypatch.setattr(testing, "_MIN_RUNS", 2_048)  # as in the tests of metrics
    preds, target = data(task)
    report = tc.report(preds, target, task=task, n_bins=5, with_calibration=False)
    given = {"task": task} | ({} if task == "binary" else {f"num_{'classes' if task == 'multiclass' else 'labels'}": 5})
    checked = Counter()
    for line in report.lines:
        name, *mode = line.key.split("/")
        of = {"mode": mode[0]} if mode else {}
        if name in ERRORS:
            bins = {} if name in ("tce", "ks", "atb", "mcb") else {"n_bins": 5}
            metric = ERRORS[name](**given, **bins, **of)
            found = calibration_test(metric, preds, target, n_replicates=REPLICATES)
            expected = near(found.statistic, found.noise_floor, found.p_value, found.low, found.high)
            assert [line.value, line.noise_floor, line.p_value, *ends(line)] == expected, line.key
            assert (line.interval is None) == (name in WITHOUT_INTERVAL or line.group == "class-wise")
            assert f"{line.name} " in str(line)
            assert "(noise floor " in str(line)
            checked["errors"] += 1
        else:
            assert line.noise_floor is line.p_value is None, line.key
            assert line.interval is not None
        if name in FUNCTIONS:
            expected = bootstrap(FUNCTIONS[name], preds, target, task=task, **of, n_replicates=199)
            low, high = expected.without_bias
            high = high.clamp(max=1) if line.perfect == 1 else high
            assert [line.value, *ends(line)] == near(expected.value, low.clamp(min=0), high), line.key
            checked["scores"] += 1
    assert checked == {"errors": n_errors, "scores": n_scores}
    shown = [line for line in report.lines if line.interval is not None]
    assert len(shown) >= 8
    assert not [str(line) for line in shown if not line.interval.low <= line.value <= line.interval.high]


def test_text_of_a_line_contains_value_noise_floor_interval_and_p_value():
    rest = {"perfect": 0, "question": "", "source": ""}
    ece = {"key": "ece/top_label", "name": "ECE", "group": "top label", "unit": "probability", **rest}
    line = Line(value=0.021, naive=0, noise_floor=0.004, p_value=0.0005, **ece)
    score = Line(key="nll", name="NLL", group="scores", unit="nats", value=0.6931472, naive=1, **rest)
    signed = {"name": "ESCE", "value": -0.0109, "p_value": 0.0123, "interval": (-0.0174, -0.0041)}
    small = {"value": 0.00021, "noise_floor": 0.00018, "p_value": 0.41}
    for of, change, words in (
        (line, {"interval": (0.018, 0.024)}, "ECE 0.0210 (noise floor 0.0040, 95% 0.0180-0.0240, p < 0.001)"),
        (line, signed, "ESCE -0.0109 (noise floor 0.0040, 95% -0.0174 to -0.0041, p = 0.012)"),
        (line, small, "ECE 0.000210 (noise floor 0.000180, p = 0.41)"),
        (score, {"interval": (0.61, float("inf"))}, "NLL 0.6931 (95% 0.6100-inf)"),
    ):
        interval = LineInterval(*change["interval"]) if "interval" in change else None
        assert str(replace(of, **{**change, "interval": interval})) == words


def test_intervals_with_weights_ignored_rows_and_soft_targets_equal_bootstrap():
    preds, target = data("binary")
    marked = torch.where(torch.arange(120) == 5, -1, target)
    for labels, given in (
        (marked, {"ignore_index": -1, "weights": torch.arange(120) % 3}),
        ((target + 0.5) / 2, {}),
    ):
        line = tc.report(preds, labels, task="binary", with_calibration=False, **given).lines[1]
        expected = bootstrap(F.nll, preds, labels, task="binary", n_replicates=199, **given)
        assert ends(line) == near(expected.low, expected.high)


def missing(report, name):
    """Return the keys of lines without a field, and the notes."""
    return {line.key for line in report.lines if getattr(line, name) is None}, " ".join(report.notes)


def test_slow_lines_have_no_interval_or_few_replicates_with_a_note(monkeypatch):
    preds, target = data("multiclass")
    given = {"task": "multiclass", "with_calibration": False}
    with monkeypatch.context() as patch:
        for limit, most in {"MAX_EVENTS": 100, "MAX_RANKED": 100}.items():
            patch.setattr(testing, limit, most)
        report = tc.report(preds, target, **given)
        floors, (keys, notes) = missing(report, "noise_floor")[0], missing(report, "interval")
        assert {"nll", "dsc/top_label", "unc/top_label", *SELECTIVE} <= keys
        assert "The interval of NLL is omitted above 100 samples." in notes
        assert "The interval of DSC and UNC, top label is omitted above 100 samples." in notes
        assert "The interval of metrics of selective prediction is omitted above 100 samples." in notes
        assert "ks/top_label" in floors
        assert "ace/top_label" not in floors
        assert "KS, ATB, TCE and MCB, top label, have no noise floor and p" in notes
    monkeypatch.setattr(testing, "_REPLICATES", (999, 399, 199, 39))
    monkeypatch.setattr(testing, "_MAX_CELLS", 1)
    report = tc.report(preds, target, **given, with_intervals=False)
    words = "All noise floors and p-values are computed from 39 replicates, because the data are large. The smallest"
    assert sum(words in note for note in report.notes) == 1
    p_values = [line.p_value for line in report.lines if line.group == "class-wise" and line.p_value is not None]
    assert min(p_values) >= 1 / 40
    # Without intervals and calibration, predictions are not stored: 5 classes and 39 replicates.
    combined = "p of class-wise errors combines the p-values of single classes. If one class is miscalibrated,"
    assert f"{combined} the smallest possible p is 0.12." in " ".join(report.notes)
    assert "combines the p-values" not in " ".join(tc.report(preds, target, **given).notes)


def test_scores_have_no_bootstrap_interval_for_fewer_than_10_events():
    """The number of events is the larger one of expected and observed events, divided by the design effect."""
    p = torch.full((500,), 0.018)
    few, enough = (torch.arange(500) < k for k in (9, 10))
    given = {"task": "binary", "with_calibration": False}
    for target, options, is_shown in (
        (few.long(), {}, False),
        (enough.long(), {}, True),
        (few.long(), {"weights": torch.full((500,), 2)}, True),  # copies
        (few.long(), {"weights": torch.full((500,), 2.0)}, False),  # importance
        (1 - few.long(), {}, False),
        (enough.long(), {"clusters": torch.arange(500) // 2}, False),  # both events of a cluster occur
    ):
        preds = p if target.sum() < 250 else 1 - p
        report = tc.report(preds, target, **given, **options)
        assert (report.lines[1].interval is not None) == is_shown
        why = "Bootstrap intervals are omitted: they are too narrow for fewer than 10 events."
        assert (why in report.notes) == (not is_shown)


def test_undefined_replicates_leave_out_an_interval_with_a_note():
    """A third of the replicates do not contain the only error, and AUROC of correctness needs one."""
    preds = torch.linspace(0.52, 0.95, 40, dtype=torch.float64)  # 10.6 events are expected
    report = tc.report(preds, (torch.arange(40) != 7).long(), task="binary", with_calibration=False)
    keys, notes = missing(report, "interval")
    assert "correctness_auroc" in keys
    assert not keys & {"aurc", "eaurc", "augrc", "accuracy_at_coverage", "coverage_at_risk"}
    assert "AUROC of correctness are omitted: the value of some replicates is undefined." in notes
    assert "nan to nan" not in str(report)


def test_bootstrap_intervals_are_left_out_with_a_note_if_they_are_too_large_or_fail(monkeypatch):
    """In some replicates a sample with weight 2^51 is drawn five times, which exceeds the largest count."""
    weights = torch.ones(120, dtype=torch.int64).index_fill(0, torch.tensor([3]), 2**51)
    report = tc.report(*data("binary"), task="binary", weights=weights, with_calibration=False)
    keys, notes = missing(report, "interval")
    assert "nll" in keys
    assert "Bootstrap intervals are omitted: the bootstrap failed with ValueError: `weights` must" in notes
    monkeypatch.setattr(buffer, "MAX_SAMPLES", 100)
    keys, notes = missing(tc.report(*data("binary"), task="binary"), "interval")
    assert {"nll", "dsc/positive"} <= keys
    assert not keys & {"ece/positive", "ace/positive", "rmsce/positive"}, "that is of what was streamed"
    assert "Bootstrap intervals are omitted: " in notes


def test_intervals_are_shown_and_do_not_change_sentence_and_noise_floor(capsys):
    pytest.importorskip("rich")
    report, quick = (
        tc.report(*data("binary"), task="binary", with_calibration=False, with_intervals=flag) for flag in (True, False)
    )
    assert (quick.sentence, quick.main_line) == (report.sentence, replace(report.main_line, interval=None))
    assert not any(line.interval for line in quick.lines)
    terminal.show(report, everything=True)
    shown, ece = capsys.readouterr().out, report.main_line
    nll = next(line.interval for line in report.lines if line.key == "nll")
    assert nll.low < report["nll"] < nll.high
    assert f"{nll.low:.3g} to {nll.high:.3g}" in shown
    assert f"{ece.noise_floor:.3g} expected if calibrated" in shown
    assert f"{ece.interval.low:.3g} to {ece.interval.high:.3g}" in shown


def test_narrow_terminal_wraps_names_and_shows_all_digits(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(terminal, "_WIDTH", 80)
    report = tc.report(*data("binary"), task="binary", with_calibration=False)
    terminal.show(report, everything=True)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith(f"AUROC of correctness {significant(report['correctness_auroc'])} ") for line in shown)
    monkeypatch.setattr(terminal, "_WIDTH", 65)
    terminal.show(report, everything=True)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    first = next(k for k, line in enumerate(shown) if line.startswith("AUROC of 0."))
    assert shown[first].startswith(f"AUROC of {significant(report['correctness_auroc'])} ")
    assert shown[first + 1] == "correctness"
