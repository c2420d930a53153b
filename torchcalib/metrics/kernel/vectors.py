"""Predictions and targets as vectors over classes; binary ones, and those of each label, are of two classes."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.ops.logs import spread_infinite_logits, wide_dtype


class Vectors(NamedTuple):
    """What canonical calibration is read from, each with rows `(..., N)`; a label is one more batch axis.

    Attributes:
        values: probabilities or logits `(..., N, C)`, of the dtype given.
        target: labels `(..., N)`, int64, or distributions `(..., N, C)`.
    """

    values: Tensor
    target: Tensor


def vectors(p: Predictions) -> Vectors:
    """Return predictions and targets with the classes on the last axis."""
    if p.task == "multiclass":
        return Vectors(p.given, p.given_target)
    values = torch.stack((torch.zeros_like(p.values) if p.from_logits else p.not_probs, p.values), -1)
    target = p.given_target.long() if p.hard else torch.stack((1 - p.target, p.target), -1)
    return Vectors(values, target)


def distributions(p: Predictions) -> tuple[Tensor, Tensor]:
    """Return probabilities, and targets less probabilities, `(..., N, C)` in the dtype of sums; 0 in rows left out."""
    values, target = vectors(p)
    wide = values.to(wide_dtype(values.device))
    absent = None if p.weights is None else in_all_replicates(p.weights == 0, len(p.samples)).unsqueeze(-1)
    if absent is not None:  # before the softmax, which would pass a NaN on to the gradient
        wide = wide.masked_fill(absent, 0)
    q = spread_infinite_logits(wide).softmax(-1) if p.from_logits else wide
    if p.hard:
        classes = torch.arange(q.shape[-1], device=q.device)
        target = target.unsqueeze(-1) == classes
    residual = target.to(q.dtype) - q
    if absent is None:
        return q, residual
    return q.masked_fill(absent, 0), residual.masked_fill(absent, 0)


def ways_of_weighing(p: Predictions) -> Tensor:
    """Return the weights `(..., R, N)` in the dtype of sums: R is 1 where the rows are weighed in one way."""
    if p.weights is None:
        return torch.ones((*p.samples[:-1], 1, p.samples[-1]), dtype=wide_dtype(p.given.device), device=p.given.device)
    weights = p.weights.expand(*p.replicates, *p.samples)
    ways = weights.flatten(0, len(p.replicates) - 1) if p.replicates else weights.unsqueeze(0)
    return ways.movedim(0, -2)


def by_way(values: Tensor, p: Predictions) -> Tensor:
    """Return values `(..., R)` with the ways of weighing in front, as `p` has them."""
    return values.movedim(-1, 0).reshape((*p.replicates, *p.samples[:-1]))
