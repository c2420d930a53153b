"""Penalties for training: against slow loops in values and gradients, where batches are extreme, and in training."""

import math
import pickle
from functools import partial

import oracles
import pytest
import torch
from oracles import losses as slow
from torch import nn
from torch.nn.functional import cross_entropy

import torchcalib as tc

C = 4
TASKS = ("binary", "multiclass", "multilabel")
PENALTIES = {  # function, module, options, loop over claims
    "soft l1": (tc.soft_binned_ece, tc.SoftBinnedECELoss, {"n_bins": 7, "norm": "l1"},
                partial(slow.soft_binned_ece, n_bins=7, temperature=0.01, norm="l1")),
    "soft l2": (tc.soft_binned_ece, tc.SoftBinnedECELoss, {"temperature": 0.002},
                partial(slow.soft_binned_ece, n_bins=15, temperature=0.002, norm="l2")),
    "mmce": (tc.mmce, tc.MMCELoss, {}, partial(slow.mmce, bandwidth=0.2, weighted=False)),
    "mmce weighted": (tc.mmce, tc.MMCELoss, {"bandwidth": 0.05, "weighted": True},
                      partial(slow.mmce, bandwidth=0.05, weighted=True)),
    "ece": (tc.ece, tc.ECELoss, {"n_bins": 6}, None),
    "canonical": (tc.canonical_error, tc.CanonicalLoss, {"bandwidth": 0.1, "p": 2}, None),
    "skce": (partial(tc.skce, estimator="biased"), tc.SKCELoss, {"bandwidth": 0.5}, None),
}  # fmt: skip
KINDS = [
    *(("binary", reduction) for reduction in ("positive_class", "top_label")),
    *(("multiclass", reduction) for reduction in ("top_label", "classwise", tc.TopK(2))),
    ("multilabel", "classwise"),
]


@pytest.fixture(params=PENALTIES)
def penalty(request):
    return PENALTIES[request.param]


@pytest.fixture(params=[name for name in PENALTIES if PENALTIES[name][-1]])
def new_penalty(request):
    """Those that are functions of this room; of others values and laws are tested where they are."""
    return PENALTIES[request.param]


def data(task, n=24, seed=0, dtype=torch.float64, lead=()):
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, n) if task == "binary" else (*lead, n, C)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    high = C if task == "multiclass" else 2
    target = torch.randint(0, high, shape if task == "multilabel" else (*lead, n), generator=generator)
    return logits.to(dtype), target


def claims_of(task, reduction, logits, target, weights):
    """Lists of (confidence, outcome, weight): one, or one for each class."""
    if task == "multiclass":
        qs = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in logits]
        ts = [oracles.one_hot(h, C) for h in target]
        if reduction == "classwise":
            return [[(q[k], t[k], w) for q, t, w in zip(qs, ts, weights, strict=True)] for k in range(C)]
        k = 1 if reduction == "top_label" else reduction.k
        tops = [sorted(range(C), key=lambda j, q=q: -q[j])[:k] for q in qs]
        return [
            [
                (sum(q[j] for j in top), sum(t[j] for j in top), w)
                for q, t, top, w in zip(qs, ts, tops, weights, strict=True)
            ]
        ]
    if task == "multilabel":
        columns = zip(zip(*logits, strict=True), zip(*target, strict=True), strict=True)
        return [claims_of("binary", "positive_class", zs, ys, weights)[0] for zs, ys in columns]
    ps = [1 / (1 + math.exp(-z)) for z in logits]
    pairs = [
        (p, y) if reduction == "positive_class" or p > 0.5 else (1 - p, 1 - y) for p, y in zip(ps, target, strict=True)
    ]
    return [[(c, y, w) for (c, y), w in zip(pairs, weights, strict=True)]]


def slow_value(loop, task, reduction, logits, target, weights):
    values = [loop(claims) for claims in claims_of(task, reduction, logits, target, weights)]
    return sum(values) / len(values)


@pytest.mark.parametrize(("task", "reduction"), KINDS)
def test_slow_loop_value_and_gradient(new_penalty, task, reduction):
    function, _, options, loop = new_penalty
    logits, target = data(task)
    weights = torch.arange(24) % 4 / 2
    value = partial(slow_value, loop, task, reduction, target=target.tolist(), weights=weights.tolist())
    leaf = logits.clone().requires_grad_()
    found = function(leaf, target, task=task, reduction=reduction, from_logits=True, weights=weights, **options)
    assert found.item() == pytest.approx(value(logits=logits.tolist()), rel=1e-11)
    found.backward()
    step = 1e-6
    for at in [(3,), (7,), (18,)] if task == "binary" else [(3, 0), (7, 2), (18, 3)]:
        moved = [logits.clone(), logits.clone()]
        for sign, tensor in zip((1, -1), moved, strict=True):
            tensor[at] += sign * step
        up, down = (value(logits=tensor.tolist()) for tensor in moved)
        assert leaf.grad[at].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("task", "reduction"), KINDS)
def test_gradient_is_that_of_finite_differences(new_penalty, task, reduction):
    function, _, options, _ = new_penalty
    logits, target = data(task, n=6)
    call = partial(function, target=target, task=task, reduction=reduction, **options)
    assert torch.autograd.gradcheck(partial(call, from_logits=True), logits.requires_grad_())
    probs = (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()).detach().requires_grad_()
    assert torch.autograd.gradcheck(partial(call, validate_args=False), probs)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_cold_soft_bins_are_bins(norm):
    logits, target = data("multiclass", n=200)
    hard = {"l1": tc.ece, "l2": tc.rmsce}[norm](logits, target, task="multiclass", from_logits=True)
    soft = tc.soft_binned_ece(logits, target, task="multiclass", from_logits=True, temperature=1e-7, norm=norm)
    torch.testing.assert_close(soft, hard, rtol=1e-3, atol=0)


def test_closed_form_of_two_claims():
    """Residuals 0.8 - 1 and 0.8: of one confidence they add; far apart, they do not."""
    same = tc.mmce(torch.tensor([0.8, 0.8], dtype=torch.float64), torch.tensor([1, 0]), task="binary")
    assert float(same) == pytest.approx(0.6 / 2)
    apart = tc.mmce(torch.tensor([0.8, 0.3], dtype=torch.float64), torch.tensor([1, 0]), task="binary", bandwidth=0.001)
    assert float(apart) == pytest.approx(math.sqrt(0.2**2 + 0.3**2) / 2)
    weighted = tc.mmce(torch.tensor([0.8, 0.8, 0.8]), torch.tensor([1, 1, 0]), task="binary", weighted=True)
    assert float(weighted) == pytest.approx(0.8 - 0.2)
    one = tc.soft_binned_ece(torch.tensor([0.5]), torch.tensor([1]), task="binary", n_bins=1, norm="l1")
    assert float(one) == 0.5


# Laws that the streaming metrics keep too.


@pytest.mark.parametrize("task", TASKS)
def test_law_sample_order_ties_included(new_penalty, task):
    function, _, options, _ = new_penalty
    logits, target = data(task)
    logits[5:10] = logits[4]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    one = function(a, target, task=task, from_logits=True, **options)
    other = function(b[order], target[order], task=task, from_logits=True, **options)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    one.backward()
    other.backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
def test_law_integer_weights_are_repeats(new_penalty, task):
    function, _, options, _ = new_penalty
    logits, target = data(task)
    times = torch.arange(24) % 4
    call = partial(function, task=task, from_logits=True, **options)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    one = call(a, target, weights=times)
    other = call(b.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    one.backward()
    other.backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)
    ways = torch.stack([times, times.flip(0), torch.ones(24)])
    loop = torch.stack([call(logits, target, weights=w) for w in ways])
    torch.testing.assert_close(call(logits, target, weights=ways), loop, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
def test_law_batches_are_loops_and_classes_stand_anywhere(new_penalty, task):
    function, _, options, _ = new_penalty
    logits, target = data(task, lead=(3,))
    call = partial(function, task=task, from_logits=True, **options)
    whole = call(logits, target)
    torch.testing.assert_close(whole, torch.stack([call(*pair) for pair in zip(logits, target, strict=True)]))
    torch.testing.assert_close(torch.vmap(call)(logits, target), whole)
    if task != "binary":
        labels = target.movedim(-1, 1) if task == "multilabel" else target
        torch.testing.assert_close(call(logits.movedim(-1, 1), labels, class_axis=1), whole)


@pytest.mark.parametrize("task", TASKS)
def test_law_what_is_masked_is_not_there(penalty, task):
    """By weight, also where it is NaN; by `ignore_index`; as missing. Gradients there are 0."""
    function, module, options, _ = penalty
    logits, target = data(task)
    keep = torch.arange(24) % 3 > 0
    expected = function(logits[keep], target[keep], task=task, from_logits=True, **options)
    marked, spoiled = target.clone(), logits.clone()
    marked[~keep], spoiled[~keep] = -100, torch.nan
    make = partial(module, task=task, from_logits=True, **options)
    leaf = logits.clone().requires_grad_()
    masked = make(ignore_index=-100)(leaf, marked)
    masked.backward()
    assert (leaf.grad[~keep] == 0).all()
    assert leaf.grad.isfinite().all()
    found = [masked, make()(spoiled, marked, weights=keep), make(nan_policy="drop")(spoiled, target)]
    for value in found:
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
    leaf = spoiled.clone().requires_grad_()
    make(nan_policy="drop")(leaf, target).backward()
    assert (leaf.grad[~keep] == 0).all()
    assert leaf.grad.isfinite().all()


def test_law_soft_targets_and_votes(new_penalty):
    function, _, options, _ = new_penalty
    logits, target = data("multiclass")
    call = partial(function, task="multiclass", from_logits=True, **options)
    votes = 3 * nn.functional.one_hot(target, C)
    torch.testing.assert_close(call(logits, votes), call(logits, target))
    votes[:, 0] += 1
    torch.testing.assert_close(call(logits, votes), call(logits, votes / votes.sum(-1, keepdim=True).double()))


# Modules.


@pytest.mark.parametrize("task", TASKS)
def test_modules_are_their_functions_of_all_samples(penalty, task):
    function, module, options, _ = penalty
    logits, target = data(task)
    loss = module(task=task, from_logits=True, **options)
    expected = function(logits, target, task=task, from_logits=True, **options)
    torch.testing.assert_close(loss(logits, target), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(loss))(logits, target), expected)
    assert not list(loss.parameters())
    assert f"task='{task}', from_logits=True" in repr(loss)
    if task == "binary":
        torch.testing.assert_close(loss(logits.reshape(2, 3, 4), target.reshape(2, 3, 4)), expected)
        return
    images = logits.reshape(2, 3, 4, C).movedim(-1, 1)
    of_images = target.reshape(2, 3, 4, -1).movedim(-1, 1) if task == "multilabel" else target.reshape(2, 3, 4)
    loss = module(task=task, from_logits=True, class_axis=1, **options)
    torch.testing.assert_close(loss(images, of_images), expected)


def test_settings_of_a_module_are_frozen(penalty):
    _, module, options, _ = penalty
    loss = module(task="binary", **options)
    with pytest.raises(AttributeError):
        loss.penalty.n_bins = 3
    with pytest.raises(AttributeError):
        loss.input_format.from_logits = True


def _compiled():
    """A few; the others take long."""
    for name in PENALTIES:
        for task in TASKS:
            quick = task == "multiclass" and name in ("soft l2", "mmce weighted", "canonical")
            yield pytest.param(name, task, marks=() if quick else pytest.mark.extended)


@pytest.mark.parametrize(("name", "task"), list(_compiled()))
def test_modules_compile_whole_and_there_a_bad_row_gives_nan(name, task):
    torch.compiler.reset()
    _, module, options, _ = PENALTIES[name]
    loss = module(task=task, from_logits=True, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, target = data(task, dtype=torch.float32)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, expected = compiled(a, target), loss(b, target)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(a.grad, b.grad)
    logits[3] = torch.nan
    assert compiled(logits, target).isnan()
    with pytest.raises(ValueError, match="`preds` must not hold NaN"):
        loss(logits, target)


@pytest.mark.parametrize("cls", [tc.SKCELoss, tc.CanonicalLoss, tc.MMCELoss])
def test_instances_with_equal_arguments_share_what_was_compiled(cls):
    torch.compiler.reset()
    logits, target = data("multiclass")
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    losses = [cls(task="multiclass", from_logits=True, bandwidth=width) for width in (0.5, 0.5, 0.5, 0.25)]
    for loss, n_graphs in zip(losses, (1, 1, 1, 2), strict=True):
        torch.compile(loss, fullgraph=True, backend=count)(logits, target)
        assert len(graphs) == n_graphs


@pytest.mark.parametrize("task", TASKS)
def test_nothing_waits_for_the_device(penalty, task):
    """On the meta device there are no values, so that whoever looks at one fails."""
    _, module, options, _ = penalty
    logits, target = (tensor.to("meta") for tensor in data(task, dtype=torch.float32))
    weights = torch.ones(24, device="meta")
    for policy in ("raise", "drop"):
        loss = module(task=task, from_logits=True, ignore_index=-100, nan_policy=policy, **options)
        leaf = logits.clone().requires_grad_()
        loss(leaf, target, weights=weights).backward()
        assert leaf.grad.shape == logits.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types_are_read_as_they_are_and_autocast_changes_nothing(penalty, dtype):
    _, module, options, _ = penalty
    loss = module(task="multiclass", from_logits=True, **options)
    logits, target = data("multiclass", dtype=dtype)
    exact = loss(logits.double(), target)
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    value.backward()
    assert value.dtype == torch.float32
    assert leaf.grad.dtype == dtype
    assert leaf.grad.isfinite().all()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(loss(logits, target), value.detach(), rtol=0, atol=0)


# Extremes.


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_are_finite_at_certain_predictions_and_of_single_samples(penalty, task, dtype):
    """All right, all wrong, saturated so that probabilities are 0 and 1, infinite, exactly even; one sample alone."""
    _, module, options, _ = penalty
    loss = module(task=task, from_logits=True, **options)
    for size in (0.0, 30.0, 6e4, math.inf):
        for n in (1, 2, 7):
            z = torch.full((n,) if task == "binary" else (n, C), -size, dtype=dtype)
            (z if task != "multiclass" else z[:, 0]).fill_(size)
            for label in (0, 1):
                target = torch.full((n,) if task != "multilabel" else (n, C), label)
                leaf = z.clone().requires_grad_()
                value = loss(leaf, target)
                value.backward()
                assert value.isfinite(), (size, n, label)
                assert leaf.grad.isfinite().all(), (size, n, label)
    probs = torch.tensor([0.0, 1.0, 1.0, 0.5] if task == "binary" else [[1.0, 0, 0, 0]] * 4, dtype=dtype)
    leaf = probs.requires_grad_()
    target = torch.tensor([0, 1, 0, 1])
    module(task=task, **options)(leaf, target if task != "multilabel" else target.expand(4, 4)).backward()
    assert leaf.grad.isfinite().all()


def test_certain_logits_are_what_certain_probabilities_are():
    """Infinite ones too, also of tasks that are read as two classes."""
    logits, probs = torch.tensor([math.inf, -math.inf, 0.0]), torch.tensor([1.0, 0.0, 0.5])
    target = torch.tensor([0, 1, 1])
    for _, module, options, _ in PENALTIES.values():
        found = module(task="binary", from_logits=True, **options)(logits, target)
        torch.testing.assert_close(found, module(task="binary", **options)(probs, target))


@pytest.mark.parametrize("task", TASKS)
def test_nothing_that_counts_gives_nan(penalty, task):
    _, module, options, _ = penalty
    logits, target = data(task)
    loss = module(task=task, from_logits=True, **options)
    assert loss(logits[:0], target[:0]).isnan()
    assert loss(logits, target, weights=torch.zeros(24)).isnan()


def test_a_narrow_kernel_of_many_samples_is_that_of_all_pairs():
    """In one pass over sorted confidences, where exponentials of them run over hundreds of orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3000, generator=generator, dtype=torch.float64)
    p[:300] = p[300:600]
    y = torch.randint(0, 2, (3000,), generator=generator)
    for bandwidth in (0.001, 0.03, 5.0):
        kernel = ((p[:, None] - p).abs() / -bandwidth).exp()
        expected = ((y - p) @ kernel @ (y - p)).sqrt() / 3000
        torch.testing.assert_close(tc.mmce(p, y, task="binary", bandwidth=bandwidth), expected, rtol=1e-11, atol=0)


WRONG = [
    (partial(tc.soft_binned_ece, temperature=0.0), ValueError, "`temperature` must be finite and above 0, got 0.0"),
    (partial(tc.soft_binned_ece, temperature="cold"), TypeError, "`temperature` must be a number, got 'cold'"),
    (partial(tc.soft_binned_ece, norm="max"), ValueError, "`norm` must be one of 'l1', 'l2', got 'max'"),
    (partial(tc.soft_binned_ece, n_bins=0), ValueError, "`n_bins` must be at least 1, got 0"),
    (partial(tc.mmce, bandwidth=1e-4), ValueError, "`bandwidth` must be finite and at least 0.001, got 0.0001"),
    (partial(tc.mmce, weighted="yes"), TypeError, "`weighted` must be True or False, got 'yes'"),
    (partial(tc.mmce, reduction="classwise"), ValueError, "`reduction` must be one of 'positive_class', 'top_label'"),
    (partial(tc.mmce, average=None), ValueError, "`average` must be 'macro' where there is a single value"),
]


@pytest.mark.parametrize(("function", "error", "message"), WRONG)
def test_wrong_settings(function, error, message):
    with pytest.raises(error, match=message):
        function(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), task="binary")


def test_wrong_tasks_of_functions_and_modules():
    for make in (tc.SoftBinnedECELoss, tc.MMCELoss, tc.ECELoss):
        with pytest.raises(ValueError, match="`task` must be one of 'binary', 'multiclass', 'multilabel', got 'any'"):
            make(task="any")
        with pytest.raises(ValueError, match="Pass from_logits=True"):
            make(task="binary")(torch.tensor([0.2, 7.0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="`task` must be one of"):
        tc.mmce(torch.tensor([0.2]), torch.tensor([0]), task="any")


# What they are for.


def samples(n, seed):
    """Labels drawn by a linear model that nobody can predict better than two times of three."""
    weights = torch.randn(20, C, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=generator)
    return x, torch.multinomial((1.8 * x @ weights / 20**0.5).softmax(-1), 1, generator=generator).squeeze(-1)


def held_out(penalty=None, strength=0.0):
    """ECE and accuracy on new samples of a small net that is trained until it knows the few it has by heart."""
    (x, y), (new_x, new_y) = samples(400, seed=1), samples(4000, seed=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, C))
        batches = [batch for _ in range(30) for batch in torch.randperm(400).split(100)]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for batch in batches:
        logits = net(x[batch])
        loss = cross_entropy(logits, y[batch])
        if penalty is not None:
            loss = loss + strength * penalty(logits, y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = net(new_x)
    options = {"task": "multiclass", "from_logits": True}
    return float(tc.ece(logits, new_y, **options)), float(tc.accuracy(logits, new_y, **options))


@pytest.mark.parametrize(
    ("make", "strength"),
    [
        (tc.SoftBinnedECELoss, 1),
        (partial(tc.SoftBinnedECELoss, norm="l1"), 2),
        (tc.MMCELoss, 4),
        (partial(tc.MMCELoss, weighted=True), 0.5),
        (tc.CanonicalLoss, 2),
        (tc.SKCELoss, 30),
    ],
)
def test_a_penalty_lowers_held_out_ece_at_equal_accuracy(make, strength):
    """Cross-entropy alone ends over-confident by 23 points; a standard error of the accuracy is 0.8 of one."""
    ece, accuracy = held_out()
    with_penalty, its_accuracy = held_out(make(task="multiclass", from_logits=True), strength)
    assert ece > 0.2
    assert with_penalty < 0.8 * ece
    assert its_accuracy > accuracy - 0.016
