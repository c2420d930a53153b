"""Bayes risk, decisions and their expected cost: worked examples, what must be equal, and wrong calls."""

import pytest
import torch
from helpers.refusals import assert_refused

import torchcalib as tc

F64 = torch.float64


binary, multi = {"task": "binary"}, {"task": "multiclass"}


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


def test_closed_form_of_a_rare_class_keeps_its_digits():
    """Always deciding 0 costs the share of ones: found as 1 less the share of zeros it would have 5 digits here."""
    target, weights = torch.tensor([0, 1]), torch.tensor([1e12, 3.0], dtype=torch.float64)
    preds = torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert tc.bayes_risk(preds, target, task="binary", weights=weights, normalize="prior").item() == pytest.approx(
        1, rel=1e-15
    )


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
    unread = torch.tensor([0, 99, 1])
    assert tc.expected_cost(unread, h[[0, 1, 4]], cost=cost, weights=torch.tensor([1, 0, 3])).item() == 0.75


P2, Y2 = torch.tensor([0.2, 0.7], dtype=F64), torch.tensor([0, 1])
Q = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]], dtype=F64)


def risk(**options):
    return tc.bayes_risk(P2, Y2, **binary, **options)


CALLS = [
    ("three classes for two", lambda: risk(cost=tc.CostMatrix.zero_one(3)), ValueError, "`cost`", "2, got 3 rows"),
    ("unknown normalize", lambda: risk(normalize="max"), ValueError, "`normalize`", "'max'"),
    ("priors of 3", lambda: risk(priors=[0.2, 0.3, 0.5]), ValueError, "`priors`"),
    ("a class of 2 x 2 for three", lambda: tc.BayesRisk(num_classes=3, cost=[[0, 1], [1, 0]], **multi), ValueError,
     "`cost`", "3, got 2"),
    ("a class of 3 x 3 for binary", lambda: tc.BayesRisk(cost=tc.CostMatrix.zero_one(3), **binary), ValueError,
     "`cost`", "2, got 3"),
    ("decisions along no axis", lambda: tc.bayes_decisions(Q, class_axis=2, **multi), ValueError, "`class_axis`"),
    ("probabilities as decisions", lambda: tc.expected_cost(P2, Y2, cost=[[0, 1], [1, 0]]), TypeError, "bayes_risk"),
    ("decision 2 of 2", lambda: tc.expected_cost(Y2 + 1, Y2, cost=[[0, 1], [1, 0]]), ValueError,
     "`decisions`", "[0, 1]", "got 2 (1 of 2"),
    ("a list of decisions", lambda: tc.expected_cost([0, 1], Y2, cost=[[0, 1], [1, 0]]), TypeError, "`decisions`"),
    ("decisions too short", lambda: tc.expected_cost(Y2[:1], Y2, cost=[[0, 1], [1, 0]]), ValueError,
     "`target`", "(1,)", "(2,)"),
    ("target 2 of 2", lambda: tc.expected_cost(Y2, Y2 + 1, cost=[[0, 1], [1, 0]]), ValueError, "`target`", "got 2"),
]  # fmt: skip


def test_wrong_call():
    assert_refused((what, call, error, parts) for what, call, error, *parts in CALLS)
