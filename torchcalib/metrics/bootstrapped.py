"""Streaming bootstrap confidence intervals for metrics whose state consists of sums."""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torchmetrics.metric import Metric

from torchcalib.core.arguments import check_count, check_in_all_batches, check_level, check_seed
from torchcalib.core.clusters import identifiers, least_of_batch, of_samples
from torchcalib.core.predictions import Predictions
from torchcalib.core.saved import Description
from torchcalib.core.state import N_IGNORED, SumState, check_counts, ignored_counts
from torchcalib.core.sums import Sums, check_sums
from torchcalib.core.tasks import as_tensors
from torchcalib.inference.resampling import Interval, Weights
from torchcalib.metrics.base import CalibrationMetric, WrappedMetric
from torchcalib.metrics.engine import refuse_if_synced
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S")


@dataclass(frozen=True)
class Replicates(SumState[S]):
    """Operations on a state: sums for the data, sums for R replicates, number of rows and number of clustered rows."""

    def empty(self) -> Tensor:
        """Return the initial state, float64 zeros `(n,)`."""
        return torch.zeros(N_IGNORED + math.prod(self.shape) + 2, dtype=torch.float64)

    def statistic(self, state: Tensor) -> S:
        """Return the sums `(1 + R, ...)`: entry 0 for the data, entries 1 to R for the replicates."""
        return self.accumulator.wrap(state[N_IGNORED:-2].reshape(self.shape))

    def _check_sums(self, state: Tensor) -> None:
        n_rows, n_clustered = state[-2], state[-1]
        check_counts("the numbers of rows", torch.cat((state[:N_IGNORED], state[-2:], n_rows - n_clustered.reshape(1))))
        check_sums(state[N_IGNORED:-2].reshape(self.shape), self.accumulator.ranges, None)

    def resampled(self, p: Predictions, weights: Weights, *, are_clusters: bool = False) -> Tensor:
        """Return the state `(n,)` for a batch with replicate weights, which are those of clusters if `are_clusters`."""
        n, device = p.samples[-1], p.input_preds.device

        def sums(counts: Tensor) -> Tensor:
            return self.accumulator.from_predictions(p.resampled(counts)).sums.flatten()

        of_data = sums(torch.ones(1, n, dtype=wide_dtype(device), device=device))
        with torch.no_grad():
            chunks = weights.chunks(self.shape[0] - 1, self.accumulator.n_events(p))
            of_replicates = [sums(counts) for counts in chunks]
        flat = torch.cat([of_data, *of_replicates])
        # `new_full` does not synchronise a GPU, unlike `new_tensor`.
        n_rows, n_clustered = flat.new_full((1,), n), flat.new_full((1,), n * are_clusters)
        return torch.cat((ignored_counts(p, flat), flat, n_rows, n_clustered))


class Bootstrapped(WrappedMetric[S]):
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

    kind: Replicates[S]

    def __init__(
        self,
        metric: CalibrationMetric[S],
        *,
        n_replicates: int = 200,
        level: float = 0.95,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if not isinstance(metric, CalibrationMetric):
            raise TypeError(
                f"`metric` must be a torchcalib metric, got {type(metric).__name__}. Pass a metric such as ECE(...)."
            )
        has_sums = isinstance(metric.kind, SumState) and metric.kind.is_additive and metric.images is None
        if not has_sums or isinstance(metric, WrappedMetric):
            raise ValueError(
                f"`metric` must have sums as its state and not be a wrapper, got {metric}. Pass `resolution` to "
                "rank-based metrics, or store the predictions and use torchcalib.inference.bootstrap."
            )
        check_count("n_replicates", n_replicates)
        check_level(level, n_replicates)
        check_seed(seed)
        self.n_replicates, self.level, self.seed = n_replicates, level, seed
        self._n_rows, self._rank = 0, 0
        self._has_clusters: bool | None = None  # None before the first update
        accumulator: Any = metric.kind.accumulator
        # Omit the sums for the noise floor: replicates estimate the sampling noise. Debiased errors need these sums.
        if hasattr(accumulator, "with_noise") and not metric.settings.get("debiased"):
            accumulator = replace(accumulator, with_noise=False)
        super().__init__(metric, accumulator, **kwargs)

    def interval(self) -> Interval:
        """Return the metric value with its bootstrap interval, over all ranks if `torch.distributed` is running.

        Raises:
            ValueError: If rows on CUDA were invalid.
        """
        with self._over_ranks():
            statistic, n_clustered = cast(Any, self.statistic()), int(self.state[-1])
        values, n_clusters = self.metric._value(statistic), None
        if n_clustered:  # the effective number follows from the variance of the total weight in the replicates
            total = statistic.total if isinstance(statistic, Sums) else statistic.n.sum(-1)
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
        preds, target, weights = as_tensors(preds, target, weights, sample_weight, **self.input_format.conversion)
        refuse_if_synced(self, "update")
        _, p = self._keyed_predictions(preds, target, weights)
        n = p.samples[-1]
        if clusters is None:
            # Rows are numbered over all batches, so that their weights do not depend on batch sizes.
            rows = torch.arange(self._n_rows, self._n_rows + n, device=preds.device)
            drawn = Weights(self.seed, rows, "poisson", first=self._rank << 32)
        else:
            n_batch = len(self.batch_shape)
            samples = self.input_format.samples_of(preds, target, n_batch)[n_batch:]
            ids = of_samples(identifiers(clusters, preds.device), samples).reshape(-1)
            # The same weights on all ranks, because a cluster may have rows on several ranks.
            drawn = Weights(self.seed, ids, "poisson")
        self._has_clusters = clusters is not None
        self._add(preds, self.kind.resampled(p, drawn, are_clusters=self._has_clusters))
        self._n_rows += n

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric; see `CalibrationMetric.merge_state`.

        Raises:
            ValueError: If the configurations differ, or both metrics contain rows with the same seed and rank.
        """
        if isinstance(incoming_state, Bootstrapped):
            incoming_state = incoming_state.metric_state
        if isinstance(incoming_state, dict):
            state, described = self._read_state("incoming_state", incoming_state)
            n_rows, n_clustered = map(int, state[-2:])
            both_have_rows = min(self._n_rows, n_rows) > 0
            if both_have_rows and self._has_clusters != (n_clustered > 0):
                raise ValueError(
                    "`incoming_state` must have clusters if this metric has clusters, got clusters in one of them. "
                    "Pass `clusters` to `update` of both."
                )
            if both_have_rows and described.draws == self._description().draws and not self._has_clusters:
                raise ValueError(
                    f"`incoming_state` must have a different seed than this metric, got seed={self.seed} in both. "
                    "Create the metrics with different seeds."
                )
            if n_rows:
                super().merge_state(incoming_state)
                self._has_clusters = n_clustered > 0
                return
        super().merge_state(incoming_state)

    def _description(self) -> Description:
        return super()._description()._replace(draws=[self.seed, self._rank])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state, and continue the row numbers after its last row."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._n_rows, n_clustered = map(int, self.state[-2:])
        self._has_clusters = n_clustered > 0 if self._n_rows else None

    def _state_kind(self) -> Replicates[S]:
        kind = super()._state_kind()
        assert isinstance(kind, SumState)  # checked by __init__
        return Replicates(kind.accumulator, (1 + self.n_replicates, *kind.shape))

    def _configuration(self) -> dict[str, object]:
        return {**super()._configuration(), "class": type(self.metric).__name__, "n_replicates": self.n_replicates}

    def _value(self, statistic: S) -> Tensor:
        return self.metric._value(statistic)[0]
