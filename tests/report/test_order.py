"""What a report reads from the sample in order: its values, what memory they take, when they are left out."""

import json
import math

import pytest
import torch
from report.test_report import TASKS, predictions

import torchcalib as tc
from torchcalib import bounded
from torchcalib.html import render, save_report
from torchcalib.report import ReportBuilder

REDUCTIONS = {"binary": ("positive_class", "top_label"), "multiclass": ("top_label",), "multilabel": ("classwise",)}
NAMES = ("ace", "tce", "ks", "mcb", "dsc", "unc")
PLAIN = {"with_calibration": False, "with_intervals": False}
"""What is read from the order depends on neither."""
COUNTING = ("tce", "mcb", "dsc", "unc")
"""Those that need labels."""


def keys(task, names=NAMES):
    return {f"{name}/{reduction}" for reduction in REDUCTIONS[task] for name in names}


def ordered(report):
    """Its order-based lines, by key."""
    return {key: report[key] for key in report if key.split("/")[0] in NAMES}


def check_against_functions(report, preds, target, n_bins=15, **given):
    for reduction in REDUCTIONS[given["task"]]:
        asked = {**given, "reduction": reduction}
        parts = tc.corp(preds, target, **asked)
        expected = {
            "ace": tc.ace(preds, target, n_bins=n_bins, **asked),
            "tce": tc.tce(preds, target, **asked),
            "ks": tc.ks(preds, target, **asked),
            **{name: getattr(parts, name) for name in ("mcb", "dsc", "unc")},
        }
        for name, value in expected.items():
            assert report[f"{name}/{reduction}"] == pytest.approx(value.item(), abs=1e-12, nan_ok=True), name


def check_tables(report, preds, target, **given):
    """One series; the entries of several labels are the samples of one."""
    for reduction, table in report.tests.items():
        if given["task"] == "multilabel":
            expected = tc.tce_table(preds.flatten(), target.flatten(), **{**given, "task": "binary"})
        else:
            expected = tc.tce_table(preds, target, **given, reduction=reduction)
        for name, column in expected.to_dict().items():
            assert table.to_dict()[name] == pytest.approx(column, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("n", [1, 2, 19, 200])
@pytest.mark.parametrize("task", TASKS)
def test_numbers_and_tables_are_those_of_the_functions(task, n):
    logits, target = predictions(task, n)
    report = tc.report(logits, target, task=task, from_logits=True, n_bins=7, **PLAIN)
    assert set(ordered(report)) == keys(task)
    assert report.settings["order_based"] == "exact"
    assert report.notes == ()
    assert set(report.tests) == set(report.tables)
    check_against_functions(report, logits, target, 7, task=task, from_logits=True)
    check_tables(report, logits, target, task=task, from_logits=True)


def test_recorded_tce_of_imagenet_dogs(recorded):
    arrays = recorded("imagenet_dogs_alexnet.npz")
    report = tc.report(arrays["probs"], arrays["targets"], task="binary", **PLAIN)
    assert report["tce/positive_class"] == pytest.approx(42.736, abs=1e-9)
    assert report.tests["positive_class"].rejected.sum() == 21368


@pytest.mark.parametrize("task", TASKS)
def test_data_of_one_class_alone(task):
    logits, target = predictions(task, 60)
    report = tc.report(logits, torch.ones_like(target), task=task, from_logits=True, **PLAIN)
    check_against_functions(report, logits, torch.ones_like(target), task=task, from_logits=True)


def test_a_set_of_classes_against_the_rest_is_binary():
    logits, target = predictions("multiclass")
    given = {"from_logits": True, "positive_classes": [0, 3]}
    report = tc.report(logits, target, task="multiclass", **given, **PLAIN)
    assert set(report.tests) == {"positive_class", "top_label"}
    for reduction in report.tests:
        expected = tc.tce(logits, target, task="multiclass", reduction=reduction, **given)
        assert report[f"tce/{reduction}"] == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_weights_are_copies_and_ignored_rows_are_none(task):
    logits, target = predictions(task)
    times = torch.arange(200) % 3
    marked = torch.where((torch.arange(target.numel()) % 7 == 0).reshape(target.shape), -1, target)
    given = {"task": task, "from_logits": True}
    report = tc.report(logits, marked, weights=times.float(), ignore_index=-1, **given, **PLAIN)
    check_against_functions(report, logits, marked, weights=times.float(), ignore_index=-1, **given)
    if task != "multilabel":
        keep = marked != -1
        repeated = [x[keep].repeat_interleave(times[keep], 0) for x in (logits, target)]
        check_against_functions(report, *repeated, **given)
        check_tables(report, *repeated, **given)


def test_predictions_may_be_changed_afterwards():
    preds, target = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.ones(100)
    builder = ReportBuilder(task="binary", **PLAIN)
    builder.update(preds, target)
    before = ordered(builder.report())
    preds.fill_(0.5)
    target.fill_(0)
    assert ordered(builder.report()) == before


# A sketch where samples are many


def in_pieces(task, logits, target, size=40, **options):
    builder = ReportBuilder(task=task, **PLAIN, **options)
    for piece, labels in zip(logits.split(size), target.split(size), strict=True):
        builder.update(piece, labels)
    return builder


@pytest.mark.parametrize("task", TASKS)
def test_samples_above_the_limit_are_those_of_the_sketch(task, monkeypatch):
    """Its accuracy is a matter of `LogitCells`; KS is off by at most the share of a cell, which is 1/200 here."""
    monkeypatch.setattr(bounded, "MOST_SAMPLES", 60 if task != "multilabel" else 300)
    monkeypatch.setattr(bounded, "_PIECE", 64)
    logits, target = predictions(task)
    builder = in_pieces(task, logits, target, from_logits=True)
    report, again = builder.report(), builder.report()
    assert ordered(report) == ordered(again), "looking changes nothing"
    assert report.settings["order_based"] == "sketch, 2,048 cells per unit of log-odds"
    assert len(report.notes) == 1
    assert "sketch" in report.notes[0]
    outputs = {"multiclass": {"num_classes": 5}, "multilabel": {"num_labels": 5}}.get(task, {})
    for reduction in REDUCTIONS[task]:
        given = {"task": task, "from_logits": True, "reduction": reduction, "resolution": 2048, **outputs}
        metrics = {"ace": tc.ACE(**given), "tce": tc.TCE(**given), "ks": tc.KS(**given)}
        metrics |= {part: tc.CORP(**given, component=part) for part in ("mcb", "dsc", "unc")}
        for name, metric in metrics.items():
            metric.update(logits, target)
            assert report[f"{name}/{reduction}"] == pytest.approx(metric.compute().item(), abs=1e-12), name
        exact = tc.ks(logits, target, task=task, from_logits=True, reduction=reduction).item()
        assert report[f"ks/{reduction}"] == pytest.approx(exact, abs=1 / 200)
    whole = tc.report(logits, target, task=task, from_logits=True, **PLAIN)
    for reduction, table in whole.tests.items():
        assert report.tests[reduction].n.sum() == table.n.sum()
    for key in set(whole) - keys(task):
        assert report[key] == pytest.approx(whole[key], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_the_sketch_of_half_precision_probabilities_is_exact(task, dtype, monkeypatch):
    logits, target = predictions(task)
    preds = logits.sigmoid().to(dtype)
    whole = tc.report(preds, target, task=task, **PLAIN)
    monkeypatch.setattr(bounded, "MOST_SAMPLES", 60)
    report = in_pieces(task, preds, target).report()
    assert report.settings["order_based"].startswith("sketch")
    for key, value in ordered(whole).items():
        assert report[key] == pytest.approx(value, abs=1e-12), key
    for reduction, table in whole.tests.items():
        assert report.tests[reduction].rejected.tolist() == table.rejected.tolist()


def test_the_sketch_counts_copies_and_leaves_out_ignored_rows(monkeypatch):
    preds, target = torch.rand(300, generator=torch.Generator().manual_seed(0)).half(), torch.arange(300) % 3 - 1
    times = torch.arange(300) % 4
    given = {"task": "binary", "ignore_index": -1, "weights": times}
    whole = ordered(tc.report(preds, target, **given, **PLAIN))
    monkeypatch.setattr(bounded, "MOST_SAMPLES", 10)
    report = tc.report(preds, target, **given, **PLAIN)
    assert report.settings["order_based"].startswith("sketch")
    assert ordered(report) == pytest.approx(whole, abs=1e-12)


def test_memory_stays_bounded(monkeypatch):
    monkeypatch.setattr(bounded, "MOST_SAMPLES", 100)
    logits, target = predictions("binary", 1000)
    builder = in_pieces("binary", logits, target, from_logits=True)
    for reduction in ("positive_class", "top_label"):
        held = builder._metrics[f"sample of {reduction}"].state
        assert sum(score.numel() for score in held.scores) <= 100


def test_a_sample_takes_nine_bytes():
    logits, target = predictions("multiclass", 1000)
    builder = in_pieces("multiclass", logits.float(), target, from_logits=True)
    held = builder._metrics["sample of top_label"].state
    storages = [t.untyped_storage().nbytes() for part in held[:3] for t in part]
    assert sum(storages) == 9 * 1000


def test_many_labels_share_their_cells(monkeypatch):
    monkeypatch.setattr(bounded, "MOST_SAMPLES", 100)
    preds, target = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)), torch.ones(60, 40, dtype=torch.long)
    report = tc.report(preds, target, task="multilabel", **PLAIN)
    assert report.settings["order_based"] == "sketch, 819 cells per unit of log-odds"
    exact = tc.ks(preds, target, task="multilabel").item()
    assert report["ks/classwise"] == pytest.approx(exact, abs=1 / 60)


# What is left out


@pytest.mark.parametrize("task", TASKS)
def test_weights_that_are_no_counts_leave_the_order_out_from_then_on(task):
    logits, target = predictions(task)
    builder = ReportBuilder(task=task, from_logits=True, **PLAIN)
    builder.update(logits, target, weights=torch.full((200,), 2.0))
    assert set(ordered(builder.report())) == keys(task)
    builder.update(logits, target, weights=torch.full((200,), 0.5))
    builder.update(logits, target)
    report = builder.report()
    assert ordered(report) == {}
    assert report.tests == {}
    assert report.settings["order_based"] == "left out"
    assert report.notes == (
        "ACE, TCE, KS, MCB, DSC and UNC are left out: they count copies of a sample, and weights are no counts.",
    )
    unweighted = tc.report(logits, target, task=task, from_logits=True, **PLAIN)
    for key in set(report) - {key for key in report if "debiased" in key}:  # which depends on how many there are
        assert report[key] == pytest.approx(unweighted[key], rel=1e-12, abs=1e-12)
    page = render(report)
    assert report.notes[0] in page
    assert "Predictions that the outcomes refute" not in page
    assert report.notes[0] in str(report)


def test_bad_weights_leave_the_order_as_it_was():
    logits, target = predictions("binary")
    builder = ReportBuilder(task="binary", from_logits=True, **PLAIN)
    builder.update(logits, target)
    before = ordered(builder.report())
    for bad in (math.nan, -0.5, math.inf):
        with pytest.raises(ValueError, match="weights"):
            builder.update(logits, target, weights=torch.full((200,), bad))
    assert ordered(builder.report()) == before


def test_more_copies_than_can_be_counted_leave_the_order_out():
    logits, target = predictions("binary", 4)
    for weight in (2.0**54, 2.0**52):  # one too large, and four of them
        report = tc.report(logits, target, task="binary", from_logits=True, weights=torch.full((4,), weight), **PLAIN)
        assert ordered(report) == {}
        assert report.settings["order_based"] == "left out"


def soft(task):
    logits, target = predictions(task)
    if task == "multiclass":
        return logits, torch.nn.functional.one_hot(target, 5).double() * 0.75 + 0.05
    return logits, target * 0.5 + 0.25


@pytest.mark.parametrize("most", [2**24, 60])
@pytest.mark.parametrize("task", TASKS)
def test_soft_targets_leave_out_what_counts_labels(task, most, monkeypatch):
    logits, target = soft(task)
    expected = {
        f"{name}/{reduction}": getattr(tc, name)(logits, target, task=task, from_logits=True, reduction=reduction)
        for name in ("ace", "ks")
        for reduction in REDUCTIONS[task]
    }
    monkeypatch.setattr(bounded, "MOST_SAMPLES", most)
    builder = in_pieces(task, logits, target, from_logits=True)
    builder.update(logits[:0], (target[:0] if task == "multiclass" else target[:0].long()))  # forgets nothing
    report = builder.report()
    assert set(ordered(report)) == keys(task, ("ace", "ks"))
    assert report.tests == {}
    assert "TCE, MCB, DSC and UNC are left out: they count labels, and targets are shares." in report.notes
    assert len([note for note in report.notes if "calibration stage" not in note]) == 1 + (most == 60)
    for key, value in expected.items():
        assert report[key] == pytest.approx(value.item(), abs=1e-12 if most > 60 else 0.01)


@pytest.mark.parametrize("most", [2**24, 60])
@pytest.mark.parametrize("weights", [None, torch.arange(200) % 3])
@pytest.mark.parametrize("task", TASKS)
def test_floating_labels_are_labels(task, weights, most, monkeypatch):
    monkeypatch.setattr(bounded, "MOST_SAMPLES", most)
    logits, target = predictions(task)
    floating = torch.nn.functional.one_hot(target, 5).float() if task == "multiclass" else target.float()
    given = {"task": task, "from_logits": True, "weights": weights}
    report = tc.report(logits, floating, **given, **PLAIN)
    assert ordered(report) == pytest.approx(ordered(tc.report(logits, target, **given, **PLAIN)), abs=1e-12)
    assert set(report.tests) == set(report.tables)


# Pages and files


@pytest.mark.parametrize("task", TASKS)
def test_tests_are_on_the_page_and_among_the_files(task, tmp_path):
    logits, target = predictions(task)
    report = tc.report(logits, target, task=task, from_logits=True)
    written = {path.name: path for path in save_report(report, tmp_path)}
    page = written["report.html"].read_text(encoding="utf-8")
    assert page.count('<h2 id="test-') == len(REDUCTIONS[task])
    for name in ("ACE", "TCE", "KS", "MCB", "DSC", "UNC"):
        assert f'<th scope="row">{name}</th>' in page
    assert "<dt>order-based numbers</dt><dd>exact</dd>" in page
    assert "MCB − DSC + UNC" in page
    assert {f"test_{reduction}.svg" for reduction in REDUCTIONS[task]} <= set(written)
    content = json.loads(written["report.json"].read_text(encoding="utf-8"))
    for reduction in REDUCTIONS[task]:
        assert content["tests"][reduction]["rejected"] == report.tests[reduction].rejected.tolist()
        assert "quantiles" not in content["tests"][reduction]
    assert content["notes"] == []
