"""Costs, Bayes decisions and their risk, thresholds and the risk curve: worked examples, slow loops."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import oracles
import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F

F64 = torch.float64
binary, multi = {"task": "binary"}, {"task": "multiclass"}

# Cost matrices


def test_cost_matrix_helpers():
    assert tc.CostMatrix.zero_one(3).costs == ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    assert tc.CostMatrix.zero_one(2).with_reject(0.1).costs == ((0, 1, 0.1), (1, 0, 0.1))
    assert tc.CostMatrix.zero_one(2).with_reject([0.1, 0.5]).costs == ((0, 1, 0.1), (1, 0, 0.5))
    assert tc.CostMatrix.imbalanced(3).costs == ((0, 1, 1), (1, 0, 1), (10, 10, 0))
    assert tc.CostMatrix.imbalanced(2, factor=3, important=0).costs == ((0, 3), (1, 0))
    assert tc.CostMatrix.from_utilities([[5, 2, 3], [-1, 0, -4]]).costs == ((0, 3, 2), (1, 0, 4))
    for cost in (np.float32(0.25), torch.tensor(0.25), torch.tensor([0.25, 0.25]), np.array([0.25, 0.25])):
        assert tc.CostMatrix.zero_one(2).with_reject(cost).costs == ((0, 1, 0.25), (1, 0, 0.25))
    assert (tc.CostMatrix.zero_one(2).with_reject(0.1).num_decisions, tc.CostMatrix.zero_one(4).num_classes) == (3, 4)


def test_cost_matrices_are_compared_and_hashed_by_value():
    rows = [[0.0, 1.0, 0.25], [4.0, 0.0, 0.25]]
    matrix = tc.CostMatrix(rows)
    read = (tc.CostMatrix(given) for given in (torch.tensor(rows), np.array(rows), tuple(rows)))
    for same in (pickle.loads(pickle.dumps(matrix)), copy.deepcopy(matrix), *read):
        assert same == matrix
        assert hash(same) == hash(matrix)
    assert matrix != tc.CostMatrix.zero_one(2)
    assert repr(matrix) == f"CostMatrix({rows})"
    one, other = tc.CostMatrix.zero_one(50), tc.CostMatrix.imbalanced(50)
    assert len(repr(one)) < 40
    assert repr(one) != repr(other)


# Decisions and their risk


def test_bayes_decisions_of_two_classes_change_at_the_closed_form_threshold():
    """If a miss costs 4 and a false alarm 1, the decision changes at P(y=1) = 1/5. A tie gives the first decision.

    With two decisions that cost nothing for class 0, the second is better by 1e-20 times 1/2.
    """
    p, cost = torch.tensor([0.0, 0.1875, 0.2, 0.21, 1.0], dtype=F64), [[0, 1], [4, 0]]
    assert F.bayes_decisions(p, cost=cost, **binary).tolist() == [0, 0, 0, 1, 1]
    assert F.bayes_decisions(p.logit(), cost=cost, from_logits=True, **binary).tolist()[3:] == [1, 1]
    cost = [[0, 0], [1, 0.5]]
    assert F.bayes_decisions(torch.tensor([1e-20], dtype=F64), cost=cost, **binary).item() == 1
    assert F.bayes_decisions(torch.tensor([-90.0]), cost=cost, from_logits=True, **binary).item() == 1


@pytest.mark.parametrize("n_classes", [2, 3, 7, 60])
def test_ties_give_the_first_decision_for_any_batch_size(n_classes):
    """Sums of 1/C in different orders differ in the last digit."""
    generator = torch.Generator().manual_seed(n_classes)
    costs = torch.randint(0, 4, (n_classes, 5), generator=generator).double() / 10
    # append a copy of each column
    costs = torch.cat((costs, costs[torch.randperm(n_classes, generator=generator)]), -1)
    uniform = torch.full((37, n_classes), 1 / n_classes, dtype=F64)
    first = costs.mean(0)[:5].argmin().item()
    decisions = F.bayes_decisions(uniform, cost=costs, **multi)
    assert set(decisions.tolist()) == {first}
    assert F.bayes_decisions(uniform[:1], cost=costs, **multi).item() == first


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["reject", "imbalanced", "dense", "huge", "constant", "one"])
def test_decisions_of_a_large_batch_equal_those_of_small_batches(kind, dtype):
    """Large batches are computed in float32 first. Many of these rows are ties, some of them up to 1e-15 or 1e-7."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(64, 70, generator=generator, dtype=F64)
    dense[:, 5] = dense[:, 60]
    cost = {
        "reject": tc.CostMatrix.zero_one(64).with_reject(0.5),
        "imbalanced": tc.CostMatrix.imbalanced(64),
        "dense": dense,
        "huge": dense.masked_fill(dense > 0.9, 1e150),
        "constant": torch.ones(64, 30),
        "one": dense[:, :1],
    }[kind]
    q = torch.zeros(900, 64, dtype=dtype)
    q[:, 3], q[:, 9] = 0.5, 0.5
    for k, shift in enumerate((0, 1e-15, 1e-7, 1e-3)):
        q[100 * k : 100 * k + 50, 9] += shift
        q[100 * k + 50 : 100 * k + 100, 9] -= shift
    q[400:500] = torch.rand(100, 64, generator=generator, dtype=dtype).softmax(-1)
    q[500:600, 0], q[500:600, 3], q[500:600, 9] = 1e-40, 1, 0
    q[600:900] = (30 * torch.randn(300, 64, generator=generator, dtype=dtype)).softmax(-1)
    options = {"cost": cost, "class_axis": -1, "validate_args": False, **multi}
    for values, from_logits in ((q, False), (q.log(), True)):
        decide = partial(F.bayes_decisions, from_logits=from_logits, **options)
        assert torch.equal(decide(values), torch.cat([decide(few) for few in values.split(100)]))


def test_large_batches_are_decided_if_the_precision_of_each_backend_is_set(monkeypatch):
    """torch then raises an error for the global precision."""

    def get() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", get)
    q = torch.rand(2000, 30, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert torch.equal(F.bayes_decisions(q, cost=tc.CostMatrix.zero_one(30), **multi), q.argmax(-1))


def test_decisions_have_the_shape_of_the_samples():
    images = torch.rand(2, 3, 4, 5, dtype=F64).softmax(1)
    decisions = F.bayes_decisions(images, class_axis=1, cost=tc.CostMatrix.zero_one(3), **multi)
    assert torch.equal(decisions, images.argmax(1))
    labels = torch.rand(2, 3, 4, dtype=F64)
    for axis in (-1, 1):
        assert torch.equal(F.bayes_decisions(labels, class_axis=axis, task="multilabel"), (labels > 0.5).long())


def test_bayes_risk_of_a_rare_class_is_exact():
    """Deciding 0 costs the frequency of ones. One minus the frequency of zeros would have five correct digits."""
    preds, target, weights = torch.tensor([[0.1, 0.2], [0, 1], [1e12, 3.0]], dtype=F64)
    found = F.bayes_risk(preds, target.long(), weights=weights, normalize="prior", **binary)
    assert found.item() == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("priors", [None, [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("normalize", [None, "prior"])
def test_expected_cost_of_bayes_decisions_equals_the_bayes_risk(priors, normalize):
    q = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(0), dtype=F64).softmax(-1)
    h = torch.arange(100).reshape(2, 50) % 3
    h[0, 3] = h[1, 7] = -1
    cost = tc.CostMatrix([[0, 2, 1, 0.3], [1, 0, 1, 0.3], [5, 1, 0, 0.3]])
    given = {"normalize": normalize, "priors": priors, "weights": torch.rand(2, 50), "ignore_index": -1}
    decisions = F.bayes_decisions(q, cost=cost, class_axis=-1, **multi)
    expected = F.bayes_risk(q, h, cost=cost, **given, **multi)
    torch.testing.assert_close(F.expected_cost(decisions, h, cost=cost, **given), expected, rtol=1e-13, atol=0)


def test_float32_priors_are_normalised():
    """Each class has one sample, so that the value is the mean of two losses at equal priors."""
    preds, h = torch.tensor([[0.2, 0.8], [0.3, 0.7]], dtype=F64), torch.tensor([0, 1])
    priors = torch.full((2,), 0.5 * (1 - 2**-23))
    expected = -(torch.tensor([0.2, 0.7], dtype=F64).log()).mean()
    torch.testing.assert_close(F.nll(preds, h, priors=priors, **multi), expected, rtol=1e-15, atol=0)


def test_expected_cost_equals_hand_computed_values():
    decisions, h = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int8), torch.tensor([0, 1, 1, 1, 0])
    cost = [[0, 1, 0.25], [8, 0, 0.25]]
    assert F.expected_cost(decisions, h, cost=cost).item() == (0 + 0 + 0.25 + 8 + 1) / 5
    at_priors = F.expected_cost(decisions, h, cost=cost, priors=[0.5, 0.5]).item()
    assert at_priors == pytest.approx((0 + 1) / 2 / 2 + (0 + 0.25 + 8) / 3 / 2)
    soft_target = torch.tensor([[0.75, 0.25]] * 5, dtype=F64)
    soft = F.expected_cost(decisions, soft_target, cost=cost).item()
    assert soft == pytest.approx((2 * 0.25 * 8 + 2 * 0.75 + 0.25) / 5)
    assert F.expected_cost(decisions[:0], h[:0], cost=cost).isnan()
    unread = torch.tensor([0, 99, 1])
    assert F.expected_cost(unread, h[[0, 1, 4]], cost=cost, weights=torch.tensor([1, 0, 3])).item() == 0.75


# Thresholds, and the risk curve over operating points


def sample(n=60, lead=(), distinct=None):
    """Return P(y=1), and labels drawn from it."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(*lead, n, generator=generator, dtype=F64)
    y = (torch.rand(*lead, n, generator=generator) < p).long()
    return (p if distinct is None else (p * distinct).round() / distinct), y


@pytest.mark.parametrize("distinct", [None, 8])
@pytest.mark.parametrize("cost", [[[0, 1], [1, 0]], [[0, 1], [5, 0]], [[0.5, 2], [1, -1]], [[1, 0], [0, 1]]])
def test_optimal_threshold_cost_equals_slow_loop(distinct, cost):
    p, y = sample(distinct=distinct)
    weights = torch.arange(60) % 4
    expected = oracles.least_threshold_cost(p.tolist(), y.tolist(), weights.tolist(), cost)
    for preds, from_logits in ((p, False), (p.masked_fill(weights == 0, math.nan), False), (p.logit(), True)):
        given = {"cost": cost, "weights": weights, "from_logits": from_logits, **binary}
        assert F.optimal_threshold_cost(preds, y, **given).item() == pytest.approx(expected)


def test_optimal_threshold_at_priors_equals_that_of_weighted_classes():
    p, y = sample(lead=(2,))
    shares = torch.stack((1 - y.double().mean(-1), y.double().mean(-1)), -1)
    weights = (torch.tensor([0.8, 0.2]) / shares).gather(-1, y)
    given = {"cost": [[0, 1], [3, 0]], **binary}
    expected = torch.stack([F.optimal_threshold_cost(*series, **given) for series in zip(p, y, strict=True)])
    given["batch_dims"] = 1
    torch.testing.assert_close(F.optimal_threshold_cost(p, y, **given), expected)
    expected = F.optimal_threshold_cost(p, y, weights=weights, **given)
    at_priors = F.optimal_threshold_cost(p, y, priors=[0.8, 0.2], **given)
    torch.testing.assert_close(at_priors, expected)
    normalized = F.optimal_threshold_cost(p, y, priors=[0.8, 0.2], normalize="prior", **given)
    torch.testing.assert_close(normalized, at_priors / (3 * 0.2))


def test_labels_and_positive_classes_give_the_values_of_binary_tasks():
    p, y = sample(lead=(3,))
    separate = torch.stack([F.optimal_threshold_cost(p[k], y[k], **binary) for k in range(3)])
    given = {"preds": p.T, "target": y.T, "task": "multilabel"}
    torch.testing.assert_close(F.optimal_threshold_cost(**given, average=None), separate)
    torch.testing.assert_close(F.optimal_threshold_cost(**given), separate.mean())
    curve = F.bayes_risk_curve(**given, points=5)
    torch.testing.assert_close(curve.risk, F.bayes_risk_curve(p, y, points=5, batch_dims=1, **binary).risk)
    areas = F.bayes_risk_area(**given, average=None)
    torch.testing.assert_close(areas, F.nll(**given, average=None))
    torch.testing.assert_close(F.bayes_risk_area(**given), areas.mean())
    rows = torch.stack((1 - p[0], p[0] / 2, p[0] / 2), -1)
    of_set = F.optimal_threshold_cost(rows, y[0], positive_classes=[1, 2], **multi)
    torch.testing.assert_close(of_set, separate[0])
    assert F.optimal_threshold_cost(p[0, :0], y[0, :0], **binary).isnan()
    assert F.optimal_threshold_cost(p[0, :1], y[0, :1], **binary).item() == 0


@pytest.mark.parametrize("from_logits", [False, True])
def test_bayes_risk_curve_equals_slow_loop(from_logits):
    p, y = sample(distinct=None if from_logits else 10)
    weights = torch.arange(60) % 3
    given = {"weights": weights, "points": 9, "from_logits": from_logits, **binary}
    curve = F.bayes_risk_curve(p.logit() if from_logits else p, y, **given)

    def cost_of(p, c):
        """[EPSR] eq. 34 for one operating point: a miss costs 1/c and a false alarm 1/(1-c)."""
        rows = zip(p, y.tolist(), strict=True)
        costs = [1 / c if t and q <= c else 1 / (1 - c) if not t and q > c else 0.0 for q, t in rows]
        return oracles.mean(costs, weights.tolist())

    assert curve.operating_point.tolist() == [i / 10 for i in range(1, 10)]
    for k, c in enumerate(curve.operating_point.tolist()):
        assert curve.risk[k].item() == pytest.approx(cost_of(p.tolist(), c), abs=1e-14)
        assert curve.cheapest[k].item() == pytest.approx(min(cost_of([q] * 60, c) for q in (0, 1)))
    torch.testing.assert_close(curve.normalized, curve.risk / curve.cheapest)


def test_points_of_the_curve_equal_the_bayes_risk():
    p, y = sample(lead=(2,))
    priors = [0.7, 0.3]
    curve = F.bayes_risk_curve(p, y, points=[0.2, 0.5, 0.9], priors=priors, batch_dims=1, **binary)
    assert curve.risk.shape == (2, 3)
    for k, c in enumerate((0.2, 0.5, 0.9)):
        given = {"cost": [[0, 1 / (1 - c)], [1 / c, 0]], "priors": priors, "batch_dims": 1, **binary}
        torch.testing.assert_close(curve.risk[:, k], F.bayes_risk(p, y, **given))
        torch.testing.assert_close(curve.normalized[:, k], F.bayes_risk(p, y, normalize="prior", **given))


@pytest.mark.parametrize(("weight", "score"), [("uniform", F.nll), ("beta22", F.brier_score)])
def test_area_of_the_curve_equals_the_score_with_its_gradient(weight, score):
    p, y = sample(n=200, lead=(2,))
    each = {"batch_dims": 1, **binary}
    given = {"weights": torch.rand(2, 200), **each}
    a, b = p.clone().requires_grad_(), p.clone().requires_grad_()
    area, expected = F.bayes_risk_area(a, y, weight=weight, **given), score(b, y, **given)
    torch.testing.assert_close(area, expected, rtol=1e-12, atol=0)
    area.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
    at_priors = F.bayes_risk_area(p, y, weight=weight, priors=[0.9, 0.1], **given)
    torch.testing.assert_close(at_priors, score(p, y, priors=[0.9, 0.1], **given), rtol=1e-12, atol=0)
    soft = torch.rand(2, 200, dtype=F64)
    expected = score(p, soft, **each) - (0 if weight == "uniform" else (soft.square() - soft).mean(-1))
    torch.testing.assert_close(F.bayes_risk_area(p, soft, weight=weight, **each), expected, rtol=1e-12, atol=0)
    finite = ((p * 5).round() / 5).clamp(0.1, 0.9)  # with ties
    torch.testing.assert_close(F.bayes_risk_area(finite, y, weight=weight, **each), score(finite, y, **each))


def test_area_of_saturated_predictions_equals_the_nll():
    """A set and its complement give the same area. The rows sum to 1 + 2e-8, which float32 cannot represent."""
    z, y = torch.tensor([200.0, -300.0, 4.0, 200.0], dtype=F64), torch.tensor([0, 1, 1, 1])
    area = F.bayes_risk_area(z, y, from_logits=True, **binary)
    torch.testing.assert_close(area, F.nll(z, y, from_logits=True, **binary), rtol=1e-14, atol=0)
    rows = torch.tensor([[1.0, 1e-8, 1e-8], [0.5, 0.25, 0.25]])
    for classes in ([0], [1, 2]):
        given = {"preds": rows, "target": torch.tensor([1, 0]), "positive_classes": classes, **multi}
        torch.testing.assert_close(F.bayes_risk_area(**given), F.nll(**given), rtol=1e-6, atol=0)
        assert F.nll(**given).item() == pytest.approx((-math.log(2e-8) + math.log(2)) / 2, rel=1e-6)


def test_area_of_certain_predictions_is_0_1_or_infinite():
    zeros, ones = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert F.bayes_risk_area(zeros, ones, **binary).item() == 0
    assert F.bayes_risk_area(zeros, 1 - ones, **binary).item() == math.inf
    assert F.bayes_risk_area(zeros, 1 - ones, weight="beta22", **binary).item() == 1
    assert F.bayes_risk_area(zeros[:0], ones[:0], **binary).isnan()
    assert F.bayes_risk_curve(zeros[:0], ones[:0], **binary).risk.isnan().all()
