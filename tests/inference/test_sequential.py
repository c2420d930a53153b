"""Evidence of sequential tests: the martingale property, results of looks, merging, clusters and detectors."""

import math

import pytest
import torch
from helpers.ranks import connected, on_ranks
from oracles.binless import SHIFTS_AND_SLOPES, log_mean, log_ratio, log_ratios

import torchcalib as tc
from torchcalib.functional.sequential import sequential_test
from torchcalib.inference.sequential import DIRECTIONS

BINARY = {"task": "binary", "from_logits": True}


def stream(n=2_000, slope=0.6, shift=0.0, seed=0):
    """Return log-odds and outcomes whose log-odds are slope times these plus shift."""
    g = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(n, generator=g, dtype=torch.float64)
    return z, torch.bernoulli((slope * z + shift).sigmoid(), generator=g).long()


def updated(z, y, size=100, **options):
    test = tc.SequentialTest(**BINARY, **options)
    for start in range(0, len(z), size):
        test.update(z[start : start + size], y[start : start + size])
    return test


@pytest.mark.parametrize("p", [1e-12, 0.001, 0.3, 0.5, 0.999])
def test_likelihood_ratios_have_mean_1_for_a_calibrated_forecast(p):
    outcomes = torch.tensor([1, 0])
    e = [math.exp(float(sequential_test(torch.tensor([p], dtype=torch.float64), y[None], task="binary").log_e))
         for y in outcomes]  # fmt: skip
    assert p * e[0] + (1 - p) * e[1] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.8])
def test_soft_targets_have_at_most_the_mean_of_labels(t):
    for p in (0.2, 0.7):
        e = [
            math.exp(float(sequential_test(torch.tensor([p]), torch.tensor([y]), task="binary").log_e)) for y in (0, 1)
        ]
        soft = float(sequential_test(torch.tensor([p]), torch.tensor([t]), task="binary").log_e)
        assert math.exp(soft) <= (1 - t) * e[0] + t * e[1] + 1e-6


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("p", "y", "log_e"), [(0.0, 0, 0.0), (1.0, 1, 0.0), (0.0, 1, math.inf), (1.0, 0, math.inf)])
def test_a_certain_forecast_is_no_evidence_or_infinite_evidence(p, y, log_e, from_logits):
    preds = torch.tensor([p], dtype=torch.float64)
    preds = preds.logit() if from_logits else preds
    for test in (
        tc.SequentialTest(task="binary", from_logits=from_logits, restart=restart) for restart in (False, True)
    ):
        test.update(preds, torch.tensor([y]))
        test.update(torch.tensor([0.4]), torch.tensor([1]))
        assert bool(test.compute().isinf()) == math.isinf(log_e)
        assert bool(test.alarm()) == math.isinf(log_e)
    assert float(sequential_test(preds, torch.tensor([y]), task="binary", from_logits=from_logits).log_e) == log_e


def test_logits_that_saturate_have_exact_evidence():
    """log q - log p = -(a + b z) + z for y = 0 and z = 1,000, up to exp(-500)."""
    found = sequential_test(torch.tensor([1000.0], dtype=torch.float64), torch.tensor([0]), **BINARY)
    assert float(found.log_e) == pytest.approx(
        log_mean([1000 - (a + b * 1000) for a, b in SHIFTS_AND_SLOPES]), rel=1e-12
    )


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("restart", [False, True])
def test_results_of_looks_are_those_of_a_slow_loop(size, restart):
    z, y = stream(700)
    test = updated(z, y, size, level=0.05, restart=restart)
    sums, largest, since = [-math.inf if restart else 0.0] * 16, 0.0, 0
    for number, start in enumerate(range(0, 700, size), 1):
        rows = slice(start, start + size)
        ratios, _ = log_ratios(z[rows].sigmoid().tolist(), y[rows].tolist(), [1] * len(y[rows]))
        if restart:  # M_t = (M_(t-1) + 1) L_t
            sums = [math.log(math.exp(x) + 1) for x in sums]
        sums = [x + more for x, more in zip(sums, ratios, strict=True)]
        largest = max(largest, log_mean(sums))
        since = since or (number if log_mean(sums) >= math.log(20) else 0)
    found = test.result()
    assert float(found.log_e) == pytest.approx(log_mean(sums), rel=1e-10)
    assert float(found.log_max) == pytest.approx(largest, rel=1e-10)
    assert int(found.since) == since > 0
    assert int(found.n) == 700
    alarms = [bool(test.alarm(*level)) for level in ((), (0.05,), (math.exp(-largest) * 0.99,))]
    assert alarms == [True, True, False]
    assert (
        bool(test.p_value.isnan()) if restart else float(test.p_value) == pytest.approx(math.exp(-largest), rel=1e-10)
    )
    if size == 1:
        of_rows = sequential_test(z, y, **BINARY, level=0.05, restart=restart)
        torch.testing.assert_close(torch.stack(of_rows), torch.stack(found), equal_nan=True)


def test_empty_batches_and_ignored_rows_are_no_looks_of_a_detector():
    z, y = stream(50)
    some, all_rows = (tc.SequentialTest(**BINARY, restart=True, ignore_index=9) for _ in range(2))
    some.update(z, y)
    for _ in range(3):
        all_rows.update(z[:0], y[:0])
        all_rows.update(z[:2], torch.tensor([9, 9]))
    all_rows.update(z, y)
    torch.testing.assert_close(all_rows.compute(), some.compute(), rtol=1e-14, atol=0)
    gaps = torch.stack((z, z), -1).flatten(), torch.stack((y, torch.full_like(y, 9)), -1).flatten()
    found = (sequential_test(*rows, **BINARY, restart=True, ignore_index=9).log_e for rows in ((z, y), gaps))
    torch.testing.assert_close(*found)
    assert sequential_test(torch.zeros(0, 3), torch.zeros(0, 3).long(), **BINARY, batch_dims=1).log_e.shape == (0,)


@pytest.mark.parametrize(
    ("slope", "shift", "direction"),
    [(0.5, 0, "over-confident"), (2, 0, "under-confident"), (1, 0.5, "too low"), (1, -0.5, "too high")],
)
def test_direction_is_that_of_the_simulated_fault(slope, shift, direction):
    z, y = stream(slope=slope, shift=shift)
    assert direction in DIRECTIONS
    assert updated(z, y).direction == sequential_test(z, y, **BINARY).direction == direction


def test_without_data_or_evidence_there_is_no_alarm():
    test = tc.SequentialTest(task="binary")
    with pytest.warns(UserWarning, match="compute"):
        assert bool(test.compute().isnan())
    assert float(test.p_value) == 1
    assert (test.direction, int(test.since), bool(test.alarm(0.5))) == ("none", 0, False)


def test_merged_shards_are_one_stream_and_one_look():
    z, y = stream()
    one, merged = updated(z, y), tc.SequentialTest(**BINARY)
    shards = [updated(z[k::3], y[k::3]) for k in range(3)]
    for shard in shards:
        merged.merge_state(shard)
    torch.testing.assert_close(merged.compute(), one.compute(), rtol=1e-12, atol=0)
    assert len(merged.state_bytes()) <= min(4096, len(shards[0].state_bytes()) + 8)
    assert float(merged.result().log_max) == pytest.approx(float(merged.compute()))
    first = float(shards[0].result().log_max)
    shards[0].merge_state(updated(*stream(slope=1.0, seed=5)))
    assert float(shards[0].result().log_max) == pytest.approx(max(first, float(shards[0].compute())))


def test_a_cluster_is_one_bet_of_the_mean_ratio():
    z, y = stream(60)
    clusters = torch.arange(60) * 7 % 11
    test = tc.SequentialTest(**BINARY)
    weights = torch.arange(60) % 3
    test.update(z, y, weights, clusters=clusters)
    components = []
    for a, b in SHIFTS_AND_SLOPES:
        total = 0.0
        for k in range(11):
            rows = [(w, log_ratio(1 / (1 + math.exp(-x)), t, a, b))
                    for x, t, w, c in zip(z.tolist(), y.tolist(), weights.tolist(), clusters.tolist(), strict=True)
                    if c == k and w]  # fmt: skip
            total += math.log(sum(w * math.exp(x) for w, x in rows) / sum(w for w, _ in rows)) if rows else 0.0
        components.append(total)
    assert float(test.compute()) == pytest.approx(log_mean(components), rel=1e-10)
    images = tc.SequentialTest(num_labels=3, average=None)
    probs, target = torch.rand(4, 5, 3), torch.randint(0, 2, (4, 5, 3))
    images.update(probs, target, clusters=["a", "b", "b", "c"])
    for k in range(3):
        one = tc.SequentialTest(task="binary")
        one.update(probs[..., k], target[..., k], clusters=torch.tensor([0, 1, 1, 2]))
        torch.testing.assert_close(images.compute()[k], one.compute(), rtol=1e-12, atol=0)
    certain = tc.SequentialTest(task="binary")
    certain.update(torch.tensor([1.0, 0.5, 0.5]), torch.tensor([0, 1, 1]), clusters=torch.tensor([3, 3, 4]))
    assert float(certain.compute()) == math.inf


def test_evidence_of_groups_is_that_of_their_rows():
    z, y = stream(300)
    groups = torch.arange(300) % 3
    test = tc.ByGroup(tc.SequentialTest(**BINARY), num_groups=3)
    test.update(z, y, groups=groups)
    expected = torch.stack([updated(z[groups == k], y[groups == k]).compute() for k in range(3)])
    torch.testing.assert_close(test.compute(), expected, rtol=1e-12, atol=1e-12)


def test_text_and_numbers_of_results():
    g = torch.Generator().manual_seed(1)
    probs = torch.rand(500, 2, generator=g)
    target = torch.stack((torch.bernoulli(probs[:, 0], generator=g), torch.zeros(500)), -1).long()
    found = sequential_test(probs, target, task="multilabel", average=None)
    assert found.direction[1] == "too high"
    assert found.flat()["alarm/1"] == 1
    assert str(found).splitlines()[1].startswith("[1] too high: log e ")
    text = found.prometheus(model='a "b"')
    assert 'torchcalib_since{model="a \\"b\\"",output="0"} 0.0\n' in text
    infinite = sequential_test(torch.tensor([1.0]), torch.tensor([0]), task="binary")
    assert "torchcalib_log_e +Inf\n" in infinite.prometheus()
    assert "torchcalib_p_value NaN\n" in sequential_test([0.3], [1], restart=True).prometheus()


def test_results_over_ranks_are_those_of_one_look_and_detectors_are_refused():
    z, y = stream(600)

    def work(rank, gather):
        test = tc.SequentialTest(**BINARY, **connected(gather))
        for rows in torch.arange(rank, 600, 3).split(20):
            test.update(z[rows], y[rows])
        detector = tc.SequentialTest(**BINARY, restart=True, **connected(gather))
        detector.update(z, y)
        with pytest.raises(ValueError, match="`restart` must be False to add the states of ranks"):
            detector.compute()
        return test.compute(), test.result(), float(test.kind.statistic(test.state).log_max)

    of_ranks = on_ranks(3, work)
    one = updated(z, y)
    for value, found, own in of_ranks:
        torch.testing.assert_close(value, one.compute(), rtol=1e-12, atol=0)
        assert float(found.log_max) == max(0.0, float(value)) > own
        assert (int(found.since), int(found.n)) == (30, 600)
