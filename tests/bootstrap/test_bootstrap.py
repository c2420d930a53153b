"""Bootstrap intervals: of every metric, of calibration losses, streamed; draws that follow from their place."""

import math
import pickle
from functools import partial

import pytest
import torch
from cases import CASES, once_a_kind

import torchcalib as tc
from torchcalib.calibration_loss.losses import both_scores
from torchcalib.kernels import draws
from torchcalib.kernels.bin_sums import bin_sums_of_replicates
from torchcalib.predictions import canonical
from torchcalib.states import SumsKind

# The pieces of a stream would cut through the blocks of what is made of blocks.
ADDITIVE = [case for case in CASES if isinstance(case.metric().kind, SumsKind) and not case.in_blocks]
BINARY = next(case for case in CASES if case.name == "nll-binary-probs")


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **{"rtol": 1e-12, "atol": 1e-12, **tolerance}, equal_nan=True)


def counts_of(n_replicates, n, seed=0):
    return draws.multinomial_counts(seed, torch.arange(n_replicates), n, torch.float64)


# Draws -----------------------------------------------------------------------------------------------------------


def splitmix(z):
    """SplitMix64's finalizer in Python's whole numbers."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_words_are_those_of_whole_numbers_of_any_size(seed):
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    streams, counters = torch.tensor([0, 1, 2**32 + 7]), torch.tensor([0, 1, 99, 10**9])
    words = draws.random_words(seed, streams, counters)
    for i, stream in enumerate(streams.tolist()):
        key = splitmix((splitmix((stream * golden + seed) & mask) + golden) & mask)
        for j, counter in enumerate(counters.tolist()):
            assert int(words[i, j]) == splitmix((key + counter * golden) & mask) >> 32


def test_words_are_uniform_and_streams_independent():
    words = draws.random_words(3, torch.arange(64), torch.arange(4096)).double() / 2**32
    for axis in (0, 1):
        spread = words.mean(axis) - 0.5
        assert float(spread.abs().max()) < 5 * math.sqrt(1 / 12 / words.shape[axis])
    cells = torch.histc(words, bins=256, min=0, max=1)
    chi_square = float(((cells - words.numel() / 256) ** 2 / (words.numel() / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    assert float((torch.corrcoef(words) - torch.eye(64)).abs().max()) < 5 / math.sqrt(4096)
    neighbours = draws.random_words(4, torch.arange(64), torch.arange(4096)).double()
    assert float(torch.corrcoef(torch.stack([words.flatten(), neighbours.flatten()]))[0, 1].abs()) < 5 / 512


def test_poisson_counts_are_poisson_and_do_not_depend_on_how_they_are_cut_up():
    counts = draws.poisson_counts(0, torch.arange(50), torch.arange(40_000), torch.float64)
    for k in range(7):
        p = math.exp(-1) / math.factorial(k)
        share = float((counts == k).double().mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / counts.numel())
    piece = draws.poisson_counts(0, torch.arange(7, 9), torch.arange(123, 130), torch.float64)
    assert torch.equal(piece, counts[7:9, 123:130])


def test_multinomial_counts_draw_n_of_n():
    counts = counts_of(2000, 50)
    assert torch.equal(counts.sum(-1), torch.full((2000,), 50.0, dtype=torch.float64))
    assert abs(float(counts.var()) - (1 - 1 / 50)) < 0.03
    assert float((counts.mean(0) - 1).abs().max()) < 5 / math.sqrt(2000)
    assert torch.equal(draws.multinomial_counts(0, torch.arange(5, 7), 50, torch.int64), counts[5:7].long())


# The interval ----------------------------------------------------------------------------------------------------


def test_ends_are_replicates_at_their_ranks():
    replicates = torch.arange(1, 1000.0)[torch.randperm(999, generator=torch.Generator().manual_seed(0))]
    found = tc.Interval(torch.tensor(500.0), replicates, 0.95)
    assert (float(found.low), float(found.high)) == (25, 975)  # 25 of 1000 at or below, 25 at or above
    assert float(found.bias) == 0
    close(found.standard_error, replicates.std())
    assert "low=25.0" in repr(found)
    least = tc.Interval(torch.tensor(0.0), torch.arange(39.0), 0.95)
    assert (float(least.low), float(least.high)) == (0, 38)


def test_an_infinite_replicate_is_an_end_and_one_that_is_nan_makes_both_nan():
    replicates = torch.arange(1, 40.0).repeat(2, 1).T.contiguous()
    replicates[[3, 7, 12], 0] = torch.inf
    replicates[5, 1] = torch.nan
    found = tc.Interval(torch.zeros(2), replicates, 0.9)
    close(found.low, torch.tensor([2.0, torch.nan]))
    close(found.high, torch.tensor([torch.inf, torch.nan]))


# The function ----------------------------------------------------------------------------------------------------


def test_replicates_of_every_metric_are_the_metric_of_the_samples_drawn(case):
    preds, target = case.data(n=25)
    found = tc.bootstrap(case.function, preds, target, task=case.task, n_replicates=39, seed=1, **case.options)
    close(found.value, case.call(preds, target))
    for r, times in enumerate(counts_of(39, 25, seed=1)[:2].long()):
        drawn = case.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
        close(found.replicates[r], drawn)
    assert not bool((found.low > found.high).any())


def test_few_replicates_at_a_time_are_the_same(monkeypatch):
    preds, target = BINARY.data(n=50)
    whole = tc.bootstrap(tc.tce, preds, target, task="binary", n_replicates=45)
    sizes = []
    monkeypatch.setattr(canonical, "_MOST_AT_ONCE", 200)

    def spy(*args, **options):
        if options["weights"] is not None:
            sizes.append(options["weights"].numel())
        return tc.tce(*args, **options)

    pieces = tc.bootstrap(spy, preds, target, task="binary", n_replicates=45)
    assert max(sizes) == 200
    close(pieces.replicates, whole.replicates)


def test_a_seed_tells_the_draws():
    preds, target = BINARY.data(n=50)
    one, same, other = (tc.bootstrap(tc.nll, preds, target, task="binary", seed=s).replicates for s in (4, 4, 5))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_what_is_left_out_is_not_drawn():
    preds, target = BINARY.data(n=30)
    marked = target.clone()
    marked[[2, 5, 11]] = -100
    keep = marked != -100
    expected = tc.bootstrap(tc.nll, preds[keep], target[keep], task="binary", n_replicates=50)
    ignoring = tc.bootstrap(tc.nll, preds, marked, task="binary", n_replicates=50, ignore_index=-100)
    close(ignoring.replicates, expected.replicates)
    weighing = tc.bootstrap(tc.nll, preds, target, task="binary", n_replicates=50, weights=keep.double())
    close(weighing.replicates, expected.replicates)


def test_a_sample_has_its_weight_each_time_it_is_drawn():
    preds, target = BINARY.data(n=30)
    weights = BINARY.weights(30)
    found = tc.bootstrap(tc.brier_score, preds, target, task="binary", n_replicates=40, weights=weights)
    close(found.replicates, tc.brier_score(preds, target, task="binary", weights=weights * counts_of(40, 30)))


def test_series_are_drawn_alike_and_labels_together():
    case = next(case for case in CASES if case.name == "nll-per-label")
    preds, target = case.data(n=30, lead=(2,))
    found = tc.bootstrap(tc.nll, preds, target, task="multilabel", n_replicates=40, average=None)
    alone = tc.bootstrap(tc.nll, preds[1], target[1], task="multilabel", n_replicates=40, average=None)
    assert found.replicates.shape == (40, 2, 4)
    close(found.replicates[:, 1], alone.replicates)
    twice = tc.bootstrap(
        tc.nll, preds.transpose(-1, -2), target.transpose(-1, -2), task="multilabel", n_replicates=40, class_axis=-2
    )
    close(twice.replicates, found.replicates.mean(-1))


def test_groups_are_drawn_whole():
    preds, target = BINARY.data(n=30)
    groups = torch.arange(30) % 7 * 10 - 20
    seen = []

    def spy(*args, **options):
        seen.append(options["weights"])
        return tc.nll(*args, **options)

    found = tc.bootstrap(spy, preds, target, task="binary", n_replicates=40, groups=groups)
    close(seen[-1], counts_of(40, 7)[:, torch.arange(30) % 7])
    close(found.replicates, tc.nll(preds, target, task="binary", weights=seen[-1]))


def test_named_tuples_are_intervals_of_each_part():
    preds, target = BINARY.data(n=60)
    found = tc.bootstrap(tc.corp, preds, target, task="binary", n_replicates=40)
    assert isinstance(found, tc.CORPDecomposition)
    alone = tc.bootstrap(
        lambda *a, **options: tc.corp(*a, **options).mcb, preds, target, task="binary", n_replicates=40
    )
    close(found.mcb.replicates, alone.replicates)


def test_no_data_is_nan():
    preds, target = BINARY.data(n=4)
    for weights in (torch.zeros(4), None):
        n = 4 if weights is not None else 0
        found = tc.bootstrap(tc.nll, preds[:n], target[:n], task="binary", n_replicates=40, weights=weights)
        assert found.low.isnan()
        assert found.value.isnan()


# Calibration losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", [tc.DPCalibration(), tc.Temperature(), tc.HistogramBinning(5), tc.Isotonic()])
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_calibration_loss_of_replicates_is_that_of_the_samples_drawn_copies_in_one_fold(calibrator, task):
    case = next(case for case in CASES if case.name == f"nll-{task}-logits")
    preds, target = case.data(n=40)
    folds = torch.arange(40) % 3
    options = {"task": task, "from_logits": True, "calibrator": calibrator, "score": "brier"}
    found = tc.bootstrap(tc.calibration_loss, preds, target, n_replicates=39, folds=folds, **options)
    for r, times in enumerate(counts_of(39, 40)[:3].long()):
        drawn = [x.repeat_interleave(times, 0) for x in (preds, target, folds)]
        expected = tc.calibration_loss(drawn[0], drawn[1], folds=drawn[2], **options)
        close(found.replicates[r], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("class_axis", [-1, 0])
def test_a_few_replicates_of_a_calibration_loss_at_a_time_are_the_same(monkeypatch, class_axis):
    case = next(case for case in CASES if case.name == "nll-multiclass-logits")
    preds, target = case.data(n=60)
    preds = preds if class_axis == -1 else preds.T
    options = {"task": "multiclass", "from_logits": True, "class_axis": class_axis, "n_replicates": 40}
    whole = tc.bootstrap(partial(tc.rcl, score="brier"), preds, target, **options)
    monkeypatch.setattr(canonical, "_MOST_AT_ONCE", 60 * 4 * 6 * 3)
    pieces = tc.bootstrap(partial(tc.rcl, score="brier"), preds, target, **options)
    close(pieces.replicates, whole.replicates, rtol=1e-8, atol=1e-8)


def test_groups_share_a_fold_in_every_replicate(monkeypatch):
    preds, target = BINARY.data(n=60)
    groups = torch.arange(60) % 12
    found = tc.bootstrap(tc.rcl, preds, target, task="binary", n_replicates=39, groups=groups)
    weights = counts_of(39, 12)[:, groups]
    close(found.replicates, tc.rcl(preds, target, task="binary", weights=weights, groups=groups))
    apart = tc.rcl(preds, target, task="binary", weights=weights)
    assert not torch.allclose(found.replicates, apart)


def test_a_calibrator_is_fitted_anew_in_every_replicate():
    preds, target = BINARY.data(n=60)
    weights = counts_of(40, 60)
    fixed = tc.calibrated(preds, target, task="binary", train_on_test=True)
    found = tc.bootstrap(tc.rcl, preds, target, task="binary", n_replicates=40, train_on_test=True)
    raw, after = both_scores(
        preds, target, "binary", "nll", tc.DPCalibration(), {"train_on_test": True, "weights": weights}
    )
    close(found.replicates, 100 * (1 - after / raw))
    assert bool((after <= tc.nll(fixed, target, task="binary", weights=weights) + 1e-9).all())  # each its own best


# What the interval covers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [tc.nll, tc.brier_score, tc.ecd], ids=lambda f: f.__name__)
def test_95_percent_intervals_cover_the_truth_in_93_to_97_percent_of_1000_data_sets(score):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        """Over-confident log-odds: the evidence is half of what is claimed."""
        logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
        target = torch.rand(*shape, generator=generator, dtype=torch.float64) < logits.sigmoid()
        return 2 * logits, target.long()

    truth = score(*drawn(4_000_000), task="binary", from_logits=True)
    preds, target = drawn(1000, 300)
    found = tc.bootstrap(score, preds, target, task="binary", from_logits=True, n_replicates=199)
    covered = (found.low <= truth) & (truth <= found.high)
    assert 0.93 <= float(covered.double().mean()) <= 0.97


def test_the_bias_of_ece_is_told_where_predictions_are_calibrated():
    """A calibrated model's ECE is 0, and what a sample shows of it is chance: the bias that is told is about that."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(200, 500, generator=generator, dtype=torch.float64)
    target = (torch.rand(200, 500, generator=generator) < preds).long()
    found = tc.bootstrap(tc.ece, preds, target, task="binary", n_replicates=99)
    assert float(found.value.mean()) > 0.03
    assert 0.3 < float(found.bias.mean() / found.value.mean()) < 1
    assert float((found.low > 0).double().mean()) == 1  # no interval covers the truth, which is why the bias is told


# Bad input ---------------------------------------------------------------------------------------------------------

P, Y = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"metric": "ece"}, TypeError, "`metric` must be a function such as torchcalib.ece, got 'ece'"),
        ({"metric": lambda *a, **k: 0.5}, TypeError, "`metric` must return a tensor"),
        ({"metric": lambda *a, **k: torch.zeros(())}, ValueError, r"`metric` must return \(40,\) for weights of 40"),
        ({"n_replicates": 0}, ValueError, "`n_replicates` must be"),
        ({"n_replicates": 38}, ValueError, "`n_replicates` must be at least 39 for level=0.95, got 38"),
        ({"level": "95 %"}, TypeError, "`level` must be a number, got '95 %'. A 95 % interval has level 0.95"),
        ({"level": 95}, ValueError, "`level` must be between 0 and 1, got 95. A 95 % interval has level 0.95"),
        ({"level": 1.0}, ValueError, "`level` must be between 0 and 1"),
        ({"seed": 0.5}, TypeError, "`seed` must be an int, got 0.5"),
        ({"seed": True}, TypeError, "`seed` must be an int, got True"),
        ({"seed": 2**64}, ValueError, "`seed` must fit in 64 bits"),
        ({"groups": torch.zeros(4)}, TypeError, "`groups` must be a tensor of integers, got dtype torch.float32"),
        ({"groups": [1, 2, 3, 4]}, TypeError, "`groups` must be a tensor of integers, got list"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, ValueError, r"`groups` must have one number per sample, shape"),
        ({"task": "regression"}, ValueError, "`task` must be"),
        ({"weights": torch.ones(3)}, ValueError, r"`weights` must have one value per sample, shape \(4,\)"),
        ({"bins": 3}, TypeError, "`bins`"),
    ],
)
def test_bad_input_is_told(change, error, message):
    given = {"metric": tc.nll, "preds": P, "target": Y, "task": "binary", "n_replicates": 40, **change}
    with pytest.raises(error, match=message):
        tc.bootstrap(**given)


@pytest.mark.parametrize(
    ("metric", "change", "error", "message"),
    [
        (lambda: tc.nll, {}, TypeError, "`metric` must be a torchcalib metric, got function"),
        (lambda: tc.TCE(task="binary"), {}, ValueError, "`metric` must have sums as its state.*Pass `resolution`"),
        (lambda: tc.Bootstrapped(tc.NLL(task="binary")), {}, ValueError, "`metric` must have sums as its state"),
        (lambda: tc.NLL(task="binary"), {"n_replicates": 10}, ValueError, "`n_replicates` must be at least 39"),
        (lambda: tc.NLL(task="binary"), {"seed": "0"}, TypeError, "`seed` must be an int"),
    ],
)
def test_bad_metrics_are_told(metric, change, error, message):
    with pytest.raises(error, match=message):
        tc.Bootstrapped(metric(), **change)


# Streamed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=once_a_kind(ADDITIVE))
def additive(request):
    return request.param


def test_streamed_in_pieces_is_a_loop_over_poisson_weights(additive):
    preds, target = additive.data(n=41)
    weights = additive.weights(41)
    metric = tc.Bootstrapped(additive.metric(), n_replicates=39, seed=3)
    for piece in (slice(0, 1), slice(1, 1), slice(1, 30), slice(30, 41)):
        metric.update(preds[piece], target[piece], weights=weights[piece])
    close(metric.compute(), additive.call(preds, target, weights=weights))
    times = draws.poisson_counts(3, torch.arange(39), torch.arange(41), torch.float64)
    found = metric.interval()
    close(found.value, metric.compute())
    close(found.replicates, additive.call(preds, target, weights=times * weights))
    assert found.level == 0.95


def test_streamed_series_are_kept_apart_and_forward_is_the_batch_value(additive):
    preds, target = additive.data(n=20, lead=(3,))
    metric = tc.Bootstrapped(additive.metric(batch_shape=(3,)), n_replicates=39)
    first = preds[:, :7].clone().requires_grad_()
    value = metric(first, target[:, :7])
    close(value, additive.call(preds[:, :7], target[:, :7]))
    if additive.differentiable:
        value.sum().backward()
        again = preds[:, :7].clone().requires_grad_()
        additive.call(again, target[:, :7]).sum().backward()
        close(first.grad, again.grad)
    metric(preds[:, 7:], target[:, 7:])
    times = draws.poisson_counts(0, torch.arange(39), torch.arange(20), torch.float64)
    close(metric.interval().replicates, additive.call(preds, target, weights=times[:, None].expand(-1, 3, -1)))


def test_metrics_that_need_the_order_stream_as_a_sketch():
    preds, target = BINARY.data(n=100)
    metric = tc.Bootstrapped(tc.KS(task="binary", resolution=64), n_replicates=39)
    metric.update(preds, target)
    times = draws.poisson_counts(0, torch.arange(2), torch.arange(100), torch.float64)
    for r in range(2):
        alone = tc.KS(task="binary", resolution=64)
        alone.update(preds, target, weights=times[r])
        close(metric.interval().replicates[r], alone.compute())


def streamed(seed=0, **kwargs):
    return tc.Bootstrapped(tc.ECE(task="binary", n_bins=5), n_replicates=39, seed=seed, **kwargs)


def test_streaming_goes_on_after_a_pickle_a_clone_and_a_state_dict():
    preds, target = BINARY.data(n=60)
    whole, metric = streamed(), streamed()
    whole.update(preds, target)
    metric.persistent(True)
    metric.update(preds[:25], target[:25])
    loaded = streamed()
    loaded.persistent(True)
    loaded.load_state_dict(metric.state_dict())
    for copy in (pickle.loads(pickle.dumps(metric)), metric.clone(), loaded):
        copy.update(preds[25:], target[25:])
        close(copy.interval().replicates, whole.interval().replicates)


def test_reset_begins_anew_and_a_failed_update_or_forward_leaves_no_trace():
    preds, target = BINARY.data(n=30)
    metric, fresh = streamed(), streamed()
    metric.update(preds[:7], target[:7])
    metric.reset()
    metric.update(preds[:11], target[:11])
    for attempt in (metric.update, metric):
        with pytest.raises(ValueError, match="`preds` must be probabilities"):
            attempt(3 + preds, target)
    metric.update(preds[11:], target[11:])
    fresh.update(preds, target)
    close(metric.interval().replicates, fresh.interval().replicates)
    assert not streamed().state_dict()


def test_merging_takes_other_draws_and_adds_them():
    preds, target = BINARY.data(n=60)
    one, other, same = streamed(seed=0), streamed(seed=1), streamed(seed=0)
    one.update(preds[:25], target[:25])
    other.update(preds[25:], target[25:])
    same.update(preds[25:], target[25:])
    with pytest.raises(ValueError, match="`incoming_state` must have drawn other numbers, got seed=0 in both"):
        one.merge_state(same)
    one.merge_state(other)
    times = torch.cat(
        [
            draws.poisson_counts(seed, torch.arange(39), torch.arange(n), torch.float64)
            for seed, n in ((0, 25), (1, 35))
        ],
        -1,
    )
    close(one.compute(), tc.ece(preds, target, task="binary", n_bins=5))
    close(one.interval().replicates, tc.ece(preds, target, task="binary", n_bins=5, weights=times))
    with pytest.raises(ValueError, match="must count the same thing"):
        one.merge_state(tc.Bootstrapped(tc.ECE(task="binary", n_bins=6), n_replicates=39, seed=2))
    with pytest.raises(ValueError, match="must count the same thing"):
        one.merge_state(tc.Bootstrapped(tc.ECE(task="binary", n_bins=5), n_replicates=40, seed=2))


def test_members_of_a_collection_share_their_reading_and_have_their_own_intervals():
    preds, target = BINARY.data(n=60)
    alone = streamed()
    metrics = tc.CalibrationCollection(
        {"ece": streamed(), "nll": tc.Bootstrapped(tc.NLL(task="binary")), "mce": tc.MCE(task="binary")}
    )
    for piece in (slice(0, 13), slice(13, 60)):
        metrics.update(preds[piece], target[piece])
        alone.update(preds[piece], target[piece])
    close(metrics["ece"].interval().replicates, alone.interval().replicates)
    close(metrics.compute()["nll"], tc.nll(preds, target, task="binary"))
    assert metrics["nll"].interval().replicates.shape == (200,)


def test_the_identity_card_is_that_of_the_metric():
    metric = streamed()
    for name in ("unit", "perfect", "question", "source", "is_differentiable", "higher_is_better", "plot_upper_bound"):
        assert getattr(metric, name) == getattr(tc.ECE, name)
    assert "n_replicates=39" in repr(metric)
    figure, _ = metric.plot(torch.tensor(0.5))
    figure.clear()


def test_streaming_reads_no_value_where_that_would_wait_for_a_device(additive):
    """On meta tensors there is none to read."""
    preds, target = (tensor.to("meta") for tensor in additive.data())
    metric = tc.Bootstrapped(additive.metric(ignore_index=-100), n_replicates=39).to("meta")
    metric.update(preds, target, weights=torch.rand(40, device="meta"))
    assert metric.state.device.type == "meta"


def test_streamed_intervals_are_about_those_of_the_function():
    preds, target = BINARY.data(n=2000)
    metric = tc.Bootstrapped(tc.Brier(task="binary"), n_replicates=1000)
    metric.update(preds, target)
    whole = tc.bootstrap(tc.brier_score, preds, target, task="binary")
    close(metric.interval().standard_error, whole.standard_error, rtol=0.1, atol=0)


@pytest.mark.parametrize("n_bins", [3, 200])
def test_sums_of_replicates_are_a_loop_infinite_values_and_all(n_bins):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, n_bins, (2, 30), generator=generator)
    values = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    values[0, 3], values[1, 5] = torch.inf, -torch.inf
    weights = torch.randint(0, 3, (4, 1, 30), generator=generator).double()
    weights[1, 0, 3] = 0
    columns = (torch.ones_like(values), values)
    found = bin_sums_of_replicates(index, columns, weights, n_bins)
    assert found.shape == (4, 2, 2, n_bins)
    for r in range(4):
        for i in range(2):
            for f, column in enumerate(columns):
                expected = torch.zeros(n_bins, dtype=torch.float64)
                for k in range(30):
                    if weights[r, 0, k]:
                        expected[index[i, k]] += weights[r, 0, k] * column[i, k]
                close(found[r, i, f], expected)


# Found by attack ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": torch.ones(40, 4)}, ValueError, r"`weights` must have one value per sample, got shape \(40, 4\)"),
        ({"metric": lambda *a, **k: torch.zeros((), dtype=torch.int64)}, TypeError, "must return floating values, got"),
        ({"level": "0.95"}, TypeError, "`level` must be a number, got '0.95'"),
        ({"level": True}, TypeError, "`level` must be a number, got True"),
    ],
)
def test_more_bad_input_is_told(change, error, message):
    given = {"metric": tc.nll, "preds": P, "target": Y, "task": "binary", "n_replicates": 40, **change}
    with pytest.raises(error, match=message):
        tc.bootstrap(**given)


def test_a_level_that_does_not_fit_is_told_before_anything_is_computed():
    with pytest.raises(ValueError, match=r"`n_replicates` must be at least 199 for level=0\.99"):
        tc.bootstrap(lambda *_, **__: pytest.fail("computed"), P, Y, task="binary", n_replicates=40, level=0.99)


def test_a_metric_without_a_signature_is_given_no_groups():
    class Builtin:
        """Like a function of C it tells no parameters."""

        @property
        def __signature__(self):
            raise ValueError("no signature found")

        def __call__(self, *args, **options):
            return tc.nll(*args, **options)

    groups = torch.tensor([0, 0, 1, 1])
    options = {"task": "binary", "n_replicates": 40, "groups": groups}
    close(tc.bootstrap(Builtin(), P, Y, **options).replicates, tc.bootstrap(tc.nll, P, Y, **options).replicates)


@pytest.mark.parametrize("n_ways", [1, 3, 15, 16, 40])
def test_few_ways_of_weighing_are_the_same_as_many(n_ways):
    preds, target = BINARY.data(n=60)
    weights = counts_of(40, 60)
    whole = tc.ece(preds, target, task="binary", weights=weights)
    close(tc.ece(preds, target, task="binary", weights=weights[:n_ways]), whole[:n_ways])


@pytest.mark.parametrize("metric", [tc.optimal_threshold_cost, tc.bayes_risk_area], ids=lambda f: f.__name__)
@pytest.mark.parametrize("average", ["macro", None])
def test_threshold_costs_of_many_labels_are_read_a_few_replicates_at_a_time(metric, average, monkeypatch):
    from torchcalib.scores import risk_curve

    case = next(case for case in CASES if case.name == "nll-per-label")
    preds, target = case.data(n=30)
    weights, options = counts_of(7, 30), {"task": "multilabel", "average": average}
    expected = torch.stack([metric(preds, target, weights=w, **options) for w in weights])
    sizes, in_order = [], risk_curve._in_order
    monkeypatch.setattr(risk_curve, "_in_order", lambda p, priors: sizes.append(len(p.weights)) or in_order(p, priors))
    monkeypatch.setattr(canonical, "_MOST_AT_ONCE", 30 * 4 * 2)
    close(metric(preds, target, weights=weights, **options), expected)
    assert sizes == [2, 2, 2, 1]


@pytest.mark.parametrize("score", ["nll", "brier", tc.nll])
def test_score_divergence_is_read_a_few_replicates_at_a_time(score, monkeypatch):
    preds, target = BINARY.data(n=60)
    weights, options = 1 + counts_of(5, 60), {"task": "binary", "score": score}
    whole = tc.score_divergence(preds, target, weights=weights, **options)
    sizes, fit_to = [], tc.DPCalibration.fit_to
    monkeypatch.setattr(canonical, "_MOST_AT_ONCE", 60 * 6 * 2)
    monkeypatch.setattr(
        tc.DPCalibration, "fit_to", lambda self, p, w=None: sizes.append(len(p.weights)) or fit_to(self, p, w)
    )
    pieces = tc.score_divergence(preds, target, weights=weights, **options)
    close(pieces.divergence, whole.divergence, rtol=1e-8, atol=1e-8)
    close(pieces.semi_empirical, whole.semi_empirical, rtol=1e-8, atol=1e-8)
    assert sizes == [2, 2, 1]


def test_expected_cost_takes_ways_of_weighing_and_tells_bad_decisions():
    decisions, target, cost = torch.tensor([0, 1, 1, 5]), torch.tensor([0, 1, 0, 1]), [[0, 1], [1, 0]]
    weights = torch.tensor([[1.0, 2, 1, 0], [0, 1, 3, 0]])
    close(tc.expected_cost(decisions, target, cost=cost, weights=weights), torch.tensor([1 / 4, 3 / 4]).double())
    weights[1, 3] = 1
    with pytest.raises(ValueError, match=r"`decisions` must be a column of `cost` in \[0, 1\], got 5 \(1 of 4 rows\)"):
        tc.expected_cost(decisions, target, cost=cost, weights=weights)


def test_a_plain_metric_is_not_merged_into_a_bootstrapped_one_nor_the_other_way_round():
    plain, metric = tc.ECE(task="binary", n_bins=5), streamed()
    for one, other in ((plain, metric), (metric, plain), (plain, tc.NLL(task="binary"))):
        with pytest.raises(ValueError, match="`incoming_state` must count the same thing, got"):
            one.merge_state(other)


def test_a_held_out_set_is_weighed_in_one_way():
    held_out = (P, Y, torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"`calibration` must have one weight per sample, got \(3,\) of them"):
        tc.rcl(P, Y, task="binary", calibration=held_out)
