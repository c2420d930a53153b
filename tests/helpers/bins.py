"""Data for tests of bins: tasks with their reductions, predictions with labels or soft targets, and weights."""

import torch
from cases import N_CLASSES

F64 = torch.float64
N_BINS = 5
REDUCTIONS = [("binary", "positive_class"), ("binary", "top_label"), ("multiclass", "top_label"),
              ("multiclass", "classwise"), ("multilabel", "classwise")]  # fmt: skip
WEIGHTS = ["none", "copies", "importance"]


def data(task, n=50, soft=False, seed=0):
    """Return probabilities, and labels or soft targets."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        preds = torch.randn(n, N_CLASSES, generator=generator, dtype=F64).softmax(-1)
        shares = torch.randn(n, N_CLASSES, generator=generator, dtype=F64).softmax(-1)
        return preds, shares if soft else torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    shape = (n,) if task == "binary" else (n, 3)
    preds, shares = (torch.rand(shape, generator=generator, dtype=F64) for _ in range(2))
    return preds, shares if soft else (shares < preds).long()


def weights_of(kind, n=50):
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(3)
    weights = torch.randint(0, 4, (n,), generator=generator)
    return weights if kind == "copies" else weights * torch.rand(n, generator=generator, dtype=F64)
