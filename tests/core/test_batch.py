"""States after a batch in one pass: plain torch and Triton against the conversion of batches of any kind."""

import itertools
from functools import partial

import pytest
import torch
from helpers.operations import operations
from helpers.triton import INTERPRETED, NEEDS_TRITON, assert_compiles, needs_compiler, poison
from processes import run_again_in_tritons_interpreter, run_python

import torchcalib as tc
from torchcalib.core.batch import Batch, error_of_batch, samples_of, states_after

# The interpreter computes with numpy, which warns about values that a kernel discards by `where`.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow|All-NaN):RuntimeWarning")
TRITON = pytest.param(("triton", "cpu"), id="triton-cpu", marks=NEEDS_TRITON)
if not INTERPRETED:
    TRITON = pytest.param(("triton", "cuda"), id="triton-cuda", marks=[NEEDS_TRITON, pytest.mark.cuda])
of_backends = pytest.mark.parametrize("backend", [pytest.param(("torch", "cpu"), id="torch-cpu"), TRITON])
of_tasks = pytest.mark.parametrize("task", ["binary", "multiclass"])
OF_NAMES = {"float": torch.float64, "half": torch.bfloat16, "single": torch.float32}
N, CLASSES = 150, 5  # more rows than one program reads


def metrics_of(task, **options):
    """Return metrics with all sums, and bins for one and for two programs."""
    options |= {"task": task, "num_classes": CLASSES} if task == "multiclass" else {"task": task}
    errors = [tc.ECE(n_bins=20, **options), tc.RMSCE(n_bins=7, **options), tc.ECE(n_bins=20, **options)]
    scores = [each(**options) for each in (tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy)]
    more = [tc.ECE(mode="top_label", **options)] if task == "binary" else []
    return [*errors, *scores, *more]


def eight(task, **options):
    """Return eight metrics of one collection."""
    options |= {"task": task, "num_classes": 1000} if task == "multiclass" else {"task": task}
    return [each(**options) for each in (tc.ECE, tc.MCE, tc.RMSCE, tc.ESCE, tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy)]


def rows(task, from_logits, dtype=torch.float64, n=N, n_classes=CLASSES):
    """Return predictions and labels, some of which are invalid, extreme, or on the edge of a bin."""
    generator = torch.Generator().manual_seed(0)
    shape = (n, n_classes) if task == "multiclass" else (n,)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    target = torch.randint(0, n_classes if task == "multiclass" else 2, (n,), generator=generator)
    values = logits if from_logits else logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
    if n > 50:
        target[5], target[6] = 9, -7
        values[20] = torch.nan
        if not from_logits:
            values[21] = values[21] + 1
        if task == "binary":
            values[30:37] = torch.tensor([0, 0.5, 1, 0.05, 0.55, 0, 1]) if not from_logits else 0.0
            target[30:37] = torch.tensor([0, 1, 1, 0, 0, 1, 0])
        elif from_logits:
            values[30, 2], values[31], values[32, 1:3] = torch.inf, -torch.inf, torch.inf
            values[33, 1:] = -torch.inf
        else:
            values[30] = torch.tensor([0.0, 1, 0, 0, 0])
            values[31] = torch.tensor([0.4, 0.4, 0.2, 0, 0])
    return values.to(dtype), target


def weights_of(kind, n=N):
    generator = torch.Generator().manual_seed(1)
    if kind is None:
        return None
    if kind == "counts":
        return torch.randint(0, 3, (n,), generator=generator)
    weights = torch.rand(n, generator=generator)
    weights[[5, 20, 40, 41, 42, 43]] = torch.tensor([0, 0, torch.nan, -1, 1e-200, torch.inf])
    return weights


def converted(metrics, preds, target, weights):
    """Return the states after a batch by the conversion of batches of any kind."""
    after = []
    for metric in metrics:
        p = metric.input_format.read(preds, target, weights, batch_shape=(), drop_invalid=True)
        after.append(metric.kind.add(metric.state, metric.kind.from_predictions(p)))
    return after


def after(metrics, preds, target, weights, backend):
    """Return the states after a batch in one pass."""
    name, device = backend
    columns = [x if x is None else x.to(device) for x in (preds, target, weights)]
    how, states = metrics[0].input_format, [metric.state.to(device) for metric in metrics]
    found = states_after(how, [metric.kind for metric in metrics], states, *columns, name)
    return found if found is None else [state.cpu() for state in found]


@pytest.mark.extended
@NEEDS_TRITON
@pytest.mark.skipif(INTERPRETED, reason="this is the fresh process")
def test_in_the_interpreter():
    run_again_in_tritons_interpreter(__file__)


CASES = [(None, None, "float"), (None, -7, "single"), ("counts", None, "single"), ("importance", 1, "float"),
         ("importance", None, "half"), (None, None, "half")]  # fmt: skip


@of_backends
@of_tasks
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("weights", "ignore_index", "dtype"), CASES)
def test_states_are_those_of_the_conversion(task, from_logits, weights, ignore_index, dtype, backend, monkeypatch):
    poison(monkeypatch, "empty")
    preds, target = rows(task, from_logits, OF_NAMES[dtype])
    given = preds, target, weights_of(weights)
    metrics = metrics_of(task, from_logits=from_logits, ignore_index=ignore_index)
    # Statistics of narrow rows are sums of float32 numbers.
    bound = 1e-12 if task == "binary" or dtype == "float" else 3e-6
    for _ in range(2):
        expected, found = converted(metrics, *given), after(metrics, *given, backend)
        for metric, state, there in zip(metrics, found, expected, strict=True):
            torch.testing.assert_close(state, there, rtol=bound, atol=bound)
            metric.state = there


@of_backends
@of_tasks
def test_layouts_and_dtypes_of_columns_do_not_change_states(task, backend):
    metrics = metrics_of(task)
    preds, target = rows(task, False, n=40)
    expected = after(metrics, preds, target, None, backend)
    every_second = torch.stack((preds, preds), 1)[:, 0]
    for same in (every_second, preds.movedim(0, -1).contiguous().movedim(-1, 0)):
        for labels in (target.to(torch.uint8), target.int(), torch.stack((target, target), 1)[:, 0]):
            for state, there in zip(after(metrics, same, labels, None, backend), expected, strict=True):
                torch.testing.assert_close(state, there, rtol=1e-12, atol=1e-12)
    if task == "binary":
        for state, there in zip(after(metrics, preds, target.bool(), None, backend), expected, strict=True):
            assert torch.equal(state, there)


@of_backends
def test_class_first_volumes_are_read(backend):
    values, target = rows("multiclass", True, n=48)
    images = values.view(2, 4, 6, CLASSES).movedim(-1, 1)
    how = {"from_logits": True}
    expected = converted(metrics_of("multiclass", **how), values, target, None)
    found = after(metrics_of("multiclass", class_axis=1, **how), images, target.view(2, 4, 6), None, backend)
    for state, there in zip(found, expected, strict=True):
        torch.testing.assert_close(state, there, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", [TRITON])
@of_tasks
def test_triton_gives_the_same_bits_in_every_call(task, backend):
    given = *rows(task, True), weights_of("importance")
    first, second = (after(metrics_of(task, from_logits=True), *given, backend) for _ in range(2))
    assert all(map(torch.equal, first, second))


@of_backends
@of_tasks
def test_values_of_a_batch_are_those_of_a_new_metric(task, backend):
    given = *rows(task, True, n=40), torch.rand(40)
    for metric in metrics_of(task, from_logits=True):
        metric.update(*given)
        before, batch = metric.state, metric(*given)
        value, state = value_and_state(metric, before, *given, backend)
        torch.testing.assert_close(value, batch, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, metric.state, rtol=1e-12, atol=1e-12)


def value_and_state(metric, before, preds, target, weights, backend):
    """Return the value of a batch, and the state after it, as `forward` computes them on an accelerator."""
    name, device = backend
    columns = [x if x is None else x.to(device) for x in (preds, target, weights)]
    states = [None, before.to(device)]
    batch, state = states_after(metric.input_format, [metric.kind] * 2, states, *columns, name)
    return metric._value(metric.kind.of_batch(batch)).cpu(), state.cpu()


# A penalty, kind of weights, ignored label and dtype. Pairs of class vectors have no second derivatives.
PENALTIES = [
    (tc.losses.ECELoss, None, None, "float"),
    (partial(tc.losses.ECELoss, mode="top_label"), "counts", 1, "single"),
    (partial(tc.losses.ECELoss, right=True), "counts", None, "half"),
    (partial(tc.losses.ECELoss, n_bins=20, mode="top_label"), None, None, "half"),
    (partial(tc.losses.SoftBinnedECELoss, n_bins=7), None, 1, "float"),
    (partial(tc.losses.SoftBinnedECELoss, norm="l1", mode="top_label", temperature=1e-3), "counts", None, "single"),
    (partial(tc.losses.SoftBinnedECELoss, n_bins=100), None, None, "float"),
    (partial(tc.losses.SoftBinnedECELoss, n_bins=200), "importance", None, "float"),  # more bins than a kernel takes
    (tc.losses.MMCELoss, "importance", 1, "float"),
    (partial(tc.losses.MMCELoss, weighted=True, mode="top_label", bandwidth=0.05), "counts", None, "single"),
    (partial(tc.losses.MMCELoss, weighted=True), None, None, "half"),
]
OF_VECTORS = [
    (partial(tc.losses.CanonicalLoss, bandwidth=0.1), "counts", 1, "float"),
    (partial(tc.losses.CanonicalLoss, p=1), None, None, "single"),
    (tc.losses.CanonicalLoss, None, None, "half"),
    (partial(tc.losses.SKCELoss, bandwidth=0.2), "importance", 1, "float"),
    (partial(tc.losses.SKCELoss, kernel="gaussian", bandwidth=0.3), "counts", None, "single"),
    (tc.losses.SKCELoss, None, None, "half"),
]


@pytest.mark.parametrize("backend", [TRITON])
@of_tasks
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("make", "weights", "ignore_index", "dtype"), PENALTIES + OF_VECTORS)
def test_penalty_and_gradient_are_those_of_the_conversion(
    make, weights, ignore_index, dtype, task, from_logits, backend, monkeypatch
):
    poison(monkeypatch, "empty")
    penalty = make(task, from_logits=from_logits, ignore_index=ignore_index)
    has_second_derivatives = (make, weights, ignore_index, dtype) in PENALTIES
    n = N if has_second_derivatives else 60  # the interpreter is slow for pairs
    preds, target = rows(task, from_logits, OF_NAMES[dtype], n=n)
    w = weights_of(weights, n=n)
    for invalid in (5, 6, 20, 21, 31):
        preds[invalid], target[invalid] = preds[0], target[0]
    if ignore_index is not None:
        preds[7], target[7] = torch.nan, ignore_index
    if w is not None:
        w[20], w[40:44], w[3], preds[3] = 1, 1, 0, torch.nan
    fast = partial(penalty_of, penalty, backend)
    found, expected = (value_and_gradient(each, preds, target, w) for each in (fast, penalty))
    bound = {"half": 2e-2, "single": 1e-5, "float": 1e-12}[dtype]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=bound, atol=bound / 100)
    few, labels = rows(task, from_logits, n=3)
    if has_second_derivatives:
        second, expected = (
            torch.autograd.functional.hessian(lambda x, each=each: each(x, labels, None), few)
            for each in (fast, penalty)
        )
        torch.testing.assert_close(second, expected)
    for n in (1, 2):
        found, expected = (value_and_gradient(each, few[:n], labels[:n], None) for each in (fast, penalty))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.cpu(), y, equal_nan=True)
    target[0] = 9
    assert fast(preds, target, w).isnan() or (w is not None and w[0] == 0)
    assert fast(few, labels, torch.zeros(3, dtype=torch.int64)).isnan()


@pytest.mark.parametrize("backend", [TRITON])
def test_many_confidences_are_sorted(backend, monkeypatch):
    preds, target = rows("binary", True, n=40)
    penalty = tc.losses.MMCELoss("binary", from_logits=True)
    given = partial(penalty_of, penalty, backend), preds, target, None
    paired = value_and_gradient(*given)
    monkeypatch.setattr("torchcalib.ops.penalties.options._MAX_PAIRED", 39)
    monkeypatch.setattr("torchcalib.ops.penalties.triton.embedding_error", None)
    for x, y in zip(value_and_gradient(*given), paired, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def penalty_of(penalty, backend, preds, target, weights):
    """Return the penalty of a batch, as a `PenaltyLoss` computes it on an accelerator."""
    name, device = backend
    columns = [x if x is None else x.to(device) for x in (preds, target, weights)]
    return penalty.penalty.of_batch(Batch(penalty.input_format, *columns, name))


@pytest.mark.parametrize("backend", [TRITON])
def test_other_penalties_are_computed_from_the_conversion(backend):
    preds, target = rows("multiclass", True, n=40)
    for penalty in (
        tc.losses.MMCELoss("multiclass", from_logits=True, mode="classwise"),
        tc.losses.SoftBinnedECELoss("multiclass", from_logits=True, nan_policy="drop"),
        tc.losses.CanonicalLoss("multiclass", from_logits=True, bandwidth="likelihood"),
        tc.losses.SKCELoss("multiclass", from_logits=True, bandwidth="median"),
    ):
        assert penalty_of(penalty, backend, preds, target, None) is None
    penalty = tc.losses.MMCELoss("multiclass", from_logits=True)
    assert penalty_of(penalty, backend, preds, preds.softmax(-1), None) is None
    assert penalty_of(penalty, backend, preds, target, torch.ones(40).requires_grad_()) is None
    canonical = tc.losses.CanonicalLoss("multiclass", from_logits=True)  # which rejects fractions as weights
    assert penalty_of(canonical, backend, preds, target, torch.ones(40)) is None
    many = torch.zeros(20_000, CLASSES)
    assert penalty_of(canonical, backend, many, torch.zeros(20_000, dtype=torch.int64), None) is None


def value_and_gradient(penalty, preds, *others):
    preds = preds.clone().requires_grad_()
    value = penalty(preds, *others)
    return value.detach(), *torch.autograd.grad(3 * value, preds)


ERRORS = [(tc.ECE, None, None, "float"), (tc.RMSCE, "importance", 1, "single"), (tc.MCE, "counts", None, "half"),
          (tc.MeanBinError, None, -7, "float"), (tc.ESCE, "importance", None, "float"),
          (partial(tc.RMSCE, debiased=True, n_bins=5), "importance", None, "float"),
          (partial(tc.ECE, debiased=True, n_bins=5), "counts", 1, "float"),
          (tc.NLL, "importance", 1, "float"), (tc.BrierScore, None, None, "half"), (tc.ECD, "counts", None, "float"),
          (tc.BrierScore, "importance", None, "float"), (tc.NLL, None, -7, "single")]  # fmt: skip


@pytest.mark.parametrize("backend", [TRITON])
@of_tasks
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("make", "weights", "ignore_index", "dtype"), ERRORS)
def test_values_with_gradient_and_states_are_those_of_the_conversion(
    make, weights, ignore_index, dtype, task, from_logits, backend
):
    given = *rows(task, from_logits, OF_NAMES[dtype], n=60), weights_of(weights, n=60)
    metric = make(task, num_classes=CLASSES if task == "multiclass" else None, from_logits=from_logits,
                  ignore_index=ignore_index)  # fmt: skip
    for _ in range(2):
        (after,) = converted([metric], *given)
        found, expected = [
            (value.detach(), *torch.autograd.grad(3 * value, leaf), *state)
            for leaf, value, *state in (of_batch(metric, *given, each) for each in (backend, None))
        ]
        bound = {"half": 2e-2, "single": 1e-5, "float": 1e-12}[dtype]
        invalid = given[0].isnan() if task == "binary" else given[0].isnan().any(-1, keepdim=True)
        expected[1].masked_fill_(invalid, 0)  # for which the conversion can give 0 * NaN
        for x, y in zip(found[:2], expected, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=bound, atol=bound / 100)
        torch.testing.assert_close(found[2].cpu(), after, rtol=bound / 100, atol=bound / 100)
        metric.state = after


def of_batch(metric, preds, target, weights, backend):
    """Return predictions that require a gradient, their value, and with a backend the state after them."""
    if backend is None:
        leaf = preds.clone().requires_grad_()
        return leaf, metric._value_of_batch(metric.input_format, leaf, target, weights)
    name, device = backend
    leaf, *columns = [x if x is None else x.to(device) for x in (preds, target, weights)]
    leaf = leaf if leaf.requires_grad else leaf.clone().requires_grad_()
    how = metric.input_format, metric.kind, metric.estimator.formula.norm, metric.state.to(device)
    return leaf, *error_of_batch(*how, leaf, *columns, metric._value_of_batch, name)


SAMPLES = [(None, None, "float"), (-7, "top_label", "single"), (None, "top_label", "half"), (1, None, "single")]
SAMPLES += [(None, "classwise", "float"), (1, "classwise", "half")]


@pytest.mark.parametrize("backend", [TRITON])
@of_tasks
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("ignore_index", "mode", "dtype"), SAMPLES)
def test_samples_are_those_of_the_conversion(task, from_logits, ignore_index, mode, dtype, backend):
    preds, target = rows(task, from_logits, OF_NAMES[dtype])
    how = {"num_classes": CLASSES} if task == "multiclass" else {}
    mode = None if (mode, task) == ("classwise", "binary") else mode
    metric = tc.KS(task, from_logits=from_logits, ignore_index=ignore_index, mode=mode, **how)
    p = metric.input_format.read(preds, target, batch_shape=(), drop_invalid=True)
    expected, found = metric.kind.from_predictions(p), samples(metric, preds, target, backend)
    used = ~found.scores[0].isnan()
    kept = ~expected.scores[0].isnan()  # the conversion removes the rows of a single event
    torch.testing.assert_close(found.scores[0][used], expected.scores[0][kept], rtol=1e-12, atol=1e-12)
    assert torch.equal(found.outcomes[0][used], expected.outcomes[0][kept])
    assert found.scores[0].shape == found.outcomes[0].shape == (*metric.kind.leading_shape, N)
    assert not found.outcomes[0][~used].any()
    assert torch.equal(found.n_ignored, expected.n_ignored)
    assert found.weights[0].shape == expected.weights[0].shape


def samples(metric, preds, target, backend):
    name, device = backend
    found = samples_of(metric.input_format, metric.kind, preds.to(device), target.to(device), None, name)
    return type(found)(*([x.cpu() for x in column] for column in found[:3]), found.n_ignored.cpu())


def test_other_batches_are_converted():
    binary, torch_backend = metrics_of("binary"), ("torch", "cpu")
    preds, target = rows("binary", False, n=40)
    assert after(binary, preds, target, None, ("auto", "cpu")) is None
    assert after(binary, preds.requires_grad_(), target, None, torch_backend) is None
    preds = preds.detach()
    assert after(binary, preds, target.double(), None, torch_backend) is None
    assert after(binary, preds[:0], target[:0], None, torch_backend) is None
    assert after(metrics_of("binary", nan_policy="drop"), preds, target, None, torch_backend) is None
    kolmogorov_smirnov = tc.KS(task="binary")
    states = [kolmogorov_smirnov.kind], [kolmogorov_smirnov.state]
    assert states_after(kolmogorov_smirnov.input_format, *states, preds, target, None, "torch") is None
    values, target = rows("multiclass", False, n=40)
    assert after([tc.ECE(num_classes=CLASSES, mode="classwise")], values, target, None, torch_backend) is None
    assert after(metrics_of("multiclass"), values, (9 * values).long(), None, torch_backend) is None


def test_shapes_and_types_are_checked():
    metrics = metrics_of("multiclass")
    values, target = rows("multiclass", False, n=40)
    with pytest.raises(ValueError, match="`target` must have shape"):
        after(metrics, values, target[:-1], None, ("torch", "cpu"))
    with pytest.raises(ValueError, match="`preds` must have 5 entries on its class axis"):
        after(metrics, values[:, 1:], target, None, ("torch", "cpu"))
    with pytest.raises(ValueError, match="`weights` must have one value per sample"):
        after(metrics, values, target, target[1:], ("torch", "cpu"))


# Numbers of launches


@pytest.mark.parametrize("backend", [TRITON])
@of_tasks
@pytest.mark.parametrize("dtype", ["single", "half"])
def test_triton_needs_few_launches(task, dtype, backend, monkeypatch):
    preds, target = rows(task, True, OF_NAMES[dtype], n=20, n_classes=1000)
    ece, collection = eight(task, from_logits=True)[:1], eight(task, from_logits=True)
    for metrics, most in ((ece, 4), (collection, 6)):
        after(metrics, preds, target, None, backend)
        with launches(monkeypatch) as kernels, operations() as found:
            after(metrics, preds, target, None, backend)
        copies = 2 * (backend[1] == "cuda") * (len(metrics) + 2)  # of the arguments and the results
        assert kernels
        assert len(kernels) + len(found) - copies <= most, (kernels, found)


# Largest numbers of launches of `forward` and of operations without a kernel, binary and multi-class
LAUNCHES = {
    **dict.fromkeys((tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE, tc.MeanBinError), (3, 5)),
    **dict.fromkeys((partial(tc.ECE, debiased=True), partial(tc.RMSCE, debiased=True)), (3, 5)),
    **dict.fromkeys((tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy), (5, 7)),
}


@pytest.mark.parametrize("backend", [TRITON])
@of_tasks
def test_triton_needs_few_launches_for_values_penalties_and_samples(task, backend, monkeypatch):
    preds, target = (x.to(backend[1]) for x in rows(task, True, torch.float32, n=20, n_classes=1000))
    options = {"task": task, "from_logits": True} | ({"num_classes": 1000} if task == "multiclass" else {})
    monkeypatch.setattr("torchcalib.functional.binned.has_error_kernel", lambda _: True)
    few, labels = (preds if task == "binary" else preds[:, :40]).clone().requires_grad_(), target % 40
    preds.requires_grad_()
    jobs = []
    for name in ("ECELoss", "SoftBinnedECELoss", "MMCELoss", "CanonicalLoss", "SKCELoss"):
        fast = partial(penalty_of, getattr(tc.losses, name)(task, from_logits=True), backend)
        # The launches of the last two do not depend on the number of classes.
        given = (few, labels) if name in ("CanonicalLoss", "SKCELoss") else (preds, target)
        jobs.append((partial(gradient_of_penalty, fast, *given), 8))
    for make, most in LAUNCHES.items():
        metric = make(**options)
        given = metric, metric.state.to(backend[1]), preds.detach(), target, None, backend
        jobs.append((partial(value_and_state, *given), most[task == "multiclass"]))
        if hasattr(metric.estimator.formula, "norm"):
            jobs.append((partial(gradient_of_value, metric, preds, target, backend), 8))
    by_class = {"num_classes": 40, "mode": "classwise"} if task == "multiclass" else {}
    for metric, *given in (
        (tc.KS(task, from_logits=True), preds, target),
        (tc.AURC(task, from_logits=True), preds, target),
        (tc.TCE(task, from_logits=True, **by_class), few, labels),
    ):
        given = metric.input_format, metric.kind, given[0].detach(), given[1], None, backend[0]
        state = samples_of(*given)
        for _ in range(2):
            state = metric.kind.add(state, samples_of(*given))
        jobs.append((lambda add=metric.kind.add, state=state, given=given: add(state, samples_of(*given)), 12))
    for job, most in jobs:
        job()
        with launches(monkeypatch) as kernels, operations() as found:
            job()
        copies = 2 * (backend[1] == "cuda")  # of value and state
        assert kernels
        assert len(kernels) + len(found) - copies <= most, (kernels, found)


def gradient_of_penalty(penalty, preds, target):
    return torch.autograd.grad(penalty(preds, target, None), preds)


def gradient_of_value(metric, preds, target, backend):
    leaf, value, _ = of_batch(metric, preds, target, None, backend)
    assert value.requires_grad == (type(metric) is not tc.Accuracy)
    return torch.autograd.grad(value, leaf) if value.requires_grad else None


def launches(monkeypatch):
    """Return a context in which starts of Triton kernels are recorded, without the operations of the interpreter."""
    from contextlib import contextmanager

    from torch.utils._python_dispatch import _disable_current_modes

    @contextmanager
    def recorded():
        names = []
        if INTERPRETED:
            from triton.runtime.interpreter import GridExecutor as Launcher
        else:
            from triton.runtime.jit import JITFunction as Launcher
        name = "__call__" if INTERPRETED else "run"
        start = getattr(Launcher, name)

        def counted(self, *arguments, **options):
            names.append(getattr(self, "fn", self).__name__)
            with _disable_current_modes():
                return start(self, *arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Launcher, name, counted)
            yield names

    return recorded()


TYPES = {"scores": "*fp64", "parts": "*fp64", "states": "*fp64", "factors": "*fp64", "found": "*fp64", "tops": "*i64"}
TYPES |= {"tiles": "*i64", "terms": "*i64", "weights": "*fp32", "target": "*i64"}
TYPES |= dict.fromkeys(("stride", "label_stride", "weight_stride", "ignore"), "i64")
TYPES |= dict.fromkeys(("n", "size", "n_sums", "n_terms", "n_parts"), "i32")
READ = {"chunk": 32, "bins": 16, "weighted": True, "has_ignore": True, "squared": True, "drops_invalid": False}
READ |= {"debiased": True}
TYPES |= {"slopes": "*fp64", "upstream": "*fp32", "out": "*fp64"}
TYPES |= dict.fromkeys(("confidence", "weight", "grads", "temperature", "bandwidth", "of_events", "factors"), "*fp64")
TYPES |= dict.fromkeys(("sums", "mean", "unit"), "*fp64")
NUMBERS = "probs", "logs", "normaliser", "totals", "copies", "log_total", "inner", "scale", "factor"
TYPES |= dict.fromkeys(NUMBERS, "*fp64") | {"n_ranges": "i32", "tolerance": "fp32"}
TYPES |= {"score": "*fp32", "outcome": "*u8", "n_ignored": "*fp64", "n_classes": "i32"}
TYPES |= dict.fromkeys(("row_stride", "column_stride"), "i64")
TYPES |= dict.fromkeys(("n_bins", "n_new", "right", "of_top"), "i32")
ADD = {"at_once": 64, "block": 16}
KERNELS = [("_add", ADD), ("_log_odds", {"rows": 1, "block": 1024})]
KERNELS += [("_rank_classes", {**READ, "logits": logits, "rows": 32, "block": 32}) for logits in (True, False)]
KERNELS += [(name, {**READ, "binary": binary, "logits": logits}) for name, binary, logits in
            itertools.product(("_read", "_slope", "_fill_events", "_rank"), (True, False), (True, False))]  # fmt: skip
KERNELS += [("_fill_gradient", {"chunk": 128, "logits": logits}) for logits in (True, False)]
KERNELS += [
    (
        "_score_slope",
        {
            **READ,
            "binary": binary,
            "logits": binary,
            "of_log": -1,
            "of_square": 0,
            "of_entropy": 1.5,
            "of_confidence": 0,
        },
    )
    for binary in (True, False)
] + [("_fill_mean", {})]
OF_PENALTIES = [("_add_soft", {"chunk": 8, "bins": 128}), ("_fill_soft_gradient", {"chunk": 32, "bins": 16}),
                ("_add_pairs", {"chunk": 32}), ("_fill_embedding_error", {"weighted": True, "block": 128}),
                ("_fill_embedding_gradient", {"chunk": 128})]  # fmt: skip
OF_PAIRS = [("_fill_mean", {"of_pairs": True, "block": 1024}), ("_fill_means", {"tile": 16, "block": 32, "width": 256})]
OF_PAIRS += [("_add_similar", {"tile": 16, "block": 16, "laplacian": laplacian}) for laplacian in (True, False)]
for logits in (True, False):
    of_rows = {"logits": logits, "binary": not logits, "rows": 4, "block": 256}
    OF_PAIRS += [("_fill_vectors", {**READ, **of_rows, "with_density": logits}), ("_fill_gradient", of_rows)]
    of_tiles = {"logits": logits, "laplacian": logits, "tile": 16}
    OF_PAIRS += [("_fill_slopes", {**of_tiles, "block": 32, "width": 256})]
    OF_PAIRS += [("_fill_similar_slopes", {**of_tiles, "block": 16, "width": 32})]


@pytest.mark.extended
@needs_compiler
@NEEDS_TRITON
@pytest.mark.parametrize(("kernel", "constants"), KERNELS)
def test_kernel_compiles_without_a_device(kernel, constants, monkeypatch, tmp_path):
    types = {**TYPES, **dict.fromkeys(("values", "out"), "*bf16" if constants.get("binary") else "*fp64")}
    assert_compiles("batch.triton", kernel, types, constants, monkeypatch, tmp_path)


@pytest.mark.extended
@needs_compiler
@NEEDS_TRITON
@pytest.mark.parametrize(("kernel", "constants"), OF_PENALTIES)
def test_kernel_of_penalties_compiles_without_a_device(kernel, constants, monkeypatch, tmp_path):
    types = {**TYPES, **dict.fromkeys(("outcome", "weights", "out"), "*fp64"), "error": "*fp32"}
    assert_compiles("penalties.triton", kernel, types, constants, monkeypatch, tmp_path)


@pytest.mark.extended
@needs_compiler
@NEEDS_TRITON
@pytest.mark.parametrize(("kernel", "constants"), OF_PAIRS)
def test_kernel_of_pairs_compiles_without_a_device(kernel, constants, monkeypatch, tmp_path):
    types = {**TYPES, **dict.fromkeys(("values", "out", "mean"), "*bf16"), "parts": "*fp64", "p": "i32"}
    if kernel in ("_fill_means", "_fill_slopes"):
        types["mean"] = "*fp64"
    if kernel in ("_add_similar", "_fill_similar_slopes"):
        types["weights"] = "*fp64"
    assert_compiles("class_vectors.triton", kernel, types, constants, monkeypatch, tmp_path)


# torch.compile

COMPILED = """
import torch
import torchcalib as tc

torch._dynamo.config.error_on_recompile = True
for task, options in (("binary", {}), ("multiclass", {"num_classes": 5})):
    options = {"task": task, "from_logits": True, **options}
    g = torch.Generator().manual_seed(0)
    n_outputs = 1 if task == "binary" else 5
    model = torch.nn.Linear(3, n_outputs)
    for make in (
        tc.ECE, tc.NLL, tc.BrierScore, lambda **o: tc.CalibrationCollection([tc.ECE(**o), tc.NLL(**o), tc.ECD(**o)])
    ):
        metric, eager = make(**options), make(**options)
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def step(x, y):
            logits = model(x).squeeze(-1)
            metric.update(logits, y)
            return logits.square().mean()

        for _ in range(3):
            x, y = torch.randn(40, 3, generator=g), torch.randint(0, max(2, n_outputs), (40,), generator=g)
            step(x, y).backward()
            eager.update(model(x).squeeze(-1).detach(), y)
        found, expected = metric.compute(), eager.compute()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    step(x, y + 7)
    try:
        metric.compute()
    except ValueError as error:
        assert "with NaN, values out of range" in str(error), error
    else:
        raise AssertionError("invalid labels were accepted")
print("compiled")
"""


@pytest.mark.extended
def test_compiled_steps_with_updates_have_no_graph_break(tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    done = run_python(script)
    assert done.stdout == "compiled\n", done.stdout + done.stderr
