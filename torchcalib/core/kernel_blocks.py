"""Sums over blocks of samples, from which the squared kernel calibration error is computed in linear time."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.sums import Sums, known
from torchcalib.ops import pairwise
from torchcalib.ops.host_values import largest
from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.pairwise import Kernel

_ROWS_OF_MEDIAN = 1024


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


@dataclass(frozen=True, eq=False)
class BlockStats(Sums):
    """Sums over blocks of samples: how many, their means of h, and the squares of these; `(..., 3, 1)`."""

    @property
    def mean(self) -> Tensor:
        """Mean over the blocks `(...)`; NaN without any."""
        return (self.sums[..., 1, :] / self.n).squeeze(-1)

    @property
    def variance_of_mean(self) -> Tensor:
        """Estimate of the variance of the mean `(...)`; NaN with fewer than two blocks."""
        n = self.n.squeeze(-1)
        squares = self.sums[..., 2, :].squeeze(-1) / n - self.mean.square()
        return (squares.clamp(min=0) / (n - 1)).masked_fill(n < 2, torch.nan)

    @property
    def p_value(self) -> Tensor:
        """One-sided p-value of an expectation of 0: the mean of many independent blocks is normal."""
        mean, variance = self.mean, self.variance_of_mean
        no_residuals = (mean == 0) & (variance == 0)  # 0 / 0; no value is smaller, so p = 1
        z = mean / variance.masked_fill(no_residuals, 1).sqrt()
        p_value: Tensor = torch.special.erfc(z / math.sqrt(2)) / 2
        return p_value.masked_fill(no_residuals, 1)


@dataclass(frozen=True)
class BlockAccumulator:
    """Sums over blocks of `size` samples, cut in the order in which they come.

    Attributes:
        kernel, bandwidth: see `skce`.
        size: samples of a block.
        chunk: how many blocks are made at a time.
    """

    kernel: Kernel
    bandwidth: float | Literal["median"]
    size: int
    chunk: int | None = field(default=None, compare=False)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return `(3, 1)`, and that for each of L labels."""
        return (*((known("num_labels", num_classes),) if task == "multilabel" else ()), 3, 1)

    def of(self, p: Predictions) -> BlockStats:
        """Cut the samples into blocks."""
        values, target = vectors(p)
        copies, poison = None, None
        if p.weights is not None:
            weights = p.weights.expand(*p.replicates, *p.samples)
            poison = 0 * weights.sum(-1, keepdim=True).unsqueeze(-1)  # NaN, if there is one
            copies = weights.nan_to_num().long()
            values = values.expand(*p.replicates, *values.shape)
            target = target.expand(*p.replicates, *target.shape)
        if self.bandwidth == "median":
            q, _ = distributions(p)
            scale = scale_of(self.kernel, median_distance(q, ways_of_weighing(p), self.kernel)).movedim(-1, 0)
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
        return BlockStats(sums if poison is None else sums + poison)

    def of_groups(self, p: Predictions, groups: Tensor, num_groups: int) -> BlockStats:
        """Return the sums over blocks that are cut within each group, `(G, ..., 3, 1)`; see `of`.

        Args:
            p: predictions without replicate weights.
            groups: the group of each sample, `(..., N)`; a label axis of size 1 is expanded.
            num_groups: G.
        """
        values, target = vectors(p)
        *lead, n, _ = values.shape
        wide = wide_dtype(values.device)
        if not n:
            return BlockStats(torch.zeros((num_groups, *lead, 3, 1), dtype=wide, device=values.device))
        weights = p.weights if p.weights is not None else torch.ones(n, dtype=wide, device=values.device)
        weights = weights.expand(*lead, n)
        groups, order = groups.expand(*lead, n).sort(dim=-1, stable=True)
        cut = _cut_in_groups(weights.nan_to_num().long().gather(-1, order), groups, num_groups, self.size, p.weighted)
        rows = order.gather(-1, cut.rows).reshape(*cut.is_block.shape, self.size)
        per_block = pairwise.blocks(
            _rows_of(values, rows, 2),
            _rows_of(target, rows, 1 if p.hard else 2),
            cut.is_block.long().unsqueeze(-1).expand_as(rows),
            torch.full(rows.shape[:-1], scale_of(self.kernel, self.bandwidth), dtype=wide, device=values.device),
            from_logits=p.from_logits,
            kernel=self.kernel,
            size=self.size,
            at_most_once=True,
            chunk=self.chunk,
        )
        _, residual = distributions(p)
        own = residual.square().sum(-1).gather(-1, order)  # h of two copies of a row
        of_copies = cut.alone.unsqueeze(-1) * torch.stack((torch.ones_like(own), own, own.square()), -1)
        sums = torch.zeros((*lead, num_groups, 3), dtype=wide, device=values.device)
        sums = sums.scatter_add(-2, cut.owner.unsqueeze(-1).expand_as(per_block), per_block)
        sums = sums.scatter_add(-2, groups.unsqueeze(-1).expand_as(of_copies), of_copies)
        poison = (0 * weights.sum(-1))[..., None, None]  # NaN, if there is one
        return BlockStats((sums + poison).movedim(-2, 0).unsqueeze(-1))

    def wrap(self, sums: Tensor) -> BlockStats:
        """Return `sums` as `BlockStats`."""
        return BlockStats(sums)

    def n_events(self, p: Predictions) -> int:
        """Return how many numbers one way of weighing works on."""
        return p.samples.numel() * p.num_classes


class _GroupBlocks(NamedTuple):
    """Blocks of rows that are sorted by group.

    Attributes:
        rows: the rows of K blocks `(..., K * size)`.
        is_block: which of the K are blocks `(..., K)`; the others are padding.
        owner: the group of each block `(..., K)`.
        alone: for each row, the number of further blocks that hold only its copies `(..., N)`.
    """

    rows: Tensor
    is_block: Tensor
    owner: Tensor
    alone: Tensor


def _cut_in_groups(copies: Tensor, groups: Tensor, num_groups: int, size: int, weighted: bool) -> _GroupBlocks:
    """Cut rows, sorted by group and each repeated `copies` times, into blocks within the groups."""
    n = copies.shape[-1]
    totals = copies.new_zeros((*copies.shape[:-1], num_groups)).scatter_add(-1, groups, copies)
    end = copies.cumsum(-1) - (totals.cumsum(-1) - totals).gather(-1, groups)  # counted within the group
    whole = (totals // size * size).gather(-1, groups)  # the remainder of a group is dropped
    begin, end = torch.minimum(end - copies, whole), torch.minimum(end, whole)
    alone = (end // size - (begin + size - 1) // size).clamp(min=0)
    # Without these, every block holds the last copy of some row. So there are at most N, whatever the weights.
    end = (end - begin - alone * size).cumsum(-1)
    n_blocks = n if weighted else n // size
    if weighted and copies.device.type == "cpu":  # on other devices reading the number would synchronise
        n_blocks = largest(end[..., -1:] // size, n)
    places = torch.arange(max(1, n_blocks) * size, device=copies.device).expand(*copies.shape[:-1], -1).contiguous()
    rows = torch.searchsorted(end, places, right=True).clamp(max=n - 1)
    first = slice(None, None, size)
    return _GroupBlocks(rows, places[..., first] < end[..., -1:], groups.gather(-1, rows[..., first]), alone)


def _rows_of(x: Tensor, rows: Tensor, n_axes: int) -> Tensor:
    """Return the entries of `x`, `(..., N)` or with two axes `(..., N, C)`, at rows `(..., K, size)`."""
    flat = rows.flatten(-2)
    found = x.gather(-1, flat) if n_axes == 1 else x.gather(-2, flat.unsqueeze(-1).expand(*flat.shape, x.shape[-1]))
    return found.reshape(*rows.shape, *found.shape[flat.dim() :])


def scale_of(kernel: Kernel, bandwidth: Any) -> Any:
    """Return the factor of probabilities for which a kernel of `ops.pairwise` has this bandwidth."""
    return 1 / (2 * bandwidth if kernel == "laplacian" else math.sqrt(2) * bandwidth)


def median_distance(q: Tensor, weights: Tensor, kernel: Kernel) -> Tensor:
    """The median distance of two rows, copies among them, `(..., R)`; 1 where that is 0.

    Args:
        q: `(..., N, C)`.
        weights: `(..., R, N)`.
        kernel: whose distance.
    """
    n = q.shape[-2]
    some = torch.arange(min(n, _ROWS_OF_MEDIAN), device=q.device) * n // max(1, min(n, _ROWS_OF_MEDIAN))
    q, weights = q.detach()[..., some, :], weights[..., some]
    distance = torch.cdist(q, q, p=1.0) / 2 if kernel == "laplacian" else torch.cdist(q, q)
    pairs = weights.unsqueeze(-1) * weights.unsqueeze(-2) - weights.diag_embed()  # of different copies
    ordered, order = distance.flatten(-2).sort(-1)
    reached = pairs.flatten(-2).gather(-1, order.unsqueeze(-2).expand_as(pairs.flatten(-2))).cumsum(-1)
    place = (reached < reached[..., -1:] / 2).sum(-1, keepdim=True).clamp(max=max(0, ordered.shape[-1] - 1))
    if not n:
        return torch.ones(weights.shape[:-1], dtype=q.dtype, device=q.device)
    median = ordered.unsqueeze(-2).expand_as(reached).gather(-1, place).squeeze(-1)
    return torch.where(median > 0, median, 1.0)
