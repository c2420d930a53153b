"""Selective prediction: closed forms, identities, other packages' definitions, large numbers, and the curve.

tests/contract compares every metric with a slow loop.
"""

import math
from fractions import Fraction
from itertools import permutations, product

import pytest
import torch
from cases import N_CLASSES, SELECTIVE
from helpers.samples import tied, updated
from oracles import selective
from sklearn.metrics import roc_auc_score

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.functional.selective import harmonic_difference

F64 = torch.float64
TASKS = ("binary", "multiclass", "multilabel")
FUNCTIONS = [function for _, function, _, _ in SELECTIVE]


def sample(task, n=60, seed=0, weighted=False):
    """Return predictions with ties, targets, and weights or None."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 4, (n,), generator=generator) if weighted else None
    return *tied(task, n, seed, steps=16), weights


def top_labels_of(task, preds, target):
    """Return columns of confidences and correctness of the predicted label: one, or one for each label."""
    if task == "multiclass":
        confidence, label = preds.max(-1)
        return [(confidence.tolist(), (label == target).long().tolist())]
    confidence, correct = torch.maximum(preds, 1 - preds), ((preds > 0.5) == (target == 1)).long()
    return list(
        zip(confidence.reshape(len(preds), -1).T.tolist(), correct.reshape(len(preds), -1).T.tolist(), strict=True)
    )


def test_saturated_logits_are_still_ranked():
    """The probabilities of logits 40 and 50 round to 1."""
    logits, target = torch.tensor([40.0, 50.0, 60.0]), torch.tensor([0, 1, 1])
    for given in (
        {"preds": logits, "target": target, "task": "binary"},
        {"preds": torch.stack((-logits, logits * 0), -1), "target": target, "task": "multiclass"},
        {"preds": logits[:, None], "target": target[:, None], "task": "multilabel"},
    ):
        assert F.correctness_auroc(**given, from_logits=True).item() == 1
        assert F.aurc(**given, from_logits=True).item() == pytest.approx(1 / 9)


def test_ties_give_the_mean_over_all_orders():
    """Enumerate all orders of 6 samples with confidences in 2 groups of ties."""
    confidence, correct = [0.9, 0.9, 0.9, 0.6, 0.6, 0.6], [1, 0, 1, 0, 0, 1]
    found = {name: Fraction(0) for name in ("aurc", "eaurc", "augrc", "risk_at_coverage")}
    orders = [[*first, *second] for first in permutations(correct[:3]) for second in permutations(correct[3:])]
    for order in orders:
        for name in found:
            value = getattr(selective, name)(list(range(6, 0, -1)), order)
            found[name] += Fraction(value) / len(orders)
    given = {"task": "binary", "mode": "positive"}
    for name, mean in found.items():
        value = getattr(F, name)(torch.tensor(confidence, dtype=F64), torch.tensor(correct), **given)
        assert value.item() == pytest.approx(float(mean), rel=1e-14)


# Identities and other packages


@pytest.mark.parametrize("weighted", [False, True])
def test_correctness_auroc_equals_scikit_learn(weighted):
    preds, target, weights = sample("multiclass", n=300, weighted=weighted)
    confidence, top = preds.max(-1)
    given = {"task": "multiclass", "weights": weights}
    expected = roc_auc_score(top == target, confidence, sample_weight=weights)
    assert F.correctness_auroc(preds, target, **given).item() == pytest.approx(expected, rel=1e-12)
    found = F.correctness_auroc(preds, target, **given, mode="classwise", average=None)
    for k, value in enumerate(found.tolist()):
        assert value == pytest.approx(roc_auc_score(target == k, preds[:, k], sample_weight=weights), rel=1e-12)
    labels, true, weights = sample("multilabel", n=300, weighted=weighted)
    found = F.correctness_auroc(labels, true, task="multilabel", mode="classwise", weights=weights)
    assert found.item() == pytest.approx(roc_auc_score(true, labels, average="macro", sample_weight=weights), rel=1e-12)


def test_trapezoidal_areas_of_other_packages_follow_from_the_curve():
    """torch-uncertainty integrates E_k / k from coverage 1/N to 1 with the trapezoidal rule, without ties.

    Its AURC is then (1/N) sum_{k<N} (R_k + R_{k+1}) / 2, divided by the length 1 - 1/N where it is normalised. With all
    R_k of the curve, sum_k R_k = N AURC, so that the trapezoidal area is AURC - (R_1 + R_N) / (2 N).
    """
    generator = torch.Generator().manual_seed(0)
    n = 500
    confidence = torch.randperm(n, generator=generator).to(F64).add(1) / (n + 1)
    correct = (torch.rand(n, generator=generator) < confidence).long()
    given = {"task": "binary", "mode": "positive"}
    order = confidence.argsort(descending=True)
    risks = (1 - correct[order]).cumsum(0) / torch.arange(1, n + 1)
    trapezoids = torch.trapezoid(risks, torch.arange(1, n + 1) / n).item()
    normalised = ((risks[1:] + risks[:-1]) / 2).sum().item() / n / (1 - 1 / n)
    aurc = F.aurc(confidence, correct, **given).item()
    relation = aurc - (risks[0].item() + risks[-1].item()) / (2 * n)
    assert trapezoids == pytest.approx(relation, rel=1e-6)
    assert normalised == pytest.approx(relation / (1 - 1 / n), rel=1e-6)
    at_80 = F.risk_at_coverage(confidence, correct, **given).item()
    assert at_80 == pytest.approx(risks[math.ceil(0.8 * n) - 1].item(), rel=1e-6)


# Exact coverages and risks, and large numbers


def test_rounding_of_the_coverage_does_not_add_a_sample():
    """For each product that is a whole number in decimal arithmetic, k is that number."""
    wrong = []
    for n, percent in product((5, 10, 25, 50, 100, 700, 1000), range(1, 101)):
        if n * percent % 100:
            continue
        k = n * percent // 100
        correct = (torch.arange(n) < k).long()  # the first error is sample k + 1
        confidence = torch.linspace(1, 0, n, dtype=F64)
        given = {"task": "binary", "mode": "positive", "coverage": percent / 100}
        if F.risk_at_coverage(confidence, correct, **given).item() != 0:
            wrong.append((n, percent))
    assert not wrong
    above = F.risk_at_coverage(confidence, correct, task="binary", mode="positive", coverage=1.0)
    assert above.item() == 0
    three = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, 0, 1])
    for coverage, expected in ((1e-9, 0), (0.33, 0), (0.34, 1 / 2), (0.67, 1 / 3)):
        value = F.risk_at_coverage(*three, task="binary", mode="positive", coverage=coverage)
        assert value.item() == pytest.approx(expected)


def test_risk_equal_to_the_limit_is_accepted():
    for n in range(1, 101):
        correct = torch.ones(n, dtype=torch.int64)
        correct[-1] = 0
        confidence = torch.linspace(1, 0, n, dtype=F64)
        given = {"task": "binary", "mode": "positive"}
        for risk in (round(1 / n, 10), 1 / n):
            value = F.coverage_at_risk(confidence, correct, **given, risk=risk).item()
            assert (value == 1) == (1 / n <= risk), (n, risk)


@pytest.mark.parametrize("ties", [False, True])
def test_aurc_of_a_million_samples_equals_an_exact_sum(ties):
    n = 1_000_000
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(n, generator=generator, dtype=F64)
    confidence = confidence.mul(n // 3).floor().div(n // 3) if ties else confidence
    correct = (torch.rand(n, generator=generator) < 0.5 + confidence / 2).long()
    order = confidence.argsort(descending=True)
    error, sorted_confidence = (1.0 - correct[order]).double(), confidence[order]
    _, group, size = sorted_confidence.unique_consecutive(return_inverse=True, return_counts=True)
    if ties:  # every sample of a group has the mean error of the group
        error = (torch.zeros(len(size), dtype=F64).scatter_add_(0, group, error) / size)[group]
    errors = error.cumsum(0)
    expected = math.fsum((errors / torch.arange(1, n + 1)).tolist()) / n
    found = F.aurc(confidence, correct, task="binary", mode="positive")
    assert found.item() == pytest.approx(expected, rel=1e-13)
    wrong = int(error.sum().round())
    ideal = math.fsum(max(0, k - (n - wrong)) / k for k in range(1, n + 1)) / n
    excess = F.eaurc(confidence, correct, task="binary", mode="positive")
    assert excess.item() == pytest.approx(expected - ideal, rel=1e-12)


def test_harmonic_differences_equal_exact_sums():
    starts, counts = (0, 1, 7, 38, 39, 40, 41, 100, 12_345, 10**6), (0, 1, 2, 3, 50, 1000)
    rows = list(product(starts, counts))
    start, stop = (torch.tensor(column, dtype=F64) for column in zip(*((a, a + m) for a, m in rows), strict=True))
    exact = [math.fsum(1 / i for i in range(a + 1, a + m + 1)) for a, m in rows]
    assert harmonic_difference(start, stop).tolist() == pytest.approx(exact, rel=1e-13, abs=0)
    huge = torch.tensor(2.0**50, dtype=F64)
    assert harmonic_difference(huge, huge + 3).item() == pytest.approx(3 * 2.0**-50, rel=1e-14)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_many_copies_of_every_sample_approach_the_continuous_limit(function):
    """Areas of n copies differ from their limit by O(1 / n). The limit of 10^9 and 10^13 copies is the same."""
    preds, target, _ = sample("binary", n=40)
    few, many = (function(preds, target, task="binary", weights=torch.full((40,), n)) for n in (10**9, 10**13))
    assert few.item() == pytest.approx(many.item(), rel=1e-8)


# Special samples


def test_perfect_useless_and_wrong_predictions():
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6])
    right, mixed = torch.ones(4, dtype=torch.int64), torch.tensor([1, 1, 0, 0])
    names = ("aurc", "eaurc", "augrc", "correctness_auroc", "risk_at_coverage", "coverage_at_risk")
    rows = [
        (confidence, right, (0, 0, 0, math.nan, 0, 1)),
        (confidence, 1 - right, (1, 0, 0.5, math.nan, 1, 0)),
        (confidence, mixed, ((1 / 3 + 1 / 2) / 4, 0, 1 / 8, 1, 0.5, 0.5)),
        (confidence, 1 - mixed, ((1 + 1 + 2 / 3 + 1 / 2) / 4, 7 / 12, 3 / 8, 0, 0.5, 0)),
        (torch.full((4,), 0.7), mixed, (1 / 2, 1 / 2 - 5 / 24, 1 / 4, 0.5, 0.5, 0)),
    ]
    for preds, correct, expected in rows:
        found = [getattr(F, name)(preds, correct, task="binary", mode="positive").item() for name in names]
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_half_of_a_tie_at_one_half_is_predicted_as_class_0():
    """The predicted class is that of `accuracy`."""
    preds, target = torch.full((4,), 0.5), torch.tensor([0, 0, 0, 1])
    for task, given in (("binary", (preds, target)), ("multilabel", (preds[:, None], target[:, None]))):
        assert F.accuracy(*given, task=task).item() == 0.75
        assert F.accuracy_at_coverage(*given, task=task).item() == 0.75


def test_multilabel_values_are_means_of_binary_values():
    """float32 probabilities near 0 and 1, whose complements float32 cannot distinguish."""
    preds = torch.tensor([[1e-9, 0.5], [2e-9, 1 - 1e-7], [0.3, 0.2], [1.0, 1e-20]])
    target = torch.tensor([[1, 0], [0, 1], [0, 1], [1, 0]])
    for _, function, cls, options in SELECTIVE:
        each = [function(preds[:, k], target[:, k], task="binary", **options) for k in range(2)]
        found = function(preds, target, task="multilabel", average=None, **options)
        torch.testing.assert_close(found, torch.stack(each), rtol=0, atol=0, equal_nan=True)
        for logits in (False, True):
            metric = updated(cls(task="multilabel", num_labels=2, from_logits=logits, **options), (preds, target))
            expected = function(preds, target, task="multilabel", from_logits=logits, **options)
            torch.testing.assert_close(metric.compute().float(), expected, equal_nan=True)


# The curve


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_curve_equals_the_loop_over_thresholds(task, weighted):
    preds, target, weights = sample(task, weighted=weighted)
    copies = None if weights is None else weights.tolist()
    curve = F.risk_coverage_curve(preds, target, task=task, weights=weights)
    own = {"num_labels": N_CLASSES} if task == "multilabel" else {}
    metric = tc.AURC(task=task, **own)
    metric.update(preds, target, weights=weights)
    torch.testing.assert_close(metric.curve(), curve, equal_nan=True)
    for k, (confidence, correct) in enumerate(top_labels_of(task, preds, target)):
        found = torch.stack(list(curve))[:, k] if task == "multilabel" else torch.stack(list(curve))
        expected = selective.points(confidence, correct, copies)
        n = expected[-1][1]
        rows = [(k / n, e / k, e / n, threshold) for threshold, k, e in expected]
        assert found[:, : len(rows)].T.flatten().tolist() == pytest.approx([x for row in rows for x in row])
        assert bool(found[:, len(rows) :].isnan().all())


def test_long_curves_are_a_selection_of_their_points():
    confidence = torch.linspace(0.999, 0.001, 5000, dtype=F64)
    correct = (torch.arange(5000) % 7 != 3).long()
    curve = F.risk_coverage_curve(confidence, correct, task="binary", mode="positive")
    assert curve.coverage.shape == (1024,)
    k = (curve.coverage * 5000).round().long()
    errors = (1 - correct).cumsum(0)[k - 1].double()
    torch.testing.assert_close(curve.risk, errors / k)
    torch.testing.assert_close(curve.threshold, confidence[k - 1])
    assert curve.coverage[-1] == 1
    assert curve.coverage.diff().max() <= 2 / 1024
    empty = F.risk_coverage_curve(confidence[:0], correct[:0], task="binary")
    assert all(column.isnan().all() for column in empty)
