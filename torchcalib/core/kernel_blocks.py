"""Sums over blocks of samples, which estimate the squared kernel calibration error (SKCE) in linear time."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.sums import Ranges, Sums, known
from torchcalib.ops import pairwise
from torchcalib.ops.host_values import largest
from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.pairwise import Kernel

_MEDIAN_ROWS = 1024  # maximum number of rows for the median distance, whose cost is quadratic


class Vectors(NamedTuple):
    """Predictions and targets as vectors over C classes, with C = 2 for binary and multi-label input."""

    values: Tensor  # probabilities or logits `(..., N, C)`; multi-class in the dtype of the input
    target: Tensor  # labels, int64 `(..., N)`, or soft targets `(..., N, C)`


def vectors(p: Predictions) -> Vectors:
    """Return predictions and targets as vectors over classes."""
    if p.task == "multiclass":
        return Vectors(p.input_preds, p.input_target)
    values = torch.stack((torch.zeros_like(p.values) if p.from_logits else p.not_probs, p.values), -1)
    target = p.input_target.long() if p.has_labels else torch.stack((1 - p.target, p.target), -1)
    return Vectors(values, target)


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
    has_pairs: ClassVar[bool] = True  # sums over pairs of rows; see `pieces.is_divisible`

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape of the sums: `(3, 1)`, or `(L, 3, 1)` for L labels."""
        return (*((known("num_labels", num_classes),) if task == "multilabel" else ()), 3, 1)

    @property
    def ranges(self) -> Ranges:
        """Ranges of the three quantities: |h| is at most the product of the lengths of two residuals, 2."""
        return (1, 1), (-2, 2), (0, 4)

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
        """Return the sums `(G, ..., 3, 1)` over blocks of samples from the same group."""
        values, target = vectors(p)
        *lead, n, _ = values.shape
        wide = wide_dtype(values.device)
        if not n:
            return BlockStats(torch.zeros((num_groups, *lead, 3, 1), dtype=wide, device=values.device))
        weights = p.weights if p.weights is not None else torch.ones(n, dtype=wide, device=values.device)
        weights = weights.expand(*lead, n)
        groups, order = groups.expand(*lead, n).sort(dim=-1, stable=True)
        copies = weights.nan_to_num().long().gather(-1, order)
        blocks = _blocks_in_groups(copies, groups, num_groups, self.size, p.weighted)
        rows = order.gather(-1, blocks.rows).reshape(*blocks.is_block.shape, self.size)
        per_block = pairwise.blocks(
            _gather_rows(values, rows, 2),
            _gather_rows(target, rows, 1 if p.has_labels else 2),
            blocks.is_block.long().unsqueeze(-1).expand_as(rows),
            torch.full(rows.shape[:-1], scale_of(self.kernel, self.bandwidth), dtype=wide, device=values.device),
            from_logits=p.from_logits,
            kernel=self.kernel,
            size=self.size,
            at_most_once=True,
            chunk=self.chunk,
        )
        _, residual = distributions(p)
        h_of_copies = residual.square().sum(-1).gather(-1, order)  # h of two copies of a row: k(p, p) = 1
        powers = torch.stack((torch.ones_like(h_of_copies), h_of_copies, h_of_copies.square()), -1)
        of_copies = blocks.n_copy_blocks.unsqueeze(-1) * powers  # sums over blocks of copies of a single row
        sums = torch.zeros((*lead, num_groups, 3), dtype=wide, device=values.device)
        sums = sums.scatter_add(-2, blocks.group.unsqueeze(-1).expand_as(per_block), per_block)
        sums = sums.scatter_add(-2, groups.unsqueeze(-1).expand_as(of_copies), of_copies)
        nan_if_invalid = (0 * weights.sum(-1))[..., None, None]  # 0, or NaN if a weight is NaN
        return BlockStats((sums + nan_if_invalid).movedim(-2, 0).unsqueeze(-1))

    def wrap(self, sums: Tensor) -> BlockStats:
        """Convert sums `(..., 3, 1)` to `BlockStats`."""
        return BlockStats(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate: one per sample and class."""
        return p.samples.numel() * p.num_classes


class _GroupBlocks(NamedTuple):
    """Partition of rows, which are sorted by group, into blocks of `size` rows."""

    rows: Tensor  # indices of the rows in K blocks, `(..., K * size)`
    is_block: Tensor  # mask of the blocks that are not padding, `(..., K)`
    group: Tensor  # group index of each block, `(..., K)`
    n_copy_blocks: Tensor  # number of additional blocks that contain only copies of one row, for each row `(..., N)`


def _blocks_in_groups(copies: Tensor, groups: Tensor, num_groups: int, size: int, weighted: bool) -> _GroupBlocks:
    """Partition rows `(..., N)`, sorted by group and repeated `copies` times, into blocks within groups."""
    n = copies.shape[-1]
    totals = copies.new_zeros((*copies.shape[:-1], num_groups)).scatter_add(-1, groups, copies)
    # end of the copies of each row, counted from the start of its group
    end = copies.cumsum(-1) - (totals.cumsum(-1) - totals).gather(-1, groups)
    whole = (totals // size * size).gather(-1, groups)  # without the incomplete last block of the group
    begin, end = torch.minimum(end - copies, whole), torch.minimum(end, whole)
    n_copy_blocks = (end // size - (begin + size - 1) // size).clamp(min=0)
    # Every other block contains the last copy of a row, which bounds the number of these blocks by N.
    end = (end - begin - n_copy_blocks * size).cumsum(-1)
    n_blocks = n if weighted else n // size
    if weighted and copies.device.type == "cpu":  # on a GPU, reading the number of blocks would synchronise
        n_blocks = largest(end[..., -1:] // size, n)
    places = torch.arange(max(1, n_blocks) * size, device=copies.device).expand(*copies.shape[:-1], -1).contiguous()
    rows = torch.searchsorted(end, places, right=True).clamp(max=n - 1)
    first = slice(None, None, size)
    return _GroupBlocks(rows, places[..., first] < end[..., -1:], groups.gather(-1, rows[..., first]), n_copy_blocks)


def _gather_rows(x: Tensor, rows: Tensor, n_axes: int) -> Tensor:
    """Gather the rows with indices `(..., K, size)` from `x`: `(..., N)`, or `(..., N, C)` if `n_axes` is 2."""
    flat = rows.flatten(-2)
    found = x.gather(-1, flat) if n_axes == 1 else x.gather(-2, flat.unsqueeze(-1).expand(*flat.shape, x.shape[-1]))
    return found.reshape(*rows.shape, *found.shape[flat.dim() :])


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
