"""Bayes risk, decisions and their expected cost: worked examples, what must be equal, and wrong calls."""

from functools import partial

import pytest
import torch
from helpers.refusals import assert_refused

import torchcalib as tc

F64 = torch.float64
binary, multi = {"task": "binary"}, {"task": "multiclass"}


def test_closed_form_decisions_of_two_classes():
    """A miss that costs 4 and a false alarm of 1 turn at P(y=1) = 1/5; a tie is decided for the first.

    Of two columns that cost nothing for class 0 the second is better, by 1e-20 times 1/2.
    """
    p, cost = torch.tensor([0.0, 0.1875, 0.2, 0.21, 1.0], dtype=F64), [[0, 1], [4, 0]]
    assert tc.bayes_decisions(p, cost=cost, **binary).tolist() == [0, 0, 0, 1, 1]
    assert tc.bayes_decisions(p.logit(), cost=cost, from_logits=True, **binary).tolist()[3:] == [1, 1]
    cost = [[0, 0], [1, 0.5]]
    assert tc.bayes_decisions(torch.tensor([1e-20], dtype=F64), cost=cost, **binary).item() == 1
    assert tc.bayes_decisions(torch.tensor([-90.0]), cost=cost, from_logits=True, **binary).item() == 1


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


def test_decisions_keep_the_shape_of_the_samples():
    images = torch.rand(2, 3, 4, 5, dtype=F64).softmax(1)
    decisions = tc.bayes_decisions(images, class_axis=1, cost=tc.CostMatrix.zero_one(3), **multi)
    assert torch.equal(decisions, images.argmax(1))
    labels = torch.rand(2, 3, 4, dtype=F64)
    for axis in (-1, 1):
        assert torch.equal(tc.bayes_decisions(labels, class_axis=axis, task="multilabel"), (labels > 0.5).long())


def test_closed_form_of_a_rare_class_keeps_its_digits():
    """Always deciding 0 costs the share of ones: found as 1 less the share of zeros it would have 5 digits here."""
    preds, target, weights = torch.tensor([[0.1, 0.2], [0, 1], [1e12, 3.0]], dtype=F64)
    found = tc.bayes_risk(preds, target.long(), weights=weights, normalize="prior", **binary)
    assert found.item() == pytest.approx(1, rel=1e-15)


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


def test_closed_form_priors_that_float32_rounds_are_normalised():
    """Each of two classes has one sample, so that the value is the mean of two losses at equal priors."""
    preds, h = torch.tensor([[0.2, 0.8], [0.3, 0.7]], dtype=F64), torch.tensor([0, 1])
    priors = torch.full((2,), 0.5 * (1 - 2**-23))
    expected = -(torch.tensor([0.2, 0.7], dtype=F64).log()).mean()
    torch.testing.assert_close(tc.nll(preds, h, priors=priors, **multi), expected, rtol=1e-15, atol=0)


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
ZERO_ONE = [[0, 1], [1, 0]]
CALLS = [
    (
        tc.bayes_risk,
        {"cost": tc.CostMatrix.zero_one(3)},
        ValueError,
        "`cost` must have one row per class, 2, got 3 rows",
    ),
    (tc.bayes_risk, {"normalize": "max"}, ValueError, "`normalize`"),
    (tc.bayes_risk, {"priors": [0.2, 0.3, 0.5]}, ValueError, "`priors`"),
    (tc.BayesRisk, {"num_classes": 3, "cost": ZERO_ONE, **multi}, ValueError, "one row per class, 3, got 2"),
    (tc.BayesRisk, {"cost": tc.CostMatrix.zero_one(3), **binary}, ValueError, "one row per class, 2, got 3"),
    (tc.bayes_decisions, {"preds": Q, "class_axis": 2, **multi}, ValueError, "`class_axis`"),
    (tc.expected_cost, {"decisions": P2}, TypeError, "bayes_risk"),
    (tc.expected_cost, {"decisions": Y2 + 1}, ValueError, "`cost` in [0, 1], got 2 (1 of 2"),
    (tc.expected_cost, {"decisions": [0, 1]}, TypeError, "`decisions`"),
    (tc.expected_cost, {"decisions": Y2[:1]}, ValueError, "`target`"),
    (tc.expected_cost, {"decisions": Y2, "target": Y2 + 1}, ValueError, "`target`"),
]


def test_wrong_calls_are_refused():
    defaults = {
        tc.bayes_risk: {"preds": P2, "target": Y2, **binary},
        tc.expected_cost: {"target": Y2, "cost": ZERO_ONE},
    }
    assert_refused(
        (wrong, partial(call, **{**defaults.get(call, {}), **wrong}), error, [part])
        for call, wrong, error, part in CALLS
    )
