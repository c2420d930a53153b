"""Streaming of samples: memory and sharing of the exact state, and the error of the sketch."""

import math
from itertools import pairwise

import pytest
import torch
from cases import SELECTIVE
from helpers.samples import updated

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core import ranked
from torchcalib.core.ranked import LogitCells

METRICS = {
    "ACE": (tc.ACE, F.ace, {}),
    "TCE": (tc.TCE, F.tce, {}),
    "TCE equal-mass": (tc.TCE, F.tce, {"bins": "equal_mass"}),
    "TCE t": (tc.TCE, F.tce, {"test": "t"}),
    "MCE pava": (tc.MCE, F.mce, {"bins": "pava"}),
    "RMSCE equal-mass": (tc.RMSCE, F.rmsce, {"bins": "equal_mass", "debiased": True}),
    "KS": (tc.KS, F.ks, {}),
    "ATB": (tc.ATB, F.atb, {}),
    "CORP": (tc.CORP, lambda *args, **options: F.corp(*args, **options).mcb, {}),
    "ICI": (tc.ICI, F.ici, {"n_points": 256}),
    "Cox": (tc.Cox, lambda *args, **options: F.cox(*args, **options).slope, {"eps": 1e-6}),
    **{cls.__name__: (cls, function, {**options, "mode": "positive"}) for _, function, cls, options in SELECTIVE},
}


def data(n=1000, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=generator, dtype=torch.float64).pow(3).to(dtype)
    return p, (torch.rand(n, generator=generator) < 0.8 * p.double() + 0.05).long()


def streamed(cls, *pieces, **options):
    """Return a metric updated with batches of binary data."""
    return updated(cls(**{"task": "binary", **options}), *pieces)


def concatenated(pieces):
    return (torch.cat(part) for part in zip(*pieces, strict=True))


def state_bytes(metric):
    return sum(tensor.nbytes for part in metric.state[:3] for tensor in part)


# Exact state


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 5), (torch.float32, 5), (torch.float64, 9)], ids=str)
def test_samples_take_their_documented_number_of_bytes(dtype, expected, from_logits):
    pieces = [(8 * p - 4 if from_logits else p, y) for p, y in (data(100, seed, dtype) for seed in range(10))]
    assert state_bytes(streamed(tc.TCE, *pieces, from_logits=from_logits)) == 1000 * expected
    p, y = pieces[0]
    weighted = tc.TCE(task="binary", from_logits=from_logits)
    weighted.update(p, y, weights=torch.ones(100, dtype=torch.int64))
    assert state_bytes(weighted) == 100 * (expected + 8)
    given = {"task": "multiclass", "num_classes": 2, "from_logits": from_logits}
    classes = streamed(tc.TCE, (torch.stack((p, 1 - p), -1), y), **given)
    assert state_bytes(classes) == 200 * (9 if from_logits else expected)
    top_labels = streamed(tc.ACE, (torch.stack((p, 1 - p), -1), y), **given)
    assert state_bytes(top_labels) == 100 * (9 if from_logits else expected)


def test_ignored_rows_take_no_memory():
    p, y = data(100)
    metric = streamed(tc.KS, (p, y.masked_fill(torch.arange(100) < 60, -100)), ignore_index=-100)
    assert state_bytes(metric) == 40 * 5
    torch.testing.assert_close(metric.compute(), F.ks(p[60:], y[60:], task="binary").double())


@pytest.mark.parametrize("method", ["update", "forward"])
def test_number_of_chunks_grows_logarithmically(method):
    metric = tc.ACE(task="binary")
    p, y = data(1500, dtype=torch.float64)
    for k in range(300):
        getattr(metric, method)(p[5 * k : 5 * k + 5], y[5 * k : 5 * k + 5])
        sizes = [len(chunk) for chunk in metric.state.scores]
        assert all(a > 2 * b for a, b in pairwise(sizes))
    assert len(sizes) <= math.log2(300) + 1
    torch.testing.assert_close(metric.compute(), F.ace(p, y, task="binary"), rtol=1e-12, atol=1e-12)


def test_forward_does_not_copy_earlier_samples():
    metric = streamed(tc.ACE, data(1000))
    first = metric.state.scores[0]
    metric(*data(10, seed=1))
    assert metric.state.scores[0] is first


def test_members_of_a_collection_share_the_memory_of_their_samples():
    metrics = tc.CalibrationCollection(
        [tc.ACE(task="binary"), tc.TCE(task="binary"), tc.KS(task="binary"), tc.MCE(task="binary", bins="pava")]
    )
    for seed in range(6):
        metrics.update(*data(50, seed))
        metrics(*data(20, seed + 10))
    first, *others = metrics.values()
    for other in others:
        assert [a.data_ptr() for a in first.state.scores] == [b.data_ptr() for b in other.state.scores]
    p, y = concatenated(data(n, seed) for k in range(6) for n, seed in ((50, k), (20, k + 10)))
    torch.testing.assert_close(metrics.compute()["TCE"], F.tce(p, y, task="binary").double())
    metrics["ACE"].reset()  # a member that was reset has its own samples
    metrics.update(*data(30))
    assert [sum(map(len, m.state.scores)) for m in metrics.values()] == [30, 450, 450, 450]


def test_batches_with_different_dtypes_weights_and_targets_equal_one_call():
    """A change of precision, and weights or soft targets in later batches, must not lose or round samples."""
    parts = [data(30, k, dtype) for k, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16))]
    metric = tc.ACE(task="binary")
    metric.update(*parts[0])
    metric.update(*parts[1], weights=torch.arange(30) % 3)
    metric.update(parts[2][0], parts[2][1].double() * 0.75)
    p = torch.cat([part[0].double() for part in parts])
    y = torch.cat([parts[0][1].double(), parts[1][1].double(), parts[2][1].double() * 0.75])
    weights = torch.cat([torch.ones(30), torch.arange(30) % 3, torch.ones(30)])
    torch.testing.assert_close(metric.compute(), F.ace(p, y, task="binary", weights=weights), rtol=1e-12, atol=1e-12)


def test_compute_on_cpu_gives_the_same_value():
    pieces = data(100), data(30, seed=1)
    metric = streamed(tc.ACE, pieces[0], compute_on_cpu=True)
    metric(*pieces[1])
    p, y = concatenated(pieces)
    torch.testing.assert_close(metric.compute(), F.ace(p, y, task="binary").double())


# Sketch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_probability_has_a_separate_cell(dtype):
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    p = bits[(bits >= 0) & (bits <= 1)].double()
    cells = LogitCells("positive", 2048)._cell(p)
    assert len(p) > 15_000
    assert (cells.diff() > 0).all()
    assert (cells[0], cells[-1]) == (0, LogitCells("positive", 2048).shape("binary", None)[-1] - 1)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sketch_of_half_precision_probabilities_is_exact(name, dtype):
    cls, function, options = METRICS[name]
    pieces = [data(700, seed, dtype) for seed in range(4)]
    found = streamed(cls, *pieces, resolution=2048, **options).compute()
    p, y = concatenated(pieces)
    torch.testing.assert_close(found, function(p.double(), y, task="binary", **options), rtol=1e-13, atol=1e-15)


def replaced_by_cell_means(p, resolution, from_logits=False):
    """Return the probabilities represented by the sketch: the mean of each cell of equal width in log-odds."""
    log_odds = [math.log(x) - math.log1p(-x) for x in p.tolist()]
    cells = {}
    for i, z in enumerate(log_odds):
        cells.setdefault(math.floor((z + 104) * resolution), []).append(i)
    moved = p.clone()
    for members in cells.values():
        moved[members] = math.fsum(p[i].item() for i in members) / len(members)
    largest = max(len(members) for members in cells.values() if len({p[i].item() for i in members}) > 1)
    return moved, largest / len(p)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("resolution", [3, 50])
def test_sketch_is_exact_for_scores_moved_within_their_cells(name, resolution):
    cls, function, options = METRICS[name]
    p, y = data(2000, dtype=torch.float64)
    moved, _ = replaced_by_cell_means(p, resolution)
    log_odds = torch.logit(torch.stack([p, moved]))
    assert (log_odds[1] - log_odds[0]).abs().max() < 1 / resolution
    assert (moved - p).abs().max() < 1 / (4 * resolution)
    metric = streamed(cls, (p[:1234], y[:1234]), (p[1234:], y[1234:]), resolution=resolution, **options)
    expected = function(moved, y, task="binary", **options)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("resolution", [2, 10, 100])
def test_error_of_the_sketch_is_within_its_bounds(seed, resolution):
    p, y = data(1500, seed, torch.float64)
    _, share = replaced_by_cell_means(p, resolution)

    def sketched(cls, **options):
        return streamed(cls, (p, y), resolution=resolution, **options).compute().item()

    given = {"task": "binary"}
    slack = 1e-12
    assert -slack <= F.ks(p, y, **given).item() - sketched(tc.KS) <= share + slack
    assert abs(F.atb(p, y, **given).item() - sketched(tc.ATB)) <= 2 * share + slack
    assert abs(F.ace(p, y, n_bins=10, **given).item() - sketched(tc.ACE, n_bins=10)) <= 2 * 9 * share + slack
    assert -slack <= F.corp(p, y, **given).dsc.item() - sketched(tc.CORP, component="dsc") <= share / 2 + slack
    edges = [0, 0.1, 0.4, 1]
    tce = F.tce(p, y, bins=edges, **given).item()
    # Samples may cross an edge of TCE when they move to the mean of their cell. Compare only if the counts are equal.
    moved, _ = replaced_by_cell_means(p, resolution)
    counts = [((side >= a) & (side < b)).sum() for side in (p, moved) for a, b in pairwise(edges)]
    if counts[:3] == counts[3:]:
        assert abs(tce - sketched(tc.TCE, bins=edges)) <= 400 * 3 * share + slack


def test_a_billion_samples_fit_in_a_few_megabytes():
    p, y = data(1000, dtype=torch.float64)
    weights = torch.full((1000,), 10**6)
    metrics = tc.CalibrationCollection([cls(task="binary", resolution=2048) for cls in (tc.ACE, tc.TCE, tc.KS)])
    metrics.update(p, y, weights=weights)
    assert metrics["KS"].statistic().n.sum() == 10**9
    assert all(metric.state.nbytes < 8e6 for metric in metrics.values())
    moved, _ = replaced_by_cell_means(p, 2048)
    for name, function in (("ACE", F.ace), ("TCE", F.tce), ("KS", F.ks)):
        expected = function(moved, y, task="binary", weights=weights)
        torch.testing.assert_close(metrics.compute()[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("from_logits", [False, True])
def test_sketch_keeps_the_order_of_extreme_probabilities(from_logits):
    """0, 1 and their neighbours stay in order and in range."""
    p = torch.tensor([0, 5e-324, 1e-300, 1e-46, 1e-45, 0.5, 1 - 2**-53, 1], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    metric = streamed(tc.KS, (torch.logit(p) if from_logits else p, y), resolution=64, from_logits=from_logits)
    cells = metric.statistic()
    assert cells.n.sum() == 8
    assert (cells.score.diff() > 0).all()
    assert (cells.score[0], cells.score[-1]) == ((-math.inf, math.inf) if from_logits else (0, 1))
    torch.testing.assert_close(metric.compute(), F.ks(p, y, task="binary"), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["classwise", "top_label", tc.TopK(2)], ids=str)
@pytest.mark.parametrize("resolution", [1, 30])
def test_sketch_of_multiclass_logits_equals_that_of_their_probabilities(resolution, mode):
    """Cells of log-odds and of probabilities have the same boundaries and means where both are defined."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 4, (300,), generator=generator)
    for cls in (tc.ACE, tc.KS, tc.ATB, tc.TCE, tc.CORP):
        given = {"task": "multiclass", "num_classes": 4, "mode": mode, "resolution": resolution}
        one = streamed(cls, (logits, target), from_logits=True, **given).compute()
        other = streamed(cls, (logits.softmax(-1), target), **given).compute()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_sketch_of_logits_stores_log_odds_of_any_size(task):
    """A cell with one score stores it up to one rounding; the outermost cells store the mean of their scores."""
    odds = torch.tensor([-5000.0, -700, -45, -36.5, -0.1, 0, 0.1, 20, 38, 69.5, 700, 5000], dtype=torch.float64)
    y = torch.arange(12) % 2
    preds = odds if task == "binary" else torch.stack((torch.zeros_like(odds), odds), -1)
    given = {"task": task, "score": "nll", "component": "score", "from_logits": True, "resolution": 64}
    given |= {"mode": "classwise", "num_classes": 2} if task == "multiclass" else {}
    for start, stop in ((2, 10), (1, 11), (0, 12)):
        metric = streamed(tc.CORP, (preds[start:stop], y[start:stop]), **given)
        cells = metric.statistic().score
        expected = odds[start:stop].clone()
        if start == 0:
            expected = torch.cat((odds[:2].mean().reshape(1), odds[2:10], odds[10:].mean().reshape(1)))
        cells = cells if task == "binary" else cells[1, ~cells[1].isnan()]
        torch.testing.assert_close(cells, expected, rtol=1e-13, atol=1e-15)
    assert metric.compute().isfinite()


def test_gradient_of_a_sketch_of_logits_equals_finite_differences():
    logits, y = torch.linspace(-90, 90, 13, dtype=torch.float64), torch.arange(13) % 2

    def value(z):
        return tc.CORP(task="binary", score="nll", component="score", from_logits=True, resolution=4)(z, y)

    assert torch.autograd.gradcheck(value, logits.requires_grad_())


@pytest.mark.parametrize("function", [F.ks, F.aurc, F.ace, F.tce, F.ici, F.corp])
def test_values_of_a_batch_do_not_depend_on_the_size_of_its_pieces(function, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(2, 3, 50, generator=generator)
    target = (torch.rand(2, 3, 50, generator=generator) < preds).long()
    given = {"preds": preds, "target": target, "task": "binary", "batch_dims": 2}
    given |= {} if function is F.ici else {"weights": torch.arange(50).expand(2, 3, 50) % 3}
    expected = function(**given)
    monkeypatch.setattr(ranked, "_CHUNK_SIZE", 100)
    torch.testing.assert_close(function(**given), expected, rtol=0, atol=0)
