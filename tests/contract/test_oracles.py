"""Scores and errors over equal-width bins against the slow loops: values, and gradients by finite differences of them.

Metrics of a sample in order have loops of their own, in test_ranked, and those without bins in test_binless.
"""

import math
from functools import partial

import oracles
import pytest
import torch
from cases import CASES, N_CLASSES, Case

import torchcalib as tc
from torchcalib.binless import EventMetric
from torchcalib.scores import ScoreMetric
from torchcalib.states import SumsKind

SCORES = {
    "nll": oracles.nll_of,
    "nce": oracles.nll_of,
    "nll-eps": oracles.nll_of,
    "brier": oracles.brier_of,
    "nbs": oracles.brier_of,
    "brier-classes": oracles.brier_of,
    "ecd": oracles.ecd_of,
    "accuracy": oracles.accuracy_of,
    "tv": oracles.total_variation_of,
    "kl": oracles.kl_of,
    "entropy": oracles.entropy_difference_of,
    "votes": oracles.brier_of,
    "tv-floor": lambda q, _: oracles.total_variation_floor(q, 1),  # a label is one vote
    "kl-floor": lambda q, _: oracles.entropy_floor(q, 1),
    "entropy-floor": lambda q, _: oracles.entropy_floor(q, 1),
    "votes-floor": lambda q, _: oracles.brier_floor(q, 1),
}
ERRORS = {"ece": oracles.ece, "esce": oracles.esce, "mce": oracles.mce, "rmsce": oracles.rmsce}


ADDITIVE = [
    case
    for case in CASES
    if isinstance(case.metric().kind, SumsKind) and not (case.in_blocks or issubclass(case.cls, EventMetric))
]


@pytest.fixture(params=ADDITIVE, ids=str)
def case(request):
    return request.param


def probabilities(case, preds):
    """Rows of probabilities, from logits by the textbook formula."""
    if not case.options.get("from_logits"):
        return preds
    if case.task == "multiclass":
        return [[math.exp(z) / sum(math.exp(other) for other in row) for z in row] for row in preds]
    if case.task == "multilabel":
        return [[1 / (1 + math.exp(-z)) for z in row] for row in preds]
    return [1 / (1 + math.exp(-z)) for z in preds]


def series(case, preds, target):
    """One (rows q, rows t) per output: itself, or one per label."""
    probs = probabilities(case, preds)
    if chosen := case.options.get("positive_classes"):
        classes = range(N_CLASSES)
        rows = [[sum(row[k] for k in classes if (k in chosen) == inside) for inside in (False, True)] for row in probs]
        return [(rows, [oracles.one_hot(int(h in chosen), 2) for h in target])]
    if case.task == "multiclass":
        return [(probs, [oracles.one_hot(h, N_CLASSES) for h in target])]
    if case.task == "binary":
        return [oracles.as_rows(probs, target)]
    columns = range(len(probs[0]))
    return [oracles.as_rows([row[k] for row in probs], [row[k] for row in target]) for k in columns]


def costs_of(case):
    """Rows of costs; 1 for every error where none are given."""
    if cost := case.options.get("cost"):
        return cost.costs
    n = N_CLASSES if case.task == "multiclass" else 2
    return [[float(j != k) for j in range(n)] for k in range(n)]


def score_oracle(case, qs, ts, weights):
    name = case.name.rsplit("-priors", 1)[0] if "priors" in case.options else case.name.split(f"-{case.task}")[0]
    name = name.split("-set-")[0]
    name = name.removesuffix("-per-label")
    of = SCORES[name] if case.cls is not tc.BayesRisk else partial(oracles.bayes_cost_of, cost=costs_of(case))
    if case.cls in (tc.Brier, tc.VotesDistance) and case.task != "multiclass":  # of two classes, one is enough
        both = of
        of = lambda q, t: both(q, t) / 2  # noqa: E731
    eps = case.options.get("eps", 0)
    scores = [of([max(q, eps) for q in row], t) for row, t in zip(qs, ts, strict=True)]
    priors = case.options.get("priors")
    shares = oracles.class_shares(ts, weights) if priors is None else priors.tolist()
    if priors is None:
        value = oracles.mean(scores, weights)
        naive = oracles.mean([of(shares, t) for t in ts], weights)
    else:
        labels = [t.index(1.0) for t in ts]
        value = oracles.mean_at_priors(scores, labels, weights, shares)
        naive = oracles.mean_at_priors([of(shares, t) for t in ts], labels, weights, shares)
    if case.options.get("normalize") == "prior":
        return value / naive
    if case.options.get("normalize") == "classes" and case.task == "multiclass":
        return value / N_CLASSES
    return value


def error_oracle(case, qs, ts, weights):
    """One value, or one per class."""
    error = ERRORS[case.cls.__name__.lower()]
    more = {"debiased": True} if case.options.get("debiased") else {}
    n_bins = case.options.get("n_bins", 15)
    task = "binary" if case.options.get("positive_classes") else case.task
    usual = {"binary": "positive_class", "multiclass": "top_label", "multilabel": "classwise"}[task]
    reduction = case.options.get("reduction", usual)
    if reduction == "top_label":
        events = [[oracles.top_label(q, t) for q, t in zip(qs, ts, strict=True)]]
    elif isinstance(reduction, tc.TopK):
        events = [[oracles.top_k(q, t, reduction.k, reduction.only) for q, t in zip(qs, ts, strict=True)]]
    elif task == "multiclass":
        events = [[(q[k], t[k]) for q, t in zip(qs, ts, strict=True)] for k in range(N_CLASSES)]
    else:
        events = [[(q[1], t[1]) for q, t in zip(qs, ts, strict=True)]]
    values = []
    for pairs in events:
        confidence, outcome = [c for c, _ in pairs], [o for _, o in pairs]
        values.append(error(oracles.bins(confidence, outcome, weights, n_bins), **more))
    return values if len(values) > 1 else values[0]


def oracle(case, preds, target, weights):
    one = score_oracle if issubclass(case.cls, ScoreMetric) else error_oracle
    values = [one(case, qs, ts, weights) for qs, ts in series(case, preds, target)]
    values = values[0] if case.task != "multilabel" else values
    if isinstance(values, list) and case.options.get("average", "macro") is not None:
        return sum(values) / len(values)
    return values


@pytest.mark.parametrize("seed", range(3))
def test_slow_loop_value(case, seed):
    preds, target = case.data(n=35, seed=seed)
    ones = [1.0] * 35
    expected = torch.tensor(oracle(case, preds.tolist(), target.tolist(), ones), dtype=torch.float64)
    torch.testing.assert_close(case.call(preds, target), expected, rtol=1e-12, atol=1e-13)


def test_slow_loop_value_with_weights(case):
    preds, target = case.data(n=35)
    weights = torch.rand(35, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights[::5] = 0
    if case.options.get("debiased"):
        weights = weights.mul(4).round()  # n - 1 is a sample variance's only for whole copies, as in the loop
    expected = torch.tensor(oracle(case, preds.tolist(), target.tolist(), weights.tolist()), dtype=torch.float64)
    torch.testing.assert_close(case.call(preds, target, weights=weights), expected, rtol=1e-12, atol=1e-13)


def test_slow_loop_gradient(case):
    if not case.differentiable:
        pytest.skip("a decision has no gradient")
    preds, target = case.data(n=6, seed=1)
    labels, ones, step = target.tolist(), [1.0] * 6, 1e-6
    if "priors" in case.options:
        preds, target = case.data(n=24, seed=1)
        labels, ones = target.tolist(), [1.0] * 24
    leaf = preds.clone().requires_grad_()
    case.call(leaf, target, validate_args=False).sum().backward()
    for at in [(0,), (3,), (5,)] if case.task == "binary" else [(0, 0), (3, 2), (5, 3)]:
        values = []
        for sign in (1, -1):
            moved = preds.clone()
            moved[at] += sign * step
            value = oracle(case, moved.tolist(), labels, ones)
            values.append(sum(value) if isinstance(value, list) else value)
        assert leaf.grad[at].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(
    ("task", "reduction"),
    [("binary", "positive_class"), ("binary", "top_label"), ("multiclass", "top_label"), ("multiclass", "classwise"),
     ("multilabel", "classwise")],
)  # fmt: skip
def test_slow_loop_bin_table(task, reduction, from_logits):
    """Every column, with the mean ECD of whole predictions, class-wise of one class against the rest."""
    case = Case("table", tc.bin_table, tc.ECE, task, {"from_logits": from_logits})
    preds, target = case.data(n=60)
    weights = torch.arange(60) % 3
    table = tc.bin_table(
        preds, target, weights=weights, n_bins=6, reduction=reduction, task=task, from_logits=from_logits
    )
    columns = {name: torch.from_numpy(column).reshape(-1, 6) for name, column in table.to_dict().items()}
    claims = []  # per series: confidence, outcome, ECD
    for qs, ts in series(case, preds.tolist(), target.tolist()):
        if reduction == "top_label":
            pairs = [oracles.top_label(q, t) for q, t in zip(qs, ts, strict=True)]
            claims.append((*zip(*pairs, strict=True), [oracles.ecd_of(q, t) for q, t in zip(qs, ts, strict=True)]))
            continue
        for k in range(N_CLASSES) if task == "multiclass" else (1,):
            confidence, outcome = [q[k] for q in qs], [t[k] for t in ts]
            rows, truths = oracles.as_rows(confidence, outcome)
            claims.append((confidence, outcome, [oracles.ecd_of(q, t) for q, t in zip(rows, truths, strict=True)]))
    assert len(claims) == len(columns["n"])
    total = float(weights.sum())
    for k, (confidence, outcome, scores) in enumerate(claims):
        held = oracles.bins(confidence, outcome, weights.tolist(), 6, extra=scores)
        assert [b for b, *_ in held] == columns["n"][k].nonzero().flatten().tolist()
        for b, n, mean_confidence, frequency, mean_ecd in held:
            row = {name: column[k, b].item() for name, column in columns.items()}
            assert (row["lower"], row["upper"]) == (b / 6, (b + 1) / 6)
            assert row["n"] == n
            expected = [n / total, mean_confidence, frequency, frequency - mean_confidence, mean_ecd]
            found = [row[name] for name in ("share", "confidence", "frequency", "gap", "ecd")]
            assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)
