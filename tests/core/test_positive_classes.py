"""A set of positive classes and its complement are equally precise, from probabilities and logits, in every dtype.

The expected values are sums over the classes of either side. 1 - P(set) would be 0 or rounding error for P(set) near 1.
"""

import math

import pytest
import torch
from helpers.samples import updated

import torchcalib as tc
import torchcalib.functional as F

F64 = torch.float64
DTYPES = [torch.float16, torch.bfloat16, torch.float32, F64]
CERTAIN = {"task": "multiclass", "positive_classes": [0]}
DOUBTED = {"task": "multiclass", "positive_classes": [1, 2]}
SCORES = [
    (F.nll, tc.NLL),
    (F.ecd, tc.ECD),
    (F.brier_score, tc.BrierScore),
    (F.bayes_risk, tc.BayesRisk),
    (F.accuracy, tc.Accuracy),
    (F.total_variation, tc.TotalVariation),
    (F.kl_divergence, tc.KLDivergence),
]


def rows(dtype, n=200):
    """Return softmax outputs of 10 classes, whose sums are 1 up to the rounding of the dtype, and labels."""
    generator = torch.Generator().manual_seed(0)
    q = (4 * torch.randn(n, 10, generator=generator, dtype=F64)).softmax(-1)
    return q.to(dtype), torch.randint(0, 10, (n,), generator=generator)


@pytest.mark.parametrize(("function", "cls"), SCORES)
def test_scores_of_a_set_equal_those_of_its_complement(function, cls):
    """The sums are equal up to the order of a few additions."""
    sides = [0, 1, 2], list(range(3, 10))
    for dtype in DTYPES:
        preds, target = rows(dtype)
        of_set, of_rest = (function(preds, target, task="multiclass", positive_classes=side) for side in sides)
        torch.testing.assert_close(of_set, of_rest)
        assert of_set.isfinite()
        for side in sides:
            metric = updated(cls(task="multiclass", positive_classes=side), (preds, target))
            torch.testing.assert_close(metric.compute().to(of_set.dtype), of_set)
        if function is F.nll:  # expected value: log of the summed probabilities of the side that occurred
            inside, wide = torch.isin(target, torch.tensor(sides[0])), preds.double()
            expected = -torch.where(inside, wide[:, :3].sum(-1), wide[:, 3:].sum(-1)).clamp(max=1).log().mean()
            torch.testing.assert_close(of_set.double(), expected, rtol=1e-6, atol=0)


def test_scores_of_an_almost_certain_set_have_the_closed_form():
    row, y = torch.tensor([[30.0, 0.0, -1.0]]).softmax(-1).bfloat16(), torch.tensor([1])
    rest = row[0, 1:].double().sum().item()  # about 1.3e-13, but 1 - P(set) rounds to 0
    for side in (CERTAIN, DOUBTED):
        assert F.nll(row, y, **side).item() == pytest.approx(-math.log(rest), rel=1e-6)
        assert F.ecd(row, y, **side).item() == pytest.approx(-math.log(rest) * (1 - rest), rel=1e-6)
        assert F.brier_score(row, torch.tensor([0]), **side).item() == pytest.approx(rest**2, rel=1e-6)
    # A positive decision costs 1, a missed y=0 costs 1e15. The positive decision is cheaper if P(rest) > 1e-15.
    for side, cost in ((CERTAIN, [[0.0, 1e15], [1.0, 0.0]]), (DOUBTED, [[0.0, 1.0], [1e15, 0.0]])):
        assert F.bayes_risk(row, torch.tensor([0]), cost=cost, **side) == 1
    row = torch.tensor([[1.0, 1e-20]], dtype=F64)
    assert F.nll(row, torch.tensor([1]), **CERTAIN).item() == pytest.approx(20 * math.log(10), rel=1e-12)


@pytest.mark.parametrize("from_logits", [False, True])
def test_spiegelhalter_z_of_an_almost_certain_set_has_the_closed_form(from_logits):
    """For one row z is ((1 - p) or -p) (1 - 2 p) / sqrt((1 - 2 p)^2 p (1 - p)); for y = 0 it is sqrt(p / (1 - p))."""
    logits, y = torch.tensor([[40.0, 0.0, 0.0]], dtype=F64), torch.tensor([1])
    preds = logits if from_logits else logits.softmax(-1)
    z = math.sqrt(math.exp(40) / 2)
    for side in (CERTAIN, DOUBTED):
        for mode in ("positive", "top_label"):
            given = {**side, "from_logits": from_logits, "mode": mode}
            assert F.spiegelhalter(preds, y, **given).item() == pytest.approx(z, rel=1e-9)
            weights = torch.ones(2, 1)
            assert F.spiegelhalter(preds, y, weights=weights, **given).tolist() == pytest.approx([z, z], rel=1e-9)
            metric = updated(tc.Spiegelhalter(**given), (preds, y))
            assert metric.compute().item() == pytest.approx(z, rel=1e-9)


def test_rows_that_do_not_sum_to_1_are_not_normalised():
    """A row that sums to 0.98 keeps both of its sums, as in multi-class scores."""
    row, y = torch.tensor([[0.5, 0.25, 0.23]]).bfloat16(), torch.tensor([0, 1])
    q, preds = row[0].double(), row.expand(2, 3)
    rest = (q[1] + q[2]).item()
    scores = [-math.log(0.5), -math.log(rest)]
    assert F.nll(preds, y, **CERTAIN, reduction="none").tolist() == pytest.approx(scores, rel=1e-6)
    squares = [rest**2, 0.25]
    assert F.brier_score(preds, y, **CERTAIN).item() == pytest.approx(sum(squares) / 2, rel=1e-6)
    assert F.accuracy(preds, y, **CERTAIN) == 0.5  # the set is the more probable side
