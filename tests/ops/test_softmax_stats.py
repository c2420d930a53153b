"""Row operation compared with its float64 formula: values, gradients, and bitwise reproducibility."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from helpers.kernels import BACKENDS, NUMBA, assert_same_on_any_number_of_threads, of_backends, of_either_input
from helpers.rows import close, definition, equal, layouts, rows_with_invalid_distributions, sample, with_gradient
from processes import quick_environment, run_together

from torchcalib.ops.bin_sums import class_bins
from torchcalib.ops.dispatch import implementation
from torchcalib.ops.softmax_stats import RowStatistics, rows

CLASSES = [1, 2, 3, 10, 17, 49, 257, 1000, 1001, 3000]  # 17 and 49 classes select other loops
# Pairs of every number of classes with kind of input and with dtype, not all triples
KINDS = [(c, (i + j) % 2 == 0, dtype) for i, c in enumerate(CLASSES)
         for j, dtype in enumerate((torch.float32, (torch.float16, torch.bfloat16)[i % 2]))]  # fmt: skip
KINDS += [(c, False, torch.float32) for c in CLASSES[::2]] + [(c, True, torch.float32) for c in CLASSES[1::2]]
INF = torch.inf
PROMISED = {"rtol": 2e-6, "atol": 1e-15}  # documented for float32 arithmetic in `rows`


@of_backends
@pytest.mark.parametrize(("n_classes", "from_logits", "dtype"), KINDS, ids=str)
def test_values_and_gradients_equal_float64(backend, n_classes, from_logits, dtype):
    values, target = sample(100, n_classes, from_logits, dtype)
    found = rows(values, target, from_logits=from_logits, backend=backend)
    close(found, definition(values, target, from_logits), **PROMISED)
    if dtype == torch.float32:
        wide = values.double() if from_logits else sample(100, n_classes, False, torch.float64)[0]
        close(
            rows(wide, target, from_logits=from_logits), definition(wide, target, from_logits), rtol=1e-12, atol=1e-15
        )
    # Each of the four scores alone, and all of them. The error is relative to the gradient of the row.
    for of in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0.3, -0.7, 0.5, 0.9)):
        wide = values.double().requires_grad_()
        expected = definition(wide, target, from_logits)
        sum(w * score.sum() for w, score in zip(of, expected[:4], strict=True)).backward()
        _, grad = with_gradient(values, target, from_logits, backend, of)
        assert grad.dtype == dtype
        error = (grad.double() - wide.grad).norm(dim=-1) / (wide.grad.norm(dim=-1) + 1e-9)
        # float16 cannot represent gradients of 1 / q. bfloat16 rounds once, to half a unit of 8 bits.
        bound = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: INF}[dtype]
        assert (error.nan_to_num() < bound).all(), of


@of_either_input
def test_formula_equals_the_definition_of_each_score(from_logits):
    values, target = sample(50, 7, from_logits, torch.float64)
    q = values.softmax(-1) if from_logits else values
    hit = torch.nn.functional.one_hot(target, 7)
    scores = (q * hit).sum(-1).log(), (q - hit).square().sum(-1), (q * q.log()).sum(-1), q.amax(-1)
    close(definition(values, target, from_logits), RowStatistics(*scores, q.argmax(-1)), rtol=1e-13, atol=1e-14)


@of_either_input
@of_backends
def test_confident_rows_have_accurate_scores(backend, from_logits):
    """For q_top = 1 - 1e-6 the scores use the sum of the other classes. 1 - q in float32 would have one digit."""
    rest = torch.tensor([1e-6, 1e-7, 3e-8], dtype=torch.float64)
    gap = ((1 - rest) / rest).log()
    target = torch.zeros(3, dtype=torch.int64)
    logits, q = torch.stack((torch.zeros(3), -gap.float()), -1), torch.stack((1 - rest.float(), rest.float()), -1)
    values = logits if from_logits else q
    found, grad = with_gradient(values, target, from_logits, backend, (1, 0, 0, 0))
    close(found, definition(values, target, from_logits), rtol=2e-6, atol=0)
    if from_logits:
        torch.testing.assert_close(grad[:, 0].double(), -torch.expm1(found.log_prob.detach()), rtol=4e-6, atol=0)


@of_backends
def test_equal_logits_give_exactly_1_over_c_and_the_first_class(backend):
    for n_classes in (2, 4, 5, 10, 1024):
        target = torch.tensor([0, n_classes - 1])
        found = rows(torch.full((2, n_classes), 1.5), target, from_logits=True, backend=backend)
        assert found.top.tolist() == [0, 0]
        torch.testing.assert_close(found.confidence, torch.full((2,), 1 / n_classes).double(), rtol=2e-6, atol=0)
        torch.testing.assert_close(found.squared_error, torch.full((2,), 1 - 1 / n_classes).double())
    # Must be exact, so that a confidence of 1/C is assigned to the bin of the edge i/B.
    for n_classes in range(1, 300) if backend in NUMBA else ():
        found = rows(torch.zeros(1, n_classes), torch.zeros(1).long(), from_logits=True, backend=backend)
        assert found.confidence.item() == 1 / n_classes


FLOATS = [("torch", torch.float64), *((backend, torch.float32) for backend in BACKENDS)]  # numba's loops are float32


@pytest.mark.parametrize(("backend", "dtype"), FLOATS, ids=str)
def test_infinite_logits_give_the_limit_and_masked_classes_have_no_effect(backend, dtype):
    given = [[INF, 0, INF, -INF], [0, INF, 5, 7], [0, -INF, 0, -INF], [0, -INF, 0, -INF], [-INF, 2, -INF, -INF]]
    given = torch.tensor([*given, [1, 2, -3, 4], [-INF] * 4], dtype=dtype)
    target, top = torch.tensor([2, 0, 2, 1, 1, 1, 1]), torch.tensor([0, 1, 0, 0, 1])
    log2 = torch.tensor(2.0).double().log().item()
    logs, squares = [-log2, -INF, -log2, -INF, 0], [0.5, 2, 0.5, 1.5, 0]
    entropies, largest = [-log2, 0, -log2, -log2, 0], [0.5, 1, 0.5, 0.5, 1]
    expected = RowStatistics(*torch.tensor([logs, squares, entropies, largest], dtype=torch.float64), top)
    finite = definition(given[5:6], target[5:6], True)
    for n_classes in (4, 30, 60, 1100):
        values = torch.nn.functional.pad(given, (0, n_classes - 4), value=-INF)
        found, grad = with_gradient(values, target, True, backend)
        close([x[:5] for x in found], expected, rtol=2e-6, atol=0)
        close([x[5:6] for x in found], finite, rtol=4e-6, atol=0)
        assert found.confidence[6].isnan()
        assert not grad[:2].any()  # finite logits have no effect on the limit
        # log q_h is -inf in row 3, and its gradient 1[h] - q. The squared error adds 2 q_k (q_k - 1[h] - 1/2).
        of_log, of_square = torch.tensor([[-0.5, 1, -0.5, 0], [0.25, 0, -0.25, 0]], dtype=torch.float64)
        torch.testing.assert_close(grad[3, :4].double(), 0.3 * of_log + 0.9 * of_square)
        assert grad[4, :4].tolist() == pytest.approx([0] * 4, abs=1e-15)


@of_backends
def test_probabilities_of_0_and_1_have_closed_form_scores_and_gradients(backend):
    values = torch.tensor([[0.0, 1, 0], [0, 1, 0], [0.5, 0.5, 0], [1e-45, 1, 1e-38]])
    target = torch.tensor([1, 0, 2, 0])
    found, grad = with_gradient(values, target, False, backend)
    expected = definition(values, target, False)
    log_prob = values.double().gather(-1, target.unsqueeze(-1)).squeeze(-1).log()
    close(found, expected._replace(log_prob=log_prob), rtol=2e-6, atol=1e-36)
    # 0.3/q_h, -1.4 (q - 1[h]), 0.5 (log q + 1) and 0.9 at the top class. Logarithms have gradient 0 at q = 0.
    assert grad[0].tolist() == pytest.approx([0, 0.3 + 0.5 + 0.9, 0], abs=1e-6)
    assert grad[1].tolist() == pytest.approx([1.4, -1.4 + 0.5 + 0.9, 0], abs=1e-6)
    half = -0.7 + 0.5 * (1 + torch.tensor(0.5).log().item())
    assert grad[2].tolist() == pytest.approx([half + 0.9, half, 1.4], abs=1e-6)


@of_backends
def test_first_of_several_maxima_is_the_top_class_also_beside_rows_of_nan(backend):
    values, target = sample(600, 10, True)
    values[3, [8, 9]], values[[5, 7]] = 20.0, torch.nan
    found = rows(values, target, from_logits=True, backend=backend)
    assert found.top[3] == 8
    assert ((found.top >= 0) & (found.top < 10)).all()
    others = ~values.isnan().any(1)
    assert torch.equal(found.top[others], values[others].argmax(1))


@of_backends
@of_either_input
def test_nan_and_invalid_labels_affect_only_their_row(backend, from_logits):
    nans = itertools.product(((700, 0), (700, 5), (700, 699), (10, 0), (10, 9)), (torch.nan, -torch.nan))
    for (n_classes, place), nan in nans:
        values, target = sample(9, n_classes, from_logits)
        spoiled = values.clone()
        spoiled[4, place] = nan
        found, grad = with_gradient(spoiled, target, from_logits, backend)
        assert all(score[4].isnan() for score in found[1:4])
        assert 0 <= found.top[4] < n_classes
        assert grad[4].isnan().any()
        clean = with_gradient(values, target, from_logits, backend)
        others = torch.arange(9) != 4
        equal_at(others, ([x[others] for x in found], grad[others]), clean)
    values, target = sample(5, 20, from_logits)
    clean, others = with_gradient(values, target, from_logits, backend), torch.arange(5) != 1
    for label in (-1, 20, -100, 2**40):
        spoiled = target.clone()
        spoiled[1] = label
        found, grad = with_gradient(values, spoiled, from_logits, backend)
        assert [score[1].isnan().item() for score in found[:4]] == [True, True, False, False]
        assert grad[1].isnan().all()
        equal([x[others] for x in found[:2]] + list(found[2:]), [x[others] for x in clean[0][:2]] + list(clean[0][2:]))
        assert torch.equal(grad[others], clean[1][others])


@of_backends
@of_either_input
def test_rows_without_incoming_gradient_have_gradient_0(backend, from_logits):
    values, target = sample(5, 20, from_logits)
    asked = torch.tensor([True, True, False, False, True])
    values[2], values[3, 4] = torch.nan, INF
    leaf = values.requires_grad_()
    found = rows(leaf, target, from_logits=from_logits, backend=backend)
    found.log_prob.masked_fill(~asked, 0).sum().backward()
    assert torch.equal((leaf.grad != 0).any(-1), asked)


# Bitwise reproducibility, as documented in `rows`


def equal_at(held, found, whole):
    """Check that scores and gradient of some rows are equal to those of the whole batch."""
    equal(found[0], [x[held] for x in whole[0]])
    assert torch.equal(found[1], whole[1][held])


PLACES = [(backend, dtype, c, (k + j) % 2 == 0) for k, c in enumerate((2, 10, 37, 1000, 3001))
          for j, (backend, dtype) in enumerate((*FLOATS, *((b, torch.bfloat16) for b in BACKENDS)))]  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype", "n_classes", "from_logits"), PLACES, ids=str)
def test_rows_have_the_same_bits_in_every_batch_order_and_layout(backend, dtype, n_classes, from_logits):
    """A row alone and in batches, in another order and memory layout, in any number of chunks and threads."""
    n = 331
    values, target = sample(n, n_classes, from_logits, dtype)
    whole = with_gradient(values, target, from_logits, backend)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    pieces = [slice(k, k + size) for size, end in ((1, 40), (2, 40), (100, n)) for k in range(0, end, size)]
    for held in [order, *pieces]:
        equal_at(held, with_gradient(values[held], target[held], from_logits, backend), whole)
    for name, same in layouts(values):
        assert torch.equal(same, values), name
        equal_at(slice(n), with_gradient(same, target, from_logits, backend), whole)


@of_backends
def test_rows_have_the_same_bits_on_any_number_of_threads(backend):
    values, target = sample(1500, 1000, True)
    long = values.flatten()[:1_000_000].view(1, -1)

    def read():
        found, grad = with_gradient(values, target, True, backend)
        alone = rows(long, target[:1], from_logits=True, backend=backend)
        many = rows(long.expand(3, -1), target[:1].expand(3), from_logits=True, backend=backend)
        equal(many, [x.expand(3) for x in alone])
        return *found, grad, *alone

    assert_same_on_any_number_of_threads(read)


OF_A_FORKED_PROCESS = """
import os, torch
from torchcalib.functional import ece

x, y = torch.randn(1024, 1000), torch.zeros(1024, dtype=torch.int64)
before = ece(x, y, task="multiclass", from_logits=True)
child = os.fork()
if child == 0:
    os._exit(not torch.equal(ece(x, y, task="multiclass", from_logits=True), before))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
def test_a_forked_process_computes_the_same_rows(tmp_path):
    """The threads of a process do not exist in a forked one, which must not wait for them."""
    script = tmp_path / "forks.py"
    script.write_text(OF_A_FORKED_PROCESS)
    codes, output = run_together([[script]])
    assert codes == [0], output


@pytest.mark.parametrize(
    ("from_logits", "unreadable"), [(True, [torch.nan, 1]), (True, [-INF, -INF]), (False, [-0.5, 1.5])]
)
def test_unused_rows_do_not_affect_derivatives_of_any_order(from_logits, unreadable):
    values, target = sample(2, 2, from_logits, torch.float64)
    values[1] = torch.tensor(unreadable)

    def value(x):
        return sum(score[0] for score in rows(x, target, from_logits=from_logits)[:4])

    for derivative in (torch.func.grad(value)(values), torch.func.hessian(value)(values)):
        assert derivative.isfinite().all()
        assert (derivative[1] == 0).all()


def test_float64_input_raises_an_error_for_class_bins_in_numba():
    values, target = sample(3, 4, True, torch.float64)
    found = rows(values, target, from_logits=True)
    for backend in NUMBA:
        with pytest.raises(ValueError, match="must be 'auto' or 'torch' for float64 on the CPU, got 'numba'"):
            class_bins(values, target, None, found, from_logits=True, n_bins=5, backend=backend)


@of_backends
@of_either_input
@pytest.mark.parametrize("n_classes", [1, 2, 10, 48, 49, 1500])
def test_float64_rows_are_exact(backend, from_logits, n_classes):
    """All errors are a few units of 1e-16, and grow with the logarithm of the number of classes at most."""
    values, target = sample(130, n_classes, from_logits, torch.float64, scale=10)
    if from_logits and n_classes > 2:
        values[1, 1:], values[2, 1], values[3, :2] = -INF, INF, INF
    values[4, 0] = torch.nan
    target[5] = n_classes
    found, gradient = with_gradient(values, target, from_logits, backend)
    wide = values.clone().requires_grad_()
    expected = definition(wide, target, from_logits)
    valid = [k for k in range(130) if k not in (4, 5)]
    for name in RowStatistics._fields:
        a, b = getattr(found, name)[valid], getattr(expected, name)[valid]
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15, msg=lambda text, name=name: f"{name}: {text}")
    assert found.neg_entropy[4].isnan()
    assert found.log_prob[5].isnan()
    weights = torch.tensor([0.3, -0.7, 0.5, 0.9], dtype=torch.float64)
    sum(w * x.sum() for w, x in zip(weights, expected[:4], strict=True)).backward()
    error = (gradient - wide.grad)[6:].norm(dim=-1)
    assert (error <= 1e-12 * wide.grad[6:].norm(dim=-1) + 1e-14).all()


@of_backends
@pytest.mark.parametrize("n_classes", [2, 20, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_statistics_do_not_depend_on_the_entropy(backend, n_classes, dtype):
    values, target = sample(130, n_classes, False, dtype)
    values[1, 0], values[2, 1], values[3] = torch.nan, -0.5, values[3] * 2
    for tolerance in (INF, 1e-3):
        given = {"from_logits": False, "tolerance": tolerance, "backend": backend}
        expected, found = rows(values, target, **given), rows(values, target, detail="squares", **given)
        valid = torch.arange(130) > (0 if tolerance < INF else 2)  # without tolerance, other backends may give q_h
        for name in ("log_prob", "squared_error", "confidence"):
            a, b = getattr(expected, name)[valid], getattr(found, name)[valid]
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)
        assert torch.equal(expected.top[4:], found.top[4:])


@of_backends
@pytest.mark.parametrize(("n_classes", "dtype"), [(3, torch.bfloat16), (1500, torch.float32)])
def test_invalid_probability_rows_give_nan_if_a_tolerance_is_given(backend, n_classes, dtype):
    """A valid row has numbers in [0, 1], whose sum is 1 within the tolerance."""
    q, target = rows_with_invalid_distributions(n_classes, dtype)
    for tolerance, broken in ((0.02, [1, 2, 3, 4, 5, 6]), (0.04, [3, 4, 5, 6])):
        scores = torch.stack(rows(q, target, from_logits=False, tolerance=tolerance, backend=backend)[:4]).isnan()
        assert torch.equal(scores.any(0), scores.all(0))
        assert scores.all(0).nonzero().squeeze(-1).tolist() == broken
    trusted, kept = rows(q, target, from_logits=False, backend=backend), [0, 1, 2, 4]
    assert trusted.confidence[kept].tolist() == q[kept].amax(-1).tolist()


@of_backends
@pytest.mark.parametrize("detail", ["label", "confidence"])
def test_fewer_statistics_have_the_documented_error_and_the_same_bits_in_every_batch(backend, detail):
    asked = torch.tensor([1.0, 0, 0, detail == "confidence"], dtype=torch.float64).unsqueeze(-1)

    def derivative(values, target):
        leaf = values.clone().requires_grad_()
        found = rows(leaf, target, from_logits=True, detail=detail, backend=backend)
        loss = found.log_prob.sum() + (found.confidence.sum() if detail == "confidence" else 0)
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(first.nan_to_num(), gradient.nan_to_num())
        return found.log_prob.detach(), gradient

    for n_classes in (2, 10, 60, 300):
        values, target = sample(40, n_classes, True)
        values[2], values[3, 1:], values[4, 1:], target[2:5] = 1e4, -INF, 150.0, 0
        wide = values.double().requires_grad_()
        expected = definition(wide, target, True)
        (asked * torch.stack(expected[:4])).sum().backward()
        log_prob, gradient = derivative(values, target)
        torch.testing.assert_close(log_prob, expected.log_prob.detach(), rtol=2e-6, atol=0)
        value = rows(values, target, from_logits=True, detail=detail, backend=backend).log_prob
        torch.testing.assert_close(value, expected.log_prob.detach(), rtol=2e-6, atol=0)
        assert ((gradient - wide.grad).norm(dim=-1) <= 1e-5 * wide.grad.norm(dim=-1) + 1e-15).all()
        assert torch.equal(derivative(values.T.contiguous().T, target)[1], gradient)
        for part in (slice(0, 1), slice(3, 5)):
            again = derivative(values[part], target[part])
            assert torch.equal(again[0], log_prob[part])
            assert torch.equal(again[1], gradient[part])
            alone = rows(values[part], target[part], from_logits=True, detail=detail, backend=backend).log_prob
            assert torch.equal(alone, value[part])
        spoiled, labels = values.clone(), target.clone()
        spoiled[1, 1], spoiled[5, 0], labels[6] = torch.nan, INF, n_classes
        log_prob, gradient = derivative(spoiled, labels)
        assert log_prob.isnan().nonzero().squeeze(-1).tolist() == [1, 6]
        assert gradient[[1, 6]].isnan().any(-1).all()
        assert not gradient[5].any()


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="`ru_maxrss` is in kB on Linux")
@of_backends
def test_forward_needs_less_than_10_mb_in_addition_to_its_outputs(backend):
    """A copy of the input of 100 MB would exceed the limit. A new process has no earlier peak of memory."""
    program = f"""
import resource, torch
from torchcalib.ops.softmax_stats import rows
from torchcalib.ops.bin_sums import class_bins, event_bins

def run(values):
    target = torch.zeros(len(values), dtype=torch.int64)
    options = {{"backend": {backend!r}}}
    found = rows(values, target, from_logits=True, **options)
    event_bins(found.confidence, found.top == target, n_bins=15, **options)
    class_bins(values, target, None, found, from_logits=True, n_bins=15, **options)

values = torch.randn(25_000, 1000)
run(values[:2000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(values)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=quick_environment(), capture_output=True, text=True, check=True)
    outputs = 25_000 * (4 * 8 + 8) * 3  # scores, bin sums of similar size, and their copies
    assert int(done.stdout) * 1024 < 10e6 + outputs


@of_either_input
@pytest.mark.parametrize("share", [0.05, 0.9])
@pytest.mark.parametrize("n_classes", [3, 17, 60])
@of_backends
def test_rows_at_places_have_the_statistics_of_a_copy_of_them(backend, n_classes, share, from_logits):
    values, target = sample(3000, n_classes, from_logits, torch.float32)
    keep = torch.rand(3000, generator=torch.Generator().manual_seed(0)) < share
    values[~keep], target[~keep] = torch.nan, -100
    values[keep.nonzero()[7]] = torch.eye(n_classes)[0].log() if from_logits else torch.eye(n_classes)[0]
    labels, places = target[keep].numpy(), keep.nonzero().squeeze(1).numpy()
    source, options = implementation("rows", backend), (from_logits, 1e-3, "entropy", None, None, 1)
    expected = source.labelled_rows(values[keep].numpy(), labels, *options)
    for layout in (values, values.T.contiguous().T):
        found = source.labelled_rows(layout.numpy(), labels, *options, places)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(x), torch.from_numpy(y), rtol=1e-12, atol=1e-12)
    bad = values.clone()
    bad[places[3], 1] = torch.nan
    assert source.labelled_rows(bad.numpy(), labels, *options, places) is None
