"""Clusters of dependent rows in reports, comparisons, files, saved states and `evaluate`."""

import re

import numpy as np
import pytest
import torch
from helpers.reports import MODES, QUICK, TASKS, predictions

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.inference import calibration_test
from torchcalib.reporting import buffer
from torchcalib.reporting.building import ReportBuilder

GIVEN = {"task": "binary", "with_calibration": False}
N, IMAGES = 600, 30


def data():
    """Return confidences `(30, 20)` that are equal in each image and calibrated, outcomes, and names of the images."""
    g = torch.Generator().manual_seed(3)
    p = torch.rand(IMAGES, 1, generator=g, dtype=torch.float64)
    y = (torch.rand(IMAGES, 1, generator=g) < p).long()
    return *(x.repeat(1, N // IMAGES) for x in (p, y)), [f"image {k}" for k in range(IMAGES)]


def inference_of(report):
    return [(line.key, line.noise_floor, line.p_value, line.interval) for line in report.lines]


def assert_close(a, b):
    for (key, *mine), (other, *theirs) in zip(inference_of(a), inference_of(b), strict=True):
        assert key == other
        for x, y in zip(mine, theirs, strict=True):
            ends = [(z.low, z.high) if hasattr(z, "low") else z for z in (x, y)]
            assert ends[0] == (None if ends[1] is None else pytest.approx(ends[1], rel=1e-9, abs=1e-12)), key


@pytest.mark.parametrize("task", TASKS)
def test_lines_have_the_tests_of_the_metrics_for_clusters(task):
    logits, target = predictions(task)
    clusters = torch.arange(200) // 8
    options = {"task": task, "from_logits": True}
    report = tc.report(logits, target, clusters=clusters, with_calibration=False, **options)
    mode = MODES[task][0]
    outputs = {"multilabel": {"num_labels": logits.shape[-1]}}.get(task, {})
    metrics = {"ece": tc.ECE, "ks": tc.KS}
    metrics |= {"rmsce": tc.RMSCE, "esce": tc.ESCE, "ace": tc.ACE} if task == "binary" else {}
    for name, cls in metrics.items():
        line = next(line for line in report.lines if line.key == f"{name}/{mode}")
        metric = cls(mode=mode, **options, **outputs)
        found = calibration_test(metric, logits, target, clusters=clusters, n_replicates=999)
        assert line.value == pytest.approx(float(found.statistic), rel=1e-9)
        # Combined p-values of 3 labels vary more than single ones, whose standard error is at most 0.016.
        assert line.p_value == pytest.approx(float(found.p_value), abs=0.05 if task != "multilabel" else 0.1)
        assert line.noise_floor == pytest.approx(float(found.noise_floor), rel=0.1)
    assert report.settings["clusters"] == 25
    assert report.settings["effective_clusters"] == pytest.approx(25, rel=1e-6)
    assert "There are 25 independent clusters of rows. The design effect" in report.notes[0]
    assert "The effective number of clusters is 25" in report.notes[1]


def test_dependent_pixels_are_significant_only_without_clusters_which_a_note_recommends():
    p, y, names = data()
    rows, images = tc.report(p, y, **GIVEN), tc.report(p, y, clusters=names, **GIVEN)
    assert any("pass `clusters`" in note for note in rows.notes)
    assert not any("pass `clusters`" in note for note in images.notes)
    for a, b in zip(rows.lines, images.lines, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-9)
        if a.p_value is not None:
            assert a.p_value <= b.p_value + 0.02, a.key
    assert rows.main_line.p_value < 0.05 < images.main_line.p_value
    widths = [report["nll"] and report.lines[1].interval for report in (rows, images)]
    assert widths[1].high - widths[1].low > 1.5 * (widths[0].high - widths[0].low)


def test_without_stored_predictions_only_errors_over_bins_have_tests(monkeypatch):
    monkeypatch.setattr(buffer, "MAX_SAMPLES", 100)
    p, y, names = data()
    report = tc.report(p, y, clusters=names, **GIVEN)
    by_key = {line.key: line for line in report.lines}
    assert by_key["ece/positive"].p_value > 0.05
    assert by_key["ks/positive"].p_value is None
    assert any("have no noise floor and p for clusters" in note for note in report.notes)


@pytest.mark.parametrize("n", [957, pytest.param(100_001, marks=pytest.mark.extended)])
def test_reports_state_the_number_of_distinct_clusters(n):
    ids = torch.arange(n) * 7919
    p, y = torch.full((n,), 0.3, dtype=torch.float64), (torch.arange(n) % 10 < 3).long()
    shown = f"{n:,}" if n <= 100_000 else "more than 100,000"
    for clusters in (ids, [f"patient {k}" for k in ids.tolist()]):
        report = tc.report(p, y, clusters=clusters, task="binary", **QUICK)
        assert report.settings["clusters"] == n
        words = re.match(r"There are (.*) independent clusters of rows( \(merged into [\d,]+\))?\. ", report.notes[0])
        assert words[1] == shown
        assert words[2] is not None or n < 1024


@pytest.mark.parametrize(("n", "n_sums"), [(957, 957), (4_096, 4_096), (4_200, 4_096)])
def test_sums_of_up_to_4096_clusters_are_not_merged_if_predictions_are_stored(n, n_sums):
    p, y = torch.full((n,), 0.3, dtype=torch.float64), (torch.arange(n) % 10 < 3).long()
    builder = ReportBuilder(**GIVEN)
    builder.update(p, y, clusters=[f"patient {k}" for k in range(n)])
    stored, _ = builder._buffered()
    for available, expected in ((stored, n_sums), (None, 1024)):
        of_clusters = builder._clusters(available)["bins of positive"]
        assert of_clusters.n_distinct == n
        assert len(of_clusters.sums) == expected
        assert float(of_clusters.whole.n.sum()) == n


def test_a_note_warns_of_a_small_effective_number_of_clusters():
    def notes(sizes):
        cluster = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        g = torch.Generator().manual_seed(0)
        p = torch.rand(len(sizes), generator=g, dtype=torch.float64)
        y = (torch.rand(len(sizes), generator=g) < p).long()
        # Rows of a cluster are equal, so that their correlation is 1.
        report = tc.report(p[cluster], y[cluster], clusters=cluster, with_intervals=False, **GIVEN)
        return report.settings["effective_clusters"], [note for note in report.notes if "effective number" in note]

    assert notes([10] * 220) == (pytest.approx(220, rel=1e-6), [])
    number, (note,) = notes([10] * 80)
    assert number == pytest.approx(80, rel=1e-6)
    assert note.startswith("The effective number of clusters is 80: ")
    sizes = [400 // k for k in range(1, 401)]  # Zipf's law
    number, _ = notes(sizes)
    assert 2 < number < 6


def test_a_note_says_that_clusters_determine_the_label():
    p = torch.rand(60, generator=torch.Generator().manual_seed(0))
    y, words = torch.arange(60) // 30, "The clusters determine the label"
    for clusters, expected in ((y, True), (torch.arange(60) // 3, True), (torch.arange(60) % 20, False)):
        report = tc.report(p, y, clusters=clusters, **GIVEN)
        assert any(words in note for note in report.notes) is expected


@pytest.mark.extended
def test_compare_resamples_clusters(tmp_path, monkeypatch, capsys):
    p, y, names = data()
    systems = {"a": p.flatten(), "b": (p.flatten().logit() * 0.7).sigmoid()}
    rows, found = (
        tc.compare(systems, y.flatten(), task="binary", clusters=each) for each in (None, np.repeat(names, 20))
    )
    for key in ("nll", "brier", "ece/positive"):
        a, b = rows[key].differences["b"], found[key].differences["b"]
        assert a.value == pytest.approx(b.value, rel=1e-9)
        assert b.interval.high - b.interval.low > 1.3 * (a.interval.high - a.interval.low)
    assert any("Replicates resample 30 independent clusters" in note for note in found.notes)
    monkeypatch.chdir(tmp_path)
    for name, x in systems.items():
        np.savez(f"{name}.npz", probs=x.numpy(), y=y.flatten().numpy(), image=np.repeat(np.arange(IMAGES), 20))
    assert main(["compare", "a.npz", "b.npz", "--clusters", "image", "--all"]) == 0
    assert "resample 30 independent clusters of rows" in " ".join(capsys.readouterr().out.split())


def test_calibrators_are_validated_with_whole_clusters_in_a_fold(monkeypatch):
    seen = []
    original = tc.reporting.calibration.folds_of

    def recording(p, options):
        folds, n = original(p, options)
        seen.append((folds, options["groups"]))
        return folds, n

    monkeypatch.setattr("torchcalib.reporting.calibration.folds_of", recording)
    p, y, names = data()
    tc.report(p, y, clusters=names, task="binary", with_intervals=False)
    (folds, other), groups = seen[0]
    assert not torch.equal(folds, other), "600 rows have two random splits"
    assert all(len(set(folds[groups == k].tolist())) == 1 for k in set(groups.tolist()))


def test_items_of_batches_may_be_the_clusters_of_evaluate():
    p, y, _ = data()
    logits, images = p.logit(), torch.arange(IMAGES)
    options = {"task": "binary", "from_logits": True, **QUICK}
    batches = [{"x": logits[part], "labels": y[part]} for part in images.split(8)]
    items = tc.evaluate(lambda x: x, batches, cluster_by="batch item", **options)
    assert_close(items, tc.report(logits, y, clusters=images, **options))
