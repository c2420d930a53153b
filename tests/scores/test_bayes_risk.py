"""Costs, decisions and the Bayes-risk curve: worked examples, slow loops, what must be equal, and bad input."""

import copy
import math
import pickle
from itertools import product

import numpy as np
import oracles
import pytest
import torch

import torchcalib as tc

F64 = torch.float64
P2, Y2 = torch.tensor([0.2, 0.7], dtype=F64), torch.tensor([0, 1])
Q, H = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]], dtype=F64), torch.tensor([1, 0, 0])
binary, multi = {"task": "binary"}, {"task": "multiclass"}


def sample(n=60, seed=0, lead=(), distinct=None):
    """P(y=1) and labels that follow them."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(*lead, n, generator=generator, dtype=F64)
    y = (torch.rand(*lead, n, generator=generator) < p).long()
    return (p if distinct is None else (p * distinct).round() / distinct), y


# Cost matrices.


def test_cost_matrix_helpers():
    assert tc.CostMatrix.zero_one(3).costs == ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    assert tc.CostMatrix.zero_one(2).with_reject(0.1).costs == ((0, 1, 0.1), (1, 0, 0.1))
    assert tc.CostMatrix.zero_one(2).with_reject([0.1, 0.5]).costs == ((0, 1, 0.1), (1, 0, 0.5))
    assert tc.CostMatrix.imbalanced(3).costs == ((0, 1, 1), (1, 0, 1), (10, 10, 0))
    assert tc.CostMatrix.imbalanced(2, factor=3, important=0).costs == ((0, 3), (1, 0))
    assert tc.CostMatrix.from_utilities([[5, 2, 3], [-1, 0, -4]]).costs == ((0, 3, 2), (1, 0, 4))
    assert (tc.CostMatrix.zero_one(2).with_reject(0.1).num_decisions, tc.CostMatrix.zero_one(4).num_classes) == (3, 4)


def test_costs_may_be_numbers_of_other_libraries():
    rows = [[np.float32(0), np.int64(1)], [1, torch.tensor(0.5).item()]]
    assert tc.CostMatrix(rows).costs == ((0, 1), (1, 0.5))
    matrix = tc.CostMatrix.zero_one(2)
    for cost in (np.float32(0.25), torch.tensor(0.25), torch.tensor([0.25, 0.25]), np.array([0.25, 0.25])):
        assert matrix.with_reject(cost) == matrix.with_reject(0.25)


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple], ids=["tensor", "array", "tuple"])
def test_cost_matrix_is_a_value(make):
    rows = [[0.0, 1.0, 0.25], [4.0, 0.0, 0.25]]
    matrix = tc.CostMatrix(make(rows))
    assert matrix == tc.CostMatrix(rows) == pickle.loads(pickle.dumps(matrix)) == copy.deepcopy(matrix)
    assert hash(matrix) == hash(tc.CostMatrix(rows))
    assert matrix != tc.CostMatrix.zero_one(2)
    assert repr(matrix) == f"CostMatrix({rows})"


def test_large_cost_matrices_are_told_apart_by_a_short_name():
    one, other = tc.CostMatrix.zero_one(50), tc.CostMatrix.imbalanced(50)
    assert len(repr(one)) < 40
    assert repr(one) != repr(other)
    a, b = (tc.BayesRisk(num_classes=50, cost=cost, **multi) for cost in (one, other))
    with pytest.raises(ValueError, match="must count the same thing"):
        a.merge_state(b)


def test_utilities_decide_as_their_costs_do():
    utilities = torch.tensor([[5.0, 2.0, 3.0], [-1.0, 0.0, -0.5]])
    p, _ = sample()
    by_hand = (torch.stack((1 - p, p), -1) @ utilities.double()).argmax(-1)
    assert torch.equal(tc.bayes_decisions(p, cost=tc.CostMatrix.from_utilities(utilities), **binary), by_hand)


# Decisions.


def test_closed_form_decisions_of_two_classes():
    """A miss that costs 4 and a false alarm of 1 turn at P(y=1) = 1/5; a tie is decided for the first."""
    p = torch.tensor([0.0, 0.1875, 0.2, 0.21, 1.0], dtype=F64)
    assert tc.bayes_decisions(p, cost=[[0, 1], [4, 0]], **binary).tolist() == [0, 0, 0, 1, 1]
    assert tc.bayes_decisions(p.logit(), cost=[[0, 1], [4, 0]], from_logits=True, **binary).tolist()[3:] == [1, 1]


@pytest.mark.parametrize("n_classes", [2, 3, 7, 60])
def test_ties_go_to_the_first_decision_whatever_the_batch_size(n_classes):
    """Equal probabilities: a sum of 1/C in another order differs in the last place."""
    generator = torch.Generator().manual_seed(n_classes)
    costs = torch.randint(0, 4, (n_classes, 5), generator=generator).double() / 10
    costs = torch.cat((costs, costs[torch.randperm(n_classes, generator=generator)]), -1)  # each column has a twin
    uniform = torch.full((37, n_classes), 1 / n_classes, dtype=F64)
    first = costs.mean(0)[:5].argmin().item()
    decisions = tc.bayes_decisions(uniform, cost=costs, **multi)
    assert set(decisions.tolist()) == {first}
    assert tc.bayes_decisions(uniform[:1], cost=costs, **multi).item() == first


def test_a_decision_that_is_better_by_little_where_a_class_is_certain_is_taken():
    """Of two columns that cost nothing for class 0 the second is better, by 1e-20 times 1/2."""
    costs = [[0, 0], [1, 0.5]]
    assert tc.bayes_decisions(torch.tensor([1e-20], dtype=F64), cost=costs, **binary).item() == 1
    assert tc.bayes_decisions(torch.tensor([-90.0]), cost=costs, from_logits=True, **binary).item() == 1


def test_decisions_keep_the_shape_of_the_samples():
    images = torch.rand(2, 3, 4, 5, dtype=F64).softmax(1)
    decisions = tc.bayes_decisions(images, class_axis=1, cost=tc.CostMatrix.zero_one(3), **multi)
    assert torch.equal(decisions, images.argmax(1))
    labels = torch.rand(2, 3, 4, dtype=F64)
    for axis in (-1, 1):
        assert torch.equal(tc.bayes_decisions(labels, class_axis=axis, task="multilabel"), (labels > 0.5).long())


def test_zero_one_risk_is_the_error_rate():
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    h = torch.arange(200) % 7
    error = (logits.argmax(-1) != h).double().mean().item()
    assert tc.bayes_risk(logits, h, from_logits=True, **multi).item() == pytest.approx(error, abs=1e-7)


def test_no_other_prediction_is_cheaper_than_the_truth():
    """Proper: against outcomes of probability t, decisions from t cost least, for every cost matrix."""
    t = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64)
    grid = torch.tensor([q for q in product(range(11), repeat=3) if sum(q) == 10], dtype=F64) / 10
    for seed in range(5):
        cost = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
        others = tc.bayes_risk_per_sample(grid, t.expand(len(grid), -1), cost=cost, **multi)
        assert (others >= tc.bayes_risk(t, t, cost=cost, **multi) - 1e-15).all()


def test_normalised_by_the_cheapest_of_all_columns():
    """Priors 1/4 and 3/4: constant decisions cost 3, 1/4 and 1/5, the reject."""
    y = torch.tensor([0, 1, 1, 1])
    cost = [[0, 1, 0.2], [4, 0, 0.2]]
    p = torch.tensor([0.9, 0.9, 0.9, 0.9])
    assert tc.bayes_risk(p, y, cost=cost, **binary).item() == pytest.approx(1 / 4)
    assert tc.bayes_risk(p, y, cost=cost, normalize="prior", **binary).item() == pytest.approx(1 / 4 / 0.2)
    at = {"priors": [0.9, 0.1], "normalize": "prior"}
    assert tc.bayes_risk(p, y, cost=cost, **at, **binary).item() == pytest.approx(0.9 / 0.1 / 2)


# Costs of decisions that were made already.


@pytest.mark.parametrize("priors", [None, [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("normalize", [None, "prior"])
def test_expected_cost_of_bayes_decisions_is_the_bayes_risk(priors, normalize):
    q = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(0), dtype=F64).softmax(-1)
    h = torch.arange(100).reshape(2, 50) % 3
    h[0, 3] = h[1, 7] = -1
    cost = tc.CostMatrix([[0, 2, 1, 0.3], [1, 0, 1, 0.3], [5, 1, 0, 0.3]])
    given = {"normalize": normalize, "priors": priors, "weights": torch.rand(2, 50), "ignore_index": -1}
    decisions = tc.bayes_decisions(q, cost=cost, **multi)
    expected = tc.bayes_risk(q, h, cost=cost, **given, **multi)
    torch.testing.assert_close(tc.expected_cost(decisions, h, cost=cost, **given), expected, rtol=1e-13, atol=0)


def test_expected_cost_by_hand():
    decisions, h = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int8), torch.tensor([0, 1, 1, 1, 0])
    cost = [[0, 1, 0.25], [8, 0, 0.25]]
    assert tc.expected_cost(decisions, h, cost=cost).item() == (0 + 0 + 0.25 + 8 + 1) / 5
    at_priors = tc.expected_cost(decisions, h, cost=cost, priors=[0.5, 0.5]).item()
    assert at_priors == pytest.approx((0 + 1) / 2 / 2 + (0 + 0.25 + 8) / 3 / 2)
    votes = torch.tensor([[0.75, 0.25]] * 5, dtype=F64)
    soft = tc.expected_cost(decisions, votes, cost=cost).item()
    assert soft == pytest.approx((2 * 0.25 * 8 + 2 * 0.75 + 0.25) / 5)
    assert tc.expected_cost(decisions[:0], h[:0], cost=cost).isnan()


def test_a_decision_of_weight_zero_is_never_read():
    decisions, h = torch.tensor([0, 99, 1]), torch.tensor([0, 1, 0])
    assert tc.expected_cost(decisions, h, cost=[[0, 1], [1, 0]], weights=torch.tensor([1, 0, 3])).item() == 0.75


# Thresholds.


@pytest.mark.parametrize("distinct", [None, 8])
@pytest.mark.parametrize("cost", [[[0, 1], [1, 0]], [[0, 1], [5, 0]], [[0.5, 2], [1, -1]], [[1, 0], [0, 1]]])
def test_slow_loop_optimal_threshold(distinct, cost):
    p, y = sample(distinct=distinct)
    weights = torch.arange(60) % 4
    expected = oracles.least_threshold_cost(p.tolist(), y.tolist(), weights.tolist(), cost)
    assert tc.optimal_threshold_cost(p, y, cost=cost, weights=weights, **binary).item() == pytest.approx(expected)
    spoiled = p.masked_fill(weights == 0, math.nan)
    assert tc.optimal_threshold_cost(spoiled, y, cost=cost, weights=weights, **binary).item() == pytest.approx(expected)
    logits = tc.optimal_threshold_cost(p.logit(), y, cost=cost, weights=weights, from_logits=True, **binary)
    assert logits.item() == pytest.approx(expected)


@pytest.mark.parametrize("priors", [None, [0.8, 0.2]])
def test_no_threshold_is_cheaper_than_the_optimal_one(priors):
    p, y = sample(lead=(3, 2))
    given = {"cost": [[0, 1], [3, 0]], "priors": priors, "normalize": "prior", **binary}
    optimal = tc.optimal_threshold_cost(p, y, **given)
    for f in (lambda p: p, lambda p: p**3, torch.sqrt):
        assert (optimal <= tc.bayes_risk(f(p), y, **given) + 1e-12).all()
    assert (optimal <= 1).all()
    for i, j in product(range(3), range(2)):
        assert optimal[i, j].item() == pytest.approx(tc.optimal_threshold_cost(p[i, j], y[i, j], **given).item())


def test_optimal_threshold_of_labels_and_of_a_set():
    p, y = sample(lead=(3,))
    apart = torch.stack([tc.optimal_threshold_cost(p[k], y[k], **binary) for k in range(3)])
    given = {"preds": p.T, "target": y.T, "task": "multilabel"}
    torch.testing.assert_close(tc.optimal_threshold_cost(**given, average=None), apart)
    torch.testing.assert_close(tc.optimal_threshold_cost(**given), apart.mean())
    rows = torch.stack((1 - p[0], p[0] / 2, p[0] / 2), -1)
    of_set = tc.optimal_threshold_cost(rows, y[0], positive_classes=[1, 2], **multi)
    torch.testing.assert_close(of_set, apart[0])
    assert tc.optimal_threshold_cost(p[0, :0], y[0, :0], **binary).isnan()
    assert tc.optimal_threshold_cost(p[0, :1], y[0, :1], **binary).item() == 0


# The curve.


def curve_of(p, y, weights, c):
    """[EPSR] eq. 34, one operating point: a miss costs 1/c and a false alarm 1/(1-c)."""
    costs = [1 / c if t and q <= c else 1 / (1 - c) if not t and q > c else 0.0 for q, t in zip(p, y, strict=True)]
    return oracles.mean(costs, weights)


@pytest.mark.parametrize("from_logits", [False, True])
def test_slow_loop_curve(from_logits):
    p, y = sample(distinct=None if from_logits else 10)
    weights = torch.arange(60) % 3
    curve = tc.bayes_risk_curve(
        p.logit() if from_logits else p, y, weights=weights, points=9, from_logits=from_logits, **binary
    )
    assert curve.operating_point.tolist() == [i / 10 for i in range(1, 10)]
    for k, c in enumerate(curve.operating_point.tolist()):
        assert curve.risk[k].item() == pytest.approx(curve_of(p.tolist(), y.tolist(), weights.tolist(), c), abs=1e-14)
        constant = [curve_of([q] * 60, y.tolist(), weights.tolist(), c) for q in (0, 1)]
        assert curve.cheapest[k].item() == pytest.approx(min(constant))
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
def test_area_of_the_curve_is_the_score(weight, score):
    p, y = sample(n=200, lead=(2,))
    given = {"weights": torch.rand(2, 200), **binary}
    area = tc.bayes_risk_area(p, y, weight=weight, **given)
    torch.testing.assert_close(area, score(p, y, **given), rtol=1e-12, atol=0)
    at_priors = tc.bayes_risk_area(p, y, weight=weight, priors=[0.9, 0.1], **given)
    torch.testing.assert_close(at_priors, score(p, y, priors=[0.9, 0.1], **given), rtol=1e-12, atol=0)
    soft = torch.rand(2, 200, dtype=F64)
    torch.testing.assert_close(
        tc.bayes_risk_area(p, soft, weight=weight, **binary),
        score(p, soft, **binary) - (0 if weight == "uniform" else (soft.square() - soft).mean(-1)),
        rtol=1e-12,
        atol=0,
    )
    tied = (p * 5).round() / 5
    finite = tied.clamp(0.1, 0.9)
    torch.testing.assert_close(tc.bayes_risk_area(finite, y, weight=weight, **binary), score(finite, y, **binary))


@pytest.mark.parametrize(("weight", "density"), [("uniform", lambda c: 1), ("beta22", lambda c: 2 * c * (1 - c))])
def test_area_is_the_integral_of_the_curve(weight, density):
    """By the midpoint rule; a step of the curve is met within one cell of it."""
    p, y = sample(n=40)
    p = p.clamp(0.02, 0.98)
    n = 200_000
    c = (torch.arange(n, dtype=F64) + 0.5) / n
    curve = tc.bayes_risk_curve(p, y, points=c, **binary)
    area = tc.bayes_risk_area(p, y, weight=weight, **binary)
    assert (curve.risk * density(c)).mean().item() == pytest.approx(area.item(), abs=1e-4)


def test_area_of_saturated_logits_is_exact():
    z, y = torch.tensor([200.0, -300.0, 4.0, 200.0], dtype=F64), torch.tensor([0, 1, 1, 1])
    area = tc.bayes_risk_area(z, y, from_logits=True, **binary)
    torch.testing.assert_close(area, tc.nll(z, y, from_logits=True, **binary), rtol=1e-14, atol=0)


def test_area_of_certain_predictions():
    zeros, ones = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert tc.bayes_risk_area(zeros, ones, **binary).item() == 0
    assert tc.bayes_risk_area(zeros, 1 - ones, **binary).item() == math.inf
    assert tc.bayes_risk_area(zeros, 1 - ones, weight="beta22", **binary).item() == 1
    assert tc.bayes_risk_area(zeros[:0], ones[:0], **binary).isnan()
    assert tc.bayes_risk_curve(zeros[:0], ones[:0], **binary).risk.isnan().all()


def test_area_has_the_gradient_of_its_score():
    p, y = sample()
    a, b = p.clone().requires_grad_(), p.clone().requires_grad_()
    tc.bayes_risk_area(a, y, **binary).backward()
    tc.nll(b, y, **binary).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)


def test_curves_of_labels_stay_apart():
    p, y = sample(lead=(3,))
    curve = tc.bayes_risk_curve(p.T, y.T, task="multilabel", points=5)
    torch.testing.assert_close(curve.risk, tc.bayes_risk_curve(p, y, points=5, **binary).risk)
    areas = tc.bayes_risk_area(p.T, y.T, task="multilabel", average=None)
    torch.testing.assert_close(areas, tc.nll(p.T, y.T, task="multilabel", average=None))
    torch.testing.assert_close(tc.bayes_risk_area(p.T, y.T, task="multilabel"), areas.mean())


# Bad input.


def risk(**options):
    return tc.bayes_risk(P2, Y2, **binary, **options)


CALLS = [
    ("one class", lambda: risk(cost=[[0, 1]]), ValueError, ["`cost`", "at least 2 rows", "[2]"]),
    ("three classes for two", lambda: risk(cost=tc.CostMatrix.zero_one(3)), ValueError, ["`cost`", "2, got 3 rows"]),
    ("transposed", lambda: risk(cost=[[0, 1], [1, 0], [2, 2]]), ValueError, ["`cost`", "transpose"]),
    ("ragged", lambda: risk(cost=[[0, 1], [1]]), ValueError, ["`cost`", "one length", "[2, 1]"]),
    ("no decision", lambda: risk(cost=[[], []]), ValueError, ["`cost`", "[0, 0]"]),
    ("a vector", lambda: risk(cost=[0, 1]), TypeError, ["`cost`", "matrix of numbers"]),
    ("a vector tensor", lambda: risk(cost=torch.ones(2)), TypeError, ["`cost`", "matrix of numbers"]),
    ("three axes", lambda: risk(cost=torch.ones(2, 2, 2)), TypeError, ["`cost`", "matrix of numbers"]),
    ("text", lambda: risk(cost="01"), TypeError, ["`cost`", "'01'"]),
    ("text within", lambda: risk(cost=[["a", "b"], ["c", "d"]]), TypeError, ["`cost`", "numbers"]),
    ("bools", lambda: risk(cost=[[False, True], [True, False]]), TypeError, ["`cost`", "numbers"]),
    ("NaN cost", lambda: risk(cost=[[0, math.nan], [1, 0]]), ValueError, ["`cost`", "finite", "nan"]),
    ("infinite cost", lambda: risk(cost=[[0, math.inf], [1, 0]]), ValueError, ["`cost`", "inf", "above all others"]),
    ("NaN utility", lambda: tc.CostMatrix.from_utilities([[0, math.nan], [1, 0]]), ValueError, ["`utilities`"]),
    ("no classes", lambda: tc.CostMatrix.zero_one(1), ValueError, ["`num_classes`", "at least 2"]),
    ("important class 5 of 3", lambda: tc.CostMatrix.imbalanced(3, important=5), ValueError, ["`important`", "got 5"]),
    ("too few rejects", lambda: tc.CostMatrix.zero_one(3).with_reject([0.1]), ValueError, ["`cost`", "3 classes"]),
    ("reject of text", lambda: tc.CostMatrix.zero_one(2).with_reject("ab"), TypeError, ["`cost`", "'ab'"]),
    ("reject of True", lambda: tc.CostMatrix.zero_one(2).with_reject(True), TypeError, ["`cost`", "True"]),
    ("cost of 400 digits", lambda: risk(cost=[[0, 10**400], [1, 0]]), ValueError, ["`cost`", "finite", "inf"]),
    ("cost of 300 digits", lambda: risk(cost=[[0, 10**300], [1, 0]]), ValueError, ["`cost`", "at most 1e+150"]),
    ("factor of text", lambda: tc.CostMatrix.imbalanced(2, factor="3"), TypeError, ["`factor`", "'3'"]),
    ("negative factor", lambda: tc.CostMatrix.imbalanced(2, factor=-3), ValueError, ["`factor`", "-3"]),
    ("factor NaN", lambda: tc.CostMatrix.imbalanced(2, factor=math.nan), ValueError, ["`factor`", "nan"]),
    ("reject at infinity", lambda: tc.CostMatrix.zero_one(2).with_reject(math.inf), ValueError, ["finite"]),
    ("unknown normalize", lambda: risk(normalize="max"), ValueError, ["`normalize`", "'max'"]),
    ("priors of 3", lambda: risk(priors=[0.2, 0.3, 0.5]), ValueError, ["`priors`"]),
    ("a class of 2 x 2 for three", lambda: tc.BayesRisk(num_classes=3, cost=[[0, 1], [1, 0]], **multi), ValueError,
     ["`cost`", "3, got 2"]),
    ("a class of 3 x 3 for binary", lambda: tc.BayesRisk(cost=tc.CostMatrix.zero_one(3), **binary), ValueError,
     ["`cost`", "2, got 3"]),
    ("decisions of text", lambda: tc.bayes_decisions([0.2], **binary), TypeError, ["`preds`", "list"]),
    ("decisions of NaN", lambda: tc.bayes_decisions(P2 * math.nan, **binary), ValueError, ["`preds`", "NaN"]),
    ("decisions along no axis", lambda: tc.bayes_decisions(Q, class_axis=2, **multi), ValueError, ["`class_axis`"]),
    ("probabilities as decisions", lambda: tc.expected_cost(P2, Y2, cost=[[0, 1], [1, 0]]), TypeError, ["bayes_risk"]),
    ("decision 2 of 2", lambda: tc.expected_cost(Y2 + 1, Y2, cost=[[0, 1], [1, 0]]), ValueError,
     ["`decisions`", "[0, 1]", "got 2 (1 of 2"]),
    ("a list of decisions", lambda: tc.expected_cost([0, 1], Y2, cost=[[0, 1], [1, 0]]), TypeError, ["`decisions`"]),
    ("decisions too short", lambda: tc.expected_cost(Y2[:1], Y2, cost=[[0, 1], [1, 0]]), ValueError,
     ["`target`", "(1,)", "(2,)"]),
    ("target 2 of 2", lambda: tc.expected_cost(Y2, Y2 + 1, cost=[[0, 1], [1, 0]]), ValueError, ["`target`", "got 2"]),
    ("threshold with a reject", lambda: tc.optimal_threshold_cost(P2, Y2, cost=[[0, 1, 0.1], [1, 0, 0.1]], **binary),
     ValueError, ["`cost`", "2 columns", "got 3"]),
    ("threshold of classes", lambda: tc.optimal_threshold_cost(Q, H, **multi), ValueError, ["`task`", "positive_cl"]),
    ("threshold normalised", lambda: tc.optimal_threshold_cost(P2, Y2, normalize="x", **binary), ValueError, ["'x'"]),
    ("curve of classes", lambda: tc.bayes_risk_curve(Q, H, **multi), ValueError, ["`task`", "'multiclass'"]),
    ("point 1", lambda: tc.bayes_risk_curve(P2, Y2, points=[0.5, 1.0], **binary), ValueError, ["`points`", "(0, 1)"]),
    ("points in rows", lambda: tc.bayes_risk_curve(P2, Y2, points=[[0.5]], **binary), ValueError, ["`points`"]),
    ("no points", lambda: tc.bayes_risk_curve(P2, Y2, points=0, **binary), ValueError, ["`points`", "at least 1"]),
    ("weight of the area", lambda: tc.bayes_risk_area(P2, Y2, weight="nll", **binary), ValueError, ["`weight`"]),
    ("labels of one area", lambda: tc.bayes_risk_area(P2, Y2, average=None, **binary), ValueError, ["`average`"]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "parts"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_wrong_call(call, error, parts):
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_closed_form_of_a_rare_class_keeps_its_digits():
    """Always deciding 0 costs the share of ones: found as 1 less the share of zeros it would have 5 digits here."""
    target, weights = torch.tensor([0, 1]), torch.tensor([1e12, 3.0], dtype=torch.float64)
    preds = torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert tc.bayes_risk(preds, target, task="binary", weights=weights, normalize="prior").item() == pytest.approx(
        1, rel=1e-15
    )
