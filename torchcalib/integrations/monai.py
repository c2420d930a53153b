"""Metrics per image as cumulative metrics of MONAI."""

from typing import Any

import torch
from torch import Tensor

try:
    from monai.metrics import CumulativeIterationMetric
    from monai.metrics.utils import do_metric_reduction
except ImportError as error:
    raise ImportError("`MonaiMetric` needs MONAI, which is not installed. Install it: pip install monai.") from error

from torchcalib.io.errors import shown
from torchcalib.metrics.base import CalibrationMetric


class MonaiMetric(CumulativeIterationMetric):  # type: ignore[misc]  # without types if MONAI is not installed
    """Metric with `per_image=True` as a cumulative metric of MONAI: `metric(y_pred, y)`, `aggregate()`, `reset()`.

    MONAI's handlers accept it: `IgniteMetricHandler(metric_fn=MonaiMetric(...))`. Its buffer has a value for each image
    and class, `(B, C)`. `metric` also has the sums of all images of this process, for `metric.cases()` with the pooled
    value, test and intervals.

    Args:
        metric: A torchcalib metric with `per_image=True`. Its state is reset, and afterwards belongs to this object.
        metric_reduction: MONAI's reduction of the values, such as `"mean"`, `"mean_batch"` or `"none"`.
        get_not_nans: Whether `aggregate` also returns the number of values that are not NaN.

    Raises:
        TypeError: If `metric` is something else.

    Example:
        >>> from torchcalib import ECE
        >>> metric = MonaiMetric(ECE(num_classes=3, mode="classwise", per_image=True))
        >>> probs, labels = torch.full((2, 3, 4, 4), 1 / 3), torch.zeros(2, 1, 4, 4)
        >>> metric(y_pred=probs, y=labels).shape
        torch.Size([2, 3])
        >>> metric.aggregate()
        tensor([0.4444])
        >>> metric.metric.cases().pooled
        tensor(0.4444, dtype=torch.float64)
    """

    def __init__(
        self, metric: CalibrationMetric[Any], metric_reduction: str = "mean", get_not_nans: bool = False
    ) -> None:
        if not isinstance(metric, CalibrationMetric) or metric.images is None:
            raise TypeError(f"`metric` must be a torchcalib metric with per_image=True, got {shown(metric)}.")
        self.metric, self.metric_reduction, self.get_not_nans = metric, metric_reduction, get_not_nans
        super().__init__()  # calls `reset`

    def _compute_tensor(self, y_pred: Any, y: Any = None, **columns: Any) -> Tensor:
        """Add images `(B, C, ...)` with labels, or one-hot labels, and return their values `(B, C)`, float32.

        `columns` are further arguments of `update`, such as `weights` and `case`.
        """
        preds, target = (x.as_tensor() if hasattr(x, "as_tensor") else x for x in (y_pred, y))
        if self.metric.input_format.task == "multiclass":
            is_one_hot = target.shape == preds.shape and preds.shape[1] > 1
            target = target.argmax(1) if is_one_hot else target.long()
        batch: Any = self.metric.clone()
        batch.reset()
        batch.update(preds, target, **columns)
        self.metric.to(preds.device).merge_state(batch)
        values: Tensor = batch.estimator.values_of_images(batch.statistic().each).float()
        return values if values.dim() == 2 else values.unsqueeze(-1)

    def aggregate(self, reduction: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the reduced values of all images, over all processes; see `metric_reduction`."""
        values = self.get_buffer()
        if not isinstance(values, torch.Tensor):
            raise ValueError("`y_pred` must be added before `aggregate`, got no data. Call metric(y_pred, y).")
        reduced, not_nans = do_metric_reduction(values, reduction or self.metric_reduction)
        return (reduced, not_nans) if self.get_not_nans else reduced

    def reset(self) -> None:
        """Remove all images."""
        super().reset()
        self.metric.reset()
