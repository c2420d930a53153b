"""Streaming bootstrap confidence intervals for metrics whose state consists of sums."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics.metric import Metric

from torchcalib.core.arguments import check_count, check_in_all_batches, check_level, check_seed
from torchcalib.core.clusters import identifiers, least_of_batch, of_samples
from torchcalib.core.partition import Partition, SumsByPart
from torchcalib.core.predictions import Predictions
from torchcalib.core.saved import Description
from torchcalib.core.state import N_IGNORED, SumState, check_counts, ignored_counts
from torchcalib.core.sums import check_sums
from torchcalib.inference.resampling import Interval, Weights
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.by_group import PartitionedMetric
from torchcalib.ops.logs import wide_dtype


@dataclass(frozen=True)
class ReplicateState(SumState[Partition[Any]]):
    """Operations on the sums of the data, part 0, and of R replicates, and on the numbers of all and clustered rows.

    Each row is in all parts, with the weight of the replicate.
    """

    def empty(self) -> Tensor:
        """Return the initial state, float64 zeros `(n,)`."""
        return torch.zeros(N_IGNORED + math.prod(self.shape) + 2, dtype=torch.float64)

    def statistic(self, state: Tensor) -> Partition[Any]:
        """Return the sums `(1 + R, ...)`."""
        return self.accumulator.wrap(state[N_IGNORED:-2].reshape(self.shape))

    def _check_sums(self, state: Tensor) -> None:
        n_rows, n_clustered = state[-2], state[-1]
        check_counts("the numbers of rows", torch.cat((state[:N_IGNORED], state[-2:], n_rows - n_clustered.reshape(1))))
        check_sums(state[N_IGNORED:-2].reshape(self.shape), self.accumulator.ranges, None)

    def resampled(self, p: Predictions, weights: Weights, are_clusters: bool) -> Tensor:
        """Return the state `(n,)` for a batch with replicate weights, which are those of clusters if `are_clusters`."""
        n, device, by_part = p.samples[-1], p.input_preds.device, cast(Any, self.accumulator)

        def sums(counts: Tensor) -> Tensor:
            found: Tensor = by_part.accumulator.from_predictions(p.resampled(counts)).sums.flatten()
            return found

        of_data = sums(torch.ones(1, n, dtype=wide_dtype(device), device=device))
        with torch.no_grad():
            chunks = weights.chunks(self.shape[0] - 1, by_part.n_events(p))
            of_replicates = [sums(counts) for counts in chunks]
        flat = torch.cat([of_data, *of_replicates])
        # `new_full` does not synchronise a GPU, unlike `new_tensor`.
        n_rows, n_clustered = flat.new_full((1,), n), flat.new_full((1,), n * are_clusters)
        return torch.cat((ignored_counts(p, flat), flat, n_rows, n_clustered))


class Bootstrapped(PartitionedMetric):
    """Streaming bootstrap confidence interval for a metric.

    `compute` returns the metric value, and `interval` returns the value with its confidence interval. In each of R
    replicates, every row gets a Poisson weight with mean 1. Rows are not stored. The state is 1 + R times as large as
    for the metric itself. Each rank resamples its own rows, and `compute` adds the sums over all ranks.

    With `update(..., clusters=ids)` all rows of a cluster get the same weight, also in different batches and on
    different ranks, because they may be dependent. The number of clusters is not limited. For few clusters, the
    interval is moved outwards; see `Interval`.

    Args:
        metric: Metric whose state consists of sums: a score, an error over equal-width bins, or a metric with
            `resolution`. Only its configuration and its device are used; its accumulated state is ignored.
        n_replicates: Number of replicates R.
        level: Level of the interval, in (0, 1).
        seed: Seed for the weights. The same rows in the same order on the same rank result in the same interval on
            every device. Use different seeds for metrics that are merged by `merge_state`, and for ranks that
            communicate without `torch.distributed` (Ray, MPI or Horovod).
        **kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError, ValueError: For a metric that stores samples, for invalid arguments, and in `update` for invalid
            input.

    Reference:
        Oza, Russell: Online bagging and boosting (AISTATS 2001), for the weights.

    Example:
        >>> from torchcalib import NLL
        >>> metric = Bootstrapped(NLL(task="binary"), n_replicates=100)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(0.4004, dtype=torch.float64)
        >>> found = metric.interval()
        >>> bool(found.low < found.value) and bool(found.value < found.high)
        True
    """

    kind: ReplicateState
    _column = "clusters"

    def __init__(
        self,
        metric: CalibrationMetric[Any],
        *,
        n_replicates: int = 200,
        level: float = 0.95,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        check_count("n_replicates", n_replicates)
        check_level(level, n_replicates)
        check_seed(seed)
        self.n_replicates, self.level, self.seed = n_replicates, level, seed
        self._n_rows, self._rank = 0, 0
        self._has_clusters: bool | None = None  # None before the first update
        super().__init__(metric, 1 + n_replicates, **kwargs)

    def interval(self) -> Interval:
        """Return the metric value with its bootstrap interval, over all ranks if `torch.distributed` is running.

        Raises:
            ValueError: If rows on CUDA were invalid.
        """
        with self._over_ranks():
            replicates, n_clustered = self.statistic(), int(self.state[-1])
        values, n_clusters = replicates.evaluate(self.metric._value), None
        if n_clustered:  # the effective number follows from the variance of the total weight in the replicates
            total = replicates.sizes
            n_clusters = least_of_batch(total[0].square() / (total[1:] - total[0]).square().mean(0))
        return Interval(values[0], values[1:], self.level, n_clusters)

    def reset(self) -> None:
        """Reset the state and the row counter. The sequence of replicate weights then restarts."""
        super().reset()
        if not self._in_forward:
            self._n_rows, self._has_clusters = 0, None

    def update(  # type: ignore[override]  # clusters have no values per image
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        clusters: Any = None,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add a batch to the state; see `CalibrationMetric.update`.

        Args:
            preds, target, weights, sample_weight: See `CalibrationMetric.update`.
            clusters: Cluster of each sample of a batch element, integers or text, or one for each item of its first
                axis. Pass clusters with all batches or with none.
        """
        check_in_all_batches("clusters", self._has_clusters, clusters is not None)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()
        self._has_clusters = clusters is not None
        self._n_rows += self._add_in_parts(preds, target, weights, sample_weight, clusters).numel()

    def _keys(self, given: Any, device: torch.device, samples: tuple[int, ...]) -> Tensor:
        of_one = samples[len(self.batch_shape) :]  # batch elements share the weights
        if given is not None:
            return of_samples(identifiers(given, device), of_one)
        # Rows are numbered over all batches, so that their weights do not depend on batch sizes.
        return torch.arange(self._n_rows, self._n_rows + math.prod(of_one), device=device).reshape(of_one)

    @property
    def _identity_of_keys(self) -> tuple[Hashable, ...]:
        return self.seed, self._rank, self._n_rows

    def _state_of_piece(self, p: Predictions, keys: Tensor | None) -> Tensor:
        assert keys is not None  # `_add_in_parts` computes them
        # The same weights on all ranks for clusters, because a cluster may have rows on several ranks.
        first = 0 if self._has_clusters else self._rank << 32
        drawn = Weights(self.seed, keys.reshape(-1), "poisson", first=first)
        return self.kind.resampled(p, drawn, are_clusters=bool(self._has_clusters))

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric; see `CalibrationMetric.merge_state`.

        Raises:
            ValueError: If the configurations differ, or both metrics contain rows with the same seed and rank.
        """
        if isinstance(incoming_state, Bootstrapped):
            incoming_state = incoming_state.metric_state
        if not isinstance(incoming_state, dict):
            super().merge_state(incoming_state)  # raises an error for another metric
            return
        state, described = self._read_state("incoming_state", incoming_state)
        n_rows, n_clustered = map(int, state[-2:])
        if min(self._n_rows, n_rows) > 0:
            if self._has_clusters != (n_clustered > 0):
                raise ValueError(
                    "`incoming_state` must have clusters if this metric has clusters, got clusters in one of them. "
                    "Pass `clusters` to `update` of both."
                )
            if described.draws == self._description().draws and not self._has_clusters:
                raise ValueError(
                    f"`incoming_state` must have a different seed than this metric, got seed={self.seed} in both. "
                    "Create the metrics with different seeds."
                )
        super().merge_state(incoming_state)
        if n_rows:
            self._has_clusters = n_clustered > 0

    def _description(self) -> Description:
        return super()._description()._replace(draws=[self.seed, self._rank])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state, and continue the row numbers after its last row."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._n_rows, n_clustered = map(int, self.state[-2:])
        self._has_clusters = n_clustered > 0 if self._n_rows else None

    def _state_kind(self) -> ReplicateState:
        kind = self.metric.kind
        if not isinstance(kind, SumState) or not kind.is_additive:
            raise ValueError(
                f"`metric` must have sums as its state, got {self.metric}. Pass `resolution` to rank-based metrics, or "
                "store the predictions and use torchcalib.inference.bootstrap."
            )
        accumulator: Any = kind.accumulator
        shape = kind.shape
        # Omit the sums for the noise floor: replicates estimate the sampling noise. Debiased errors need these sums.
        if hasattr(accumulator, "with_noise") and not self.metric.settings.get("debiased"):
            accumulator = replace(accumulator, with_noise=False)
            shape = (*self.batch_shape, *accumulator.shape(self.input_format.read_as, self.num_classes))
        by_part: SumsByPart[Any] = SumsByPart(accumulator, self.n_parts)
        return ReplicateState(by_part, (self.n_parts, *shape))

    def _configuration(self) -> dict[str, object]:
        return {**self.metric._configuration(), "n_replicates": self.n_replicates}

    def _value(self, statistic: Partition[Any]) -> Tensor:
        return statistic.evaluate(self.metric._value)[0]
