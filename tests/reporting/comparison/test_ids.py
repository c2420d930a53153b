"""Comparisons of systems with different rows: pairs by id, independent rows, and numbers of common rows."""

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.systems import FEW, systems

import torchcalib as tc
from torchcalib.core.clusters import identifiers
from torchcalib.inference.resampling import Interval
from torchcalib.reporting.comparison import row_ids
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.comparison.row_ids import RowIds, hashes_of_ids
from torchcalib.results.comparison import PairedRows


def builder_of(logits, target, ids, sizes, **more):
    """Return a builder with the rows of each system in batches of its own size."""
    builder = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, **FEW)
    for name, size in zip(logits, sizes, strict=True):
        for start in range(0, len(target[name]), size):
            rows = slice(start, start + size)
            columns = {key: {name: each[name][rows]} for key, each in more.items()}
            builder.update(
                {name: logits[name][rows]}, {name: target[name][rows]}, ids={name: ids[name][rows]}, **columns
            )
    return builder


def with_own_rows(n=120):
    """Return three systems of 80 rows, of which the second has 40 in common with the first, and the third none."""
    logits, target = systems("binary", 2 * n)
    rows = {"calibrated": torch.arange(80), "sure": torch.arange(40, 120).flip(0), "noisy": torch.arange(130, 210)}
    names = [f"question {k}" for k in range(2 * n)]
    return (
        {name: logits[name][of] for name, of in rows.items()},
        {name: target[of] for name, of in rows.items()},
        {name: [names[k] for k in of] for name, of in rows.items()},
    )


def test_values_are_those_of_all_rows_of_a_system_and_common_rows_are_counted():
    logits, target, ids = with_own_rows()
    compared = tc.compare(logits, target, task="binary", from_logits=True, ids=ids, **FEW)
    for name in logits:
        report = tc.report(logits[name], target[name], from_logits=True, with_calibration=False, with_intervals=False)
        for key, line in compared.items():
            assert line.values[name] == pytest.approx(report[key], abs=1e-12), key
    assert compared.rows == {
        "sure": PairedRows(common=40, only=40, only_baseline=40),
        "noisy": PairedRows(common=0, only=80, only_baseline=80),
    }
    assert compared.notes[0] == "sure and calibrated have 40 common rows by id, 40 only in sure, 40 only in calibrated."
    assert "no common rows by id" in compared.notes[1]
    assert compared.input_line.startswith("binary, n = 80, 2 classes. sure and calibrated have 40 common rows")
    assert compared.notes[0] in str(compared)


def test_intervals_of_independent_rows_equal_those_of_explicit_weights():
    """Without common rows, the interval of a difference of means follows from independent Poisson weights."""
    logits, target, ids = with_own_rows()
    pair = [{name: each[name] for name in ("calibrated", "noisy")} for each in (logits, target, ids)]
    many = {"n_replicates": 999, "seed": 3}
    found = tc.compare(*pair[:2], ids=pair[2], task="binary", from_logits=True, **many)["nll"].differences["noisy"]
    g = torch.Generator().manual_seed(0)
    drawn = []
    for name in pair[0]:
        losses = tc.nll(logits[name], target[name], task="binary", from_logits=True, reduction="none")
        weights = torch.poisson(torch.ones(999, 80, dtype=torch.float64), generator=g)
        drawn.append((weights @ losses) / weights.sum(-1))
    expected = Interval(torch.tensor(found.value, dtype=torch.float64), drawn[1] - drawn[0], 0.95)
    width = found.interval.high - found.interval.low
    assert width == pytest.approx(float(expected.high - expected.low), rel=0.1)
    assert found.interval.low == pytest.approx(float(expected.low), abs=0.1 * width)


def test_clusters_determine_the_weights_of_rows_with_ids():
    """All rows of a cluster have the same weight, also if their systems have different rows of it."""
    logits, target, ids = with_own_rows()
    places = {name: torch.tensor([int(text.split()[1]) for text in texts]) for name, texts in ids.items()}
    clusters = {name: of // 4 for name, of in places.items()}
    compared = tc.compare(logits, target, ids=ids, clusters=clusters, task="binary", from_logits=True, **FEW)
    assert compared.settings["clusters"] == len({int(k) for of in clusters.values() for k in of})
    preds, targets = {"a": logits["noisy"], "b": 2 * logits["noisy"]}, dict.fromkeys("ab", target["noisy"])
    how = {"clusters": clusters["noisy"], "task": "binary", "from_logits": True, **FEW}
    common, apart = (
        tc.compare(preds, targets, ids={"a": range(80), "b": range(start, start + 80)}, **how)["nll"].differences["b"]
        for start in (0, 80)
    )
    assert (common.value, common.interval, common.p_value) == (apart.value, apart.interval, apart.p_value)


def test_images_with_ids_in_another_order_are_paired_with_their_pixels():
    g = torch.Generator().manual_seed(0)
    images = torch.rand(30, 4, 4, generator=g, dtype=torch.float64)
    target = torch.bernoulli(images, generator=g).long()
    order = torch.randperm(30, generator=g)
    ids = torch.arange(30) * 7
    how = {"task": "binary", "n_replicates": 99}
    expected = tc.compare({"a": images, "b": images.sqrt()}, target, ids=ids, **how)
    preds, targets = {"a": images, "b": images.sqrt()[order]}, {"a": target, "b": target[order]}
    found = tc.compare(preds, targets, ids={"a": ids, "b": ids[order]}, **how)
    for key, line in expected.items():
        assert found[key].differences["b"].p_value == line.differences["b"].p_value, key


def test_rows_with_nan_are_dropped_from_their_system_only():
    logits, target, ids = with_own_rows()
    logits["sure"][[0, 79]] = torch.nan  # questions 119 and 40
    how = {"task": "binary", "from_logits": True, "nan_policy": "drop", **FEW}
    compared = tc.compare(logits, target, ids=ids, **how)
    assert (compared.n, compared.n_dropped) == (80, 2)
    assert compared.rows["sure"] == PairedRows(common=39, only=39, only_baseline=41)
    assert "2 rows are dropped from their systems" in " ".join(compared.notes)


def test_answers_may_have_different_outcomes_with_the_task_confidence():
    g = torch.Generator().manual_seed(0)
    stated, right = torch.rand(2, 50, generator=g), torch.randint(2, (2, 50), generator=g)
    preds, outcomes = dict(zip("ab", stated, strict=True)), dict(zip("ab", right, strict=True))
    found = tc.compare(preds, outcomes, ids=torch.arange(50), task="confidence", **FEW)
    assert found.rows["b"].common == 50


def test_numbers_of_common_rows_are_estimated_above_a_limit(monkeypatch):
    monkeypatch.setattr(row_ids, "MAX_ROWS", 500)
    ids = torch.arange(9000)
    mine, theirs = (RowIds.of(hashes_of_ids(each)[0], each) for each in (ids[:6000], ids[3000:]))
    assert (len(mine.hashes), mine.n) == (500, 6000)
    # 3,000 of 9,000 distinct rows are common: the standard error of this share is 0.02 for 500 to 1,000 known rows
    assert mine.n_common(theirs) == pytest.approx(3000, abs=500)
    assert mine.n_common(mine) == 6000
    small = RowIds.of(hashes_of_ids(ids[:40])[0], ids[:40])
    assert mine.n_common(small) <= 6000
    parts = [RowIds.of(hashes_of_ids(each)[0], each) for each in (ids[1::2][:3000], ids[::2][:3000])]
    joined = parts[0] + parts[1]
    assert torch.equal(joined.hashes, mine.hashes)
    assert torch.equal(joined.contents, mine.contents)


def test_repeated_ids_and_other_targets_are_found_in_later_batches_and_parts():
    logits, target, ids = with_own_rows()
    builder = builder_of(logits, target, ids, (80, 80, 80))
    before = builder.state_bytes()
    batch = {"sure": logits["sure"][:3]}, {"sure": target["sure"][:3]}
    for wrong, message in ((ids["sure"][:3], "'question 119' twice"), (ids["calibrated"][:3], "with another one in")):
        with pytest.raises(ValueError, match=message):
            builder.update(batch[0], {"sure": 1 - target["calibrated"][:3]}, ids={"sure": wrong})
    assert builder.state_bytes() == before
    with pytest.raises(ValueError, match="got 80 ids of system 'calibrated' in both"):
        builder.merge(builder_of(logits, target, ids, (80, 80, 80)))
    other = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, **FEW)
    flipped = 1 - target["calibrated"][:3]
    other.update({"noisy": logits["calibrated"][:3]}, {"noisy": flipped}, ids={"noisy": ids["calibrated"][:3]})
    with pytest.raises(ValueError, match="got 3 ids with different ones in 'calibrated' and 'noisy'"):
        builder.merge(other)
    without = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, **FEW)
    without.update(dict.fromkeys(logits, logits["sure"]), target["sure"])
    with pytest.raises(ValueError, match="`other` must have ids if this builder has ids"):
        without.merge(builder)
    assert builder.state_bytes() == before


def test_arrays_of_text_objects_and_bytes_have_the_ids_of_text():
    names = ["a", "question 12", "Süd"]
    expected = identifiers(names, name="ids")
    for given in (np.array(names), np.array(names, dtype=object), pd.Series(names)):
        assert torch.equal(identifiers(given, name="ids"), expected)
    assert torch.equal(identifiers(np.array([b"a", b"question 12"]), name="ids"), expected[:2])


def test_a_system_without_rows_is_named():
    logits, target, ids = with_own_rows()
    builder = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, **FEW)
    builder.update({"sure": logits["sure"]}, {"sure": target["sure"]}, ids={"sure": ids["sure"]})
    with pytest.raises(ValueError, match="system 'calibrated': `preds` must contain at least one sample"):
        builder.comparison()
    assert ComparisonBuilder.from_bytes(builder.state_bytes()).state_bytes() == builder.state_bytes()


def test_the_state_has_a_constant_size_above_the_limit_of_rows(monkeypatch):
    monkeypatch.setattr(row_ids, "MAX_ROWS", 50)
    monkeypatch.setattr("torchcalib.reporting.comparison.system.MAX_KEPT", 0)
    logits, target = systems("binary", 800)
    sizes = []
    for n in (100, 800):
        builder = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, **FEW)
        builder.update({name: x[:n] for name, x in logits.items()}, target[:n], ids=torch.arange(n))
        sizes.append(len(builder.state_bytes()))
        assert not builder.comparison().rows["sure"].is_exact
        assert builder.comparison().rows["sure"].common == n
    assert sizes[1] - sizes[0] < 100


def test_frames_with_classes_in_different_orders_are_compared_by_name():
    logits, target = systems("multiclass")
    names = ["ant", "bee", "cat", "dog"]
    labels = [names[k] for k in target]
    first, second = (pd.DataFrame(logits[name].softmax(-1), columns=names) for name in ("calibrated", "sure"))
    expected = tc.compare({"a": first, "b": second}, labels, **FEW)
    found = tc.compare({"a": first, "b": second[names[::-1]]}, labels, **FEW)
    frames = [frame.assign(label=labels) for frame in (first, second[names[::-1]])]
    for compared in (found, tc.compare(dict(zip("ab", frames, strict=True)), "label", **FEW)):
        assert {key: line.values for key, line in compared.items()} == {
            key: pytest.approx(line.values, abs=1e-12) for key, line in expected.items()
        }
