"""Simulated data sets of calibrated and miscalibrated models, and checks of p-values and coverage."""

import math
from functools import partial

import torch
from helpers.compare import close
from helpers.samples import updated

import torchcalib as tc
from torchcalib.core.sums import BinStats

F64 = torch.float64
FIELDS = ("statistic", "noise_floor", "p_value", "low", "high")
FEW = {"n_replicates": 39}

CONFIDENCES = {
    "uniform": lambda u: u,
    "beta(8,1)": lambda u: u ** (1 / 8),
    "beta(1,12)": lambda u: 1 - u ** (1 / 12),
    "mostly 0.99": lambda u: 1 - (-u.log() / 90).clamp(max=0.98),
}
ERRORS = {  # metric class, and number of data sets
    "ece": (tc.ECE, 2_000),
    "mce": (tc.MCE, 2_000),
    "rmsce": (partial(tc.RMSCE, debiased=True), 2_000),
    "esce": (tc.ESCE, 2_000),
    "ace": (tc.ACE, 2_000),
    "ks": (tc.KS, 2_000),
    "atb": (tc.ATB, 2_000),
    "corp": (tc.CORP, 500),
    "tce": (tc.TCE, 200),
}
MOVED = {
    "temperature 1.4": lambda z: z / 1.4,
    "temperature 0.7": lambda z: z / 0.7,
    "shift 0.4": lambda z: z + 0.4,
    "a fifth of the samples": lambda z: torch.where((z > 0) & (z < 0.8), z - 0.8, z),
}


def same(a, b, **tolerance):
    for name in FIELDS:
        close(getattr(a, name), getattr(b, name), **tolerance)


def one_bin(p, n, k):
    """Return a bin of n samples with confidence p, of which k are positive."""
    spread = n * p * (1 - p)
    sums = [n, n * p, k, spread, spread, n, k * (1 - p) ** 2 + (n - k) * p**2]
    return BinStats(torch.tensor(sums, dtype=F64).unsqueeze(-1), has_noise=True)


def calibrated(kind, n, n_data, seed=0, weighted=False):
    """Return data sets `(n_data, n)` of a calibrated model: confidences, outcomes drawn from them, and weights."""
    generator = torch.Generator().manual_seed(seed)
    p = CONFIDENCES[kind](torch.rand(n_data, n, generator=generator, dtype=F64))
    y = (torch.rand(n_data, n, generator=generator, dtype=F64) < p).long()
    return p, y, torch.rand(n_data, n, generator=generator, dtype=F64) if weighted else None


def miscalibrated(kind, n, n_data, moved, seed=0):
    """Return data sets of a miscalibrated model: confidences, outcomes, and the true probabilities of the outcomes."""
    p, _, _ = calibrated(kind, n, n_data, seed)
    frequency = moved(p.clamp(1e-12, 1 - 1e-12).logit()).sigmoid()
    generator = torch.Generator().manual_seed(seed + 1)
    return p, (torch.rand(n_data, n, generator=generator, dtype=F64) < frequency).long(), frequency


def metric_of(cls, p, y, weights=None):
    """Return a metric updated with data sets `(D, N)`, each a batch element."""
    return updated(cls(task="binary", batch_shape=(len(p),)), (p, y), weights=weights)


def check_valid(p_values):
    """Check that P(p <= a) <= a for every a, within the Dvoretzky-Kiefer-Wolfowitz-Massart bound at the 0.1% level."""
    n = len(p_values)
    excess = torch.arange(1, n + 1, dtype=F64) / n - p_values.sort().values
    assert excess.max() <= math.sqrt(math.log(1 / 0.001) / (2 * n))


def check_uniform(p_values, n_replicates, atom=0.0):
    """Check that P(p <= a) = a for every a, within the two-sided bound and one step of the replicates.

    A valid p-value may lie below the uniform distribution by `atom`, the largest probability of a single value of the
    statistic.
    """
    n, p = len(p_values), p_values.sort().values
    up_to, below = torch.arange(1, n + 1, dtype=F64) / n, torch.arange(n, dtype=F64) / n
    distance = max((up_to - p).max(), (p - below).max())
    assert distance <= math.sqrt(math.log(2 / 0.001) / (2 * n)) + 1 / (n_replicates + 1) + atom
