"""Events of predictions: the k most probable classes as one claim, and log-odds of logits that do not saturate.

Log losses are held against mpmath with 50 digits.
"""

import json
import math

import mpmath
import oracles
import pytest
import torch

import torchcalib as tc
from torchcalib.core.events import reduce_to_events, reduce_to_scores
from torchcalib.core.inputs import read_input

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


@pytest.mark.parametrize("which", [tc.TopK(1), tc.TopK(1, only=True)])
@pytest.mark.parametrize("from_logits", [False, True])
def test_parity_top_1_is_the_top_label(which, from_logits):
    preds, target = data()
    preds = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) if from_logits else preds
    given = {"task": "multiclass", "from_logits": from_logits}
    for function in (tc.ece, tc.mce, tc.ace, tc.ks):
        assert function(preds, target, reduction=which, **given) == function(preds, target, **given)


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


def test_gradient_is_that_of_the_softmax_sum():
    logits, target = torch.randn(30, 6, dtype=F64, generator=torch.Generator().manual_seed(1)), data(30)[1]
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    upstream = torch.linspace(-1, 1, 30, dtype=F64)
    events(a, target, tc.TopK(3), from_logits=True).confidence.mul(upstream).sum().backward()
    b.softmax(-1).sort(descending=True).values[:, :3].sum(-1).mul(upstream).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)


def test_closed_form_of_a_simulated_top_5():
    """Outcomes drawn from the predictions: the sum of five is calibrated, and an ESCE is within its standard error."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(20_000, 20, generator=generator, dtype=F64).softmax(-1)
    target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    found = events(preds, target, tc.TopK(5))
    error = (found.confidence * (1 - found.confidence)).mean().div(20_000).sqrt()
    assert abs(tc.esce(preds, target, task="multiclass", reduction=tc.TopK(5))) < 4 * error


def test_rows_are_compared_in_pieces(monkeypatch):
    preds, target = data(100)
    expected = tc.ece(preds, target, task="multiclass", reduction=tc.TopK(3))
    monkeypatch.setattr("torchcalib.core.events._PIECE", 50)
    assert tc.ece(preds, target, task="multiclass", reduction=tc.TopK(3)) == expected


def test_scores_of_probabilities_are_the_events():
    preds, target = data()
    p = read_input("multiclass", preds, target, {})
    scores, claimed = reduce_to_scores(p, tc.TopK(2)), reduce_to_events(p, tc.TopK(2))
    assert torch.equal(scores.score, claimed.confidence)
    assert torch.equal(scores.outcome.bool(), claimed.outcome)
    assert not scores.from_logits


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p, y: tc.ece(p, y, task="multiclass", reduction=tc.TopK(7)), ValueError, "at most the 6 classes, got"),
        (lambda p, y: tc.ks(p, y, task="multiclass", reduction=tc.TopK(7)), ValueError, "at most the 6 classes, got"),
        (lambda p, y: tc.ece(p[:, 0], y % 2, task="binary", reduction=tc.TopK(1)), ValueError, "for task='binary'"),
        (lambda *_: tc.TopK(0), ValueError, "`k` must be at least 1, got 0"),
        (lambda *_: tc.TopK(2.0), TypeError, "`k` must be an int, got 2.0"),
        (lambda *_: tc.TopK(2, only=1), TypeError, "`only` must be True or False, got 1"),
        (lambda p, y: tc.ece(p, y, task="multiclass", reduction="top_5"), ValueError, "or TopK\\(k\\)"),
    ],
)  # fmt: skip
def test_what_is_no_claim_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(*data())


def test_saved_states_say_which_k_and_refuse_another():
    preds, target = data()
    given = {"task": "multiclass", "persistent": True}
    one, same, other = (tc.ECE(reduction=tc.TopK(k, only), **given) for k, only in ((2, False), (2, False), (2, True)))
    one.update(preds, target)
    saved = one.state_dict()
    assert "TopK(k=2, only=False)" in json.loads(bytes(saved["description"].tolist()))["configuration"]["reduction"]
    same.load_state_dict(saved)
    assert torch.equal(same.compute(), one.compute())
    with pytest.raises(
        ValueError, match=r"reduction='TopK\(k=2, only=False\)' into reduction='TopK\(k=2, only=True\)'"
    ):
        other.load_state_dict(saved)


def test_a_collection_tells_claims_apart_and_shares_one_reading():
    preds, target = data()
    named = {f"top_{k}": tc.ECE(task="multiclass", reduction=tc.TopK(k)) for k in (1, 2, 5)}
    collection = tc.CalibrationCollection(named)
    collection.update(preds[:90], target[:90])
    collection.update(preds[90:], target[90:])
    for k in (1, 2, 5):
        expected = tc.ece(preds, target, task="multiclass", reduction=tc.TopK(k))
        torch.testing.assert_close(collection.compute()[f"top_{k}"], expected)


def test_replicates_of_a_bootstrap_are_weights():
    preds, target = data()
    interval = tc.bootstrap(tc.ece, preds, target, task="multiclass", reduction=tc.TopK(2), n_replicates=50)
    assert interval.low <= interval.value <= interval.high


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
def test_float32_logits_are_as_accurate_as_the_same_in_float64(reduction):
    """Confidences that differ do not become ties at 1: 4,000 rows of 10 classes, spread over up to 130 nats."""
    generator = torch.Generator().manual_seed(0)
    logits, target = 16 * torch.randn(4000, 10, generator=generator), torch.randint(0, 10, (4000,), generator=generator)
    for score in ("brier", "nll"):
        given = {"task": "multiclass", "reduction": reduction, "from_logits": True, "score": score}
        narrow, wide = (torch.stack(tc.corp(z, target, **given)) for z in (logits, logits.double()))
        assert wide.isfinite().all()
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_confidences_of_log_odds_are_those_of_the_events(reduction):
    logits, target = 3 * torch.randn(50, 6, generator=torch.Generator().manual_seed(2), dtype=F64), data(50)[1]
    for labels in (target, data(50, seed=3)[0]):
        p = read_input("multiclass", logits, labels, {"from_logits": True})
        scores, claimed = reduce_to_scores(p, reduction), reduce_to_events(p, reduction)
        assert scores.from_logits
        torch.testing.assert_close(scores.score.sigmoid(), claimed.confidence, rtol=1e-13, atol=0)
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
