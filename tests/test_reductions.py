"""Events of predictions: the k most probable classes as one claim, and log-odds of logits that do not saturate.

Log losses are held against mpmath with 50 digits.
"""

import math
from functools import partial
from itertools import product

import mpmath
import oracles
import pytest
import torch
from helpers.refusals import assert_refused

import torchcalib as tc
from torchcalib.predictions import read_input
from torchcalib.reductions import reduce_to_events, reduce_to_scores

F64 = torch.float64
DTYPES = [torch.float16, torch.bfloat16, torch.float32, F64]
REDUCTIONS = ["top_label", "classwise", tc.TopK(1), tc.TopK(2), tc.TopK(2, only=True)]


def events(preds, target, which, **options):
    return reduce_to_events(read_input("multiclass", preds, target, options), which)


def data(n=200, num_classes=6, seed=0, steps=10):
    """Probabilities in steps, so that most rows hold ties, and labels."""
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randint(0, num_classes, (n, steps), generator=generator)
    preds = torch.nn.functional.one_hot(votes, num_classes).sum(1).to(F64) / steps
    return preds, torch.randint(0, num_classes, (n,), generator=generator)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("soft", [False, True])
def test_slow_loop_events_with_ties(k, only, soft):
    preds, target = data()
    shares = data(seed=3)[0] if soft else torch.nn.functional.one_hot(target, 6).double()
    found = events(preds, shares if soft else target, tc.TopK(k, only))
    rows = zip(preds.tolist(), shares.tolist(), strict=True)
    expected = torch.tensor([oracles.top_k(q, t, k, only) for q, t in rows], dtype=F64)
    torch.testing.assert_close(found.confidence, expected[:, 0], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.outcome.double(), expected[:, 1], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_law_all_classes_together_are_certain_and_right(from_logits, dtype):
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    preds, target = (logits if from_logits else logits.softmax(-1)).to(dtype), data(50)[1]
    found = events(preds, target, tc.TopK(6), from_logits=from_logits)
    assert (found.confidence == 1).all()
    assert found.outcome.all()


def test_closed_form_logits_that_are_certain_or_infinite():
    inf = torch.inf
    logits = torch.tensor([[inf, 0, -inf], [inf, inf, inf], [-1.0, 0, -1], [1e4, -inf, -inf]])
    target = torch.tensor([0, 2, 1, 1])
    found = events(logits, target, tc.TopK(2), from_logits=True)
    expected = torch.tensor([1, 2 / 3, (1 + math.exp(-1)) / (1 + 2 * math.exp(-1)), 1], dtype=F64)
    torch.testing.assert_close(found.confidence, expected, rtol=1e-6, atol=0)
    assert found.outcome.tolist() == [True, False, True, True]


def test_rows_are_compared_in_pieces(monkeypatch):
    preds, target = data(100)
    expected = tc.ece(preds, target, task="multiclass", reduction=tc.TopK(3))
    monkeypatch.setattr("torchcalib.reductions._PIECE", 50)
    assert tc.ece(preds, target, task="multiclass", reduction=tc.TopK(3)) == expected


def test_what_is_no_claim_is_refused():
    p, y = data()
    of, top_7 = {"task": "multiclass"}, {"task": "multiclass", "reduction": tc.TopK(7)}
    binary = partial(tc.ece, p[:, 0], y % 2, task="binary", reduction=tc.TopK(1))
    rows = [
        ("top 7 of 6", partial(tc.ece, p, y, **top_7), ValueError, "at most the 6 classes, got"),
        ("top 7 of 6 in order", partial(tc.ks, p, y, **top_7), ValueError, "at most the 6 classes, got"),
        ("of a binary task", binary, ValueError, "for task='binary'"),
        ("top 0", partial(tc.TopK, 0), ValueError, "`k` must be at least 1, got 0"),
        ("top 2.0", partial(tc.TopK, 2.0), TypeError, "`k` must be an int, got 2.0"),
        ("only 1", partial(tc.TopK, 2, only=1), TypeError, "`only` must be True or False, got 1"),
        ("by name", partial(tc.ece, p, y, reduction="top_5", **of), ValueError, "or TopK(k)"),
    ]
    assert_refused((what, call, error, [said]) for what, call, error, said in rows)


# Logits: what a probability next to 1 has lost.


def claims(rows, target, reduction):
    """Log-odds and outcomes of every claim, with 50 digits; a list for each class, or for all."""

    def claim(row, members):
        powers = [mpmath.exp(mpmath.mpf(z)) for z in row]
        rest = [power for k, power in enumerate(powers) if k not in members]
        return mpmath.log(mpmath.fsum(powers[k] for k in members)) - mpmath.log(mpmath.fsum(rest))

    with mpmath.workdps(50):
        if reduction == "classwise":
            return [
                [(claim(row, [k]), y == k) for row, y in zip(rows, target, strict=True)] for k in range(len(rows[0]))
            ]
        which = reduction if isinstance(reduction, tc.TopK) else tc.TopK(1)
        series = []
        for row, y in zip(rows, target, strict=True):
            members = sorted(range(len(row)), key=lambda k: -row[k])[which.k - 1 if which.only else 0 : which.k]
            series.append((claim(row, members), y in members))
        return [series]


def log_loss(rows, target, reduction):
    """The mean over classes of the mean of log(1 + exp(-+ log-odds))."""
    with mpmath.workdps(50):
        means = [
            mpmath.fsum(mpmath.log1p(mpmath.exp(-z if happened else z)) for z, happened in series) / len(series)
            for series in claims(rows, target, reduction)
        ]
        return float(mpmath.fsum(means) / len(means))


def streamed_log_loss(logits, target, reduction, resolution=None):
    options = {"num_classes": logits.shape[-1], "reduction": reduction, "from_logits": True, "persistent": True}
    one, other = (
        tc.CORP(task="multiclass", score="nll", component="score", resolution=resolution, **options) for _ in range(2)
    )
    one.update(logits[:2], target[:2])
    other.load_state_dict(one.state_dict())
    rest = tc.CORP(task="multiclass", score="nll", component="score", resolution=resolution, **options)
    rest.update(logits[2:], target[2:])
    other.merge_state(rest)
    return other.compute().item()


@pytest.mark.parametrize("gap", [15, 17, 20, 38, 50, 700, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mpmath_log_loss_of_certain_logits_whole_merged_saved_and_sketched(dtype, gap):
    """As accurate as its dtype: 4 eps of the function's, and sums of float64 in a stream, whose cells hold one each."""
    logits = torch.tensor([[gap, 0, 0], [0, 1, 0], [1, 0, 2], [0.5, -0.25, 1]], dtype=torch.float64).to(dtype)
    target = torch.tensor([1, 1, 2, 0])
    for reduction in REDUCTIONS:
        expected = log_loss(logits.tolist(), target.tolist(), reduction)
        given = {"task": "multiclass", "reduction": reduction, "from_logits": True, "score": "nll"}
        found = tc.corp(logits, target, **given).score
        assert found.item() == pytest.approx(expected, rel=4 * torch.finfo(found.dtype).eps), reduction
        for resolution in (None, 2048):
            streamed = streamed_log_loss(logits, target, reduction, resolution)
            assert streamed == pytest.approx(expected, rel=1e-14), (reduction, resolution)


def test_mpmath_log_loss_of_a_class_whose_logit_is_far_above_the_other_sets():
    """A set of classes against the rest is read from the same log-odds."""
    logits, target = torch.tensor([[60.0, 0, 59, 0], [0, 1, 0, 3], [2, 0, 1, 0]]), torch.tensor([1, 3, 0])
    given = {"task": "multiclass", "positive_classes": [0, 2], "from_logits": True, "score": "nll"}
    with mpmath.workdps(80):
        powers = [[mpmath.exp(z) for z in row] for row in logits.tolist()]
        odds = [(p[0] + p[2]) / (p[1] + p[3]) for p in powers]
        happened = [y in (0, 2) for y in target.tolist()]
        losses = [mpmath.log1p(1 / o if y else o) for o, y in zip(odds, happened, strict=True)]
        expected = float(mpmath.fsum(losses) / 3)
    assert tc.corp(logits, target, **given).score.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_confidences_of_log_odds_are_those_of_the_events(reduction):
    logits, target = 3 * torch.randn(50, 6, generator=torch.Generator().manual_seed(2), dtype=F64), data(50)[1]
    for labels, from_logits in product((target, data(50, seed=3)[0]), (True, False)):
        preds = logits if from_logits else logits.softmax(-1)
        p = read_input("multiclass", preds, labels, {"from_logits": from_logits})
        scores, claimed = reduce_to_scores(p, reduction), reduce_to_events(p, reduction)
        assert scores.from_logits == from_logits
        confidence = scores.score.sigmoid() if from_logits else scores.score
        torch.testing.assert_close(confidence, claimed.confidence, rtol=1e-13, atol=0)
        torch.testing.assert_close(scores.outcome.double(), claimed.outcome.double(), rtol=0, atol=0)


@pytest.mark.parametrize("n_classes", [3, 5, 10, 20])
@pytest.mark.parametrize("right", [False, True])
def test_closed_form_uniform_rows_lie_on_the_edge_of_their_bin(n_classes, right):
    """Probability 1 / C of logits, and of the k largest k / C, belong where the edge of equal-width bins belongs."""
    logits, target = torch.zeros(6, n_classes), torch.arange(6) % n_classes
    for k in range(1, n_classes):
        table = tc.tce_table(
            logits, target, task="multiclass", reduction=tc.TopK(k), from_logits=True, bins="equal_width",
            n_bins=n_classes, right=right,
        )  # fmt: skip
        assert table.n.nonzero().tolist() == [[k - right]]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_gradients_of_ranked_metrics_in_saturated_logits_are_those_of_finite_differences(reduction):
    logits = 4 * torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=F64)
    logits[0, 0] += 40
    target = torch.arange(9) % 4
    given = {"task": "multiclass", "reduction": reduction, "from_logits": True, "validate_args": False}

    def values(z):
        parts = [tc.corp(z, target, score=score, **given).score for score in ("brier", "nll")]
        return torch.stack([*parts, tc.ks(z, target, **given), tc.ace(z, target, n_bins=3, **given)])

    assert torch.autograd.gradcheck(values, logits.requires_grad_())
