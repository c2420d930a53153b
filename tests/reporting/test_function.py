"""Every number of a report equals that of its function, also if rank-based values are computed from a sketch."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.reports import (
    IN_ORDER,
    MODES,
    QUICK,
    SCORES,
    SELECTIVE,
    TASKS,
    assert_values,
    predictions,
    quick_report,
    rank_based_lines,
    rank_based_values,
)

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core import ranked, sample_or_sketch
from torchcalib.reporting.building import ReportBuilder

ERRORS = {name: getattr(F, name) for name in ("ece", "esce", "mce", "rmsce")}
ERRORS |= {"ece_debiased": partial(F.ece, debiased=True), "rmsce_debiased": partial(F.rmsce, debiased=True)}
BINNED = {
    "binary": ("positive", "top_label"),
    "multiclass": ("top_label", "classwise"),
    "multilabel": ("classwise",),
}


def values_of_sums(preds, target, n_bins, **given):
    """Return the values of scores and of errors over equal-width bins, by key in a report."""
    values = {key: function(preds, target, **given) for key, function in SCORES.items()}
    for mode in BINNED[given["task"]]:
        of = {**given, "n_bins": n_bins, "mode": mode}
        values |= {f"{name}/{mode}": function(preds, target, **of) for name, function in ERRORS.items()}
    left_out = {"esce/classwise"} if given["task"] == "multiclass" else ()  # always 0
    return {key: value.item() for key, value in values.items() if key not in left_out}


def check_tables(report, preds, target, **given):
    """Compare tables with those of the function. The entries of several labels are pooled."""
    for mode, table in report.tests.items():
        if given["task"] == "multilabel":
            expected = F.tce_table(preds.flatten(), target.flatten(), **{**given, "task": "binary"})
        else:
            expected = F.tce_table(preds, target, **given, mode=mode)
        columns = expected.to_dict()
        if given["task"] == "multiclass":  # reports do not store the ECD of all classes
            columns["ecd"] = np.full_like(columns["ecd"], np.nan)
        for name, column in columns.items():
            assert table.to_dict()[name] == pytest.approx(column, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("n", [1, 19, 60, 200])
@pytest.mark.parametrize("task", TASKS)
def test_numbers_and_tables_equal_those_of_the_functions(task, n):
    logits, target = predictions(task, n)
    target = torch.ones_like(target) if n == 60 else target
    given = {"task": task, "from_logits": True}
    report = tc.report(logits, target, n_bins=7, **given, **QUICK)
    expected = values_of_sums(logits, target, 7, **given) | rank_based_values(logits, target, n_bins=7, **given)
    assert {*report} == {*expected}
    assert_values(report, expected)
    has_one_class = target.min() == target.max()
    assert report.settings["order_based"] == "exact"
    one_class = "All targets are 1" if task == "multilabel" else "All targets are class 1"
    assert [note.partition(":")[0] for note in report.notes] == [one_class] * has_one_class
    assert set(report.tests) == set(report.tables)
    check_tables(report, logits, target, **given)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.filterwarnings("ignore:.*got only 0 and 1")
def test_naive_and_perfect_are_the_values_of_constant_and_certain_predictions(task):
    _, target = predictions(task)
    report = quick_report(task)
    certain = torch.nn.functional.one_hot(target, 5).double() if task == "multiclass" else target.double()
    shares = certain.mean(0)
    priors = [1 - shares.item(), shares.item()] if task == "binary" else shares.tolist()
    assert report.priors == pytest.approx(priors, abs=1e-15)
    constant = shares.expand(certain.shape).contiguous()
    for preds, name in ((constant, "naive"), (certain, "perfect")):
        found = tc.report(preds, target, task=task, **QUICK)
        expected = {line.key: getattr(line, name) for line in report.lines}
        if name == "perfect":  # without errors, AUROC is undefined, and the value is that of an ideal order
            assert expected.pop("correctness_auroc") == 1
            assert math.isnan(found["correctness_auroc"])
        assert_values(found, expected)


def test_tce_of_imagenet_dogs_equals_recording(recorded):
    arrays = recorded("imagenet_dogs_alexnet.npz")
    report = tc.report(arrays["probs"], arrays["targets"], task="binary", **QUICK)
    assert report["tce/positive"] == pytest.approx(42.736, abs=1e-9)
    assert report.tests["positive"].rejected.sum() == 21368


@pytest.mark.parametrize("task", TASKS)
def test_whole_weights_count_copies_and_ignored_entries_do_not_count(task):
    logits, target = predictions(task)
    marked = torch.where((torch.arange(target.numel()) % 7 == 0).reshape(target.shape), -1, target)
    given = {"task": task, "from_logits": True, "weights": torch.arange(200.0) % 3, "ignore_index": -1}
    report = tc.report(logits, marked, **given, **QUICK)
    expected = values_of_sums(logits, marked, 15, **given) | rank_based_values(logits, marked, **given)
    assert {*report} == {*expected}
    assert_values(report, expected)
    if task != "multilabel":
        check_tables(report, logits, marked, **given)


@pytest.mark.parametrize("task", TASKS)
def test_weights_that_are_not_counts_leave_out_rank_based_lines(task):
    logits, target = predictions(task)
    builder = ReportBuilder(task=task, from_logits=True, **QUICK)
    for weight in (2.0, 0.5, 1.0):
        builder.update(logits, target, weights=torch.full((200,), weight))
        report = builder.report()
        assert bool(rank_based_lines(report)) == (weight == 2)
    assert (report.tests, report.settings["order_based"]) == ({}, "left out")
    names = "ACE, TCE, KS, ATB, MCB, DSC, UNC and metrics of selective prediction"
    note = f"{names} are omitted: they need weights that are whole numbers."
    assert report.notes == (note,)
    assert note in str(report)
    keys = {key for key in report if "debiased" not in key}  # the debiased error depends on the number of samples
    assert keys == {key for key in quick_report(task) if "debiased" not in key} - set(
        rank_based_lines(quick_report(task))
    )
    assert_values(report, quick_report(task), keys)


def test_too_large_counts_leave_out_rank_based_lines():
    for weight in (2.0**54, 2.0**52):  # a weight above the limit, and four weights whose sum is
        given = {"weights": torch.full((4,), weight), "from_logits": True}
        report = tc.report(*predictions("binary", 4), task="binary", **given, **QUICK)
        assert (rank_based_lines(report), report.settings["order_based"]) == ({}, "left out")


# Above a limit of samples, a report computes rank-based values from a sketch.

METRICS = (tc.AURC, tc.EAURC, tc.AUGRC, tc.CorrectnessAUROC, tc.AccuracyAtCoverage, tc.CoverageAtRisk)
METRICS = dict(zip(SELECTIVE, METRICS, strict=True))


def in_pieces(task, logits, target):
    builder = ReportBuilder(task=task, from_logits=True, **QUICK)
    for piece, labels in zip(logits.split(40), target.split(40), strict=True):
        builder.update(piece, labels)
    return builder


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[pytest.mark.extended] if task == "multilabel" else []) for task in TASKS]
)
def test_rank_based_values_above_the_limit_equal_those_of_the_sketch(task, monkeypatch):
    """Tests of `LogitCells` check its accuracy. The error of KS is at most the share of a cell, here 1/200."""
    exact = quick_report(task)  # computed before the limit is lowered
    monkeypatch.setattr(sample_or_sketch, "MAX_SAMPLES", 60 if task != "multilabel" else 300)
    monkeypatch.setattr(ranked, "_FEW", 64)
    logits, target = predictions(task)
    builder = in_pieces(task, logits, target)
    report, again = builder.report(), builder.report()
    assert rank_based_lines(report) == rank_based_lines(again), "report() does not change the builder"
    assert report.settings["order_based"] == "sketch, 2,048 cells per unit of log-odds"
    (note,) = report.notes
    assert "sketch" in note
    outputs = {"multiclass": {"num_classes": 5}, "multilabel": {"num_labels": 5}}.get(task, {})
    for mode in MODES[task]:
        given = {"task": task, "from_logits": True, "mode": mode, "resolution": 2048, **outputs}
        metrics = {"ace": tc.ACE(**given), "tce": tc.TCE(**given), "ks": tc.KS(**given)}
        metrics |= {part: tc.CORP(**given, component=part) for part in ("mcb", "dsc", "unc")}
        for name, metric in metrics.items():
            metric.update(logits, target)
            assert report[f"{name}/{mode}"] == pytest.approx(metric.compute().item(), abs=1e-12), name
        assert report[f"ks/{mode}"] == pytest.approx(exact[f"ks/{mode}"], abs=1 / 200)
        assert report.tests[mode].n.sum() == exact.tests[mode].n.sum()
    for key, metric_class in METRICS.items():
        metric = metric_class(task=task, from_logits=True, resolution=2048, **outputs)
        metric.update(logits, target)
        assert report[key] == pytest.approx(metric.compute().item(), abs=1e-12), key
    assert_values(report, exact, set(exact) - set(rank_based_lines(exact)))


@pytest.mark.parametrize(("task", "dtype"), [("binary", torch.float16), ("multilabel", torch.bfloat16)])
def test_sketch_of_half_precision_input_is_exact_with_weights_and_ignored_rows(task, dtype, monkeypatch):
    logits, target = predictions(task)
    target = torch.where((torch.arange(target.numel()) % 7 == 0).reshape(target.shape), -1, target)
    given = {"task": task, "ignore_index": -1, "weights": torch.arange(200) % 4, **QUICK}
    whole = tc.report(logits.sigmoid().to(dtype), target, **given)
    monkeypatch.setattr(sample_or_sketch, "MAX_SAMPLES", 60)
    report = tc.report(logits.sigmoid().to(dtype), target, **given)
    assert report.settings["order_based"].startswith("sketch")
    assert_values(report, rank_based_lines(whole))
    (of_copies,) = (note for note in whole.notes if "count as" in note)
    assert of_copies in report.notes
    for mode, table in whole.tests.items():
        assert report.tests[mode].rejected.tolist() == table.rejected.tolist()


def test_memory_of_samples_and_sketches_is_bounded(monkeypatch):
    logits, target = predictions("multiclass", 1000)
    for most, n_bytes in ((2**24, 9 * 1000), (100, 9 * 100)):
        monkeypatch.setattr(sample_or_sketch, "MAX_SAMPLES", most)
        held = in_pieces("multiclass", logits.float(), target)._states["sample of top_label"].exact
        size = sum(t.untyped_storage().nbytes() for part in held[:3] for t in part)
        assert size == n_bytes if most > 1000 else size <= n_bytes
    preds, target = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)), torch.ones(60, 40, dtype=torch.long)
    report = tc.report(preds, target, task="multilabel", **QUICK)
    assert report.settings["order_based"] == "sketch, 819 cells per unit of log-odds"
    exact = F.ks(preds, target, task="multilabel").item()
    assert report["ks/classwise"] == pytest.approx(exact, abs=1 / 60)


@pytest.mark.parametrize("most", [2**24, 60])
@pytest.mark.parametrize("task", TASKS)
def test_soft_targets_leave_out_label_metrics_and_floating_labels_are_labels(task, most, monkeypatch):
    logits, labels = predictions(task)
    floating = torch.nn.functional.one_hot(labels, 5).double() if task == "multiclass" else labels.double()
    soft = floating * 0.75 + 0.05
    given = {"task": task, "from_logits": True}
    expected = rank_based_values(logits, soft, names=("ace", "ks", "atb"), **given)
    monkeypatch.setattr(sample_or_sketch, "MAX_SAMPLES", most)
    builder = in_pieces(task, logits, soft)
    # an empty batch does not change the kind of targets
    builder.update(logits[:0], (soft[:0] if task == "multiclass" else labels[:0]))
    report = builder.report()
    assert set(rank_based_lines(report)) == set(expected)
    assert report.tests == {}
    names = "TCE, MCB, DSC, UNC and metrics of selective prediction"
    assert f"{names} are omitted: they need labels, and targets are soft." in report.notes
    assert len(report.notes) == 1 + (most == 60)
    for key, value in expected.items():
        assert report[key] == pytest.approx(value, abs=1e-12 if most > 60 else 0.01)
    given |= {"weights": torch.arange(200) % 3 if most == 60 else None, **QUICK}
    report, expected = tc.report(logits, floating, **given), tc.report(logits, labels, **given)
    assert {key.split("/")[0] for key in rank_based_lines(report)} == {*IN_ORDER, *SELECTIVE}
    assert_values(rank_based_lines(report), rank_based_lines(expected))
    assert set(report.tests) == set(report.tables)
