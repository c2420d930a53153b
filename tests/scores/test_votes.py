"""Votes as targets, and the distances to them: against slow loops, closed forms and laws."""

import math
from functools import partial

import pytest
import torch
from helpers.refusals import assert_refused
from helpers.votes import DISTANCES, SETTINGS, TASKS, C, as_classes, data, slow

import torchcalib as tc


@pytest.mark.parametrize(("name", "component"), SETTINGS)
def test_gradient_is_that_of_finite_differences(name, component):
    for task in ("binary", "multiclass"):
        logits, counts = data(task, n=5)
        call = partial(DISTANCES[name][0], target=counts, task=task, component=component, validate_args=False)
        assert torch.autograd.gradcheck(partial(call, from_logits=True), logits.clone().requires_grad_())
        probs = logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
        assert torch.autograd.gradcheck(call, probs.requires_grad_())


@pytest.mark.parametrize("task", TASKS)
def test_counts_are_read_in_batches_and_along_any_axis(task):
    options = {"task": task, "component": "corrected", "from_logits": True}
    function = partial(tc.votes_distance, **options)
    logits, counts = data(task, n=12, lead=(3,))
    expected = torch.stack([function(*pair) for pair in zip(logits, counts, strict=True)])
    found = [function(logits, counts), torch.vmap(function)(logits, counts)]
    if task != "binary":
        found.append(function(logits.movedim(-1, 1), counts.movedim(2, 1), class_axis=1))
    metric = tc.VotesDistance(**options, batch_shape=(3,), **({"num_labels": C} if task == "multilabel" else {}))
    metric.update(logits[:, :5], counts[:, :5].to(torch.int16))
    metric.update(logits[:, 5:], counts[:, 5:])
    for value in (*found, metric.compute()):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "component"), SETTINGS)
def test_slow_loop_of_every_sample(name, component, task):
    logits, counts = data(task)
    expected = [slow(name, component, task, *row) for row in zip(*as_classes(task, logits, counts), strict=True)]
    expected = torch.tensor(expected, dtype=torch.float64).reshape(logits.shape if task != "multiclass" else (-1,))
    preds = logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
    options = {"task": task, "component": component}
    of_function, of_sample, cls, *_ = DISTANCES[name]
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


@pytest.mark.parametrize("function", [tc.kl_divergence, tc.ece])
def test_compiled_functions_read_votes(function):
    torch.compiler.reset()
    logits, counts = data("multiclass")
    call = partial(function, task="multiclass", from_logits=True)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, counts), call(logits, counts))
    counts[3] = 0
    assert compiled(logits, counts).isnan()


def test_saturated_logits_are_exact_with_finite_gradients():
    logits = torch.tensor([[800.0, 0.0, -800.0], [0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    votes = torch.tensor([[0, 3, 1], [2, 0, 2]])
    certain = torch.tensor([[1.0, 0.0]], requires_grad=True)
    for name, component in SETTINGS:
        of_sample = partial(DISTANCES[name][1], task="multiclass", component=component)
        values = of_sample(logits, votes, from_logits=True)
        assert values.isfinite().all()
        gradients = torch.autograd.grad(values.sum(), logits)
        gradients += torch.autograd.grad(of_sample(certain, torch.tensor([[3, 1]])).sum(), certain)
        assert all(gradient.isfinite().all() for gradient in gradients), (name, component)
    kl = tc.kl_divergence_per_sample(logits, votes, task="multiclass", from_logits=True)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(kl, torch.tensor([0.75 * 800 + 0.25 * 1600 - entropy, 0.0], dtype=torch.float64))
    found = tc.kl_divergence_per_sample(certain.expand(2, 2), torch.tensor([[3, 1], [3, 0]]), task="multiclass")
    assert found.tolist() == [math.inf, 0]


@pytest.mark.parametrize("name", DISTANCES)
def test_rows_that_do_not_count_may_hold_any_votes(name):
    logits, counts = data("multiclass", n=8)
    keep = torch.arange(8) % 3 != 2
    without, negative = counts * keep[:, None], counts - 9 * ~keep[:, None]
    given = {"task": "multiclass", "from_logits": True}
    for component in ("value", "noise_floor"):
        call = partial(DISTANCES[name][0], component=component, **given)
        expected = call(logits[keep], counts[keep])
        torch.testing.assert_close(call(logits, negative, weights=keep.float()), expected)
        torch.testing.assert_close(call(logits, without, nan_policy="drop"), expected)
    metric = DISTANCES[name][2](nan_policy="drop", **given)
    metric.update(logits, without)
    assert metric.n_dropped() == 2
    torch.testing.assert_close(metric.compute(), DISTANCES[name][0](logits[keep], counts[keep], **given))


def test_wrong_votes_and_components_are_refused():
    logits, counts = data("multiclass")
    given = {"task": "multiclass", "from_logits": True}
    alone = counts.index_put((torch.tensor(3),), torch.tensor([0, 1, 0, 0]))
    no_counts = "`target` must be counts of votes"
    rows = [
        ("component of a distance", partial(tc.total_variation, logits, counts, component="corrected", **given),
         ValueError, ["`component` must be one of 'value', 'noise_floor', got 'corrected'"]),
        ("component of a class", partial(tc.KLDivergence, task="binary", component="bias"), ValueError,
         ["`component` must be one of 'value', 'noise_floor', 'corrected', got 'bias'"]),
        ("priors", partial(tc.VotesDistance, task="binary", priors=[0.5, 0.5]), ValueError, ["`priors` must be None"]),
    ]  # fmt: skip
    for name, component in SETTINGS:
        call = partial(DISTANCES[name][0], logits, component=component, **given)
        if component != "value":
            rows.append((name, partial(call, counts / counts.sum(-1, keepdim=True)), TypeError, [no_counts, "float32"]))
        if component == "corrected":
            rows.append((name, partial(call, counts.argmax(-1)), TypeError, [no_counts, "torch.int64 (30,)"]))
            said = "`target` must count at least 2 votes in every row, got 1 (1 of 30"
            rows.append((name, partial(call, alone), ValueError, [said]))
    assert_refused(rows)
    collection = tc.CalibrationCollection([tc.NLL(**given), tc.KLDivergence(**given, component="corrected")])
    collection.update(logits, counts)
    corrected = tc.kl_divergence(logits, counts, **given, component="corrected")
    with pytest.raises(ValueError, match="at least 2 votes"):
        collection.update(logits, alone)
    torch.testing.assert_close(collection.compute()["KLDivergence"], corrected)
