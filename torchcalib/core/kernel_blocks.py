"""Sums over blocks of samples, which estimate the squared kernel calibration error (SKCE) in linear time."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions, in_all_replicates, replicates_at_once
from torchcalib.core.sums import Sums, known
from torchcalib.ops import pairwise
from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.pairwise import Kernel

_MEDIAN_ROWS = 1024  # maximum number of rows for the median distance, whose cost is quadratic


def vectors(p: Predictions) -> tuple[Tensor, Tensor]:
    """Return predictions as vectors over C classes, and targets, with C = 2 for binary and multi-label input.

    Values are probabilities or logits `(..., N, C)`, multi-class in the dtype of the input. Targets are labels, int64
    `(..., N)`, or soft targets `(..., N, C)`.
    """
    if p.task == "multiclass":
        return p.input_preds, p.input_target
    values = torch.stack((torch.zeros_like(p.values) if p.from_logits else p.not_probs, p.values), -1)
    target = p.input_target.long() if p.has_labels else torch.stack((1 - p.target, p.target), -1)
    return values, target


def distributions(p: Predictions) -> tuple[Tensor, Tensor]:
    """Return probabilities q and residuals (target minus q), each float64 `(..., N, C)`; 0 in rows with weight 0."""
    values, target = vectors(p)
    wide = values.to(wide_dtype(values.device))
    absent = None if p.weights is None else in_all_replicates(p.weights == 0, len(p.samples)).unsqueeze(-1)
    if absent is not None:  # mask before the softmax, whose gradient is NaN in a row with NaN
        wide = wide.masked_fill(absent, 0)
    q = spread_infinite_logits(wide).softmax(-1) if p.from_logits else wide
    if p.has_labels:
        classes = torch.arange(q.shape[-1], device=q.device)
        target = target.unsqueeze(-1) == classes
    residual = target.to(q.dtype) - q
    if absent is None:
        return q, residual
    return q.masked_fill(absent, 0), residual.masked_fill(absent, 0)


def replicate_weights(p: Predictions) -> Tensor:
    """Return the weights of R replicates, float64 `(..., R, N)`; R = 1 without replicate weights."""
    if p.weights is None:
        return torch.ones(
            (*p.samples[:-1], 1, p.samples[-1]), dtype=wide_dtype(p.input_preds.device), device=p.input_preds.device
        )
    weights = p.weights.expand(*p.replicates, *p.samples)
    weights = weights.flatten(0, len(p.replicates) - 1) if p.replicates else weights.unsqueeze(0)
    return weights.movedim(0, -2)


def on_replicate_axes(values: Tensor, p: Predictions) -> Tensor:
    """Move the replicate axis of values `(..., R)` to the front and reshape it to the replicate axes of `p`."""
    return values.movedim(-1, 0).reshape((*p.replicates, *p.samples[:-1]))


@dataclass(frozen=True, eq=False)
class BlockStats(Sums):
    """Sums over blocks of samples for the squared kernel calibration error (SKCE), `(..., 3, 1)`.

    A pair of samples with predictions p, p' and one-hot targets e, e' contributes h = (e - p)^T (e' - p') k(p, p').
    The quantities are the number of blocks, the sum of the block means of h, and the sum of their squares.
    """

    @property
    def mean(self) -> Tensor:
        """Mean of the block means `(...)`, which estimates the SKCE; NaN without blocks."""
        return (self.sums[..., 1, :] / self.n).squeeze(-1)

    @property
    def variance_of_mean(self) -> Tensor:
        """Estimate of the variance of the mean `(...)`; NaN with fewer than two blocks."""
        n = self.n.squeeze(-1)
        squares = self.sums[..., 2, :].squeeze(-1) / n - self.mean.square()
        return (squares.clamp(min=0) / (n - 1)).masked_fill(n < 2, torch.nan)

    @property
    def p_value(self) -> Tensor:
        """One-sided p-value `(...)` of the hypothesis SKCE = 0, from the normal approximation for many blocks."""
        mean, variance = self.mean, self.variance_of_mean
        no_residuals = (mean == 0) & (variance == 0)  # z would be 0 / 0; the p-value is set to 1
        z = mean / variance.masked_fill(no_residuals, 1).sqrt()
        p_value: Tensor = torch.special.erfc(z / math.sqrt(2)) / 2
        return p_value.masked_fill(no_residuals, 1)


@dataclass(frozen=True)
class BlockAccumulator:
    """Accumulator of sums over blocks of consecutive samples; see `skce` for the options."""

    kernel: Kernel
    bandwidth: float | Literal["median"]
    size: int  # number of samples in a block
    chunk: int | None = field(default=None, compare=False)  # number of blocks that are processed at a time

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape of the sums: `(3, 1)`, or `(L, 3, 1)` for L labels."""
        return (*((known("num_labels", num_classes),) if task == "multilabel" else ()), 3, 1)

    def from_predictions(self, p: Predictions) -> BlockStats:
        """Return the sums over blocks, `(..., 3, 1)`, with leading axes for replicate weights."""
        values, target = vectors(p)
        copies, nan_if_invalid = None, None
        if p.weights is not None:
            weights = p.weights.expand(*p.replicates, *p.samples)
            # A NaN weight marks an invalid row for which no error was raised (`enforce`). It makes the sums NaN.
            nan_if_invalid = 0 * weights.sum(-1, keepdim=True).unsqueeze(-1)
            copies = weights.nan_to_num().long()
            values = values.expand(*p.replicates, *values.shape)
            target = target.expand(*p.replicates, *target.shape)
        if self.bandwidth == "median":
            q, _ = distributions(p)
            scale = scale_of(self.kernel, median_distance(q, replicate_weights(p), self.kernel)).movedim(-1, 0)
            scale = scale.reshape(values.shape[:-2])
        else:
            wide = wide_dtype(values.device)
            scale = torch.full(values.shape[:-2], 1.0, dtype=wide, device=values.device)
            scale = scale * scale_of(self.kernel, self.bandwidth)
        sums = pairwise.blocks(
            values,
            target,
            copies,
            scale,
            from_logits=p.from_logits,
            kernel=self.kernel,
            size=self.size,
            at_most_once=not p.weighted,
            chunk=self.chunk,
        ).unsqueeze(-1)
        return BlockStats(sums if nan_if_invalid is None else sums + nan_if_invalid)

    def of_groups(self, p: Predictions, groups: Tensor, num_groups: int) -> BlockStats:
        """Return the sums `(G, ..., 3, 1)` over blocks of samples from the same group, as replicates of the weights."""
        given, parts = 1.0 if p.weights is None else p.weights, []
        for numbers in torch.split(torch.arange(num_groups, device=groups.device), replicates_at_once(groups.numel())):
            weights = (groups == numbers.reshape(-1, *[1] * groups.dim())).to(wide_dtype(groups.device)) * given
            parts.append(self.from_predictions(replace(p, weights=weights)).sums)
        return BlockStats(torch.cat(parts))

    def wrap(self, sums: Tensor) -> BlockStats:
        """Convert sums `(..., 3, 1)` to `BlockStats`."""
        return BlockStats(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate: one per sample and class."""
        return p.samples.numel() * p.num_classes


def scale_of(kernel: Kernel, bandwidth: Any) -> Any:
    """Return the scale of the probabilities in the kernels of `ops.pairwise` that corresponds to a bandwidth."""
    return 1 / (2 * bandwidth if kernel == "laplacian" else math.sqrt(2) * bandwidth)


def median_distance(q: Tensor, weights: Tensor, kernel: Kernel) -> Tensor:
    """Return the weighted median distance between two rows of `q` `(..., N, C)`, `(..., R)`; 1 if the median is 0.

    At most 1,024 evenly spaced rows are used. A row with weight k is treated as k rows at distance 0. The distance is
    half the l1 distance for "laplacian", otherwise the l2 distance.
    """
    n = q.shape[-2]
    n_rows = min(n, _MEDIAN_ROWS)
    subset = torch.arange(n_rows, device=q.device) * n // max(1, n_rows)
    q, weights = q.detach()[..., subset, :], weights[..., subset]
    distance = torch.cdist(q, q, p=1.0) / 2 if kernel == "laplacian" else torch.cdist(q, q)
    # weight of each pair of rows; a copy of a row is not paired with itself
    pairs = weights.unsqueeze(-1) * weights.unsqueeze(-2) - weights.diag_embed()
    ordered, order = distance.flatten(-2).sort(-1)
    reached = pairs.flatten(-2).gather(-1, order.unsqueeze(-2).expand_as(pairs.flatten(-2))).cumsum(-1)
    place = (reached < reached[..., -1:] / 2).sum(-1, keepdim=True).clamp(max=max(0, ordered.shape[-1] - 1))
    if not n:
        return torch.ones(weights.shape[:-1], dtype=q.dtype, device=q.device)
    median = ordered.unsqueeze(-2).expand_as(reached).gather(-1, place).squeeze(-1)
    return torch.where(median > 0, median, 1.0)
