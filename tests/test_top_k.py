"""The k most probable classes as one claim: ties, all classes, certainty, soft targets, what is refused and saved."""

import json
import math

import oracles
import pytest
import torch

import torchcalib as tc
from torchcalib.predictions import read_input
from torchcalib.reductions import reduce_to_events, reduce_to_scores

F64 = torch.float64


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
    monkeypatch.setattr("torchcalib.reductions._PIECE", 50)
    assert tc.ece(preds, target, task="multiclass", reduction=tc.TopK(3)) == expected


def test_scores_of_samples_in_order_are_the_events():
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
