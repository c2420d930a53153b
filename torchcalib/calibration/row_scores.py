"""Scores of single samples, and their contributions to the mean score."""

from typing import Literal

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import wide_dtype

RowScore = Literal["nll", "brier"]
_ROW_SCORES = {"nll": "cross_entropy", "brier": "squared_error"}
"""Attribute of `Predictions` with the score of each sample, by score."""


def usable_score(score: RowScore, p: Predictions) -> RowScore:
    """Return `"brier"` instead of `"nll"` if the NLL of predictions is infinite."""
    return "brier" if score == "nll" and bool(contributions(p.cross_entropy, p).sum().isinf().any()) else score


def effective_samples(p: Predictions) -> float:
    """Return the effective number of samples, (sum w)^2 / sum w^2 for weights w; for labels the smallest one."""
    w = sample_weights(p)
    return float((w.sum(-1).square() / w.square().sum(-1)).nan_to_num(0).min())


def row_scores(score: RowScore, p: Predictions, values: Tensor) -> Tensor:
    """Return the score of each sample `(..., N)` for calibrated values of the predictions, float64."""
    found: Tensor = getattr(p.with_values(values.to(p.dtype)), _ROW_SCORES[score])
    return found.to(wide_dtype(found.device))


def class_counts(p: Predictions) -> Tensor:
    """Return the number of samples with positive weight of each class `(..., C)`, int64; 2 classes if binary."""
    target = p.target.long()
    present = torch.ones_like(target) if p.weights is None else (p.weights != 0).expand(target.shape).long()
    return target.new_zeros((*target.shape[:-1], p.num_classes)).scatter_add(-1, target * present, present)


def has_one_class(p: Predictions) -> bool:
    """Return whether all samples have the same class; multi-label: whether this is so for every label."""
    return bool(((class_counts(p) > 0).sum(-1) < 2).all())


def contributions(scores: Tensor, p: Predictions, groups: Tensor | None = None) -> Tensor:
    """Return the contribution of each independent unit to the mean score, `(..., U)`. Their sum is the mean score.

    Scores are `(..., N)`, for multi-label `(..., L, N)`. `groups` `(N,)` are groups of dependent samples; None if
    samples are independent.
    """
    w = sample_weights(p)
    parts = (w * scores).masked_fill(w == 0, 0) / w.sum(-1, keepdim=True)
    if p.task == "multilabel":
        parts = parts.mean(-2)
    if groups is None:
        return parts
    _, index = torch.unique(groups.reshape(-1), return_inverse=True)
    return parts.new_zeros(*parts.shape[:-1], int(index.max()) + 1).index_add(-1, index, parts)
