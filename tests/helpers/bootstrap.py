"""A test case and replicate counts for tests of the bootstrap."""

import torch
from cases import CASES

from torchcalib.ops import counter_rng

BINARY = next(case for case in CASES if case.name == "nll-binary-probs")


def counts_of(n_replicates, n, seed=0):
    return counter_rng.multinomial_counts(seed, torch.arange(n_replicates), n, torch.float64)
