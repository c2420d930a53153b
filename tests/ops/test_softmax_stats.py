"""The row op against float64 formulas over whole tensors: values, gradients of any order, and bits that do not move."""

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from helpers.kernels import BACKENDS, NUMBA, assert_same_on_any_number_of_threads, of_backends, of_either_input
from helpers.rows import close, equal, layouts, oracle, rows_with_invalid_distributions, sample, with_gradient
from processes import quick_environment

from torchcalib.ops.bin_sums import class_bins
from torchcalib.ops.softmax_stats import Rows, rows

CLASSES = [1, 2, 3, 10, 17, 49, 257, 1000, 1001, 3000]  # 17 and 49: no longer side by side, no longer abreast
# Every number of classes with logits and with probabilities, and with every dtype: pairs, not all triples.
KINDS = [(c, (i + j) % 2 == 0, dtype) for i, c in enumerate(CLASSES)
         for j, dtype in enumerate((torch.float32, (torch.float16, torch.bfloat16)[i % 2]))]  # fmt: skip
KINDS += [(c, False, torch.float32) for c in CLASSES[::2]] + [(c, True, torch.float32) for c in CLASSES[1::2]]
INF = torch.inf
PROMISED = {"rtol": 2e-6, "atol": 1e-15}  # of float32 arithmetic, in the docstring of `rows`


@of_backends
@pytest.mark.parametrize(("n_classes", "from_logits", "dtype"), KINDS, ids=str)
def test_values_and_gradients_are_those_of_float64(backend, n_classes, from_logits, dtype):
    values, target = sample(100, n_classes, from_logits, dtype)
    found = rows(values, target, from_logits=from_logits, backend=backend)
    close(found, oracle(values, target, from_logits), **PROMISED)
    if dtype == torch.float32:
        wide = values.double() if from_logits else sample(100, n_classes, False, torch.float64)[0]
        close(rows(wide, target, from_logits=from_logits), oracle(wide, target, from_logits), rtol=1e-12, atol=1e-15)
    # Each of the four scores alone, and all of them; the error is relative to the gradient of the row.
    for of in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0.3, -0.7, 0.5, 0.9)):
        wide = values.double().requires_grad_()
        expected = oracle(wide, target, from_logits)
        sum(w * score.sum() for w, score in zip(of, expected[:4], strict=True)).backward()
        _, grad = with_gradient(values, target, from_logits, backend, of)
        assert grad.dtype == dtype
        error = (grad.double() - wide.grad).norm(dim=-1) / (wide.grad.norm(dim=-1) + 1e-9)
        # float16 has no numbers for gradients of 1 / q; bfloat16 rounds once, to half a unit of 8 bits.
        bound = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: INF}[dtype]
        assert (error.nan_to_num() < bound).all(), of


@of_either_input
@of_backends
def test_confident_rows_keep_their_digits(backend, from_logits):
    """q_top = 1 - 1e-6: what scores read is the rest, of which 1 - q in float32 keeps one digit."""
    rest = torch.tensor([1e-6, 1e-7, 3e-8], dtype=torch.float64)
    gap = ((1 - rest) / rest).log()
    target = torch.zeros(3, dtype=torch.int64)
    logits, q = torch.stack((torch.zeros(3), -gap.float()), -1), torch.stack((1 - rest.float(), rest.float()), -1)
    values = logits if from_logits else q
    found, grad = with_gradient(values, target, from_logits, backend, (1, 0, 0, 0))
    close(found, oracle(values, target, from_logits), rtol=2e-6, atol=0)
    if from_logits:
        torch.testing.assert_close(grad[:, 0].double(), -torch.expm1(found.log_prob.detach()), rtol=4e-6, atol=0)


@of_backends
def test_equal_logits_are_exactly_the_share_of_each_and_the_first_is_claimed(backend):
    for n_classes in (2, 4, 5, 10, 1024):
        target = torch.tensor([0, n_classes - 1])
        found = rows(torch.full((2, n_classes), 1.5), target, from_logits=True, backend=backend)
        assert found.top.tolist() == [0, 0]
        torch.testing.assert_close(found.confidence, torch.full((2,), 1 / n_classes).double(), rtol=2e-6, atol=0)
        torch.testing.assert_close(found.squared_error, torch.full((2,), 1 - 1 / n_classes).double())
    # To the last bit, so that it falls on the edge i/B and not beside it.
    for n_classes in range(1, 300) if backend in NUMBA else ():
        found = rows(torch.zeros(1, n_classes), torch.zeros(1).long(), from_logits=True, backend=backend)
        assert found.confidence.item() == 1 / n_classes


FLOATS = [("torch", torch.float64), *((backend, torch.float32) for backend in BACKENDS)]  # numba's loops are float32


@pytest.mark.parametrize(("backend", "dtype"), FLOATS, ids=str)
def test_infinite_logits_are_the_limit_and_classes_of_minus_infinity_change_nothing(backend, dtype):
    given = [[INF, 0, INF, -INF], [0, INF, 5, 7], [0, -INF, 0, -INF], [0, -INF, 0, -INF], [-INF, 2, -INF, -INF]]
    given = torch.tensor([*given, [1, 2, -3, 4], [-INF] * 4], dtype=dtype)
    target, top = torch.tensor([2, 0, 2, 1, 1, 1, 1]), torch.tensor([0, 1, 0, 0, 1])
    log2 = torch.tensor(2.0).double().log().item()
    logs, squares = [-log2, -INF, -log2, -INF, 0], [0.5, 2, 0.5, 1.5, 0]
    entropies, largest = [-log2, 0, -log2, -log2, 0], [0.5, 1, 0.5, 0.5, 1]
    expected = Rows(*torch.tensor([logs, squares, entropies, largest], dtype=torch.float64), top)
    finite = oracle(given[5:6], target[5:6], True)
    for n_classes in (4, 30, 60, 1100):
        values = torch.nn.functional.pad(given, (0, n_classes - 4), value=-INF)
        found, grad = with_gradient(values, target, True, backend)
        close([x[:5] for x in found], expected, rtol=2e-6, atol=0)
        close([x[5:6] for x in found], finite, rtol=4e-6, atol=0)
        assert found.confidence[6].isnan()
        assert not grad[:2].any()  # nothing near moves the limit
        # log q_h is -inf in row 3, and its gradient 1[h] - q; the square adds 2 q_k (q_k - 1[h] - 1/2).
        of_log, of_square = torch.tensor([[-0.5, 1, -0.5, 0], [0.25, 0, -0.25, 0]], dtype=torch.float64)
        torch.testing.assert_close(grad[3, :4].double(), 0.3 * of_log + 0.9 * of_square)
        assert grad[4, :4].tolist() == pytest.approx([0] * 4, abs=1e-15)


@of_backends
def test_probabilities_of_0_and_1(backend):
    values = torch.tensor([[0.0, 1, 0], [0, 1, 0], [0.5, 0.5, 0], [1e-45, 1, 1e-38]])
    target = torch.tensor([1, 0, 2, 0])
    found, grad = with_gradient(values, target, False, backend)
    expected = oracle(values, target, False)
    log_prob = values.double().gather(-1, target.unsqueeze(-1)).squeeze(-1).log()
    close(found, expected._replace(log_prob=log_prob), rtol=2e-6, atol=1e-36)
    # 0.3/q_h, -1.4 (q - 1[h]), 0.5 (log q + 1) and 0.9 at the top; where q = 0 the logs have gradient 0.
    assert grad[0].tolist() == pytest.approx([0, 0.3 + 0.5 + 0.9, 0], abs=1e-6)
    assert grad[1].tolist() == pytest.approx([1.4, -1.4 + 0.5 + 0.9, 0], abs=1e-6)
    half = -0.7 + 0.5 * (1 + torch.tensor(0.5).log().item())
    assert grad[2].tolist() == pytest.approx([half + 0.9, half, 1.4], abs=1e-6)


@of_backends
@of_either_input
def test_nan_and_a_label_that_is_no_class_are_in_the_scores_of_their_row_alone(backend, from_logits):
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
def test_a_row_without_gradient_is_not_read_on_the_way_back(backend, from_logits):
    values, target = sample(5, 20, from_logits)
    asked = torch.tensor([True, True, False, False, True])
    values[2], values[3, 4] = torch.nan, INF
    leaf = values.requires_grad_()
    found = rows(leaf, target, from_logits=from_logits, backend=backend)
    found.log_prob.masked_fill(~asked, 0).sum().backward()
    assert torch.equal((leaf.grad != 0).any(-1), asked)


# Bits that do not move, as the docstring of `rows` promises.


def equal_at(held, found, whole):
    """Demand the scores and the gradient of some of all rows."""
    equal(found[0], [x[held] for x in whole[0]])
    assert torch.equal(found[1], whole[1][held])


PLACES = [(backend, dtype, c, (k + j) % 2 == 0) for k, c in enumerate((2, 10, 37, 1000, 3001))
          for j, (backend, dtype) in enumerate((*FLOATS, *((b, torch.bfloat16) for b in BACKENDS)))]  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype", "n_classes", "from_logits"), PLACES, ids=str)
def test_a_row_gets_the_same_bits_wherever_it_stands(backend, dtype, n_classes, from_logits):
    """Alone, among others, in another order and in another layout of memory; in chunks and threads of any number."""
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
def test_threads_change_no_bit(backend):
    values, target = sample(1500, 1000, True)
    long = values.flatten()[:1_000_000].view(1, -1)

    def read():
        found, grad = with_gradient(values, target, True, backend)
        alone = rows(long, target[:1], from_logits=True, backend=backend)
        many = rows(long.expand(3, -1), target[:1].expand(3), from_logits=True, backend=backend)
        equal(many, [x.expand(3) for x in alone])
        return *found, grad, *alone

    assert_same_on_any_number_of_threads(read)


@pytest.mark.parametrize(
    ("from_logits", "unreadable"), [(True, [torch.nan, 1]), (True, [-INF, -INF]), (False, [-0.5, 1.5])]
)
def test_rows_of_which_nothing_is_asked_are_in_no_derivative_of_any_order(from_logits, unreadable):
    values, target = sample(2, 2, from_logits, torch.float64)
    values[1] = torch.tensor(unreadable)

    def value(x):
        return sum(score[0] for score in rows(x, target, from_logits=from_logits)[:4])

    for derivative in (torch.func.grad(value)(values), torch.func.hessian(value)(values)):
        assert derivative.isfinite().all()
        assert (derivative[1] == 0).all()


def test_float64_is_not_for_numba():
    values, target = sample(3, 4, True, torch.float64)
    found = rows(values, target, from_logits=True)
    for backend in NUMBA:
        for read in (rows, partial(class_bins, weights=None, rows=found, n_bins=5)):
            with pytest.raises(ValueError, match="must be 'auto' or 'torch' for float64 on the CPU, got 'numba'"):
                read(values, target=target, from_logits=True, backend=backend)


@of_backends
@pytest.mark.parametrize(("n_classes", "dtype"), [(3, torch.bfloat16), (1500, torch.float32)])
def test_rows_that_are_no_distribution_are_nan_where_that_is_asked_for(backend, n_classes, dtype):
    """What a distribution is: numbers in [0, 1], whose sum is 1 within the tolerance."""
    q, target = rows_with_invalid_distributions(n_classes, dtype)
    for tolerance, broken in ((0.02, [1, 2, 3, 4, 5, 6]), (0.04, [3, 4, 5, 6])):
        scores = torch.stack(rows(q, target, from_logits=False, tolerance=tolerance, backend=backend)[:4]).isnan()
        assert torch.equal(scores.any(0), scores.all(0))
        assert scores.all(0).nonzero().squeeze(-1).tolist() == broken
    trusted, kept = rows(q, target, from_logits=False, backend=backend), [0, 1, 2, 4]
    assert trusted.confidence[kept].tolist() == q[kept].amax(-1).tolist()


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="`ru_maxrss` is in kB on Linux")
@of_backends
def test_forward_needs_10_mb_beyond_its_outputs(backend):
    """For an input of 100 MB, which one copy would double: in a process that has never held more."""
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
    outputs = 25_000 * (4 * 8 + 8) * 3  # scores, found sums of the same number, and their copies
    assert int(done.stdout) * 1024 < 10e6 + outputs
