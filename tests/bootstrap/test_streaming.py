"""Streamed bootstrap: loops over Poisson weights, merging, saving, and what is refused."""

import pickle

import pytest
import torch
from cases import CASES, covering, path_of
from helpers.bootstrap import BINARY, close

import torchcalib as tc
from torchcalib.kernels import draws
from torchcalib.states import SumsKind

# The pieces of a stream would cut through the blocks of what is made of blocks.
ADDITIVE = [case for case in CASES if isinstance(case.metric().kind, SumsKind) and not case.in_blocks]


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


@pytest.fixture(params=list(covering(ADDITIVE, lambda case: {path_of(case)})))
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


def test_a_plain_metric_is_not_merged_into_a_bootstrapped_one_nor_the_other_way_round():
    plain, metric = tc.ECE(task="binary", n_bins=5), streamed()
    for one, other in ((plain, metric), (metric, plain), (plain, tc.NLL(task="binary"))):
        with pytest.raises(ValueError, match="`incoming_state` must count the same thing, got"):
            one.merge_state(other)
