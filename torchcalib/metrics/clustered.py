"""Streaming metrics with inference for clusters of dependent rows."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count, check_level, check_seed
from torchcalib.core.clusters import (
    MAX_CLUSTERS,
    ClusterNumbers,
    cluster_numbers,
    effective_number,
    identifiers,
    in_clusters,
    least_of_batch,
    num_clusters_for,
    of_samples,
)
from torchcalib.core.partition import ClusterState, SumsByPart, joined
from torchcalib.core.pieces import Parts
from torchcalib.core.predictions import Predictions
from torchcalib.inference.resampling import Interval, Weights
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.by_group import PartitionedMetric


class Clustered(PartitionedMetric):
    """Test a metric, and compute its confidence interval, for clusters of dependent rows.

    Rows are often not independent: pixels of an image, tokens of a document, answers to the same question, visits of a
    patient. If they are treated as independent, p-values are too small and intervals too narrow. Here only the clusters
    are treated as independent. `update` accepts the cluster of each row, an integer or text. Rows of a
    cluster may be in different batches and on different ranks. `compute` returns the value of the metric itself.

    The state contains sums for at most 1,024 clusters (128 for large sums), or 8 additional bytes for each stored
    sample. Clusters with the same hash of the identifier are merged. Identifiers from 0 to 1,023 have different
    hashes. Merged clusters remain independent of each other. Distinct clusters are counted exactly up to 100,000, which
    takes 8 bytes for each. `test` returns this number, the number after merging, and the effective number of clusters.
    Below an effective number of 200, p-values are too small if outcomes are rare; see `benchmarks.clusters`. A
    `CalibrationCollection` passes `clusters` to its `Clustered` metrics.

    Args:
        metric: A torchcalib metric, not a wrapper. Only its configuration and its device are used; its accumulated
            state is ignored.
        **kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError, ValueError: For a metric whose state cannot be split by cluster (`SKCE`), for invalid arguments, and
            in `update` for invalid input.

    Reference:
        See `torchcalib.inference.clusters` for tests; Field, Welsh: Bootstrapping clustered data (Journal of the Royal
        Statistical Society B, 2007), for intervals.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> g = torch.Generator().manual_seed(0)
        >>> preds = torch.rand(60, 100, generator=g)  # 60 images of 100 pixels, with the same outcome in each image
        >>> target = (torch.rand(60, 1, generator=g) < preds).long()
        >>> rows, images = ECE(task="binary"), Clustered(ECE(task="binary"))
        >>> rows.update(preds, target)
        >>> images.update(preds, target, clusters=torch.arange(60))
        >>> bool(rows.test().p_value < 0.01), bool(images.test().p_value > 0.05)
        (True, True)
    """

    _column = "clusters"

    def __init__(self, metric: CalibrationMetric[Any], **kwargs: Any) -> None:
        if not getattr(metric, "allows_clusters", True):
            has_own = "clusters" in signature(metric.update).parameters
            why_not = "compares pairs of rows. Use ECE or NLL, for example."
            if has_own:
                why_not = "has one bet for each cluster. Pass clusters to its `update`."
            raise ValueError(
                f"`metric` must be a metric that is computed from single rows, got {metric}, which {why_not}"
            )
        super().__init__(metric, MAX_CLUSTERS, **kwargs)

    def update(  # type: ignore[override]  # clusters have no values per image
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        clusters: Any = None,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add a batch to the state.

        Args:
            preds, target, weights, sample_weight: See `CalibrationMetric.update`.
            clusters: Cluster of each sample, integers or text; required. The shape is that of the samples of a batch
                element, or one cluster for each item of its first axis, such as an image.

        Raises:
            TypeError, ValueError, RuntimeError, TorchMetricsUserError: See `CalibrationMetric.update`.
        """
        if clusters is None:
            raise ValueError("`clusters` must be passed to every update, got None. Pass the cluster of each sample.")

        self._add_in_parts(preds, target, weights, sample_weight, clusters)

    _own_update = update  # type: ignore[assignment]  # with another argument

    def _keys(self, given: Any, device: torch.device, samples: tuple[int, ...]) -> Tensor:
        return of_samples(identifiers(given, device), samples, len(self.batch_shape))

    def _numbers(self) -> ClusterNumbers:
        accumulator: Any = self.kind.accumulator
        return ClusterNumbers(accumulator.n_parts)

    def _changes_by_parts(self, parts: Parts) -> dict[str, Any]:
        _, name = self.state_names
        numbers: Any = parts.numbers
        return {name: joined([*vars(self)[name], *numbers.seen])}

    def test_from(self, statistic: Any, **how: Any) -> CalibrationTest:
        """Return the calibration test, which respects clusters; see `torchcalib.inference.clusters`."""
        return self.metric.test_from(statistic.whole, clusters=statistic, **how)

    def interval(self, *, level: float = 0.95, n_replicates: int = 999, seed: int = 0) -> Interval:
        """Return the metric value with its bootstrap interval, over all ranks if `torch.distributed` is running.

        Clusters are resampled with replacement. All batch elements share the resampled clusters. For few clusters, the
        percentiles are moved outwards; see `Interval`. The interval is NaN if there are too few. It includes the bias
        of the metric; see `Interval.bias`.

        Args:
            level: Level of the interval, in (0, 1).
            n_replicates: Number R of replicates.
            seed: Seed of the replicates, which are equal on all devices.

        Raises:
            TypeError, ValueError: For invalid arguments, or if an update contained invalid rows on CUDA.
        """
        check_count("n_replicates", n_replicates)
        check_level(level, n_replicates)
        check_seed(seed)
        clusters: Any = self._synced_statistic()
        sizes = clusters.sizes
        occupied = (sizes > 0).flatten(1).any(-1) if sizes.dim() > 1 else sizes > 0
        drawn = Weights.with_replacement(seed, occupied)
        with torch.no_grad():
            counts = drawn.chunks(n_replicates, clusters.n_values)
            values = [self.metric._value(clusters.replicate(each)) for each in counts]
            n_clusters = least_of_batch(effective_number(sizes))
            return Interval(self.metric._value(clusters.whole), torch.cat(values), level, n_clusters)

    def _assigned(self, p: Predictions, groups: Tensor) -> Predictions:
        return in_clusters(p, groups)

    @property
    def _num_stored_groups(self) -> None:
        return None

    def _state_of_sums(self, accumulator: Any, shape: tuple[int, ...]) -> ClusterState:
        by_cluster: SumsByPart[Any] = SumsByPart(accumulator, num_clusters_for(shape), cluster_numbers)
        return ClusterState(by_cluster, (by_cluster.n_parts, *shape))

    def _value(self, statistic: Any) -> Tensor:
        return self.metric._value(statistic.whole)
