"""Targets that are all 0 or 1 are labels, whatever their dtype and batches: the calibration test is the same."""

from dataclasses import replace
from functools import partial

import oracles
import pytest
import torch
from cases import CASES, N_CLASSES, covering, path_of
from helpers import null_distribution
from helpers.null_distribution import F64, FEW
from helpers.samples import updated

import torchcalib as tc
from torchcalib.inference import calibration_test

FLOATING = [torch.float16, torch.bfloat16, torch.float32, F64]
same = partial(null_distribution.same, rtol=1e-9)
TESTED = [
    case
    for case in CASES
    if case.cls.has_test
    and case.cls not in (tc.Cox, tc.SKCE)
    and not case.format.hard_targets
    and case.options.get("component", "ici") == "ici"
    and case.cls is not tc.SmECE  # SmECE sums over cells, which are compared below
]


def floating(case, target, dtype=F64):
    return torch.nn.functional.one_hot(target, N_CLASSES).to(dtype) if case.task == "multiclass" else target.to(dtype)


def noise_summands(metric):
    """Return the sums `spread` and `noise` over bins."""
    b = metric.statistic()
    b = getattr(b, "each", b)  # of groups
    return torch.stack((b.spread, b.noise))


@pytest.mark.parametrize(
    "case", list(covering(TESTED, lambda case: {case.cls, path_of(case)}, lambda case: (case.cls, path_of(case))))
)
def test_calibration_test_of_labels_is_independent_of_dtype_batches_and_excluded_rows(case):
    """Rows with soft labels do not count if they have weight 0 or are dropped."""
    preds, target = case.data(n=60)
    expected = calibration_test(case.metric(), preds, target, **FEW)
    same(calibration_test(case.metric(), preds, floating(case, target), **FEW), expected)
    metric = case.metric()
    for rows, dtype in zip(torch.arange(60).split(13), (*FLOATING, None), strict=True):
        metric.update(preds[rows], target[rows] if dtype is None else floating(case, target[rows], dtype))
    streamed = metric.test(**FEW)
    if streamed.method == expected.method:
        same(streamed, expected)
    else:  # sums do not contain the rows whose labels are simulated
        assert case.task == "multiclass"
        assert streamed.statistic.tolist() == pytest.approx(expected.statistic.tolist(), rel=1e-9)
    if case.task != "multiclass":
        same(calibration_test(case.metric(), preds, target.bool(), **FEW), expected)
    copies = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    shares = floating(case, target)
    shares[copies == 0] = torch.full_like(shares[copies == 0], 1 / N_CLASSES)
    preds[0], shares[0], copies[0] = torch.nan, 1 / N_CLASSES, 1
    drops = replace(case, own={**case.own, "nan_policy": "drop"})
    expected = calibration_test(drops.metric(), preds, target, weights=copies, **FEW)
    same(calibration_test(drops.metric(), preds, shares, weights=copies, **FEW), expected)


@pytest.mark.parametrize("weighing", ["plain", "copies", "weights"])
def test_noise_of_states_with_soft_labels_or_floating_weights_equals_slow_loop(weighing):
    """Compare with `oracles.noise_of_bins`: p (1 - p) for labels, (t - p)^2 for floating targets with a soft label.

    With floating weights, floating targets are soft labels. Integer targets are labels in any case.
    """
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(60, generator=generator, dtype=F64)
    target = (torch.rand(60, generator=generator, dtype=F64) < preds).double()
    weights = torch.randint(1, 4, (60,), generator=generator) if weighing != "plain" else torch.ones(60).long()
    given = {"plain": None, "copies": weights, "weights": weights / 2.0}[weighing]
    counted = (weights if given is None else given).tolist()
    for share in (target[30].item(), 0.25):
        target[30] = share
        metric, expected = tc.ECE(task="binary", n_bins=5), torch.zeros(2, 5, dtype=F64)
        for dtype, soft in ((F64, share == 0.25 or weighing == "weights"), (torch.int64, False)):
            labels = target.to(dtype)
            for rows in torch.arange(60).split(17):
                metric.update(preds[rows], labels[rows], weights=None if given is None else given[rows])
            pairs = list(zip(preds.tolist(), labels.tolist(), strict=True))
            noise = oracles.noise_of_bins(pairs, counted, 5, copies=weighing != "weights", soft=soft)
            expected += torch.tensor(noise[:2], dtype=F64)
        metric.update(preds, target, weights=torch.zeros(60))  # rows of weight 0 do not count
        torch.testing.assert_close(noise_summands(metric), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "copies"])
@pytest.mark.parametrize("cls", [tc.ECE, tc.SmECE])
def test_only_batch_elements_labels_and_groups_with_a_soft_label_are_soft(cls, weighted):
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(3, 50, generator=generator, dtype=F64)
    target = (torch.rand(3, 50, generator=generator, dtype=F64) < preds).double()
    weights = torch.randint(1, 3, (50,), generator=generator) if weighted else None
    target[1, 7] = 0.4
    alone = [updated(cls(task="binary"), (preds[k], target[k]), weights=weights) for k in range(3)]
    expected = torch.stack([noise_summands(metric) for metric in alone], 1)
    assert [torch.equal(*pair) for pair in expected.unbind(1)] == [True, False, True]
    all_weights = None if weights is None else weights.expand(3, 50)
    series = updated(cls(task="binary", batch_shape=(3,)), (preds, target), weights=all_weights)
    labels = updated(cls(task="multilabel", num_labels=3, average=None), (preds.T, target.T), weights=weights)
    groups = tc.ByGroup(cls(task="binary"), num_groups=3)
    numbers = torch.arange(3).unsqueeze(-1).expand(3, 50).flatten()
    for rows in torch.randperm(150, generator=generator).split(40):
        some = None if all_weights is None else all_weights.flatten()[rows]
        groups.update(preds.flatten()[rows], target.flatten()[rows], groups=numbers[rows], weights=some)
    for metric in (series, labels, groups):
        torch.testing.assert_close(noise_summands(metric), expected, rtol=1e-12, atol=1e-14)
