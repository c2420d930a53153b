"""Streamed bootstrap: loops over Poisson weights, merging and saving."""

from functools import partial

import pytest
import torch
from cases import CASES, covering, path_of
from helpers.bootstrap import BINARY
from helpers.compare import close

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.state import SumState
from torchcalib.ops import counter_rng

# Batches of a stream would split blocks. 39 replicates of SmECE are slow, so that only one case is tested.
ADDITIVE = [
    case
    for case in CASES
    if isinstance(case.metric().kind, SumState)
    and not case.in_blocks
    and (case.cls is not tc.SmECE or case.name == "smece-wide-binary")
]


@pytest.fixture(params=list(covering(ADDITIVE, lambda case: {path_of(case)}, lambda case: case.cls)))
def additive(request):
    return request.param


def poisson(n_replicates, n, seed=0):
    return counter_rng.poisson_counts(seed, torch.arange(n_replicates), torch.arange(n), torch.float64)


def test_streamed_replicates_equal_a_loop_over_poisson_weights(additive):
    preds, target = additive.data(n=41)
    weights = additive.weights(41)
    metric = tc.Bootstrapped(additive.metric(), n_replicates=39, seed=3)
    for piece in (slice(0, 1), slice(1, 1), slice(1, 30), slice(30, 41)):
        metric.update(preds[piece], target[piece], weights=weights[piece])
    close(metric.compute(), additive.call(preds, target, weights=weights))
    found = metric.interval()
    close(found.value, metric.compute())
    close(found.replicates, additive.call(preds, target, weights=poisson(39, 41, seed=3) * weights))


def test_batch_axes_are_separate_and_forward_returns_the_batch_value(additive):
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
    times = poisson(39, 20)[:, None].expand(-1, 3, -1).long()  # numbers of copies
    close(metric.interval().replicates, additive.call(preds, target, weights=times))


def streamed(seed=0, n_bins=5, n_replicates=39, **kwargs):
    return tc.Bootstrapped(tc.ECE(task="binary", n_bins=n_bins), n_replicates=n_replicates, seed=seed, **kwargs)


def test_merged_states_have_the_draws_of_both():
    preds, target = BINARY.data(n=60)
    one, other, same = (streamed(seed=seed) for seed in (0, 1, 0))
    one.update(preds[:25], target[:25])
    for metric in (other, same):
        metric.update(preds[25:], target[25:])
    with pytest.raises(
        ValueError, match="`incoming_state` must have a different seed than this metric, got seed=0 in both"
    ):
        one.merge_state(same)
    one.merge_state(other)
    drawn = poisson(39, 25), poisson(39, 35, seed=1)
    ece = partial(F.ece, preds, target, task="binary", n_bins=5)
    close(one.compute(), ece())
    close(one.interval().replicates, ece(weights=torch.cat(drawn, -1)))
    for different in ({"n_bins": 6}, {"n_replicates": 40}):
        with pytest.raises(ValueError, match="must have the configuration of this metric"):
            one.merge_state(streamed(seed=2, **different))


def test_members_of_a_collection_have_separate_intervals_and_ks_uses_a_sketch():
    preds, target = BINARY.data(n=60)
    alone, sketch = streamed(), partial(tc.KS, task="binary", resolution=64)
    metrics = tc.CalibrationCollection({"ece": streamed(), "ks": tc.Bootstrapped(sketch())})
    for piece in (slice(0, 13), slice(13, 60)):
        metrics.update(preds[piece], target[piece])
        alone.update(preds[piece], target[piece])
    close(metrics["ece"].interval().replicates, alone.interval().replicates)
    replicates = metrics["ks"].interval().replicates
    assert replicates.shape == (200,)
    for r, times in enumerate(poisson(2, 60)):
        weighted = sketch()
        weighted.update(preds, target, weights=times)
        close(replicates[r], weighted.compute())
    assert "n_replicates=39" in repr(alone)
    figure, _ = alone.plot(torch.tensor(0.5))
    figure.clear()


def test_weights_of_the_last_of_many_replicates_count_and_are_checked():
    """Whether a sample has weight 0 in all replicates usually follows from the first ones."""
    preds, target = torch.tensor([0.9, 0.2], dtype=torch.float64), torch.tensor([1, 1])
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(40, 1)
    for last, expected in ((0.0, 0.01), (3.0, (0.01 + 3 * 0.64) / 4)):
        weights[-1, 1] = last
        found = F.brier_score(preds, target, task="binary", weights=weights)
        close(found, torch.tensor([0.01] * 39 + [expected], dtype=torch.float64))
    for wrong in (1e-200, 1e200, -1.0, torch.nan):
        weights[-1, 1] = wrong
        with pytest.raises(ValueError, match="0, or from 1e-150 to 1e150"):
            F.brier_score(preds, target, task="binary", weights=weights)
