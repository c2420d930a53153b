"""Comparisons of systems: values equal those of reports, intervals those of slow loops, verdicts follow the numbers."""

import json
import math
from functools import partial

import pytest
import torch
from helpers.reports import MODES, QUICK, SELECTIVE, TASKS
from helpers.systems import FEW, systems
from scipy.stats import foldnorm

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.clusters import cluster_numbers
from torchcalib.core.saved import content_of, saved_bytes
from torchcalib.inference.resampling import Interval
from torchcalib.plots import DARK, difference_plot, to_svg
from torchcalib.reporting.comparison import system
from torchcalib.reporting.comparison.building import ComparisonBuilder


def ends(difference):
    return () if difference.interval is None else (difference.interval.low, difference.interval.high)


@pytest.mark.parametrize("task", TASKS)
def test_values_equal_those_of_a_report_and_equal_systems_differ_by_0(task):
    found, target = systems(task)
    logits = {"a": found["calibrated"], "b": found["sure"], "c": found["calibrated"].clone()}
    compared = tc.compare(logits, target, task=task, from_logits=True, **FEW)
    for name in ("a", "b"):
        report = tc.report(logits[name], target, task=task, from_logits=True, **QUICK)
        assert set(report) - set(compared) == {key for key in report if key.startswith("unc/")}
        for key, line in compared.items():
            assert line.values[name] == pytest.approx(report[key], abs=1e-12), key
    for key, line in compared.items():
        same = line.differences["c"]
        assert (same.value, same.verdict) == (0, "not significant"), key
        assert not any(ends(same)), key
    assert compared.n == (480 if task == "multilabel" else 120)


@pytest.mark.parametrize(("task", "weighted"), [("binary", False), ("multiclass", True), ("multilabel", False)])
def test_intervals_equal_those_of_explicit_replicate_weights(task, weighted, monkeypatch):
    monkeypatch.setattr(system, "num_clusters_for", lambda _: 64)  # fewer groups than rows
    monkeypatch.setattr(system, "MAX_CLUSTERS", 64)
    for name in ("null_bins", "null_samples"):  # see test_differences.py
        monkeypatch.setattr(system, name, lambda *_, **__: ())
    logits, target = systems(task)
    own = torch.arange(120) % 3 if weighted else torch.ones(120, dtype=torch.int64)
    options = {"task": task, "from_logits": True}
    compared = tc.compare(logits, target, seed=5, weights=own if weighted else None, **options, **FEW)
    group = cluster_numbers(torch.arange(120), 64)
    counts = system.Draws(5, 39, torch.device("cpu")).weights(torch.arange(64))
    functions = {"nll": F.nll, "nbs": partial(F.brier_score, normalize="prior")}
    functions |= {f"{name}/{MODES[task][0]}": getattr(F, name) for name in ("ece", "esce", "ks")} | SELECTIVE
    for key, function in functions.items():
        drawn = []
        for weights in (own, *(own * times[group].to(own) for times in counts)):
            values = [function(logits[name], target, weights=weights, **options) for name in ("noisy", "calibrated")]
            drawn.append([value.item() for value in values])
        drawn = torch.tensor(drawn, dtype=torch.float64)
        value = drawn[0]
        if key.startswith("esce"):  # expected absolute values of normal variables
            deviation = drawn[1:].std(0)
            drawn = torch.from_numpy(foldnorm.mean((drawn / deviation).abs(), scale=deviation))
            value = value.abs()
        drawn, value = drawn[:, 0] - drawn[:, 1], (value[0] - value[1]).item()
        expected = Interval(drawn[0], drawn[1:], 0.95)
        bias = expected.bias.item() * (abs(expected.bias.item()) > expected.standard_error.item() / 4)
        found = compared[key].differences["noisy"]
        numbers = [value, expected.low.item() - bias, expected.high.item() - bias]
        assert [found.value, *ends(found)] == pytest.approx(numbers, abs=1e-12), key


def test_verdicts_follow_the_direction_of_each_metric():
    logits, target = systems("binary", n=1500)
    compared = tc.compare(logits, target, task="binary", from_logits=True, **FEW)
    assert compared.baseline == "calibrated"
    better = {"accuracy": "higher", "dsc/positive": "higher", "nll": "lower"}
    better |= {"ecd": "nearer to 0", "esce/top_label": "nearer to 0"}
    better |= dict.fromkeys(("aurc", "eaurc", "augrc"), "lower")
    better |= dict.fromkeys(("correctness_auroc", "accuracy_at_coverage", "coverage_at_risk"), "higher")
    assert {key: compared[key].better for key in better} == better
    sure = ("nll", "ece/positive", "ecd", "esce/top_label", "mcb/top_label")
    verdicts = {("accuracy", "sure"): "not significant", **{(key, "sure"): "worse" for key in sure}}
    verdicts |= {("accuracy", "noisy"): "worse", ("dsc/positive", "noisy"): "worse"}
    # The same order and the same predicted classes, and noise in both.
    verdicts |= {(key, "sure"): "not significant" for key in SELECTIVE} | {("aurc", "noisy"): "worse"}
    assert {(key, name): compared[key].differences[name].verdict for key, name in verdicts} == verdicts
    assert compared.sentences["sure"].startswith(
        "sure is worse calibrated than calibrated: the ECE of sure is higher by"
    )
    back = tc.compare(dict(reversed(logits.items())), target, task="binary", from_logits=True, **FEW)
    assert back["nll"].differences["calibrated"].verdict == "better"
    assert back["nll"].differences["calibrated"].value == -compared["nll"].differences["noisy"].value


def test_pixels_of_an_image_are_resampled_together():
    g = torch.Generator().manual_seed(0)
    images = torch.rand(40, generator=g).repeat_interleave(9).reshape(40, 3, 3)
    target = torch.bernoulli(images[:, 0, 0], generator=g).long().reshape(40, 1, 1).expand(40, 3, 3).contiguous()
    together, alone, independent = (
        tc.compare({"a": x, "b": x.sqrt()}, y, task="binary", n_replicates=99)["nll"].differences["b"].interval
        for x, y in ((images, target), (images[:, 0, 0], target[:, 0, 0]), (images.flatten(), target.flatten()))
    )
    assert together.low == pytest.approx(alone.low)
    assert together.high - together.low > 2 * (independent.high - independent.low)


def test_infinite_and_undefined_differences_are_reported_and_drawn():
    target = torch.tensor([0, 1] * 20)
    certain = torch.full((40,), 0.5)
    certain[0] = 1.0
    probs = {"a": torch.full((40,), 0.4), "b": certain, "c": certain.clone()}
    compared = tc.compare(probs, target, task="binary", **FEW)
    assert compared["nll"].differences["b"].value == math.inf
    assert compared["nll"].differences["b"].verdict == "worse"
    both = tc.compare({"b": certain, "c": certain.clone()}, target, task="binary", **FEW)
    assert math.isnan(both["nll"].differences["c"].value)
    content = json.loads(both.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert next(line for line in content["lines"] if line["key"] == "nll")["differences"]["c"]["value"] == "nan"
    assert "undefined" in to_svg(difference_plot(both, style=DARK))


@pytest.mark.parametrize("n", [1, 4])
def test_replicates_without_rows_give_no_intervals_and_no_verdicts(n):
    logits, target = systems("multiclass", n)
    compared = tc.compare(logits, target, task="multiclass", from_logits=True)
    assert any(line.differences["sure"].value for line in compared.lines)
    for line in compared.lines:
        found = line.differences["sure"]
        assert (found.interval, found.verdict) == (None, "not significant")
        assert set(line.intervals.values()) == {None}
    assert "some replicates are empty" in compared.notes[-1]
    assert "nan to nan" not in str(compared)


def test_rows_with_nan_in_any_system_are_dropped_for_all():
    logits, target = systems("multiclass")
    logits["sure"][3, 1] = logits["noisy"][7] = torch.nan
    logits["noisy"][9] = -torch.inf
    with pytest.raises(ValueError, match="system 'sure'"):
        tc.compare(logits, target, task="multiclass", from_logits=True)
    compared = tc.compare(logits, target, task="multiclass", from_logits=True, nan_policy="drop", **FEW)
    keep = torch.ones(120, dtype=torch.bool)
    keep[[3, 7, 9]] = False
    expected = F.nll(logits["calibrated"][keep], target[keep], task="multiclass", from_logits=True)
    assert compared["nll"].values["calibrated"] == pytest.approx(expected.item(), abs=1e-12)
    assert (compared.n, compared.n_dropped) == (117, 3)
    assert "3 rows are dropped" in " ".join(compared.notes)


def test_notes_mention_soft_targets_weights_and_many_classes(monkeypatch):
    g = torch.Generator().manual_seed(0)
    probs, soft = (torch.rand(30, 3, generator=g, dtype=torch.float64).softmax(-1) for _ in range(2))
    weights = torch.rand(30, generator=g, dtype=torch.float64)
    found = tc.compare({"a": probs, "b": probs.roll(1, 0)}, soft, task="multiclass", **FEW)
    names = "TCE, MCB, DSC and metrics of selective prediction"
    assert f"{names} are omitted: they need labels, and targets are soft." in found.notes
    assert not set(SELECTIVE) & set(found)
    expected = F.brier_score(probs, soft, task="multiclass", normalize="prior").item()
    assert found["nbs"].values["a"] == pytest.approx(expected, abs=1e-12)
    assert found["nbs"].differences["b"].interval is not None
    for limits, given, key, has_interval, words in (
        ({}, {"weights": weights}, "ks/top_label", None, "weights that are whole numbers"),
        ({"_MAX_SIZE": 1000}, {}, "ece/classwise", False, "class-wise are omitted: too many classes times bins"),
        ({"num_clusters_for": lambda _: 20}, {}, "ece/classwise", True, "width is about 16%"),
    ):
        with monkeypatch.context() as patch:
            for name, limit in limits.items():
                patch.setattr(system, name, limit)
            found = tc.compare(*systems("multiclass", 30), task="multiclass", from_logits=True, **given, **FEW)
        assert any(words in note for note in found.notes)
        assert (key in found) == (has_interval is not None)
        assert key not in found or (found[key].differences["sure"].interval is not None) == has_interval


@pytest.mark.extended
def test_calibrated_systems_are_rarely_called_better_or_worse_calibrated(monkeypatch):
    """The sharp system has predictions in more bins, so that sampling noise makes its ECE larger."""
    monkeypatch.setattr("torchcalib.reporting.comparison.system.MAX_KEPT", 0)  # rank-based values are slow
    n_wrong = n_excluded = n_larger = 0
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        sharp = (3 * torch.randn(1000, generator=g, dtype=torch.float64)).sigmoid()
        target = torch.bernoulli(sharp, generator=g).long()
        dull = torch.where(sharp > 0.5, sharp[sharp > 0.5].mean(), sharp[sharp <= 0.5].mean())
        compared = tc.compare({"sharp": sharp, "dull": dull}, target, task="binary", n_replicates=199)
        found = compared["ece/positive"].differences["dull"]
        n_wrong += found.verdict != "not significant"
        n_excluded += found.interval.low > 0 or found.interval.high < 0
        n_larger += bool(tc.ece(sharp, target) > tc.ece(dull, target))
    assert n_wrong <= 8, n_wrong
    assert n_excluded <= 8, n_excluded
    assert n_larger >= 80, n_larger


def parts_of(logits, target, task, ends, **options):
    """Return a builder of a comparison for each part of the rows, with pairs of rows as clusters."""
    builders = []
    for k, (start, end) in enumerate(zip((0, *ends), (*ends, len(target)), strict=True)):
        builder = ComparisonBuilder(tuple(logits), task=task, from_logits=True, **FEW)
        preds = {name: each[start:end] for name, each in logits.items()}
        builder.update(preds, target[start:end], clusters=torch.arange(len(target))[start:end] // 2, **options)
        builder.as_part(str(k), f"rows {start} to {end}")
        builders.append(builder)
    return builders


def test_parts_of_a_comparison_must_be_alike_and_different_and_have_clusters():
    logits, target = systems("binary")
    first, second = parts_of(logits, target, "binary", (31,))
    with pytest.raises(ValueError, match="a part that was merged before"):
        first.merge(first)
    second.as_part("0", "other rows")
    with pytest.raises(ValueError, match="Part '0' must have the same rows in all states"):
        first.merge(second)
    without = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, **FEW)
    first.merge(without)  # an empty part
    without.update(logits, target)
    with pytest.raises(ValueError, match="`other` must have clusters if this builder has clusters"):
        first.merge(without)
    other = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, seed=7, **FEW)
    with pytest.raises(ValueError, match="must have the same arguments, got seed=7 instead of seed=0"):
        first.merge(other)


def test_damaged_states_of_a_comparison_raise_an_error():
    logits, target = systems("binary")
    (builder,) = parts_of(logits, target, "binary", ())
    content = builder.state_bytes()
    state = content_of(content, "comparison state")
    system_of = state["systems"]["sure"]
    states = system_of["states"]
    sums, ranks = next(iter(states)), next(name for name in states if name.startswith("sample"))
    for changes in (
        {"settings": {**state["settings"], "n_bins": 16}},
        {"settings": {**state["settings"], "n_bins": 10**9}},
        {"n_rows": "1"},
        {"n_rows": -1},
        {"clusters": torch.ones(3)},
        {"parts": []},
        {"systems": {"sure": system_of}},
        *(
            {"systems": {**state["systems"], "sure": {**system_of, **changes}}}
            for changes in (
                {"likely_axis": 2},
                {"settings": {**system_of["settings"], "from_logits": False}},
                {"states": {}},
                {"states": {**states, sums: [torch.ones(1)]}},
                {"states": {**states, sums: [-part for part in states[sums]]}},
                {"states": {**states, ranks: states[ranks][:-1]}},
                {"states": {**states, ranks: 3}},
            )
        ),
    ):
        with pytest.raises(ValueError, match="`content` must be a complete comparison state, got"):
            ComparisonBuilder.from_bytes(saved_bytes("comparison state", {**state, **changes}))
    with pytest.raises(ValueError, match="`content` must be a complete report state, got"):
        tc.ReportBuilder.from_bytes(content)
    assert ComparisonBuilder.from_bytes(content).comparison().n == len(target)


def test_empty_batches_and_empty_builders_change_nothing_without_clusters():
    logits, target = systems("binary")
    how = {"task": "binary", "from_logits": True, **FEW}
    more = {"weights": torch.ones(len(target))}
    builder, empty = (ComparisonBuilder(tuple(logits), **how) for _ in range(2))
    for rows in (slice(0, 0), slice(None)):
        batch = {name: each[rows] for name, each in logits.items()}
        builder.update(batch, target[rows], **{name: each[rows] for name, each in more.items()})
    empty.merge(builder)
    expected = tc.compare(logits, target, **how, **more)
    for found in (builder, empty):
        assert found.comparison().to_dict()["lines"] == expected.to_dict()["lines"]


@pytest.mark.parametrize("rows", [slice(1, 17, 2), slice(1, 2)], ids=["8 rows", "1 row"])
def test_an_infinite_difference_is_certain(rows):
    """37% of the resamples omit a single outcome of probability 0, and the expected log loss is infinite."""
    p = torch.linspace(0.05, 0.95, 60, dtype=torch.float64)
    y = (torch.arange(60) % 2).long()
    certain = p.clone()
    certain[rows] = 0
    compared = tc.compare({"a": p, "b": certain}, y, task="binary", n_replicates=199)
    found = compared["nll"].differences["b"]
    assert found.verdict == "worse"
    assert found.interval.low == found.interval.high == torch.inf
    assert found.p_value <= found.adjusted_p_value < 0.05
    assert "It is worse in NLL (infinitely higher, p = 0.01)" in compared.sentences["b"]
