"""Implementations, random samples and tables for tests of isotonic blocks."""

import torch
from helpers.kernels import NUMBA

from torchcalib.ops.isotonic import Blocks, pava

PAVA_BACKENDS = ["python", "rounds", *NUMBA]
PAVA_BC_BACKENDS = ["python", *NUMBA]
VARIANTS = ["code", "paper"]
TIES = ["pool", "split"]


def table(blocks):
    """Return sizes and positives of one row as lists, without the empty blocks that pad a batch."""
    keep = blocks.n > 0
    return blocks.n[keep].tolist(), blocks.positives[keep].tolist()


def random_sample(n, seed=0, lead=(), distinct=None, weighted=False):
    """Return scores, outcomes drawn from them, and weights. `distinct` values make ties."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*lead, n, generator=generator, dtype=torch.float64)
    if distinct:
        scores = (scores * distinct).floor() / distinct
    outcomes = (torch.rand(*lead, n, generator=generator) < scores).long()
    weights = torch.randint(0, 4, (*lead, n), generator=generator) if weighted else None
    return scores, outcomes, weights


def assert_large_counts_are_exact(device, backend):
    """Means that differ by 1e-18 are told apart: (10^9 - 1) / 10^9 against (10^9 - 2) / (10^9 - 1), falling."""
    falling = Blocks(*torch.tensor([[0, 1], [10**9, 10**9 - 1], [10**9 - 1, 10**9 - 2]], device=device))
    rising = Blocks(falling.index, falling.n.flip(0), falling.positives.flip(0))
    assert pava(falling, backend=backend).n.tolist() == [2 * 10**9 - 1]
    assert pava(rising, backend=backend).n.tolist() == [10**9 - 1, 10**9]
