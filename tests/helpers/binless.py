"""What the tests of binless metrics share: predictions that are calibrated, or are not by a factor of the log-odds."""

import torch

F64 = torch.float64


def calibrated(n, lead=(), seed=0, scale=1.0):
    """Probabilities, skewed to the lower half, and outcomes of `scale` times their log-odds."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(*lead, n, generator=generator, dtype=F64) - 1
    target = torch.rand(*lead, n, generator=generator, dtype=F64) < (scale * logits).sigmoid()
    return logits.sigmoid(), target.long()
