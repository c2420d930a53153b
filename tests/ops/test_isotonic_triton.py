"""Triton kernels for isotonic blocks, compared with Python loops."""

import pytest
import torch
from helpers.blocks import VARIANTS, assert_large_counts_are_exact, find, random_sample
from helpers.kernels import F64
from helpers.triton import INTERPRETED, NEEDS_TRITON, assert_compiles, needs_compiler, on_device, poison
from processes import run_again_in_tritons_interpreter

from benchmarks.cuda import behaviour
from torchcalib.ops.isotonic import block_starts, isotonic_regression
from torchcalib.ops.sorting import sorted_columns, tie_begins

device = on_device
pytestmark = NEEDS_TRITON

# Numbers of rows and samples: short for the interpreter; on a GPU near powers of two, long, and many
SHAPES = [(3, 2), (2, 41)] if INTERPRETED else [(3, 2), (9, 31), (5, 1025), (1000, 1000), (1, 100_000)]
SAMPLES = {"distinct": {}, "tied": {"distinct": 20}, "weighted": {"distinct": 20, "weighted": True}}


@pytest.fixture(autouse=True)
def has_invalid_rows(monkeypatch):
    poison(monkeypatch, "empty_like")


def assert_loops(device, n, positives, turn=lambda column: column):
    """Compare the blocks of the kernels with those of the loops. `turn` changes the memory layout of a column."""
    given = [turn(column.to(device)) for column in (n, positives)]
    for op, options in (("pava", {}), *(("pava_bc", {"variant": variant}) for variant in VARIANTS)):
        found = find(op, *given, backend="triton", **options)
        expected = find(op, n, positives, backend="python", **options)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def counts(scores, outcomes, weights):
    """Return sizes and positives of tied groups in ascending order of the score, padded by zeros."""
    weights = torch.ones_like(outcomes) if weights is None else weights
    score, positives, n, _ = sorted_columns(scores.masked_fill(weights == 0, torch.nan), weights * outcomes, weights)
    group = tie_begins(score).cumsum(-1) - 1
    zeros = torch.zeros_like(n)
    return zeros.scatter_add(-1, group, n), zeros.scatter_add(-1, group, positives)


@pytest.mark.extended
@pytest.mark.skipif(INTERPRETED, reason="this is the fresh process")
def test_in_the_interpreter():
    run_again_in_tritons_interpreter(__file__)


@pytest.mark.extended
@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "dtype", "constants"),
    [("_pava", "i64", {}), ("_pava", "fp64", {}), ("_pava_bc", "i64", {"paper": False}),
     ("_pava_bc", "i64", {"paper": True})],
)  # fmt: skip
def test_kernel_compiles_without_a_device(kernel, dtype, constants, monkeypatch, tmp_path):
    from torchcalib.ops.isotonic.triton import _OPTIONS

    types = {"ends": "*i64", "first": "*i1", "length": "i32"}
    types |= dict.fromkeys(("weight", "values", "low", "high", "size", "total"), f"*{dtype}")
    assert_compiles("isotonic.triton", kernel, types, constants, monkeypatch, tmp_path, options=_OPTIONS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SAMPLES)
def test_pava_and_pava_bc_equal_the_loop(device, shape, kind):
    scores, outcomes, weights = random_sample(shape[1], lead=shape[:1], **SAMPLES[kind])
    if weights is not None:
        weights[..., 0] = 3  # at least 3 samples in every row
    assert_loops(device, *counts(scores, outcomes, weights))


@pytest.mark.parametrize("paper", [False, True])
def test_pava_bc_with_bounds_per_row_equals_the_loop(device, paper):
    """Sixty short rows with counts of any size, many of them 0, and any valid bounds."""
    generator = torch.Generator().manual_seed(0)
    n = (torch.randint(-2, 5, (60, 7), generator=generator)).clamp(min=0)
    n[:, 3] += 2
    positives = (torch.rand(n.shape, generator=generator) * (n + 1)).long()
    total = n.sum(-1)
    low = 1 + (torch.rand(60, generator=generator) * (total - 1)).long()
    high = low + (torch.rand(60, generator=generator) * (total - low + 2)).long()
    given = [column.to(device) for column in (n, positives, low, high)]
    found = block_starts("pava_bc", *given[:2], "triton", *given[2:], paper)
    assert torch.equal(found.cpu(), block_starts("pava_bc", n, positives, "python", low, high, paper))


@pytest.mark.parametrize("shape", [(1,), *SHAPES])
@pytest.mark.parametrize("weighted", [False, True])
def test_isotonic_regression_equals_the_loop(device, shape, weighted):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(shape[::-1], generator=generator, dtype=F64).movedim(0, -1) + torch.linspace(0, 3, shape[-1])
    w = None
    if weighted:
        w = (torch.rand(shape, generator=generator, dtype=F64) - 0.2).clamp(min=0)
        y[w == 0] = torch.nan  # samples of weight 0 are not read
    expected = isotonic_regression(y, w, backend="python")
    for layout in (y, y.contiguous()):
        found = isotonic_regression(layout.to(device), None if w is None else w.to(device), backend="triton")
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_columns_in_any_layout_give_the_same_blocks(device):
    scores, outcomes, weights = random_sample(9, lead=(3,), distinct=5, weighted=True)
    n, positives = counts(scores, outcomes, weights + 3)  # at least 3 samples in every row
    for turn in (lambda column: torch.stack((column, column), -1)[..., 0], lambda column: column.T.contiguous().T):
        assert not turn(n).is_contiguous()
        assert_loops(device, n, positives, turn)


def test_isotonic_regression_gradients_equal_finite_differences(device):
    generator = torch.Generator().manual_seed(0)
    y, w = torch.randn(2, 2, 4, generator=generator, dtype=F64).to(device)
    leaves = y.requires_grad_(), (w.abs() + 0.5).requires_grad_()
    # On a GPU the order of summation within a block is not fixed.
    tolerance = 0 if INTERPRETED else 1e-12
    assert torch.autograd.gradcheck(lambda *c: isotonic_regression(*c, backend="triton"), leaves, nondet_tol=tolerance)


def test_no_data_gives_no_blocks(device):
    for shape in ((0,), (3, 0), (0, 3)):
        nothing = torch.empty(shape, device=device)
        for op in ("pava", "pava_bc"):
            assert not find(op, nothing.long(), nothing.long(), backend="triton")[1].any()
        assert isotonic_regression(nothing, backend="triton").shape == shape


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_cells_and_rows_without_data_have_one_block(device, variant):
    """One row has a single cell with 5 samples. The other has no data, and only an empty first block."""
    n, positives = torch.tensor([[[5], [0]], [[2], [0]]], device=device)
    for op, options in (("pava", {}), ("pava_bc", {"variant": variant})):
        _, *sums = find(op, n, positives, backend="triton", **options)
        assert [x.tolist() for x in sums] == [[[5], [0]], [[2], [0]]]


def test_rising_targets_stay_separate_and_a_low_last_target_merges_all(device):
    """As many blocks as samples exceed the marks of one pass. Then one target merges the whole stack."""
    y = torch.arange(300, dtype=F64)
    assert torch.equal(isotonic_regression(y.to(device), backend="triton").cpu(), y)
    y = torch.arange(50, dtype=F64)
    y[49] = -49 * 24 - 50  # the mean with the other 49 targets, whose mean is 24, is -1
    assert isotonic_regression(y.to(device), backend="triton").tolist() == [-1] * 50
    assert_large_counts_are_exact(device, "triton")


@pytest.mark.cuda
def test_isotonic_regression_does_not_synchronise_the_device():
    y = torch.randn(3, 100, device="cuda", dtype=F64)
    expected = isotonic_regression(y)  # compiles
    with behaviour.forbid_synchronisation(y.device):
        found = isotonic_regression(y)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
