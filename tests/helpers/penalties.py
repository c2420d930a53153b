"""Penalties for training, the loops that they are held against, and batches."""

import math
from functools import partial

import torch
from oracles import losses as slow
from oracles.ranked import events

import torchcalib as tc

C = 4
TASKS = ("binary", "multiclass", "multilabel")
PENALTIES = {  # function, module, options, loop over claims
    "soft l1": (tc.soft_binned_ece, tc.SoftBinnedECELoss, {"n_bins": 7, "norm": "l1"},
                partial(slow.soft_binned_ece, n_bins=7, temperature=0.01, norm="l1")),
    "soft l2": (tc.soft_binned_ece, tc.SoftBinnedECELoss, {"temperature": 0.002},
                partial(slow.soft_binned_ece, n_bins=15, temperature=0.002, norm="l2")),
    "mmce": (tc.mmce, tc.MMCELoss, {}, partial(slow.mmce, bandwidth=0.4, weighted=False)),
    "mmce weighted": (tc.mmce, tc.MMCELoss, {"bandwidth": 0.05, "weighted": True},
                      partial(slow.mmce, bandwidth=0.05, weighted=True)),
    "ece": (tc.ece, tc.ECELoss, {"n_bins": 6}, None),
    "canonical": (tc.canonical_error, tc.CanonicalLoss, {"bandwidth": 0.1, "p": 2}, None),
    "skce": (partial(tc.skce, estimator="biased"), tc.SKCELoss, {"bandwidth": 0.5}, None),
}  # fmt: skip
KINDS = [
    *(("binary", reduction) for reduction in ("positive_class", "top_label")),
    *(("multiclass", reduction) for reduction in ("top_label", "classwise", tc.TopK(2))),
    ("multilabel", "classwise"),
]


def data(task, n=24, seed=0, dtype=torch.float64, lead=()):
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, n) if task == "binary" else (*lead, n, C)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    high = C if task == "multiclass" else 2
    target = torch.randint(0, high, shape if task == "multilabel" else (*lead, n), generator=generator)
    return logits.to(dtype), target


def slow_value(loop, task, reduction, logits, target, weights):
    """The loop over each list of (confidence, outcome, weight), averaged over classes."""
    if task == "multiclass":
        probs = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in logits]
    else:
        rows = logits if task == "multilabel" else [[z] for z in logits]
        probs = [[1 / (1 + math.exp(-z)) for z in row] for row in rows]
        probs = probs if task == "multilabel" else [p for (p,) in probs]
    values = [loop(list(zip(*columns, weights, strict=True))) for columns in events(task, reduction, probs, target)]
    return sum(values) / len(values)
