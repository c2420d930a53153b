"""Estimation error of bins, and optimal bins; tests/contract compares the metric with a slow loop."""

import math
from itertools import chain, combinations, pairwise

import pytest
import torch
from helpers.samples import tied
from oracles import ranked as oracle

import torchcalib.functional as F

F64 = torch.float64
P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9]), torch.tensor([0, 1, 0, 1])
BINARY = {"preds": P, "target": Y, "task": "binary"}
BINS = {"optimal_bins": "pava", "near_optimal_bins": "pava_bc"}


def test_edges_without_data_are_nan():
    for function in (F.optimal_bins, F.near_optimal_bins):
        assert function(torch.zeros(0), torch.zeros(0).long(), task="binary").isnan().tolist() == [True, True]


def test_table_has_the_errors_of_bins():
    pytest.importorskip("pandas")
    given = {**BINARY, "bins": [0, 0.5, 0.6, 0.8, 1], "weights": torch.tensor([1, 1, 3, 1])}
    given["target"] = torch.tensor([1, 1, 0, 1])
    errors = torch.tensor([0.75 * 0.25, math.nan, 0, 0], dtype=F64)
    for table in (F.tce_table(**given), F.calibration_curve(**given)):
        torch.testing.assert_close(table.estimation_error(), errors, equal_nan=True)
        assert table.estimation_error(norm="l1").item() == pytest.approx(0.1875 * 4 / 6)
        assert table.estimation_error(norm="mean").item() == pytest.approx(0.1875 / 3)
    column = F.tce_table(**given).to_pandas()["estimation_error"]
    assert column.tolist() == pytest.approx(errors.tolist(), nan_ok=True)


def test_infinite_distance_to_an_outcome_that_does_not_occur_counts_as_zero():
    log_loss = lambda y, p: torch.where(y == 1, -p.log(), -(1 - p).log())  # noqa: E731
    assert F.estimation_error(**BINARY, bins=[0, 0.5, 1], distance=log_loss) == 0


# Optimal bins


def partitions(parts):
    """Return all partitions of a sequence of parts into bins of adjacent parts."""
    for k in range(len(parts)):
        for cuts in combinations(range(1, len(parts)), k):
            yield [list(chain(*parts[a:b])) for a, b in pairwise([0, *cuts, len(parts)])]


@pytest.mark.parametrize("seed", range(6))
def test_optimal_bins_have_the_smallest_error_of_all_bins_with_increasing_frequencies(seed):
    """[TCE] Definition 3, by comparison with all partitions."""
    preds, target = tied("binary", 12, seed)
    sample, parts = oracle.Sample(target.tolist()), oracle.groups(preds.tolist(), target.tolist())
    allowed = [
        blocks for blocks in partitions(parts) if all(sample.mean(a) <= sample.mean(b) for a, b in pairwise(blocks))
    ]
    smallest = min(oracle.estimation_error(blocks, target.tolist()) for blocks in allowed)
    edges = F.optimal_bins(preds, target, task="binary")
    error = F.estimation_error(preds, target, task="binary", bins=edges)
    assert error.item() == pytest.approx(smallest, abs=1e-12)


@pytest.mark.parametrize("name", BINS)
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_edges_reproduce_the_bins(name, from_logits, weighted):
    preds, target = tied("binary", 200)
    preds = preds.double().clamp(0.01, 0.99).logit() if from_logits else preds
    given = {"preds": preds, "target": target, "task": "binary", "from_logits": from_logits}
    given["weights"] = torch.arange(200) % 3 if weighted else None
    edges = getattr(F, name)(**given)
    assert (edges[0], edges[-1]) == (0, 1)
    assert (edges.diff() > 0).all()
    inner = edges[1:-1]
    for function in (F.mce, F.tce, F.estimation_error):
        torch.testing.assert_close(function(**given, bins=edges), function(**given, bins=BINS[name]))
    probabilities = preds.sigmoid() if from_logits else preds.double()
    low = torch.stack([probabilities[probabilities < edge].max() for edge in inner])
    high = torch.stack([probabilities[probabilities >= edge].min() for edge in inner])
    if not weighted:  # rows without weight may be nearer
        torch.testing.assert_close(inner, (low + high) / 2)


def test_edges_of_classes_are_padded_and_accepted():
    preds, target = tied("multiclass", 90)
    padded = F.near_optimal_bins(preds, target, task="multiclass", n_min=3, n_max=40)
    assert padded.shape[:-1] == preds.shape[-1:]
    assert padded.isnan().any()
    assert not padded[..., -1].isnan().all()
    for k, edges in enumerate(padded):
        own = {"preds": preds[:, k], "target": (target == k).long(), "task": "binary"}
        expected = F.near_optimal_bins(**own, n_min=3, n_max=40)
        torch.testing.assert_close(edges[: len(expected)], expected)
        assert edges[len(expected) :].isnan().all()
        assert torch.equal(F.tce(**own, bins=edges), F.tce(**own, n_min=3, n_max=40))
    assert F.optimal_bins(P[:0], Y[:0], task="binary").isnan().all()


def test_adjacent_floats_and_equal_probabilities_have_distinct_edges():
    low = torch.tensor(0.5, dtype=F64)
    high = low.nextafter(torch.tensor(1.0, dtype=F64))
    assert F.optimal_bins(torch.stack((low, high)), torch.tensor([0, 1]), task="binary").tolist() == [0, high, 1]
    logits = torch.tensor([-50.0, 400.0, 800.0], dtype=F64)  # the last two have probability 1
    edges = F.optimal_bins(logits, torch.tensor([0, 0, 1]), task="binary", from_logits=True)
    assert len(edges) == 2
    F.mce(logits, torch.tensor([0, 0, 1]), task="binary", from_logits=True, bins=edges)


def test_near_optimal_bins_have_the_edges_of_algorithm_3():
    preds, target = tied("binary", 90)
    for variant in ("code", "paper"):
        edges = F.near_optimal_bins(preds, target, task="binary", n_min=5, n_max=30, variant=variant)
        blocks = oracle.blocks_of("pava_bc", preds.tolist(), target.tolist(), n_min=5, n_max=30, variant=variant)
        ends = [(float(preds[a].max()) + float(preds[b].min())) / 2 for a, b in pairwise(blocks)]
        assert edges.tolist() == pytest.approx([0, *ends, 1], abs=1e-15)
