"""Systems to compare: calibrated, over-confident and noisy."""

from functools import cache

import torch

import torchcalib as tc

FEW = {"n_replicates": 39}


def systems(task, n=120, seed=0):
    """Return logits of the three systems by name, and targets."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn((n,) if task == "binary" else (n, 4), generator=g, dtype=torch.float64)
    if task == "multiclass":
        uniform = torch.rand(n, 1, generator=g, dtype=torch.float64)
        target = (logits.softmax(-1).cumsum(-1) < uniform).sum(-1)
    else:
        target = torch.bernoulli(logits.sigmoid(), generator=g).long()
    noise = torch.randn(logits.shape, generator=g, dtype=torch.float64)
    return {"calibrated": logits, "sure": 4 * logits, "noisy": logits + 2 * noise}, target


@cache
def compared(task):
    return tc.compare(*systems(task), task=task, from_logits=True, **FEW)
