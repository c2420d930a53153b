"""Statistics of a linear layer compared with the float64 softmax of the whole product, for every division in blocks.

Hidden states and weights are small integers and multiples of 1/4, whose products are exact in every dtype.
"""

import itertools
import subprocess
import sys

import pytest
import torch
from helpers.kernels import of_backends
from helpers.rows import close
from processes import quick_environment, run_ranks
from processes.linear_rank import layer

from torchcalib.ops.bin_sums import event_bins
from torchcalib.ops.linear_softmax_stats import Head, all_bins, largest, moments, rows
from torchcalib.ops.softmax_stats import RowStatistics, sums
from torchcalib.ops.softmax_stats.formula import row_formula
from torchcalib.ops.softmax_stats.logit_sums import joined, merge, scores_of

INF = torch.inf
PROMISED = {"rtol": 1e-6, "atol": 1e-14}
BLOCKS = [None, 1, 2, 7, 36, 37, 100]
WEIGHTS = torch.tensor([0.3, -0.7, 0.5, 0.9], dtype=torch.float64)


def all_logits(hidden, head):
    """Return softcap * tanh(logit_scale * (W h + bias) / softcap) / temperature in float64."""
    weight, bias, scale, cap, temperature = (x.double() if isinstance(x, torch.Tensor) else x for x in head)
    x = torch.einsum("...h,vh->...v", hidden.double(), weight)
    x = x if bias is None else x + bias
    x = x if scale is None else scale * x
    x = x if cap is None else cap * torch.tanh(x / cap)
    if temperature is None:
        return x
    return torch.stack([x / t for t in temperature]) if getattr(temperature, "ndim", 0) else x / temperature


def definition(hidden, target, head):
    x = all_logits(hidden, head)
    scores, top = row_formula(x, target.expand(x.shape[:-1]), True)
    return RowStatistics(*scores.unbind(-2), top)


TEMPERATURES = [None, 0.7, torch.tensor(1.3), torch.tensor([1.0, 0.5, 2.0])]
HEADS = [
    {},
    {"logit_scale": 0.5, "softcap": 6.0},
    {"logit_scale": torch.tensor(1.5), "temperature": 0.5},
    {"temperature": torch.tensor(1.25)},
    {"softcap": 4.0, "temperature": torch.tensor([1.0, 0.5, 2.0])},
]
of_heads = pytest.mark.parametrize("options", HEADS, ids=str)
of_blocks = pytest.mark.parametrize("block", BLOCKS)


@of_heads
@of_blocks
def test_values_equal_the_softmax_of_the_whole_product(options, block):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        hidden, target, weight, bias = layer(dtype)
        head = Head(weight, bias, **options)
        expected = definition(hidden, target, head)
        found = rows(hidden, target, head, block=block)
        close(found, expected, **(PROMISED if dtype != torch.float64 else {"rtol": 1e-13, "atol": 1e-15}))
        assert torch.equal(found.top, expected.top)
    for detail in ("confidence", "squares"):
        again = rows(hidden, target, head, block=block, detail=detail)
        assert torch.equal(again.confidence, found.confidence)
        assert torch.equal(again.top, found.top)


@of_blocks
def test_extreme_and_masked_logits(block):
    """Logits of 1e4 and -1e4, masked classes, blocks without a class, and ties, whose first class is the top one."""
    hidden, target, weight, bias = layer()
    bias[:20], bias[30] = -INF, -INF
    for scale in (1, 1000):
        head = Head(weight, bias, logit_scale=scale)
        found = rows(hidden, target, head, block=block)
        close(found, definition(hidden, target, head), rtol=1e-6, atol=1e-30)
    tied = Head(weight[:1].repeat(37, 1), bias.clamp(max=0).clamp(min=-INF))
    assert (rows(hidden, target, tied, block=block).top >= 20).all()
    top = definition(hidden, target, tied).top
    assert torch.equal(rows(hidden, target, tied, block=block).top, top)
    no_class = rows(hidden, target, Head(weight, torch.full((37,), -INF)), block=block)
    assert torch.stack(no_class[:4]).isnan().all()
    bias[25] = bias[33] = INF
    found = rows(hidden, torch.full_like(target, 33), Head(weight, bias), block=block)
    assert (found.confidence == 0.5).all()
    assert (found.top == 25).all()
    torch.testing.assert_close(found.log_prob, torch.full_like(found.log_prob, 0.5).log())


@of_blocks
def test_probabilities_near_1_are_accurate(block):
    """For q_top = 1 - 1e-16 the scores use the sum of the other classes. 1 - q would be 0."""
    weight = torch.zeros(37, 1)
    weight[5] = 1
    hidden, target = torch.tensor([[20.0], [40.0]]), torch.tensor([5, 5])
    rest = 36 * torch.tensor([-20.0, -40.0]).double().exp()
    found = rows(hidden, target, Head(weight), block=block)
    torch.testing.assert_close(found.log_prob, -torch.log1p(rest), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.squared_error, (rest**2 + rest**2 / 36) / (1 + rest) ** 2, rtol=1e-6, atol=0)


@of_blocks
def test_unknown_labels_and_nan_affect_only_their_row(block):
    hidden, target, weight, bias = layer()
    head, clean = Head(weight, bias), rows(*layer()[:2], Head(weight, bias), block=block)
    target[0, :4] = torch.tensor([-1, -100, 37, 2**40])
    hidden[1, 2, 3] = torch.nan
    found = rows(hidden, target, head, block=block)
    unknown, broken = torch.zeros(2, 3, 5, dtype=torch.bool)
    unknown[0, :4] = broken[1, 2] = True
    for name in RowStatistics._fields:
        invalid = broken if name in ("neg_entropy", "confidence") else unknown | broken
        keep = ~invalid if name != "top" else ~broken
        assert torch.equal(getattr(found, name)[keep], getattr(clean, name)[keep])
        assert name == "top" or getattr(found, name)[invalid].isnan().all()
    assert ((found.top >= 0) & (found.top < 37)).all()


def test_no_rows_and_any_leading_axes():
    hidden, target, weight, bias = layer()
    whole = rows(hidden, target, Head(weight, bias))
    for shape in ((15,), (1, 15), (5, 1, 3)):
        found = rows(hidden.reshape(*shape, 8), target.reshape(shape), Head(weight, bias))
        close(found, [x.reshape(shape) for x in whole], rtol=1e-6, atol=0)
    for shape in ((0,), (2, 0)):
        leaf = torch.zeros(*shape, 8, requires_grad=True)
        head = Head(weight.clone().requires_grad_(), temperature=torch.ones(4))
        found = rows(leaf, torch.zeros(shape, dtype=torch.int64), head)
        assert all(x.shape == (4, *shape) for x in found)
        found.log_prob.sum().backward()
        assert leaf.grad.shape == leaf.shape
        assert not head.weight.grad.any()
        assert moments(leaf, torch.zeros(shape, dtype=torch.int64), head).mean.shape == (4, *shape)


@of_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_any_division_in_classes_merge_to_the_same_scores(backend, dtype):
    """`softmax_stats.sums` of 1 to 4 parts of the classes, in every backend, with and without a factor."""
    generator = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(40, 3000, generator=generator, dtype=dtype)
    x[1], x[2, :1500], x[3, 4], x[4, 2000], x[5, ::2] = -INF, -INF, INF, torch.nan, x[5, 1::2]
    target = torch.randint(0, 3000, (40,), generator=generator)
    target[6:8] = torch.tensor([-100, 3000])
    for alpha, cuts in itertools.product((None, 0.3, 2.0), ((3000,), (1, 2999), (1000, 1000, 1000), (7, 2000, 993))):
        factor = None if alpha is None else torch.tensor(alpha, dtype=torch.float64)
        parts, first = [], 0
        for part in x.split(cuts, -1):
            found = sums(part, target - first, factor, backend=backend)
            parts.append(found._replace(top=found.top + first))
            first += part.shape[-1]
        merged = merge(joined(torch.cat, parts, 0))
        found = RowStatistics(*scores_of(merged, merged.top == target), merged.top)
        scores, top = row_formula(x.double() * (alpha or 1), target, True)
        valid = torch.arange(40) != 4
        close([y[valid] for y in found], [y[valid] for y in (*scores, top)], rtol=2e-6, atol=1e-13)
        assert torch.stack(found[:4])[:, 4].isnan().all()


@of_blocks
def test_moments_are_derivatives_in_the_inverse_temperature(block):
    for temperature in TEMPERATURES:
        hidden, target, weight, bias = layer(torch.float64)
        bias[3] = -INF
        found = moments(hidden, target, Head(weight, bias, softcap=5.0, temperature=temperature), block=block)
        x = all_logits(hidden, Head(weight, bias, softcap=5.0))
        alpha = 1 / torch.as_tensor(1.0 if temperature is None else temperature, dtype=torch.float64)
        q = (x * alpha.view(*alpha.shape, 1, 1, 1)).softmax(-1)
        x = (x - x.amax(-1, keepdim=True)).clamp(min=-1e9)
        index = target.expand(q.shape[:-1]).unsqueeze(-1)
        mean = (q * x).sum(-1)
        variance = (q * (x - mean.unsqueeze(-1)) ** 2).sum(-1)
        label = x.expand(q.shape).gather(-1, index).squeeze(-1)
        expected = q.gather(-1, index).squeeze(-1).log(), label, mean, variance
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.expand_as(a), rtol=1e-10, atol=1e-12)


@of_blocks
def test_largest_probabilities_and_bins_of_all_classes(block):
    hidden, target, weight, bias = layer()
    bias[20:], target[0, 0] = bias[:17], -100
    weight[20:] = weight[:17]  # ties
    for temperature in TEMPERATURES:
        head = Head(weight, bias, temperature=temperature)
        q = all_logits(hidden, head).softmax(-1)
        for k in (1, 6, 37):
            found, classes = largest(hidden, head, k, block=block)
            expected, order = torch.sort(q, dim=-1, descending=True, stable=True)
            torch.testing.assert_close(found, expected[..., :k], **PROMISED)
            assert torch.equal(classes, order[..., :k])
        outcome = (torch.arange(37) == target.unsqueeze(-1)).expand(q.shape)
        for right in (False, True):
            found = all_bins(hidden, target, head, n_bins=7, right=right, block=block)
            torch.testing.assert_close(found, event_bins(q, outcome, n_bins=7, right=right), rtol=1e-6, atol=1e-9)


def gradients(read, hidden, head, target):
    """Return the gradients in hidden states and tensors of the head. Some rows and scores have no incoming gradient."""
    given = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in (hidden, *head)]
    found = read(given[0], target, Head(*given[1:]))
    known = (target >= 0) & ~hidden.isnan().any(-1)
    total = sum(w * x.masked_fill(~known, 0).sum() for w, x in zip(WEIGHTS, found[:4], strict=True))
    leaves = [x for x in given if isinstance(x, torch.Tensor)]
    return torch.autograd.grad(total + found.log_prob[..., -1].sum(), leaves)


@of_heads
@pytest.mark.parametrize("block", [None, 1, 7])
def test_gradients_equal_float64(options, block):
    for dtype, bound in ((torch.float32, 3e-6), (torch.float64, 1e-12), (torch.bfloat16, 2**-8)):
        hidden, target, weight, bias = layer(dtype)
        target[0, 0] = -100
        wide = {k: x.to(dtype) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        head = Head(weight, bias, **wide)
        found = gradients(lambda *given: rows(*given, block=block), hidden, head, target)
        double = Head(*(x.double() if isinstance(x, torch.Tensor) else x for x in head))
        expected = gradients(definition, hidden.double(), double, target)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            assert a.dtype == dtype
            assert (a.double() - b).norm() <= bound * b.norm()


def test_rows_without_incoming_gradient_do_not_affect_gradients():
    """Rows with NaN, with an unknown label, and masked classes, as in a batch with padding."""
    hidden, target, weight, bias = layer()
    bias[3], target[0, 0], hidden[0, 0] = -INF, -100, torch.nan
    found = gradients(rows, hidden, Head(weight, bias), target)
    assert all(x.isfinite().all() for x in found)
    assert not found[0][0, 0].any()
    assert found[2][3] == 0
    detailed = gradients(lambda *given: rows(*given, detail="squares")._replace(neg_entropy=torch.zeros(3, 5)),
                         hidden, Head(weight, bias), target)  # fmt: skip
    assert all(x.isfinite().all() for x in detailed)


def test_transforms_and_the_compiler_use_the_formula():
    hidden, target, weight, bias = layer(torch.float64)

    def score(h, y):
        found = rows(h, y, Head(weight, bias, softcap=5.0))
        return found.log_prob + found.squared_error + found.neg_entropy + found.confidence

    whole = score(hidden, target)
    torch.testing.assert_close(torch.vmap(score)(hidden, target), whole)
    compiled = torch.compile(score, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, target), whole)
    leaf = hidden[0, :2].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda h: score(h, target[0, :2]), leaf)


def test_ranks_that_hold_parts_of_the_classes_return_the_same_results(tmp_path):
    codes, output = run_ranks(3, tmp_path, "linear_rank", "compare_with_one_process")
    assert codes == [0] * 3, output


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="`ru_maxrss` is in kB on Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_logits(dtype):
    """1,024 x 65,536 logits would take 268 MB. The gradients in hidden states and weight take 9 MB."""
    program = f"""
import resource, torch
from torchcalib.ops.linear_softmax_stats import Head, moments, rows

def run(n, n_classes):
    hidden = torch.zeros(n, 32, dtype=torch.{dtype}, requires_grad=True)
    weight = torch.zeros(n_classes, 32, dtype=torch.{dtype}, requires_grad=True)
    target = torch.zeros(n, dtype=torch.int64)
    moments(hidden, target, Head(weight))
    rows(hidden, target, Head(weight)).log_prob.sum().backward()

run(8, 100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(1024, 65_536)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=quick_environment(), capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 40e6 + 3 * 9e6
