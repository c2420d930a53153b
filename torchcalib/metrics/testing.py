"""Noise floor, p-value and interval of a calibration error, in one call."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric


def calibration_test(
    metric: CalibrationMetric[Any],
    preds: Tensor,
    target: Tensor,
    *,
    weights: Tensor | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    with_interval: bool = True,
) -> CalibrationTest:
    """Return a calibration error with its noise floor, the p-value of perfect calibration and an interval.

    Outcomes are simulated from the predicted confidences and the metric is recomputed (consistency resampling). Rows
    are assumed to be independent, and confidences to be fixed. Integer weights are numbers of independent copies;
    floating weights are the importance of a row.

    The variance of a soft target is estimated by its squared distance from the confidence. Targets that are all 0 or 1
    are labels, whatever their dtype; this is decided for each batch element, label and group by itself. With floating
    weights, floating targets always count as soft; see `BinStats.noise`.

    For averages over classes, whose outcomes depend on each other, p-values are combined by a Cauchy combination. An
    average of signed errors is tested by its absolute value, with independent labels. Over classes that exclude each
    other it is 0 for every model, and so is its noise floor.

    Args:
        metric: an error such as `ECE(task="binary")`. Only its configuration is used; its state is ignored.
        preds: as for its `update`: all axes but the class axis are samples, after its `batch_shape`.
        target: as for its `update`.
        weights: one non-negative weight per sample.
        level: level of the interval, in (0, 1).
        n_replicates: R; the least p-value is 1 / (R + 1).
        seed: seed of the draws, which are the same on every device.
        with_interval: False leaves the interval NaN, which saves most of the time.

    Returns:
        `CalibrationTest` of the shape of the value. NaN without data. If bins follow from the outcomes or decisions are
        counted (TCE), no value is free of noise: the interval is that of the expected value at this number of samples,
        whose least value is the noise floor. For smECE and ICI it is NaN, because it would take long;
        `torchcalib.inference.bootstrap` computes the interval of the value with its noise.

    Raises:
        TypeError, ValueError: for bad input; the message states the rule.

    Gradient:
        None.

    Source:
        Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007), for the
        replicates; for the interval see `torchcalib/inference/inversion.py`.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.8]), torch.tensor([0, 1, 0, 1])
        >>> found = calibration_test(ECE(task="binary", n_bins=2), preds, target)
        >>> round(found.statistic.item(), 4), round(found.p_value.item(), 2)
        (0.15, 1.0)
    """
    if not isinstance(metric, CalibrationMetric):
        raise TypeError(
            f"`metric` must be a calibration error of torchcalib, got {metric!r}. Pass one such as ECE(task='binary')."
        )
    fresh = deepcopy(metric)
    fresh.reset()
    fresh.update(preds, target, weights=weights)
    return fresh.test(level=level, n_replicates=n_replicates, seed=seed, with_interval=with_interval)
