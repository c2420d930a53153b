"""Sums over blocks of samples, of which the squared kernel calibration error is read in linear time."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.canonical.vectors import distributions, vectors, ways_of_weighing
from torchcalib.kernels import pair_op
from torchcalib.kernels.pair_op import Kernel
from torchcalib.kernels.row_stats import wide_dtype
from torchcalib.predictions import Predictions, Task
from torchcalib.statistics import Sums, known

_ROWS_OF_MEDIAN = 1024


class CalibrationTest(NamedTuple):
    """A squared kernel calibration error and the p-value of calibration.

    Attributes:
        value: `(...)`; see `skce`.
        p_value: the probability of a value at least as large if the model is calibrated, `(...)`, in [0, 1]. It is
            approximate or an upper bound; see `skce_test`.
    """

    value: Tensor
    p_value: Tensor


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

    def test(self) -> CalibrationTest:
        """Test whether the expectation is 0: the mean of many independent blocks is normal."""
        mean, variance = self.mean, self.variance_of_mean
        is_exact = (mean == 0) & (variance == 0)  # no residuals at all: every calibrated model shows as much
        z = mean / variance.masked_fill(is_exact, 1).sqrt()
        return CalibrationTest(mean, (torch.special.erfc(z / math.sqrt(2)) / 2).masked_fill(is_exact, 1))


@dataclass(frozen=True)
class BlockRecipe:
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
        sums = pair_op.blocks(
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

    def wrap(self, sums: Tensor) -> BlockStats:
        """Return `sums` as `BlockStats`."""
        return BlockStats(sums)

    def n_events(self, p: Predictions) -> int:
        """Return how many numbers one way of weighing works on."""
        return p.samples.numel() * p.num_classes


def scale_of(kernel: Kernel, bandwidth: Any) -> Any:
    """What probabilities are multiplied by, so that a kernel of bandwidth 1 in `pair_op` is the one that is meant."""
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
