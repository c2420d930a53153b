"""Thresholds, the Bayes-risk curve and its area: slow loops, what must be equal, and wrong calls."""

import math
from functools import partial

import oracles
import pytest
import torch
from helpers.refusals import assert_refused

import torchcalib as tc

F64 = torch.float64
binary, multi = {"task": "binary"}, {"task": "multiclass"}


def sample(n=60, lead=(), distinct=None):
    """P(y=1) and labels that follow them."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(*lead, n, generator=generator, dtype=F64)
    y = (torch.rand(*lead, n, generator=generator) < p).long()
    return (p if distinct is None else (p * distinct).round() / distinct), y


@pytest.mark.parametrize("distinct", [None, 8])
@pytest.mark.parametrize("cost", [[[0, 1], [1, 0]], [[0, 1], [5, 0]], [[0.5, 2], [1, -1]], [[1, 0], [0, 1]]])
def test_slow_loop_optimal_threshold(distinct, cost):
    p, y = sample(distinct=distinct)
    weights = torch.arange(60) % 4
    expected = oracles.least_threshold_cost(p.tolist(), y.tolist(), weights.tolist(), cost)
    for preds, from_logits in ((p, False), (p.masked_fill(weights == 0, math.nan), False), (p.logit(), True)):
        given = {"cost": cost, "weights": weights, "from_logits": from_logits, **binary}
        assert tc.optimal_threshold_cost(preds, y, **given).item() == pytest.approx(expected)


def test_optimal_threshold_at_priors_is_that_of_weighted_classes():
    p, y = sample(lead=(2,))
    shares = torch.stack((1 - y.double().mean(-1), y.double().mean(-1)), -1)
    weights = (torch.tensor([0.8, 0.2]) / shares).gather(-1, y)
    given = {"cost": [[0, 1], [3, 0]], **binary}
    expected = torch.stack([tc.optimal_threshold_cost(*series, **given) for series in zip(p, y, strict=True)])
    torch.testing.assert_close(tc.optimal_threshold_cost(p, y, **given), expected)
    expected = tc.optimal_threshold_cost(p, y, weights=weights, **given)
    at_priors = tc.optimal_threshold_cost(p, y, priors=[0.8, 0.2], **given)
    torch.testing.assert_close(at_priors, expected)
    normalized = tc.optimal_threshold_cost(p, y, priors=[0.8, 0.2], normalize="prior", **given)
    torch.testing.assert_close(normalized, at_priors / (3 * 0.2))


def test_labels_and_sets_of_classes_are_binary_tasks():
    p, y = sample(lead=(3,))
    apart = torch.stack([tc.optimal_threshold_cost(p[k], y[k], **binary) for k in range(3)])
    given = {"preds": p.T, "target": y.T, "task": "multilabel"}
    torch.testing.assert_close(tc.optimal_threshold_cost(**given, average=None), apart)
    torch.testing.assert_close(tc.optimal_threshold_cost(**given), apart.mean())
    curve = tc.bayes_risk_curve(**given, points=5)
    torch.testing.assert_close(curve.risk, tc.bayes_risk_curve(p, y, points=5, **binary).risk)
    areas = tc.bayes_risk_area(**given, average=None)
    torch.testing.assert_close(areas, tc.nll(**given, average=None))
    torch.testing.assert_close(tc.bayes_risk_area(**given), areas.mean())
    rows = torch.stack((1 - p[0], p[0] / 2, p[0] / 2), -1)
    of_set = tc.optimal_threshold_cost(rows, y[0], positive_classes=[1, 2], **multi)
    torch.testing.assert_close(of_set, apart[0])
    assert tc.optimal_threshold_cost(p[0, :0], y[0, :0], **binary).isnan()
    assert tc.optimal_threshold_cost(p[0, :1], y[0, :1], **binary).item() == 0


@pytest.mark.parametrize("from_logits", [False, True])
def test_slow_loop_curve(from_logits):
    p, y = sample(distinct=None if from_logits else 10)
    weights = torch.arange(60) % 3
    given = {"weights": weights, "points": 9, "from_logits": from_logits, **binary}
    curve = tc.bayes_risk_curve(p.logit() if from_logits else p, y, **given)

    def cost_of(p, c):
        """[EPSR] eq. 34, one operating point: a miss costs 1/c and a false alarm 1/(1-c)."""
        rows = zip(p, y.tolist(), strict=True)
        costs = [1 / c if t and q <= c else 1 / (1 - c) if not t and q > c else 0.0 for q, t in rows]
        return oracles.mean(costs, weights.tolist())

    assert curve.operating_point.tolist() == [i / 10 for i in range(1, 10)]
    for k, c in enumerate(curve.operating_point.tolist()):
        assert curve.risk[k].item() == pytest.approx(cost_of(p.tolist(), c), abs=1e-14)
        assert curve.cheapest[k].item() == pytest.approx(min(cost_of([q] * 60, c) for q in (0, 1)))
    torch.testing.assert_close(curve.normalized, curve.risk / curve.cheapest)


def test_a_point_of_the_curve_is_a_bayes_risk():
    p, y = sample(lead=(2,))
    priors = [0.7, 0.3]
    curve = tc.bayes_risk_curve(p, y, points=[0.2, 0.5, 0.9], priors=priors, **binary)
    assert curve.risk.shape == (2, 3)
    for k, c in enumerate((0.2, 0.5, 0.9)):
        given = {"cost": [[0, 1 / (1 - c)], [1 / c, 0]], "priors": priors, **binary}
        torch.testing.assert_close(curve.risk[:, k], tc.bayes_risk(p, y, **given))
        torch.testing.assert_close(curve.normalized[:, k], tc.bayes_risk(p, y, normalize="prior", **given))


@pytest.mark.parametrize(("weight", "score"), [("uniform", tc.nll), ("beta22", tc.brier_score)])
def test_area_of_the_curve_is_the_score_and_so_is_its_gradient(weight, score):
    p, y = sample(n=200, lead=(2,))
    given = {"weights": torch.rand(2, 200), **binary}
    a, b = p.clone().requires_grad_(), p.clone().requires_grad_()
    area, expected = tc.bayes_risk_area(a, y, weight=weight, **given), score(b, y, **given)
    torch.testing.assert_close(area, expected, rtol=1e-12, atol=0)
    area.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
    at_priors = tc.bayes_risk_area(p, y, weight=weight, priors=[0.9, 0.1], **given)
    torch.testing.assert_close(at_priors, score(p, y, priors=[0.9, 0.1], **given), rtol=1e-12, atol=0)
    soft = torch.rand(2, 200, dtype=F64)
    expected = score(p, soft, **binary) - (0 if weight == "uniform" else (soft.square() - soft).mean(-1))
    torch.testing.assert_close(tc.bayes_risk_area(p, soft, weight=weight, **binary), expected, rtol=1e-12, atol=0)
    finite = ((p * 5).round() / 5).clamp(0.1, 0.9)  # with ties
    torch.testing.assert_close(tc.bayes_risk_area(finite, y, weight=weight, **binary), score(finite, y, **binary))


def test_area_of_saturated_logits_and_of_a_set_whose_probability_rounds_to_1_is_the_nll():
    """A set and its complement alike; rows are exact in float32 but for the sum of 1 + 2e-8."""
    z, y = torch.tensor([200.0, -300.0, 4.0, 200.0], dtype=F64), torch.tensor([0, 1, 1, 1])
    area = tc.bayes_risk_area(z, y, from_logits=True, **binary)
    torch.testing.assert_close(area, tc.nll(z, y, from_logits=True, **binary), rtol=1e-14, atol=0)
    rows = torch.tensor([[1.0, 1e-8, 1e-8], [0.5, 0.25, 0.25]])
    for classes in ([0], [1, 2]):
        given = {"preds": rows, "target": torch.tensor([1, 0]), "positive_classes": classes, **multi}
        torch.testing.assert_close(tc.bayes_risk_area(**given), tc.nll(**given), rtol=1e-6, atol=0)
        assert tc.nll(**given).item() == pytest.approx((-math.log(2e-8) + math.log(2)) / 2, rel=1e-6)


def test_area_of_certain_predictions():
    zeros, ones = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert tc.bayes_risk_area(zeros, ones, **binary).item() == 0
    assert tc.bayes_risk_area(zeros, 1 - ones, **binary).item() == math.inf
    assert tc.bayes_risk_area(zeros, 1 - ones, weight="beta22", **binary).item() == 1
    assert tc.bayes_risk_area(zeros[:0], ones[:0], **binary).isnan()
    assert tc.bayes_risk_curve(zeros[:0], ones[:0], **binary).risk.isnan().all()


CALLS = [
    (tc.optimal_threshold_cost, {"cost": [[0, 1, 0.1], [1, 0, 0.1]]}, "`cost` must have 2 columns"),
    (tc.optimal_threshold_cost, {"preds": torch.full((2, 2), 0.5), **multi}, "`task` must be 'binary'"),
    (tc.optimal_threshold_cost, {"normalize": "x"}, "`normalize` must be None or 'prior', got 'x'"),
    (tc.bayes_risk_curve, {"points": [0.5, 1.0]}, "`points` must be in (0, 1)"),
    (tc.bayes_risk_curve, {"points": [[0.5]]}, "`points` must be a number of points"),
    (tc.bayes_risk_curve, {"points": 0}, "`points` must be at least 1"),
    (tc.bayes_risk_area, {"weight": "nll"}, "`weight`"),
    (tc.bayes_risk_area, {"average": None}, "`average`"),
]


def test_wrong_calls_are_refused():
    given = {"preds": torch.tensor([0.2, 0.7], dtype=F64), "target": torch.tensor([0, 1]), **binary}
    assert_refused((wrong, partial(call, **{**given, **wrong}), ValueError, [part]) for call, wrong, part in CALLS)
