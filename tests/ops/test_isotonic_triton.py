"""Triton kernels for isotonic blocks, compared with Python loops."""

import pytest
import torch
from helpers.blocks import VARIANTS, find, random_sample
from helpers.triton import INTERPRETED, NEEDS_TRITON, assert_compiles, needs_compiler, on_device, poison
from processes import run_again_in_tritons_interpreter

from torchcalib.ops.isotonic import block_starts
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
    for variant in VARIANTS:
        found = find("pava_bc", *given, backend="triton", variant=variant)
        expected = find("pava_bc", n, positives, backend="python", variant=variant)
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
@pytest.mark.parametrize("paper", [False, True])
def test_kernel_compiles_without_a_device(paper, monkeypatch, tmp_path):
    from torchcalib.ops.isotonic.triton import _OPTIONS

    types = dict.fromkeys(("weight", "values", "low", "high", "size", "total", "ends"), "*i64")
    types |= {"first": "*i1", "length": "i32"}
    assert_compiles("isotonic.triton", "_pava_bc", types, {"paper": paper}, monkeypatch, tmp_path, options=_OPTIONS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SAMPLES)
def test_blocks_equal_the_loop(device, shape, kind):
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


def test_columns_in_any_layout_give_the_same_blocks(device):
    scores, outcomes, weights = random_sample(9, lead=(3,), distinct=5, weighted=True)
    n, positives = counts(scores, outcomes, weights + 3)  # at least 3 samples in every row
    for turn in (lambda column: torch.stack((column, column), -1)[..., 0], lambda column: column.T.contiguous().T):
        assert not turn(n).is_contiguous()
        assert_loops(device, n, positives, turn)


def test_no_data_gives_no_blocks(device):
    for shape in ((0,), (3, 0), (0, 3)):
        nothing = torch.empty(shape, device=device)
        assert not find("pava_bc", nothing.long(), nothing.long(), backend="triton")[1].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_cells_and_rows_without_data_have_one_block(device, variant):
    """One row has a single cell with 5 samples. The other has no data, and only an empty first block."""
    n, positives = torch.tensor([[[5], [0]], [[2], [0]]], device=device)
    _, *sums = find("pava_bc", n, positives, backend="triton", variant=variant)
    assert [x.tolist() for x in sums] == [[[5], [0]], [[2], [0]]]


def test_rising_frequencies_stay_separate_and_many_late_negatives_merge_all(device):
    """As many blocks as samples exceed the marks of one pass. Then one element merges the whole stack of blocks."""
    n, positives = torch.full((1, 300), 300), torch.arange(300).unsqueeze(0)
    bounds = torch.tensor([1]), torch.tensor([10**9])
    for late, n_blocks in ((300, 299), (10**8, 2)):  # the last block is final
        n[0, -2], positives[0, -2] = late, 298 if late == 300 else 0
        found = block_starts(
            "pava_bc", n.to(device), positives.to(device), "triton", *(bound.to(device) for bound in bounds)
        )
        assert torch.equal(found.cpu(), block_starts("pava_bc", n, positives, "python", *bounds))
        assert int(found.sum()) == n_blocks
