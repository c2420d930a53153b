"""Evidence of a metric over data that are at hand, in one call."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from torchcalib.consistency.evidence import Evidence
from torchcalib.consistency.metric import TestedMetric


def evidence(
    metric: TestedMetric[Any],
    preds: Tensor,
    target: Tensor,
    *,
    weights: Tensor | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    with_interval: bool = True,
) -> Evidence:
    """Return a calibration error with its noise floor, the p-value of "calibrated" and an interval, in one call.

    Args:
        metric: an error such as `ECE(task="binary")`. It is taken for what it is, not for what it has seen, and left
            as it is.
        preds: as for its `update`: every axis but that of classes is samples, after its `batch_shape`.
        target: as for its `update`.
        weights: one non-negative weight per sample.
        level: of the interval, in (0, 1).
        n_replicates: R; the least p-value is 1 / (R + 1).
        seed: of the draws, which are the same on every device.
        with_interval: False leaves the interval NaN, for which most of the time is needed.

    Returns:
        See `TestedMetric.evidence`.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        See `TestedMetric.evidence`.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.8]), torch.tensor([0, 1, 0, 1])
        >>> found = evidence(ECE(task="binary", n_bins=2), preds, target)
        >>> round(found.value.item(), 4), round(found.p_value.item(), 2)
        (0.15, 1.0)
    """
    if not isinstance(metric, TestedMetric):
        raise TypeError(
            f"`metric` must be a calibration error of torchcalib such as ECE(task='binary'), got {metric!r}. "
            "Scores have no noise floor: `torchcalib.bootstrap` has their intervals. "
            "Cox and Spiegelhalter are tests already."
        )
    of_these = deepcopy(metric)
    of_these.reset()
    of_these.update(preds, target, weights=weights)
    return of_these.evidence(level=level, n_replicates=n_replicates, seed=seed, with_interval=with_interval)
