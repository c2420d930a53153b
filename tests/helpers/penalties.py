"""Penalties for training, their slow loops, and batches."""

import math
from functools import partial

import oracles
import torch
from oracles import losses as slow

import torchcalib as tc

C = 4


TASKS = ("binary", "multiclass", "multilabel")


PENALTIES = {  # function, module, options, slow loop over (confidence, outcome, weight)
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


def claims_of(task, reduction, logits, target, weights):
    """Return lists of (confidence, outcome, weight): a single one, or one for each class."""
    if task == "multiclass":
        qs = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in logits]
        ts = [oracles.one_hot(h, C) for h in target]
        if reduction == "classwise":
            return [[(q[k], t[k], w) for q, t, w in zip(qs, ts, weights, strict=True)] for k in range(C)]
        k = 1 if reduction == "top_label" else reduction.k
        tops = [sorted(range(C), key=lambda j, q=q: -q[j])[:k] for q in qs]
        return [
            [
                (sum(q[j] for j in top), sum(t[j] for j in top), w)
                for q, t, top, w in zip(qs, ts, tops, weights, strict=True)
            ]
        ]
    if task == "multilabel":
        columns = zip(zip(*logits, strict=True), zip(*target, strict=True), strict=True)
        return [claims_of("binary", "positive_class", zs, ys, weights)[0] for zs, ys in columns]
    ps = [1 / (1 + math.exp(-z)) for z in logits]
    pairs = [
        (p, y) if reduction == "positive_class" or p > 0.5 else (1 - p, 1 - y) for p, y in zip(ps, target, strict=True)
    ]
    return [[(c, y, w) for (c, y), w in zip(pairs, weights, strict=True)]]


def slow_value(loop, task, reduction, logits, target, weights):
    values = [loop(claims) for claims in claims_of(task, reduction, logits, target, weights)]
    return sum(values) / len(values)
