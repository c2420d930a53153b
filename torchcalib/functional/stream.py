"""Accumulate the statistic of a metric over batches, without torchmetrics."""

from collections.abc import Sequence
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

    def parts(self) -> list[Any]:
        """Return the parts of the state, to save them."""
        return list(self._kind.parts(self._state))

    def load(self, parts: Sequence[Any]) -> None:
        """Replace the state by saved parts. Raise ValueError if they are not those of a state."""
        state = self._kind.check(parts, self._kind.empty())
        if state is None:
            shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise ValueError(
                f"`state` must have the shapes and dtypes of this stream, got {shapes}. Load a state of equal options."
            )
        self._state = state

    def statistic(self) -> S:
        """Return the sums or samples of all batches."""
        return self._kind.statistic(self._state)  # type: ignore[no-any-return]

    def compute(self) -> Tensor:
        """Return the value `(...)` for all batches, in float64."""
        return self.estimator.value(self.statistic())
