"""Accumulate the statistic of a metric over batches, without torchmetrics."""

from typing import Any, Generic, TypeVar

from torch import Tensor

from torchcalib.core.mistakes import Evidence
from torchcalib.functional.estimator import Estimator

S = TypeVar("S")


class Stream(Generic[S]):
    """Statistic of all batches in one process. A failed update changes nothing.

    The classes of `torchcalib.metrics` also support ranks, checkpoints and devices.

    Args:
        estimator: an estimator from `Estimator.streamed`.
    """

    def __init__(self, estimator: Estimator[S]) -> None:
        self.estimator, self._kind = estimator, estimator.state_kind()
        self._state: Any = self._kind.empty()
        self._evidence = Evidence()

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; see `torchcalib.metrics.base.CalibrationMetric.update`."""
        evidence = Evidence(self._evidence.probabilities, self._evidence.decisions)  # unchanged if this raises
        p = self.estimator.read(preds, target, weights, batch_shape=(), evidence=evidence)
        self._state = self._kind.add(self._state, self._kind.from_predictions(p))
        self._evidence = evidence

    def statistic(self) -> S:
        """Return the sums or samples of all batches."""
        return self._kind.statistic(self._state)  # type: ignore[no-any-return]

    def compute(self) -> Tensor:
        """Return the value `(...)` for all batches, in float64."""
        return self.estimator.value(self.statistic())
