"""Implementations, random samples and tables of isotonic blocks for tests."""

import torch
from helpers.kernels import NUMBA

from torchcalib.ops.isotonic import block_ends, block_starts
from torchcalib.ops.segments import run_index, run_sums
from torchcalib.ops.sorting import order_of, sorted_columns, tie_begins

PAVA_BACKENDS = ["python", "rounds", *NUMBA]
PAVA_BC_BACKENDS = ["python", *NUMBA]
VARIANTS = ["code", "paper"]
TIES = ["pool", "split"]


def find(op, n, positives, begins=None, **options):
    """Return ends, sizes and positives of the blocks of counts `(..., M)`. By default every count may begin a block."""
    begins = torch.ones_like(n, dtype=torch.bool) if begins is None else begins
    ends = block_ends(op, begins, positives, n, **options)
    return ends, *(run_sums(x, ends).long() for x in (n, positives))


def find_in_sample(op, scores, outcomes, weights=None, *, ties="pool", **options):
    """Return the block index of each sample in the given order, and sizes and positives of the blocks."""
    weights = torch.ones_like(scores, dtype=torch.int64) if weights is None else weights
    scores = scores.double().masked_fill(weights == 0, torch.nan)
    score, positives, n, _ = sorted_columns(scores, weights * outcomes, weights)
    begins = tie_begins(score) if ties == "pool" else torch.ones_like(score, dtype=torch.bool)
    ends, *sums = find(op, n, positives, begins, **options)
    index = run_index(ends, score.shape[-1]).clamp(max=ends.shape[-1] - 1)
    return torch.empty_like(index).scatter(-1, order_of(scores), index), *sums


def table(n, positives):
    """Return sizes and positives of one row as lists, without the empty blocks that pad a batch."""
    return n[n > 0].tolist(), positives[n > 0].tolist()


def random_sample(n, seed=0, lead=(), distinct=None, weighted=False):
    """Return scores, outcomes drawn from them, and weights. With `distinct` there are that many different scores."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*lead, n, generator=generator, dtype=torch.float64)
    if distinct:
        scores = (scores * distinct).floor() / distinct
    outcomes = (torch.rand(*lead, n, generator=generator) < scores).long()
    weights = torch.randint(0, 4, (*lead, n), generator=generator) if weighted else None
    return scores, outcomes, weights


def assert_large_counts_are_exact(device, backend):
    """Compare means that differ by 1e-18: (10^9 - 1) / 10^9 and (10^9 - 2) / (10^9 - 1), in both orders."""
    n, positives = torch.tensor([[10**9, 10**9 - 1], [10**9 - 1, 10**9 - 2]], device=device)
    starts = [
        block_starts("pava", *columns, backend).tolist() for columns in ((n, positives), (n.flip(0), positives.flip(0)))
    ]
    assert starts == [[True, False], [True, True]]
