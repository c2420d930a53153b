"""Samples with ties, and slow loops over their events, for tests of rank-based metrics."""

import oracles
import pytest
import torch
from hypothesis import strategies as st
from oracles import ranked as oracle

import torchcalib as tc

F64 = torch.float64
N_CLASSES = 4
KINDS = ["pava_bc", "pava", "equal_mass", "equal_width", [0, 0.125, 0.25, 0.75, 1]]
NORMS = ["l1", "l2", "max"]
SETTINGS = [
    ("binary", {"reduction": "positive_class"}),
    ("binary", {"reduction": "top_label"}),
    ("multiclass", {"reduction": "top_label"}),
    ("multiclass", {"reduction": "classwise"}),
    ("multiclass", {"reduction": tc.TopK(2)}),
    ("multiclass", {"positive_classes": [0, 2]}),
    ("multilabel", {}),
]
setting = pytest.mark.parametrize(("task", "how"), SETTINGS, ids=str)


def sample(task, n=60, seed=0, weighted=False, heaviest=3):
    """Return predictions in steps of 1/64 (ties, and exact sums), targets drawn from them, and weights."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        votes = torch.randint(0, N_CLASSES, (n, 64), generator=generator)
        votes = torch.where(torch.rand(n, 64, generator=generator) < 0.5, votes[:, :1], votes)
        preds = torch.nn.functional.one_hot(votes, N_CLASSES).sum(1).to(F64) / 64
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    else:
        shape = (n, N_CLASSES) if task == "multilabel" else (n,)
        preds = torch.randint(0, 65, shape, generator=generator).to(F64) / 64
        target = (torch.rand(shape, generator=generator) < 0.3 + 0.5 * preds).long()
    weights = torch.randint(0, heaviest + 1, (n,), generator=generator) if weighted else None
    return preds, target, weights


def distinct(task, n=24, seed=0):
    """Return distinct predictions, for derivatives."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        preds = torch.rand(n, N_CLASSES, generator=generator, dtype=F64).add(0.1)
        preds = preds / preds.sum(-1, keepdim=True)
        return preds, torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    shape = (n, N_CLASSES) if task == "multilabel" else (n,)
    preds = torch.rand(shape, generator=generator, dtype=F64) * 0.9 + 0.05
    return preds, (torch.rand(shape, generator=generator) < preds).long()


def looped(loop, task, how, preds, target, weights=None):
    """Return the value of the loop for each column of events of the reduction."""
    columns = oracle.events(task, how.get("reduction"), preds.tolist(), target.tolist(), how.get("positive_classes"))
    weights = None if weights is None else weights.tolist()
    return [loop(confidence, outcome, weights) for confidence, outcome in columns]


def assert_slow_loop(function, loop, task, how, data, **options):
    """Compare the mean, and the value of every class or label if there are several, with the loop."""
    preds, target, weights = data
    values = looped(loop, task, how, preds, target, weights)
    given = {"task": task, "weights": weights, **how, **options}
    found = function(preds, target, **given)
    assert found.item() == pytest.approx(sum(values) / len(values), rel=1e-11, abs=1e-12)
    if len(values) > 1:
        assert function(preds, target, average=None, **given).tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)


def assert_gradient(function, loop, task, how, **options):
    """Compare the gradient with central differences of the loop, at three entries."""
    preds, target = distinct(task)
    leaf = preds.clone().requires_grad_()
    function(leaf, target, task=task, validate_args=False, **how, **options).backward()
    for at in [(0,), (7,), (20,)] if task == "binary" else [(0, 0), (7, 2), (20, 3)]:
        slope = 0
        for step in (1e-6, -1e-6):
            moved = preds.clone()
            moved[at] += step
            columns = looped(loop, task, how, moved, target)
            slope += sum(columns) / len(columns) / (2 * step)
        assert leaf.grad[at].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def equal_mass(error, **options):
    """Return the loop over blocks of equal mass."""

    def loop(*columns):
        return error(oracle.rows_of(oracle.blocks_of("equal_mass", *columns, n_bins=7), *columns), **options)

    return loop


# Function, its options, and its slow loop over scores, outcomes and weights.
OF_EQUAL_MASS = {"bins": "equal_mass", "n_bins": 7}
EQUAL_MASS = {
    "ace": (tc.ace, {"n_bins": 7}, equal_mass(oracles.ece)),
    "mce": (tc.mce, OF_EQUAL_MASS, equal_mass(oracles.mce)),
    "rmsce": (tc.rmsce, OF_EQUAL_MASS, equal_mass(oracles.rmsce)),
    "debiased": (tc.rmsce, {**OF_EQUAL_MASS, "debiased": True}, equal_mass(oracles.rmsce, debiased=True)),
    "ks": (tc.ks, {}, oracle.ks),
}


@st.composite
def samples(draw, max_weight=3):
    """Draw scores in steps of 1/16, labels, and weights with a sum of at least 2."""
    n = draw(st.integers(2, 30))
    scores = draw(st.lists(st.integers(0, 16), min_size=n, max_size=n))
    outcomes = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    weights = draw(st.lists(st.integers(0, max_weight), min_size=n, max_size=n).filter(lambda w: sum(w) > 1))
    return torch.tensor(scores, dtype=F64) / 16, torch.tensor(outcomes), torch.tensor(weights)
