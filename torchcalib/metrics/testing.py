"""Calibration test for any calibration error: noise floor, p-value and interval."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric


def calibration_test(
    metric: CalibrationMetric[Any],
    preds: Any = None,
    target: Any = None,
    *,
    weights: Tensor | None = None,
    sample_weight: Tensor | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    with_interval: bool = True,
) -> CalibrationTest:
    """Return a calibration error with its noise floor, the p-value of perfect calibration and an interval.

    The noise floor is the expected value under perfect calibration. Outcomes are simulated from the predicted
    confidences and the metric is recomputed (consistency resampling). Rows are assumed to be independent, and
    confidences to be fixed. Integer weights are numbers of independent copies; floating weights are the importance of
    a row.

    The variance of a soft target is estimated by its squared distance from the confidence. Targets that are all 0 or 1
    are labels, whatever their dtype; each batch element, label and group is checked separately. With floating weights,
    floating targets always count as soft; see `BinStats.noise`.

    For averages over classes, whose outcomes are dependent, the p-values are combined by a Cauchy combination. An
    average of signed errors is tested by its absolute value, with independent labels. Over mutually exclusive classes
    it is 0 for every model, and so is its noise floor.

    Args:
        metric: Calibration error such as `ECE(task="binary")`. Only its configuration is used; its state is ignored.
        preds: See `update` of the metric: after the axes of its `batch_shape`, all axes except the class axis are
            samples.
        target: See `update` of the metric.
        weights: Non-negative weight per sample.
        sample_weight: Alias of `weights`, as in scikit-learn.
        level: Level of the interval, in (0, 1).
        n_replicates: Number R of simulated replicates. The smallest possible p-value is 1 / (R + 1).
        seed: Seed for the simulation, which is the same on every device.
        with_interval: Compute the interval. False returns NaN for it, which saves most of the time.

    Returns:
        A `CalibrationTest` in the shape of the value. NaN without data. The interval is that of the error in the
        population. If the bins depend on the outcomes or decisions are counted (TCE, test-based calibration error),
        this is not defined; the interval is then that of the expected value at this sample size, which is at least the
        noise floor. For smooth errors (smECE, ICI) the interval is NaN, because it would take too long. For these, use
        `torchcalib.inference.bootstrap`, whose interval includes the sampling noise.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
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
            f"`metric` must be a calibration error from torchcalib, got {metric!r}. "
            "Pass an error such as ECE(task='binary')."
        )
    fresh = deepcopy(metric)
    fresh.reset()
    fresh.update(preds, target, weights, sample_weight=sample_weight)
    return fresh.test(level=level, n_replicates=n_replicates, seed=seed, with_interval=with_interval)
