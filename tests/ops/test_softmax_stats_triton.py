"""Triton kernels for the row and bin operations, compared with tensor operations."""

import itertools
from functools import partial

import pytest
import torch
from helpers.kernels import assert_empty_input_gives_zero_sums, of_either_input
from helpers.rows import layouts, rows_with_invalid_distributions, sample, with_gradient
from helpers.triton import INTERPRETED, NEEDS_TRITON, assert_compiles, needs_compiler, on_device, poison
from processes import run_again_in_tritons_interpreter

from torchcalib.core.sums import BinStats
from torchcalib.functional import binned
from torchcalib.ops.bin_sums import bin_errors, class_bins, event_bins
from torchcalib.ops.softmax_stats import rows, sums
from torchcalib.ops.softmax_stats.logit_sums import merge

device = on_device
pytestmark = [
    NEEDS_TRITON,
    # The interpreter computes with numpy, which warns about values that a kernel discards by `where`.
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow|All-NaN):RuntimeWarning"),
]

# Many rows per program, one row, merged parts, and an incomplete part
CLASSES = [1, 2, 10, 1000, 1001, 5000, 33_000]
INF, NAN = torch.inf, torch.nan
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


@pytest.fixture(autouse=True)
def has_invalid_rows(monkeypatch):
    poison(monkeypatch, "empty")


def check(values, target, from_logits, device, held=slice(None)):
    """Compare scores with tensor operations on the CPU. Compare top class and gradient for the rows `held`."""
    found, grad = with_gradient(values.to(device), target.to(device), from_logits, "triton")
    expected, there = with_gradient(values.cpu(), target, from_logits, "torch")
    wide = values.dtype == torch.float64
    close_to(found[:4], expected[:4], **({"rtol": 1e-12, "atol": 1e-14} if wide else {"rtol": 3e-6, "atol": 1e-15}))
    assert torch.equal(found.top.cpu()[held], expected.top[held])
    assert grad.dtype == values.dtype
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[values.dtype]
    close_to([grad[held]], [there[held]], rtol=bound, atol=bound * 0.1)
    return found, grad


def close_to(found, expected, **tolerance):
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a.cpu(), b, **tolerance, equal_nan=True, msg=lambda text, k=k: f"{k}: {text}")


@pytest.mark.extended
@pytest.mark.skipif(INTERPRETED, reason="this is the fresh process")
def test_in_the_interpreter():
    run_again_in_tritons_interpreter(__file__)


ROW_TYPES = dict.fromkeys(("scores", "grads", "partial", "alpha", "numbers"), "*fp64") | dict.fromkeys(
    ("target", "tops", "places"), "*i64"
)
ROW_TYPES |= dict.fromkeys(("row_units", "column_stride", "score_stride"), "i64")
ROW_TYPES |= dict.fromkeys(("n_rows", "units", "n_parts"), "i32") | {"tolerance": "fp32"}
FLOATS = "confidence", "weights", "heaviest", "ecd", "parts", "first", "others", "grads", "sums", "slopes", "n_invalid"
BIN_TYPES = dict.fromkeys(FLOATS, "*fp64")
BIN_TYPES |= dict.fromkeys(("target", "tops"), "*i64") | {"outcome": "*u8", "errors": "*fp32"}
BIN_TYPES |= dict.fromkeys(("row_units", "column_stride"), "i64")
BIN_TYPES |= dict.fromkeys(("n", "size", "n_bins", "n_sums", "n_parts", "n_rows", "n_added", "units"), "i32")
ERRORS = {
    "l1": binned.ece_from_bins,
    "l2": binned.rmsce_from_bins,
    "max": binned.mce_from_bins,
    "mean": binned.mean_bin_error_from_bins,
    "signed": binned.esce_from_bins,
    "debiased_l1": partial(binned.ece_from_bins, debiased=True),
    "debiased_l2": partial(binned.rmsce_from_bins, debiased=True),
}
NOISE = {"has_noise": True, "shares": True, "squared": True}
KERNELS = [
    ("softmax_stats.triton", "_read_rows", ROW_TYPES, {"unit": 2, "rows": 128, "block": 16}),
    ("softmax_stats.triton", "_read_parts", ROW_TYPES, {"unit": 1, "rows": 1, "block": 1024}),
    ("softmax_stats.triton", "_read_parts", ROW_TYPES, {"unit": 4, "rows": 1, "block": 4096}),
    ("softmax_stats.triton", "_fill_sums", ROW_TYPES, {"unit": 4, "rows": 1, "block": 4096}),
    *(
        (
            "softmax_stats.triton",
            "_fill_gradient",
            ROW_TYPES,
            {"unit": 2, "rows": 128, "block": 16, "only_confidence": only},
        )
        for only in (False, True)
    ),
    ("softmax_stats.triton", "_merge_parts", ROW_TYPES, {"unit": 4, "rows": 128, "n_slots": 1}),
    ("softmax_stats.triton", "_merge_parts", ROW_TYPES, {"unit": 4, "rows": 16, "n_slots": 32}),
    (
        "bin_sums.triton",
        "_add_events",
        BIN_TYPES,
        {"chunk": 256, "bins": 16, "weighted": True, "has_ecd": True, **NOISE},
    ),
    (
        "bin_sums.triton",
        "_add_classes",
        BIN_TYPES,
        {"unit": 4, "rows": 4, "classes": 128, "weighted": False, "n_sums": 5},
    ),
    (
        "bin_sums.triton",
        "_add_classes",
        BIN_TYPES,
        {"unit": 1, "rows": 32, "classes": 16, "weighted": True, "n_sums": 7},
    ),
    *(
        ("bin_sums.triton", "_fill_errors", BIN_TYPES, {"checks": True, "norm": norm, "at_once": 2, "block": 16})
        for norm in ERRORS
    ),
]


@pytest.mark.extended
@needs_compiler
@pytest.mark.parametrize(("dtype", "logits"), [("fp32", True), ("bf16", False), ("fp64", True)])
@pytest.mark.parametrize(("module", "kernel", "types", "constants"), KERNELS)
def test_kernel_compiles_without_a_device(module, kernel, types, constants, dtype, logits, monkeypatch, tmp_path):
    types = {**types, "values": f"*{dtype}", "out": f"*{dtype}"}
    assert_compiles(module, kernel, types, {**constants, "logits": logits, "right": logits}, monkeypatch, tmp_path)


# Row operation


@pytest.mark.parametrize("n_classes", CLASSES)
@of_either_input
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_their_gradient_equal_tensor_operations(device, n_classes, from_logits, dtype):
    n = 37 if n_classes < 1000 or not INTERPRETED else 5 if n_classes < 2000 else 2
    check(*sample(n, n_classes, from_logits, DTYPES[dtype]), from_logits, device)


@of_either_input
def test_rows_in_any_layout_equal_tensor_operations(device, from_logits):
    values, target = sample(9, 70, from_logits)
    moved = values.to(device)
    # the last layout is one row, expanded
    for same in (*(same for _, same in layouts(moved)), moved[:1].expand(9, 70)):
        check(same, target, from_logits, device)
    check(values, torch.stack((target, target), -1)[:, 0], from_logits, device)  # labels with a stride
    images = values.view(3, 3, 70).movedim(-1, 1).contiguous().movedim(1, -1)
    check(images, target.view(3, 3), from_logits, device)


@pytest.mark.parametrize("n_classes", [7, 1001, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_classes_equal_tensor_operations(device, n_classes, dtype):
    values, target = sample(5, n_classes, True, dtype)
    values[1], values[2, :-1], values[3, 1] = -INF, -INF, INF
    for alpha in (None, torch.tensor(0.3, dtype=torch.float64)):
        factor = None if alpha is None else alpha.to(device)
        found = merge(sums(values.to(device), target.to(device), factor, backend="triton"))
        expected = merge(sums(values, target, alpha, backend="torch"))
        kept = [0, 2, 3, 4]  # no class of row 1 has a probability
        close_to([x[kept] for x in found], [x[kept] for x in expected], rtol=3e-6, atol=1e-15)
        assert torch.equal(found.top.cpu(), expected.top)


@pytest.mark.parametrize("n_classes", [7, 5000, 33_000])
@of_either_input
def test_rows_have_the_same_bits_in_every_batch(device, n_classes, from_logits):
    values, target = (x.to(device) for x in sample(3 if INTERPRETED and n_classes > 7 else 150, n_classes, from_logits))
    whole, grad = with_gradient(values, target, from_logits, "triton")
    alone, there = with_gradient(values[1:2], target[1:2], from_logits, "triton")
    for a, b in zip((*alone, there), (*whole, grad), strict=True):
        assert torch.equal(a, b[1:2])


@pytest.mark.parametrize("n_classes", [3, 70, 9000])
def test_invalid_probability_rows_give_nan_if_a_tolerance_is_given(device, n_classes):
    q, target = rows_with_invalid_distributions(n_classes)
    for tolerance in (0.02, 0.04):
        expected = rows(q, target, from_logits=False, tolerance=tolerance, backend="torch")
        options = {"from_logits": False, "tolerance": tolerance, "backend": "triton"}
        found = rows(q.to(device), target.to(device), **options)
        assert 4 <= int(expected[0].isnan().sum()) < 7
        close_to(found[:4], expected[:4], rtol=3e-6, atol=1e-15)


@pytest.mark.parametrize("n_classes", [6, 9000, 40_000])
def test_ties_infinite_saturated_and_nan_logits_equal_tensor_operations(device, n_classes):
    values = torch.full((9, n_classes), -3.0)
    last = n_classes - 1
    values[0, [1, last]] = 2.0  # a tie across blocks
    values[1, [0, last]] = INF
    values[2], values[2, 3] = -INF, 1.0
    values[3, last] = 1000.0
    values[4, last], values[5, 0] = NAN, NAN
    values[6], values[7, : n_classes // 2] = -INF, -INF
    values[8] = 0.0
    # The top class of a row without numbers is arbitrary.
    found, _ = check(values, torch.tensor([last, last, 3, 0, 0, 0, 0, 0, 1]), True, device, held=[0, 1, 2, 3, 7, 8])
    assert ((found.top >= 0) & (found.top < n_classes)).all()
    assert found.top[0] == 1
    assert found.confidence[8].item() == pytest.approx(1 / n_classes, rel=1e-12)


@of_either_input
def test_invalid_labels_and_extreme_probabilities_equal_tensor_operations(device, from_logits):
    values, target = sample(6, 20, from_logits)
    target[1], target[2] = -100, 20
    found, _ = check(values, target, from_logits, device)
    assert found.log_prob[1:3].isnan().all()
    values[3] = NAN
    leaf = values.to(device).requires_grad_()
    found = rows(leaf, target.to(device), from_logits=from_logits, backend="triton")
    found.log_prob.masked_fill(torch.arange(6, device=device) == 3, 0).sum().backward()
    assert not leaf.grad[3].any()  # rows without incoming gradient are not read
    if not from_logits:
        values = torch.tensor([[0.0, 1, 0], [0, 1, 0], [0.5, 0.5, 0], [NAN, 0.5, 0.5], [0.5, 0.5, NAN]])
        check(values, torch.tensor([1, 0, 2, 1, 1]), False, device, held=slice(3))


# Bin operation


def _comparable(sums):
    """Return sums with NaN for infinite ones of squared residuals, which are the rows 4 and 6."""
    sums = sums.clone()
    sums[..., 4:7, :] = sums[..., 4:7, :].where(sums[..., 4:7, :].isfinite(), NAN)
    return sums


@pytest.mark.parametrize(
    ("n_bins", "right", "dtype"), [(1, False, "fp32"), (15, False, "fp64"), (15, True, "fp32"), (40, True, "fp64")]
)
def test_event_bins_equal_tensor_operations(device, n_bins, right, dtype):
    generator = torch.Generator().manual_seed(0)
    n = 150  # more than one piece
    confidence, shares, weights = torch.rand(3, 2, n, generator=generator, dtype=torch.float64)
    confidence = confidence.to(DTYPES[dtype])
    edges = torch.arange(n_bins + 1, dtype=torch.float64) / n_bins
    confidence[0, : n_bins + 1] = edges.to(confidence.dtype)
    confidence[0, 60:64] = torch.tensor([NAN, -1.0, 2.0, INF])
    outcome = shares < confidence
    weights[:, 60::7] = 0
    weights[0, 61:64] = 1
    weights[1, 3] = NAN
    ecd = torch.randn(2, n, generator=generator, dtype=torch.float64)
    kinds = [("none", True, (outcome,)), ("none", True, (outcome, weights)), ("none", True, (shares, weights, ecd))]
    columns_of_noise = (outcome.long(),), (shares, weights), (shares, weights, ecd)
    kinds += itertools.product(("labels", "shares"), (True, False), columns_of_noise)
    for noise, copies, columns in kinds:
        options = {"n_bins": n_bins, "right": right, "noise": noise, "copies": copies}
        found = event_bins(confidence.to(device), *(x.to(device) for x in columns), **options, backend="triton")
        expected = event_bins(confidence, *columns, **options, backend="torch")
        # The square of an infinite residual is inf, or inf - inf where it is expanded.
        close_to([_comparable(found)], [_comparable(expected)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ERRORS)
@pytest.mark.parametrize("n_bins", [1, 300])
def test_errors_of_bins_and_their_gradient_equal_tensor_operations(device, norm, n_bins):
    generator = torch.Generator().manual_seed(0)
    n, p, y = torch.rand(3, 4, 2, n_bins, generator=generator, dtype=torch.float64)
    n[..., 1::7] = 0  # empty bins
    n[2], n[3, 1] = 0, NAN  # no samples, and invalid sums
    p[1, 0], y[3, 0] = 0.25, p[3, 0]  # equal gaps of either sign, and gaps of 0
    y[1, 0] = torch.arange(n_bins) % 2 * 0.5
    spread = torch.rand(4, 2, n_bins, generator=generator, dtype=torch.float64) - 0.2
    residual = n * ((y - p).square() + spread)  # below the square of the mean, as with rounding errors, where negative
    sums = torch.stack((n, n * p, n * y, n, n, n.square() * 0.3, residual), -2)
    sums[0, 1, 5] = sums[0, 1, 0].square()  # one row

    def formula(sums):
        return ERRORS[norm](BinStats(sums, has_noise=True))

    results = []
    for where, compute in ((device, lambda sums: bin_errors(sums, norm, formula)), ("cpu", formula)):
        leaf = sums.to(where).requires_grad_()
        errors = compute(leaf)
        defined = ~errors.isnan()
        (gradient,) = torch.autograd.grad(errors[defined].square().sum(), leaf)
        second = torch.autograd.functional.hessian(lambda x, compute=compute: compute(x)[0], leaf.detach()[:1, 0])
        results.append([errors.detach(), gradient[defined], second])
    close_to(*results, rtol=1e-12, atol=1e-12)


@of_either_input
@pytest.mark.parametrize(
    ("n_classes", "n_bins", "right", "weighted", "dtype"),
    [(1, 3, False, True, "fp32"), (10, 15, False, False, "fp32"), (10, 15, True, True, "fp32"),
     (40, 1, True, False, "fp32"), (40, 40, False, True, "fp32"),
     *((50, 15, False, False, dtype) for dtype in ("fp16", "bf16", "fp64"))],
)  # fmt: skip
def test_class_bins_and_their_gradient_equal_tensor_operations(
    device, n_classes, n_bins, right, weighted, dtype, from_logits
):
    values, target = sample(70, n_classes, from_logits, DTYPES[dtype])  # more than one piece
    if from_logits and n_classes > 1:
        values[3, 1] = INF
        values[4, 0] = -INF
    target[5] = -1
    weights = None
    if weighted:
        weights = torch.arange(70, dtype=torch.float64) % 4
        values[8] = NAN
    turned = values.T.contiguous().T
    results = []
    for where, given, backend in ((device, values, "triton"), (device, turned, "triton"), ("cpu", values, "torch")):
        leaf = given.to(where).detach().requires_grad_()
        labels, w = target.to(where), None if weights is None else weights.to(where)
        found = rows(leaf.detach(), labels, from_logits=from_logits, backend=backend)
        options = {"from_logits": from_logits, "n_bins": n_bins, "right": right, "backend": backend}
        options |= {"noise": n_classes > 1, "copies": n_classes == 10}
        sums = class_bins(leaf, labels, w, found, **options)
        sums[:, 1].square().sum().backward()
        results.append((sums.detach().cpu(), leaf.grad.cpu().double()))
    narrow = dtype in ("fp16", "bf16")
    for sums, grad in results[:2]:
        torch.testing.assert_close(sums[:, :3], results[2][0][:, :3], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(sums[:, 3:], results[2][0][:, 3:], rtol=1e-5, atol=1e-7)  # 1 - q has cancellation
        torch.testing.assert_close(grad, results[2][1], rtol=2**-6 if narrow else 1e-4, atol=1e-4 if narrow else 1e-6)


def test_bins_in_any_layout_have_equal_sums(device):
    confidence = torch.rand(9, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    columns = confidence, confidence > 0.5, confidence.flip(-1), confidence.flip(-1)
    options = {"n_bins": 7, "backend": "triton"}
    whole = event_bins(*columns, **options)
    for views in zip(*map(layouts, columns), strict=True):
        assert torch.equal(event_bins(*(x for _, x in views), **options), whole), views[0][0]
    one_row = event_bins(*columns[:2], columns[2][0], **options)  # weights broadcast over the batch
    assert torch.equal(one_row[1], event_bins(columns[0][1], columns[1][1], columns[2][0], **options))

    values, target = (x.to(device) for x in sample(9, 36, True))
    found = rows(values, target, from_logits=True, backend="triton")

    def read(given):
        leaf = given.detach().requires_grad_()
        sums = class_bins(leaf, target, None, found, from_logits=True, **options)
        return sums.detach(), torch.autograd.grad(sums[:, 1].square().sum(), leaf)[0]

    sums, gradient = read(values)
    for name, same in layouts(values):  # the layout determines which float32 sums a thread computes
        of_layout = read(same)
        torch.testing.assert_close(of_layout[0], sums, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(of_layout[1], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_empty_input_gives_zero_sums(device):
    for shape in ((0,), (3, 0), (0, 3)):
        assert_empty_input_gives_zero_sums(shape, "triton", device)
