"""Predictions for tests of binless metrics: calibrated, or miscalibrated by a factor of the log-odds."""

import torch

F64 = torch.float64


def calibrated(n, lead=(), seed=0, scale=1.0):
    """Return probabilities, mostly below 1/2, and outcomes whose log-odds are `scale` times theirs."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(*lead, n, generator=generator, dtype=F64) - 1
    target = torch.rand(*lead, n, generator=generator, dtype=F64) < (scale * logits).sigmoid()
    return logits.sigmoid(), target.long()
