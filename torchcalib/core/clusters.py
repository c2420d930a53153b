"""Clusters of dependent rows: cluster numbers from identifiers, and sums of every cluster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arrays import as_tensor
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats, SumsAccumulator
from torchcalib.io.hashing import hashes_of
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import cell_sums, weighted_sums

MAX_CLUSTERS = 2**10
"""Largest number of clusters for which sums are stored. Clusters with the same hash are merged.

Merged clusters are independent of each other. A variance estimated from them has a relative standard error of
sqrt(2 / 1024), 4%.
"""

_GOLDEN = 633  # odd, so that multiples are distinct modulo 1,024; about 1,024 times the golden ratio
_MIN_CLUSTERS, _MAX_SUMS = 2**7, 2**20  # sums over all clusters; the minimum may need more

S = TypeVar("S")


def num_clusters_for(shape: Sequence[int]) -> int:
    """Return the number of clusters G to store, from 128 to 1,024, for sums of `shape` per cluster."""
    return max(_MIN_CLUSTERS, min(MAX_CLUSTERS, _MAX_SUMS // max(1, math.prod(shape))))


def identifiers(clusters: Any, device: torch.device | None = None) -> Tensor:
    """Return integer identifiers of clusters, int64. Text and dates are hashed.

    Raises:
        TypeError: if the clusters are neither integers nor text.
        ValueError: if a cluster is missing.
    """
    if not isinstance(clusters, Tensor):
        column = np.asarray(clusters)
        if column.dtype.kind in "OUSTMm":
            if any(x is None or x != x or x == "" for x in column.flat):
                raise ValueError(
                    "`clusters` must name the cluster of each row, got a missing value. "
                    "Give rows without a cluster distinct names."
                )
            names = column.astype(str)
            return hashes_of(names.ravel().tolist()).reshape(column.shape).to(device)
        clusters = as_tensor("clusters", column, device)
    assert isinstance(clusters, Tensor)
    if clusters.is_floating_point() or clusters.is_complex() or clusters.dtype == torch.bool:
        raise TypeError(
            f"`clusters` must be integers or text, got dtype {clusters.dtype}. Convert whole numbers with .long(), and "
            "give rows without a cluster distinct numbers."
        )
    return clusters.long()


def cluster_numbers(clusters: Tensor) -> Tensor:
    """Return a number in [0, `MAX_CLUSTERS`) for each identifier, int64; see `cluster_words`."""
    return (cluster_words(clusters) * MAX_CLUSTERS) >> 32


def cluster_words(clusters: Tensor) -> Tensor:
    """Return a hash in [0, 2^32) of each identifier, int64, equal in all batches, processes and devices.

    The leading 10 bits of identifiers from 0 to 1,023 are different. Their leading bits are spread evenly (Fibonacci
    hashing). Other identifiers have random hashes.
    """
    stream = torch.zeros(1, dtype=torch.int64, device=clusters.device)
    words = random_words(0, stream, clusters.reshape(-1))[0].reshape(clusters.shape)
    is_small = (clusters >= 0) & (clusters < MAX_CLUSTERS)
    spread = (clusters * _GOLDEN) % MAX_CLUSTERS
    return torch.where(is_small, spread * (2**32 // MAX_CLUSTERS), words)


def of_samples(clusters: Tensor, samples: Sequence[int], n_batch: int = 0) -> Tensor:
    """Return the cluster of each sample, int64 with shape `samples`, which begins with `n_batch` batch axes.

    `clusters` has the shape of the samples of one batch element, which all share it, or of all samples. With one
    cluster per item of the first axis of samples, such as an image, all samples of an item form a cluster.

    Raises:
        ValueError: if the shape does not fit.
    """
    inner = tuple(samples)[n_batch:]
    given = tuple(clusters.shape)
    if given in (inner[:1], (*inner[:1], 1)):
        clusters = clusters.reshape(-1, *[1] * (len(inner) - 1))
    elif given not in (inner, tuple(samples)):
        raise ValueError(
            f"`clusters` must have one identifier per sample, shape {inner}, or one per item of the first axis, "
            f"shape {inner[:1]}, got {given}."
        )
    return clusters.expand(tuple(samples))


@dataclass(frozen=True, eq=False)
class ClusteredSums(Generic[S]):
    """Sums over the rows of every cluster.

    Attributes:
        sums: sums of G clusters `(G, ..., F, K)`; the first sum of each cell is its weight.
        accumulator: accumulator of the sums.
    """

    sums: Tensor
    accumulator: SumsAccumulator[S]

    @property
    def whole(self) -> S:
        """Statistic of all rows, such as `BinStats`, or a `RankedSample` of a sketch."""
        return self.accumulator.wrap(self.sums.sum(0))

    @property
    def sizes(self) -> Tensor:
        """Total weight of each cluster in each batch element, float64 `(G, ...)`."""
        return self.sums[..., 0, :].sum(-1)

    def replicate(self, counts: Tensor) -> S:
        """Return the statistic of replicates, `(r, ...)`, in which each cluster occurs `counts` times, `(r, G)`."""
        table = self.sums.flatten(1)
        sums = weighted_sums(counts.to(table), table, bool(table.isfinite().all()))
        return self.accumulator.wrap(sums.reshape(len(counts), *self.sums.shape[1:]))


@dataclass(frozen=True, eq=False)
class ClusteredSample:
    """Samples with the cluster of each sample.

    Attributes:
        whole: all samples `(..., M)`.
        clusters: cluster numbers in [0, `MAX_CLUSTERS`), int64, broadcastable to the samples.
    """

    whole: RankedSample
    clusters: Tensor

    @property
    def sizes(self) -> Tensor:
        """Total weight of each cluster in each batch element, float64 `(MAX_CLUSTERS, ...)`."""
        n = _weight_and_residual(self.whole)[..., :1, :]
        return cell_sums(self.clusters.expand(self.whole.score.shape), n, MAX_CLUSTERS).squeeze(-2).movedim(-1, 0)

    def replicate(self, counts: Tensor) -> RankedSample:
        """Return the sample of replicates, `(r, ..., M)`, in which each cluster occurs `counts` times, `(r, G)`."""
        whole, wide = self.whole, wide_dtype(self.clusters.device)
        copies = counts.to(wide)[:, self.clusters.expand(whole.score.shape)]
        n = copies if whole.n is None else copies * whole.n
        score = whole.score.expand(n.shape).masked_fill(n == 0, torch.nan)  # samples without a copy are ignored
        return RankedSample(score, copies * whole.positives.to(wide), n, whole.from_logits)


Clusters = ClusteredSums[Any] | ClusteredSample


def effective_number(sizes: Tensor) -> Tensor:
    """Return the effective number of clusters (sum n)^2 / sum n^2 `(...)`, for sizes n `(G, ...)`; NaN without data."""
    return sizes.sum(0).square() / sizes.square().sum(0)


def least_of_batch(number: Tensor) -> float:
    """Return the smallest effective number of clusters of a batch `(...)`, ignoring batch elements without data."""
    number = number[number.isfinite()]
    return float(number.clamp(min=1).min()) if number.numel() else 1.0


def cluster_table(clusters: Clusters, upper: Tensor | None) -> Tensor:
    """Return the weight and the residual of every cluster in each cell, `(..., G, 2, K)`.

    The residual is the sum of outcomes minus confidences.

    Args:
        clusters: sums or samples by cluster.
        upper: largest score in each cell `(..., K)`, if the cells are runs of sorted samples; else None.
    """
    if isinstance(clusters, ClusteredSample):
        return _table_of_sample(clusters, upper)
    parts = clusters.accumulator.wrap(clusters.sums)
    if isinstance(parts, BinStats):
        n, confidence, outcomes = parts.sums[..., :3, :].unbind(-2)
        return torch.stack((n, outcomes - confidence), -2).movedim(0, -3)
    assert upper is not None  # cells of a ranked sample are runs
    columns = _weight_and_residual(parts).movedim(0, -3)  # (..., G, 2, M) for M elements of the sketch
    cell = _cell_of(clusters.whole, upper).unsqueeze(-2).expand(*columns.shape[:-2], -1)
    return cell_sums(cell, columns, upper.shape[-1])


def _table_of_sample(clusters: ClusteredSample, upper: Tensor | None) -> Tensor:
    """Return the table of `cluster_table` for samples."""
    assert upper is not None  # cells of a ranked sample are runs
    n_cells = upper.shape[-1]
    index = clusters.clusters * n_cells + _cell_of(clusters.whole, upper)
    sums = cell_sums(index, _weight_and_residual(clusters.whole), MAX_CLUSTERS * n_cells)
    return sums.reshape(*sums.shape[:-1], MAX_CLUSTERS, n_cells).movedim(-3, -2)


def _cell_of(sample: RankedSample, upper: Tensor) -> Tensor:
    """Return the cell of each element `(..., M)`, found by its score."""
    score = sample.score.detach().nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf).contiguous()
    cell = torch.searchsorted(upper.to(score.dtype).contiguous(), score)
    return cell.clamp(max=upper.shape[-1] - 1)


def _weight_and_residual(sample: RankedSample) -> Tensor:
    """Return the weight, and the sum of outcomes minus confidences, of each element `(..., 2, M)`."""
    wide = wide_dtype(sample.score.device)
    score = sample.score.detach().to(wide)
    confidence = score.sigmoid() if sample.from_logits else score
    n = torch.ones_like(confidence) if sample.n is None else sample.n.to(wide)
    columns = torch.stack((n, sample.positives.detach().to(wide) - n * confidence), -2)
    return columns.masked_fill(score.isnan().unsqueeze(-2), 0)
