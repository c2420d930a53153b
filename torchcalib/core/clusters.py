"""Clusters of dependent rows: their identifiers, hashes and exact number."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arrays import as_tensor, starts_with_tensor
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.io.text import hashes_of
from torchcalib.ops.counter_rng import random_words

MAX_CLUSTERS = 2**10
"""Largest number of clusters for which a state stores sums. Clusters with the same hash are merged.

Merged clusters are independent of each other. A variance estimated from them has a relative standard error of
sqrt(2 / 1024), 4%.
"""

MAX_DISTINCT = 100_000
"""Largest number of clusters that are counted exactly. A larger number is represented by `MAX_DISTINCT` + 1."""

_BITS = 22  # low bits of a 32-bit hash, which do not affect a number below 1,024
_FEW_ROWS = 2**12  # up to this number of rows, runs are not searched: hashing takes less time
_ABSENT = 2**63 - 1  # identifier that stands for no cluster, on devices where tensors are not shortened

_GOLDEN = 633  # odd, so that multiples are distinct modulo 1,024; about 1,024 times the golden ratio
_COINCIDENCE = 0.001  # largest probability by chance at which clusters are said to determine the label
_MIN_CLUSTERS, _MAX_SUMS = 2**7, 2**20  # sums over all clusters; the minimum may need more


def num_clusters_for(shape: Sequence[int], at_most: int = MAX_CLUSTERS) -> int:
    """Return the number of clusters G to store, from 128 to `at_most`, for sums of `shape` per cluster."""
    return max(_MIN_CLUSTERS, min(at_most, _MAX_SUMS // max(1, math.prod(shape))))


_REMEDIES = {
    "clusters": ("name the cluster of each row", "give rows without a cluster distinct identifiers"),
    "ids": ("identify each row", "give each row its own id"),
}
"""Rule and remedy for missing identifiers, by argument."""


def are_text(given: Any) -> bool:
    """Return whether identifiers are text or dates, which are hashed."""
    if isinstance(given, Tensor) or starts_with_tensor(given):
        return False
    return np.asarray(given).dtype.kind in "OUSTMm"


def identifiers(clusters: Any, device: torch.device | None = None, name: str = "clusters") -> Tensor:
    """Return integer identifiers of clusters, or of rows (`name` "ids"), int64.

    Text and dates are hashed. A missing identifier raises ValueError.
    """
    rule, remedy = _REMEDIES[name]
    if are_text(clusters):
        column = np.asarray(clusters)
        if any(x is None or x != x or x == "" for x in column.flat):
            raise ValueError(f"`{name}` must {rule}, got a missing value. {remedy.capitalize()}.")
        # Objects are not converted to an array of text, in which every row has the length of the longest one.
        texts = column if column.dtype.kind == "O" else column.astype(str)
        return hashes_of([str(text) for text in texts.flat]).reshape(column.shape).to(device)
    found = as_tensor(name, clusters, device)
    if device is not None and found.device != device:
        raise ValueError(
            f"`{name}` must be on the device of `preds` ({device}), got {found.device}. "
            f"Move them with {name}.to(preds.device)."
        )
    if found.is_floating_point() or found.dtype == torch.bool:
        raise TypeError(
            f"`{name}` must be integers or text, got dtype {found.dtype}. Convert whole numbers with .long(), and "
            f"{remedy}."
        )
    return found.long()


def cluster_numbers(clusters: Tensor, n_clusters: int) -> Tensor:
    """Return a number in [0, `n_clusters`) for each identifier, int64; see `cluster_words`."""
    if clusters.device.type == "cpu" and clusters.numel() > _FEW_ROWS:
        numbers = ClusterNumbers(n_clusters)(clusters.reshape(-1).numpy())
        return torch.from_numpy(np.broadcast_to(numbers, clusters.numel()).reshape(clusters.shape).copy())
    return number_of_word(cluster_words(clusters), n_clusters)


class ClusterNumbers:
    """Function from identifiers of clusters to numbers in [0, G), which hashes each distinct identifier once."""

    def __init__(self, n_clusters: int) -> None:
        self._n_clusters = n_clusters
        self._latest: tuple[int | None, Any] = None, None  # last identifier that all rows of a call shared, its number
        self.seen: list[Tensor] = []  # `distinct` identifiers of each call

    def __call__(self, clusters: Any) -> Any:
        """Return the numbers of identifiers `(n,)`, int64 arrays; `(1,)` if all identifiers are equal."""
        least, greatest = int(clusters.min()), int(clusters.max())
        latest, number = self._latest
        if least == greatest == latest:
            return number
        if least == greatest:
            identifiers, places = clusters[:1], np.zeros(1, np.int64)
        elif greatest - least < len(clusters):  # counting takes less time than sorting
            places = clusters - least
            present = np.bincount(places) > 0
            identifiers, places = np.flatnonzero(present) + least, (np.cumsum(present) - 1)[places]
        else:
            identifiers, places = np.unique(clusters, return_inverse=True)
        found = torch.from_numpy(np.ascontiguousarray(identifiers))
        self.seen.append(distinct(found))
        numbers = number_of_word(cluster_words(found), self._n_clusters).numpy()[places]
        if least == greatest:
            self._latest = least, numbers
        return numbers


def number_of_word(words: Tensor, n_clusters: int) -> Tensor:
    """Return a number in [0, `n_clusters`) for each hash of `cluster_words`, int64."""
    return (words >> _BITS) * n_clusters // MAX_CLUSTERS


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


def distinct(clusters: Tensor) -> Tensor:
    """Return the smallest `MAX_DISTINCT` + 1 distinct identifiers in ascending order, int64 `(n,)`.

    The result for a union of sets only depends on their results. It is therefore the same for all orders and parts of
    the data. On devices other than the CPU the identifiers are followed by `_ABSENT`, because their number is unknown
    without a synchronisation.
    """
    clusters = clusters.reshape(-1)
    if clusters.device.type == "cpu":
        runs: Tensor = torch.unique_consecutive(clusters)  # much shorter if the rows of a cluster are contiguous
        if not bool((runs[1:] > runs[:-1]).all()):
            least, greatest = (int(x) for x in runs.aminmax())
            if greatest - least < len(runs):  # counting takes less time than sorting
                runs = torch.bincount(runs - least).nonzero().squeeze(-1) + least
            else:
                runs = torch.unique(runs)
        clusters = runs
        return clusters[: int((clusters < _ABSENT).sum())][: MAX_DISTINCT + 1]
    return _distinct_padded(clusters)


def _distinct_padded(clusters: Tensor) -> Tensor:
    """Return distinct identifiers followed by `_ABSENT`, by operations whose shapes do not depend on values."""
    ordered = clusters.sort().values
    repeated = torch.cat((torch.zeros_like(ordered[:1], dtype=torch.bool), ordered[1:] == ordered[:-1]))
    return ordered.masked_fill(repeated, _ABSENT).sort().values[: MAX_DISTINCT + 1]


def distinct_in(p: Predictions) -> Tensor:
    """Return the `distinct` identifiers of the rows in `p` that have a positive weight in any batch element."""
    assert p.groups is not None  # set by `in_clusters`
    if p.weights is None:
        return distinct(p.groups)
    ignored = in_all_replicates(p.weights == 0, len(p.samples))
    groups = p.groups.expand(p.samples)
    ignored = ignored.expand(p.samples)
    return distinct(groups[~ignored] if groups.device.type == "cpu" else groups.masked_fill(ignored, _ABSENT))


def number_of(identifiers: Tensor) -> int:
    """Return the number of identifiers in a result of `distinct`, at most `MAX_DISTINCT` + 1."""
    return int((identifiers < _ABSENT).sum())


def numbered(clusters: Tensor, at_most: int) -> Tensor:
    """Return a number in [0, `at_most`) for the cluster of each sample, int64 with the shape of `clusters`.

    Numbers are different for up to `at_most` distinct identifiers. Of more identifiers, those whose ranks differ by a
    multiple of `at_most` are merged, so that each number has nearly equally many.
    """
    rank: Tensor = torch.unique(clusters, return_inverse=True)[1]
    return rank % at_most


def in_clusters(p: Predictions, clusters: Tensor) -> Predictions:
    """Return the predictions with the identifier of the cluster of each sample, int64. The cache of `p` is shared."""
    per_sample = (*p.samples[:-2], 1, p.samples[-1]) if p.task == "multilabel" else p.samples
    return p.in_groups(clusters.reshape(per_sample).long(), p.weights, p.n_invalid)


def determine_label(p: Predictions) -> bool:
    """Return whether all rows of each cluster (`groups` of `p`) have the same label, which is not a coincidence.

    For class frequencies f_k, labels that do not depend on the clusters have a single class in a cluster of n rows with
    probability sum_k f_k^n. The product over all clusters must be below 0.001. Labels that are all equal, soft targets
    and multi-label tasks give False.
    """
    if p.groups is None or not p.has_labels or p.task == "multilabel":
        return False
    present = slice(None) if p.weights is None else p.weights.reshape(-1) > 0
    label, cluster = p.target.reshape(-1).long()[present], p.groups.reshape(-1)[present]
    cluster = torch.unique(cluster, return_inverse=True)[1]
    if not len(label):
        return False
    size = torch.bincount(cluster)
    first = torch.zeros_like(size).scatter_(0, cluster, label)  # the label of any row of each cluster
    if not bool((first[cluster] == label).all()):
        return False
    frequency = torch.bincount(label).double() / len(label)
    sizes, n_clusters = torch.unique(size, return_counts=True)
    log_probability = frequency.pow(sizes.unsqueeze(-1)).sum(-1).log() @ n_clusters.double()
    return bool(log_probability < math.log(_COINCIDENCE))


def of_samples(clusters: Tensor, samples: Sequence[int], n_batch: int = 0) -> Tensor:
    """Return the cluster of each sample, int64 with shape `samples`, which begins with `n_batch` batch axes.

    `clusters` has the shape of the samples of one batch element, which all share it, or of all samples. With one
    cluster per item of the first axis of samples, such as an image, all samples of an item form a cluster.
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


def effective_number(sizes: Tensor) -> Tensor:
    """Return the effective number of clusters (sum n)^2 / sum n^2 `(...)`, for sizes n `(G, ...)`; NaN without data."""
    return sizes.sum(0).square() / sizes.square().sum(0)


def least_of_batch(number: Tensor) -> float:
    """Return the smallest effective number of clusters of a batch `(...)`, ignoring batch elements without data."""
    number = number[number.isfinite()]
    return float(number.clamp(min=1).min()) if number.numel() else 1.0
