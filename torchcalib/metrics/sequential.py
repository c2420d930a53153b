"""Streaming sequential test of calibration."""

from typing import Any

from torch import Tensor

from torchcalib.core.clusters import identifiers, in_clusters, of_samples
from torchcalib.core.tasks import as_tensors
from torchcalib.functional.sequential import SequentialEstimator, SequentialEvidence, sequential_test
from torchcalib.inference.sequential import SequentialState, SequentialSums
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.engine import refuse_if_synced


class SequentialTest(CalibrationMetric[SequentialSums], function=sequential_test):
    """Streaming test of calibration whose evidence holds at every look; see `sequential_test`.

    Each update is a look. `compute` returns the logarithm of the e-value E. `p_value` is the anytime-valid p-value, and
    `direction` the kind of miscalibration. `since` is the number of the first update with E >= 1 / `level`. For a
    calibrated model, P(alarm at any look) <= `level`. The state has constant size: the weight, 16 sums, the largest E,
    `since` and the number of updates. `update` does not synchronise a GPU. Add batches in the order in which outcomes
    became known, and call `alarm` after each.

    `merge_state` is one look at all rows of the other state. The likelihood ratios of each component multiply, so that
    `compute` is that of one stream. The looks of the other state do not count: its largest E is not a result of the
    common stream. Shards are valid if outcomes are calibrated given the rows of all shards. Over several ranks,
    `compute` and other results are those of one look at the rows of all ranks. The largest E is then known at this look
    only. Detectors of changes (`restart`) cannot be merged, and run on one rank.

    `ByGroup` computes E for each group. It does not store the largest E, so compare each look with 1 / level. For an
    alarm of any of G groups, use level / G.

    Args:
        level: Probability of a false alarm at any update, for `alarm` and `since`. With `restart`, the inverse of the
            mean number of updates until a false alarm.

    Example:
        >>> import torch
        >>> test = SequentialTest(task="binary")
        >>> for _ in range(3):
        ...     test.update(torch.full((100,), 0.5), torch.arange(100) % 4 == 0)
        >>> bool(test.alarm()), test.direction, int(test.since)
        (True, 'too high', 1)
    """

    is_differentiable = False
    estimator: SequentialEstimator
    kind: SequentialState

    def update(  # type: ignore[override]  # with clusters instead of names of images
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        clusters: Any = None,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add a batch to the state. Each update is a look at the evidence.

        Args:
            preds, target: See `CalibrationMetric.update`.
            weights: Number of rows with the same forecast and outcome, whole numbers.
            clusters: Cluster of each sample, integers or text, if rows are dependent. Each cluster is one bet, the mean
                of the likelihood ratios of its rows. All rows of a cluster must be in the same update.
            sample_weight: Alias of `weights`.

        Raises:
            TypeError, ValueError, RuntimeError, TorchMetricsUserError: See `CalibrationMetric.update`.
        """
        if clusters is None:
            super().update(preds, target, weights, sample_weight=sample_weight)
            return
        refuse_if_synced(self, "update")
        preds, target, weights = as_tensors(preds, target, weights, sample_weight, **self.input_format.conversion)
        _, p = self._keyed_predictions(preds, target, weights)
        samples = self.input_format.samples_of(preds, target, len(self.batch_shape))
        p = in_clusters(p, of_samples(identifiers(clusters, preds.device), samples, len(self.batch_shape)))
        self._add(preds, self.kind.from_predictions(p))

    def result(self) -> SequentialEvidence:
        """Return all results, over all ranks if `torch.distributed` is running."""
        return SequentialEvidence(*self.estimator.fields(self._synced_statistic()).unbind(-1))

    def alarm(self, level: float | None = None) -> Tensor:
        """Return whether E >= 1 / level at any update, bool `(...)`; None uses the level of the test."""
        return self.result().alarm(self.estimator.accumulator.level if level is None else level)

    @property
    def p_value(self) -> Tensor:
        """Anytime-valid p-value `(...)`, 1 / max E; NaN with `restart`."""
        return self.result().p_value

    @property
    def direction(self) -> Any:
        """Kind of miscalibration, such as `"over-confident"`; see `SequentialEvidence.direction`."""
        return self.result().direction

    @property
    def since(self) -> Tensor:
        """Number of the first update with E >= 1 / `level` `(...)`, counted from 1; 0 for none."""
        return self.result().since.long()

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        """Add an incoming state as one look. In `forward` it is the state before the batch."""
        if self._in_forward:
            super()._reduce_states(incoming_state)
            return
        self.kind.check_merges()
        self.state = self.kind.add(self.state, self.kind.join([incoming_state[name] for name in self.state_names]))
