"""Intervals of a report: those that `bootstrap` finds, on the page, in files and in the terminal."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.reports import TASKS, predictions

import torchcalib as tc
from torchcalib import cli
from torchcalib.report import Line, LineInterval, ReportBuilder, evidence, intervals, kept


def data(task):
    logits, target = predictions(task, 120)
    return (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()), target


def corp_part(*args, part, **options):
    return getattr(tc.corp(*args, **options), part)


FUNCTIONS = {"nll": tc.nll, "brier": tc.brier_score, "ecd": tc.ecd}
FUNCTIONS |= {"nce": partial(tc.nll, normalize="prior"), "nbs": partial(tc.brier_score, normalize="prior")}
FUNCTIONS |= {part: partial(corp_part, part=part) for part in ("dsc", "unc")}
ERRORS = {name: getattr(tc, name.upper()) for name in ("ece", "esce", "mce", "rmsce", "ace", "tce", "ks")}
ERRORS |= {"rmsce_debiased": partial(tc.RMSCE, debiased=True), "mcb": tc.CORP}
REPLICATES = 99


def near(*expected):
    """Sums in another order, of weights that are the same."""
    return pytest.approx([float(value) for value in expected], abs=1e-9)


def ends(line):
    return [line.interval.low, line.interval.high]


@pytest.mark.parametrize("task", TASKS)
def test_scores_have_the_intervals_of_bootstrap_and_errors_the_evidence_of_their_metrics(task, few_replicates):
    preds, target = data(task)
    report = tc.report(preds, target, task=task, n_bins=5, with_calibration=False)
    given = {"task": task} | ({} if task == "binary" else {f"num_{'classes' if task == 'multiclass' else 'labels'}": 5})
    checked = Counter()
    for line in report.lines:
        name, *reduction = line.key.split("/")
        of = {"reduction": reduction[0]} if reduction else {}
        if line.key == "esce/classwise" and task == "multiclass":  # whose parts cancel
            assert line.noise_floor is line.p_value is line.interval is None
        elif name in ERRORS:
            bins = {} if name in ("tce", "ks", "mcb") else {"n_bins": 5}
            metric = ERRORS[name](**given, **bins, **of)
            metric.update(preds, target)
            expected = metric.evidence(n_replicates=REPLICATES)
            found = [line.value, line.noise_floor, line.p_value, *ends(line)]
            assert found == near(expected.value, expected.noise_floor, expected.p_value, expected.low, expected.high), (
                line.key
            )
            assert f"{line.name} " in str(line)
            assert "(noise floor " in str(line)
            checked["errors"] += 1
        else:
            assert line.noise_floor is line.p_value is None, line.key
            assert line.interval is not None
        if name in FUNCTIONS:
            expected = tc.bootstrap(FUNCTIONS[name], preds, target, task=task, **of, n_replicates=199)
            assert [line.value, *ends(line)] == near(expected.value, expected.low, expected.high), line.key
            checked["scores"] += 1
    assert (
        checked
        == {
            "binary": {"errors": 18, "scores": 9},
            "multiclass": {"errors": 13, "scores": 7},
            "multilabel": {"errors": 9, "scores": 7},
        }[task]
    )


@pytest.fixture
def few_replicates(monkeypatch):
    """The same number of replicates for every line."""
    monkeypatch.setattr(evidence, "_MOST_REPLICATES", REPLICATES)


def test_one_line_says_it_as_it_is_written_down():
    line = Line("ece/top_label", "ECE", "top label", 0.021, "probability", 0, 0, "", "", 0.004, 0.0005)
    assert str(line) == "ECE 0.0210 (noise floor 0.0040, p < 0.001)"
    assert str(replace(line, interval=LineInterval(0.018, 0.024))) == (
        "ECE 0.0210 (noise floor 0.0040, 95 % 0.0180-0.0240, p < 0.001)"
    )
    signed = replace(line, name="ESCE", value=-0.0109, p_value=0.0123, interval=LineInterval(-0.0174, -0.0041))
    assert str(signed) == "ESCE -0.0109 (noise floor 0.0040, 95 % -0.0174 to -0.0041, p = 0.012)"
    score = Line("nll", "NLL", "scores", 0.6931472, "nats", 0, 1, "", "", interval=LineInterval(0.61, float("inf")))
    assert str(score) == "NLL 0.6931 (95 % 0.6100-inf)"
    small = replace(line, value=0.00021, noise_floor=0.00018, p_value=0.41)
    assert str(small) == "ECE 0.000210 (noise floor 0.000180, p = 0.41)"


def test_without_intervals_the_sentence_is_the_same_and_errors_over_bins_keep_their_noise_floor():
    whole, quick = (
        tc.report(*data("binary"), task="binary", with_calibration=False, with_intervals=with_intervals)
        for with_intervals in (True, False)
    )
    assert quick.sentence == whole.sentence
    assert not any(line.interval for line in quick.lines)
    assert quick.main_line.noise_floor == whole.main_line.noise_floor
    assert quick.main_line.p_value == whole.main_line.p_value
    assert "95 %" not in str(quick).replace(quick.sentence, "")


def test_intervals_of_weights_ignored_rows_and_soft_targets_that_come_with_labels_and_certain_ones():
    preds, target = data("binary")
    marked = torch.where(torch.arange(120) == 5, -1, target)
    for labels, given in (
        (marked, {"ignore_index": -1, "weights": torch.arange(120) % 3}),
        ((target + 0.5) / 2, {}),
    ):
        line = tc.report(preds, labels, task="binary", with_calibration=False, **given).lines[1]
        expected = tc.bootstrap(tc.nll, preds, labels, task="binary", n_replicates=199, **given)
        assert ends(line) == near(expected.low, expected.high)
    preds, target = data("multiclass")
    sure = torch.nn.functional.one_hot(target, 5).double()
    votes = (sure + preds) / 2
    builder = ReportBuilder(task="multiclass", with_calibration=False)
    for piece, labels in ((slice(0, 40), target), (slice(40, 80), sure), (slice(80, 120), votes)):
        builder.update(preds[piece], labels[piece])
    whole = torch.cat((sure[:80], votes[80:]))
    expected = tc.bootstrap(tc.nll, preds, whole, task="multiclass", n_replicates=199)
    assert ends(builder.report().lines[1]) == near(expected.low, expected.high)


def test_lines_that_would_take_long_have_none_and_a_note_says_so(monkeypatch):
    preds, target = data("multiclass")
    monkeypatch.setattr(intervals, "MOST_EVENTS", 200)
    monkeypatch.setattr(intervals, "MOST_IN_ORDER", 100)
    report = tc.report(preds, target, task="multiclass")
    by_key = {line.key: line.interval for line in report.lines}
    assert by_key["nll"] is not None
    assert by_key["dsc/top_label"] is by_key["unc/top_label"] is None
    assert "There is no interval of DSC and UNC, top label, above 100 samples;" in " ".join(report.notes)
    for key in ("ece/top_label", "ece/classwise", "ks/top_label", "tce/top_label", "mcb/top_label"):
        assert by_key[key] is not None, "evidence has no such limit"
    monkeypatch.setattr(evidence, "MOST_CELLS", 74)
    monkeypatch.setattr(evidence, "MOST_IN_ORDER", 100)
    report = tc.report(preds, target, task="multiclass", with_calibration=False)
    floors = {line.key: line.noise_floor for line in report.lines}
    by_key = {line.key: line.interval for line in report.lines}
    for key in ("ece/classwise", "mce/classwise", "rmsce_debiased/classwise"):
        assert floors[key] is not None
        assert by_key[key] is None
    assert any(note.startswith("Errors over bins, class-wise, have no interval") for note in report.notes)
    assert floors["ace/top_label"] is not None
    assert floors["ks/top_label"] is None
    assert any(note.startswith("There is no noise floor of KS, TCE and MCB, top label") for note in report.notes)


def test_p_values_of_few_replicates_say_so(monkeypatch):
    monkeypatch.setattr(evidence, "_replicates", lambda affordable, at_least: at_least)
    report = tc.report(*data("multiclass"), task="multiclass", with_calibration=False, with_intervals=False)
    said = "Noise floor and p of errors over bins, class-wise, are from 39 replicates, so that p is at least 0.025"
    assert said in " ".join(report.notes)
    p_values = [line.p_value for line in report.lines if line.group == "class-wise" and line.p_value is not None]
    assert min(p_values) >= 1 / 40


def test_too_many_samples_have_no_intervals_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr(kept, "MOST_SAMPLES", 100)
    report = tc.report(*data("binary"), task="binary")
    by_key = {line.key: line.interval for line in report.lines}
    assert by_key["nll"] is by_key["dsc/positive_class"] is None
    for key in ("ece/positive_class", "tce/positive_class", "mcb/positive_class"):
        assert by_key[key] is not None, "it follows from what was streamed"
    assert any(note.startswith("Bootstrap intervals are left out: ") for note in report.notes)


def test_intervals_are_in_json_on_the_page_and_in_the_terminal(tmp_path, capsys):
    pytest.importorskip("jinja2")
    preds, target = data("binary")
    torch.save({"probs": preds, "target": target}, tmp_path / "p.pt")
    assert cli.main(["report", str(tmp_path / "p.pt"), "--no-calibration", "--out", str(tmp_path / "out")]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
    lines = {line["key"]: line for line in json.loads((tmp_path / "out" / "report.json").read_text())["lines"]}
    nll, ece = lines["nll"], lines["ece/positive_class"]
    assert nll["interval"]["low"] < nll["value"] < nll["interval"]["high"]
    for text in (said, page):
        assert f"{nll['interval']['low']:.4g} to {nll['interval']['high']:.4g}" in text
        assert f"ECE {ece['value']:.4f} (noise floor {ece['noise_floor']:.4f}, 95 % " in text
    assert f"{ece['noise_floor']:.6f}" in said
    assert f'<data value="{ece["p_value"]}">' in page


def test_an_infinite_score_has_an_infinite_end_that_json_can_hold():
    preds, target = data("binary")
    preds[3], target[3] = 0.0, 1
    report = tc.report(preds, target, task="binary", with_calibration=False)
    line = next(line for line in report.lines if line.key == "nll")
    assert line.interval.high == float("inf")
    assert json.loads(report.to_json())["lines"][1]["interval"]["high"] == "inf"
