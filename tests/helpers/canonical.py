"""Data sets for tests of canonical calibration."""

from functools import partial

import oracles
import torch
from cases import N_CLASSES, Case
from helpers import numbers

import torchcalib as tc

F64 = torch.float64
TASKS = {"binary": {}, "multiclass": {}, "multilabel": {"average": None}}
close = partial(numbers.close, rtol=1e-11, atol=1e-13)
COPIES = torch.tensor([1, 0, 3, 2, 1, 7, 0, 1] * 3)[:23]


def data(task, n, **how):
    return Case("", tc.skce, tc.SKCE, task).data(n=n, **how)


def rows_of(task, preds, target):
    """Return (rows of q, rows of t) for every value of the metric."""
    if task == "multiclass":
        return [(preds.tolist(), [oracles.one_hot(h, N_CLASSES) for h in target.tolist()])]
    columns = [(preds, target)] if task == "binary" else zip(preds.T, target.T, strict=True)
    return [oracles.as_rows(p.tolist(), y.tolist()) for p, y in columns]


def calibrated(n_sets, n, concentration=1.0):
    """Return data sets of predictions `(S, N, 3)`, and labels drawn from them."""
    generator = torch.Generator().manual_seed(0)
    preds = (torch.randn(n_sets, n, 3, generator=generator, dtype=F64) / concentration).softmax(-1)
    target = torch.multinomial(preds.flatten(0, 1), 1, generator=generator).reshape(n_sets, n)
    return preds, target
