"""Votes as targets, and the distances to them: against slow loops, closed forms and laws."""

import math
from functools import partial

import pytest
import torch
from helpers.votes import DISTANCES, SETTINGS, TASKS, C, as_classes, data, slow

import torchcalib as tc


def often(settings, normal):
    """Settings; those that are not `normal` run in the extended run."""
    return [pytest.param(*s, marks=[pytest.mark.extended] * (not normal(*s))) for s in settings]


GRADIENTS = [(name, c, task) for name, c in SETTINGS for task in TASKS]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "component"), SETTINGS)
def test_slow_loop_of_every_sample(name, component, task):
    logits, counts = data(task)
    expected = [slow(name, component, task, *row) for row in zip(*as_classes(task, logits, counts), strict=True)]
    expected = torch.tensor(expected, dtype=torch.float64).reshape(logits.shape if task != "multiclass" else (-1,))
    preds = logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
    options = {"task": task, "component": component}
    of_function, of_sample, cls, _ = DISTANCES[name]
    of_logits = of_sample(logits, counts, from_logits=True, **options)
    torch.testing.assert_close(of_logits, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(of_sample(preds, counts, **options), expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(of_function(preds, counts, **options), expected.mean(), rtol=1e-11, atol=1e-13)
    weights = torch.arange(30) % 4
    metric = cls(**options, **({"num_labels": C} if task == "multilabel" else {}))
    for piece in (slice(0, 7), slice(7, 7), slice(7, 30)):
        metric.update(preds[piece], counts[piece], weights=weights[piece])
    mean = (expected * (weights if task != "multilabel" else weights.unsqueeze(-1))).sum(0) / weights.sum()
    torch.testing.assert_close(metric.compute(), mean.mean(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "component", "task"),
    often(GRADIENTS, lambda name, component, task: task == "multiclass" or (task == "binary" and name == "kl")),
)
def test_gradient_is_that_of_finite_differences(name, component, task):
    logits, counts = data(task, n=5)
    call = partial(DISTANCES[name][0], target=counts, task=task, component=component, from_logits=True)
    assert torch.autograd.gradcheck(call, logits.requires_grad_())
    probs = (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()).detach().requires_grad_()
    call = partial(call, from_logits=False, validate_args=False)
    assert torch.autograd.gradcheck(call, probs)


@pytest.mark.parametrize("task", TASKS)
def test_laws_of_batches_axes_and_states_hold_for_counts(task):
    """Batches are loops, class axes may stand anywhere, half types, mapped, series kept apart, merged."""
    options = {"task": task, "component": "corrected", "from_logits": True}
    function = partial(tc.votes_distance, **options)
    logits, counts = data(task, n=12, lead=(3,))
    whole = function(logits, counts)
    for k in range(3):
        torch.testing.assert_close(whole[k], function(logits[k], counts[k]), rtol=1e-12, atol=1e-13)
    if task != "binary":
        first = function(logits.movedim(-1, 1), counts.movedim(2, 1), class_axis=1)
        torch.testing.assert_close(first, whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.vmap(function)(logits, counts), whole, rtol=1e-12, atol=1e-13)
    half, exact = (function(x, counts) for x in (logits.half(), logits.half().double()))
    torch.testing.assert_close(half, exact.float(), rtol=2e-5, atol=2e-6)
    cls = partial(tc.VotesDistance, **options, **({"num_labels": C} if task == "multilabel" else {}))
    apart, one, other = cls(batch_shape=(3,)), cls(), cls()
    apart.update(logits[:, :5], counts[:, :5].to(torch.int16))
    apart.update(logits[:, 5:], counts[:, 5:])
    torch.testing.assert_close(apart.compute(), whole, rtol=1e-12, atol=1e-13)
    one.update(logits[:2], counts[:2])
    other.update(logits[2], counts[2])
    one.merge_state(other)
    torch.testing.assert_close(one.compute(), whole.mean(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", [tc.kl_divergence, tc.ece])
def test_compiled_functions_read_votes(function):
    torch.compiler.reset()
    logits, counts = data("multiclass")
    call = partial(function, task="multiclass", from_logits=True)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, counts), call(logits, counts))
    counts[3] = 0
    assert compiled(logits, counts).isnan()


METRICS = (tc.nll, tc.brier_score, tc.ecd, tc.accuracy, tc.bayes_risk, tc.ece, tc.esce, tc.mce, tc.rmsce, tc.ace, tc.ks)


@pytest.mark.parametrize("task", TASKS)
def test_counts_are_their_shares_wherever_soft_targets_are_read(task):
    logits, counts = data(task)
    n = counts.sum(-1, keepdim=True)
    shares = counts / n.double()
    given = shares if task == "multiclass" else shares[..., 1]
    options = {"task": task, "from_logits": True}
    for function in METRICS:
        torch.testing.assert_close(function(logits, counts, **options), function(logits, given, **options))
        if task == "multiclass":
            of_set = {**options, "positive_classes": [0, 2]}
            torch.testing.assert_close(function(logits, counts, **of_set), function(logits, given, **of_set))


def test_closed_form_of_two_votes_of_three():
    """q = (1/2, 1/2), two votes for the first class and one for the other."""
    preds, votes = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[2, 1]])
    found = {(name, c): float(DISTANCES[name][0](preds, votes, task="multiclass", component=c)) for name, c in SETTINGS}
    entropy = math.log(3) - 2 / 3 * math.log(2)
    expected_entropy = 3 / 4 * entropy  # three of one class in two of eight
    assert found == pytest.approx(
        {
            ("tv", "value"): 1 / 6,
            ("tv", "noise_floor"): (2 * 1 / 2 + 6 * 1 / 6) / 8,
            ("kl", "value"): math.log(2) - entropy,
            ("kl", "noise_floor"): math.log(2) - expected_entropy,
            ("kl", "corrected"): math.log(2) - (2 / 3 * (1 / 2) + 1 / 3 * (1 + 1 / 2)) - 1 / 3,
            ("entropy", "value"): math.log(2) - entropy,
            ("entropy", "noise_floor"): math.log(2) - expected_entropy,
            ("entropy", "corrected"): math.log(2) - (2 / 3 * (1 / 2) + 1 / 3 * (1 + 1 / 2)) - 1 / 3,
            ("votes", "value"): 2 / 36,
            ("votes", "noise_floor"): 1 / 6,
            ("votes", "corrected"): 2 / 36 - 2 * (2 / 9) / 2,
        },
        abs=1e-14,
    )


# Extremes, and what is refused.


def test_saturated_logits_are_exact_with_finite_gradients():
    logits = torch.tensor([[800.0, 0.0, -800.0], [0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    votes = torch.tensor([[0, 3, 1], [2, 0, 2]])
    for name, component in SETTINGS:
        per_sample = DISTANCES[name][1](logits, votes, task="multiclass", from_logits=True, component=component)
        assert per_sample.isfinite().all()
        (gradient,) = torch.autograd.grad(per_sample.sum(), logits)
        assert gradient.isfinite().all(), (name, component)
    kl = tc.kl_divergence_per_sample(logits, votes, task="multiclass", from_logits=True)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(kl, torch.tensor([0.75 * 800 + 0.25 * 1600 - entropy, 0.0], dtype=torch.float64))
    certain = torch.tensor([[1.0, 0.0]], requires_grad=True)
    value = tc.kl_divergence(certain, torch.tensor([[3, 1]]), task="multiclass")
    assert value == torch.inf
    assert torch.autograd.grad(value, certain)[0].isfinite().all()
    assert tc.kl_divergence(certain, torch.tensor([[3, 0]]), task="multiclass") == 0


@pytest.mark.parametrize("name", DISTANCES)
def test_rows_that_do_not_count_may_hold_any_votes(name):
    logits, counts = data("multiclass", n=8)
    spoiled, weights = counts.clone(), torch.ones(8)
    spoiled[2], spoiled[5], weights[[2, 5]] = 0, -7, 0
    keep = weights > 0
    for component in ("value", "noise_floor"):
        call = partial(DISTANCES[name][0], task="multiclass", from_logits=True, component=component)
        expected = call(logits[keep], counts[keep])
        torch.testing.assert_close(call(logits, spoiled, weights=weights), expected)
        spoiled[5] = 0
        torch.testing.assert_close(call(logits, spoiled, nan_policy="drop"), expected)
        spoiled[5] = -7
    metric = DISTANCES[name][2](task="multiclass", from_logits=True, nan_policy="drop")
    spoiled[5] = 0
    metric.update(logits, spoiled)
    assert metric.n_dropped() == 2
    torch.testing.assert_close(metric.compute(), DISTANCES[name][0](logits[keep], counts[keep], task="multiclass",
                                                                    from_logits=True))  # fmt: skip


@pytest.mark.parametrize(("name", "component"), [s for s in SETTINGS if s[1] != "value"])
def test_shares_of_unknown_counts_have_no_correction(name, component):
    logits, counts = data("multiclass")
    call = partial(DISTANCES[name][0], task="multiclass", from_logits=True, component=component)
    with pytest.raises(TypeError, match=r"`target` must be counts of votes, .* got torch.float64 .* Pass vote counts"):
        call(logits, counts / counts.sum(-1, keepdim=True).double())
    if component == "corrected":
        with pytest.raises(TypeError, match=r"`target` must be counts of votes, .* got torch.int64 \(30,\)"):
            call(logits, counts.argmax(-1))
        counts[3] = torch.tensor([0, 1, 0, 0])
        with pytest.raises(ValueError, match=r"`target` must count at least 2 votes in every row, got 1 \(1 of 30"):
            call(logits, counts)


def test_wrong_components_and_options_are_refused():
    logits, counts = data("multiclass")
    with pytest.raises(ValueError, match="`component` must be one of 'value', 'noise_floor', got 'corrected'"):
        tc.total_variation(logits, counts, task="multiclass", component="corrected")
    with pytest.raises(ValueError, match="`component` must be one of 'value', 'noise_floor', 'corrected', got 'bias'"):
        tc.KLDivergence(task="binary", component="bias")
    with pytest.raises(ValueError, match="`priors` must be None for distances to votes"):
        tc.VotesDistance(task="binary", priors=[0.5, 0.5])


def test_a_collection_shares_the_reading_but_not_what_a_metric_demands():
    logits, counts = data("multiclass")
    of = {"task": "multiclass", "from_logits": True}
    metrics = {
        "kl": tc.KLDivergence(**of),
        "corrected": tc.KLDivergence(**of, component="corrected"),
        "nll": tc.NLL(**of),
    }
    collection = tc.CalibrationCollection(metrics)
    collection.update(logits, counts)
    values = collection.compute()
    torch.testing.assert_close(values["kl"], tc.kl_divergence(logits, counts, **of))
    corrected = tc.kl_divergence(logits, counts, **of, component="corrected")
    torch.testing.assert_close(values["corrected"], corrected)
    counts[3] = torch.tensor([0, 1, 0, 0])
    with pytest.raises(ValueError, match="at least 2 votes"):
        collection.update(logits, counts)
    torch.testing.assert_close(collection.compute()["corrected"], corrected)


def test_reports_and_comparisons_read_votes_as_their_shares():
    logits, counts = data("multiclass", n=60)
    shares = counts / counts.sum(-1, keepdim=True).double()
    options = {"task": "multiclass", "from_logits": True}
    values_only = {"with_intervals": False, "with_calibration": False}
    counted, shared = (tc.report(logits, target, **options, **values_only) for target in (counts, shares))
    assert [line.value for line in counted.lines] == pytest.approx([line.value for line in shared.lines])
    systems = {"a": logits, "b": logits.flip(0)}
    counted, shared = (tc.compare(systems, target, n_replicates=39, **options) for target in (counts, shares))
    for one, other in zip(counted.lines, shared.lines, strict=True):
        assert one.values == pytest.approx(other.values)
