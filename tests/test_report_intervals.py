"""Intervals of a report: those that `bootstrap` finds, on the page, in files and in the terminal."""

import json
from functools import partial

import pytest
import torch

import torchcalib as tc
from torchcalib import cli
from torchcalib.report import ReportBuilder, intervals, kept


def data(task, n=120, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, *[3] * (task != "binary"), generator=generator, dtype=torch.float64)
    target = torch.randint(
        0, 3 if task == "multiclass" else 2, (n,) if task != "multilabel" else (n, 3), generator=generator
    )
    return (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()), target


def corp_part(*args, part, **options):
    return getattr(tc.corp(*args, **options), part)


FUNCTIONS = {
    "nll": tc.nll, "nce": partial(tc.nll, normalize="prior"), "brier": tc.brier_score,
    "nbs": partial(tc.brier_score, normalize="prior"), "ecd": tc.ecd, "ece": tc.ece, "esce": tc.esce, "mce": tc.mce,
    "rmsce": tc.rmsce, "ace": tc.ace, "tce": tc.tce, "ks": tc.ks,
    **{part: partial(corp_part, part=part) for part in ("mcb", "dsc", "unc")},
}  # fmt: skip


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_intervals_are_those_of_bootstrap(task):
    preds, target = data(task)
    report = tc.report(preds, target, task=task, n_bins=5, with_calibration=False)
    checked = 0
    for line in report.lines:
        if line.name == "RMSCE debiased":  # which a replicate that repeats samples tells nothing of
            assert line.interval is None
            continue
        assert line.interval is not None, line.key
        name, *reduction = line.key.split("/")
        if name not in FUNCTIONS:
            continue
        bins = {"n_bins": 5} if name in ("ece", "esce", "mce", "rmsce", "ace") else {}
        options = {**bins, **({"reduction": reduction[0]} if reduction else {}), "n_replicates": 199}
        expected = tc.bootstrap(FUNCTIONS[name], preds, target, task=task, **options)
        assert line.value == pytest.approx(float(expected.value), abs=1e-9)
        assert (line.interval.low, line.interval.high) == pytest.approx(
            (float(expected.low), float(expected.high)), abs=1e-9
        )
        told = line.name in intervals.BIASED and float(expected.bias) > float(expected.standard_error) / 4
        assert line.interval.bias == (pytest.approx(float(expected.bias), abs=1e-9) if told else None)
        checked += 1
    assert checked == {"binary": 25, "multiclass": 19, "multilabel": 15}[task]


def test_the_bias_of_a_calibrated_models_ece_is_told_beside_its_interval():
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(300, generator=generator, dtype=torch.float64)
    target = (torch.rand(300, generator=generator) < preds).long()
    report = tc.report(preds, target, task="binary", with_calibration=False)
    line = next(line for line in report.lines if line.key == "ece/positive_class")
    assert 0.01 < line.interval.bias < line.value
    assert f"{line.interval.bias:+.2g}" in str(report)


def test_intervals_of_weights_ignored_rows_and_soft_targets():
    preds, target = data("binary")
    weights = torch.arange(120) % 3
    marked = target.clone()
    marked[5] = -1
    line = tc.report(preds, marked, task="binary", ignore_index=-1, weights=weights, with_calibration=False).lines[1]
    expected = tc.bootstrap(tc.nll, preds, marked, task="binary", ignore_index=-1, weights=weights, n_replicates=199)
    assert (line.interval.low, line.interval.high) == pytest.approx((float(expected.low), float(expected.high)))
    votes = (target + 0.5) / 2
    line = tc.report(preds, votes, task="binary", with_calibration=False).lines[1]
    expected = tc.bootstrap(tc.nll, preds, votes, task="binary", n_replicates=199)
    assert (line.interval.low, line.interval.high) == pytest.approx((float(expected.low), float(expected.high)))


def test_intervals_of_soft_classes_that_come_with_labels_and_with_certain_ones():
    preds, target = data("multiclass")
    sure = torch.nn.functional.one_hot(target, 3).double()
    votes = (sure + preds) / 2
    builder = ReportBuilder(task="multiclass", with_calibration=False)
    for piece, given in ((slice(0, 40), target), (slice(40, 80), sure), (slice(80, 120), votes)):
        builder.update(preds[piece], given[piece])
    line = builder.report().lines[1]
    whole = torch.cat((sure[:80], votes[80:]))
    expected = tc.bootstrap(tc.nll, preds, whole, task="multiclass", n_replicates=199)
    assert (line.interval.low, line.interval.high) == pytest.approx((float(expected.low), float(expected.high)))


def test_lines_that_would_take_long_have_none_and_a_note_says_so(monkeypatch):
    preds, target = data("multiclass")
    monkeypatch.setattr(intervals, "MOST_EVENTS", 200)
    monkeypatch.setattr(intervals, "MOST_IN_ORDER", 100)
    report = tc.report(preds, target, task="multiclass")
    by_key = {line.key: line.interval for line in report.lines}
    assert by_key["nll"] is not None
    assert by_key["ece/top_label"] is not None
    assert by_key["ece/classwise"] is None
    assert by_key["ks/top_label"] is None
    said = " ".join(report.notes)
    assert "equal-width bins, class-wise, above 200 samples times classes" in said
    assert "samples in order, top label, above 100 samples;" in said


def test_too_many_samples_have_no_intervals_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr(kept, "MOST_SAMPLES", 100)
    report = tc.report(*data("binary"), task="binary")
    assert not any(line.interval for line in report.lines)
    assert any(note.startswith("Intervals are left out: ") and "there are more" in note for note in report.notes)
    assert "95 %" not in str(report)


def test_intervals_are_in_json_on_the_page_and_in_the_terminal(tmp_path, capsys):
    pytest.importorskip("jinja2")
    preds, target = data("binary")
    torch.save({"probs": preds, "target": target}, tmp_path / "p.pt")
    assert cli.main(["report", str(tmp_path / "p.pt"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    lines = json.loads((tmp_path / "out" / "report.json").read_text())["lines"]
    nll = next(line for line in lines if line["key"] == "nll")
    assert nll["interval"]["low"] < nll["value"] < nll["interval"]["high"]
    shown = f"{nll['interval']['low']:.4g} to {nll['interval']['high']:.4g}"
    assert shown in said
    assert shown in (tmp_path / "out" / "report.html").read_text()
    assert cli.main(["report", str(tmp_path / "p.pt"), "--no-intervals"]) == 0
    assert "95 %" not in capsys.readouterr().out


def test_an_infinite_score_has_an_infinite_end_that_json_can_hold():
    preds, target = data("binary")
    preds[3], target[3] = 0.0, 1
    report = tc.report(preds, target, task="binary", with_calibration=False)
    line = next(line for line in report.lines if line.key == "nll")
    assert line.interval.high == float("inf")
    assert json.loads(report.to_json())["lines"][1]["interval"]["high"] == "inf"
