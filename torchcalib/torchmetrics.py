"""Calibration errors with the names, arguments, checks and values of torchmetrics, in constant memory.

    from torchcalib.torchmetrics import MulticlassCalibrationError  # instead of torchmetrics.classification

torchmetrics checks and converts each batch, and torchcalib adds it to sums over bins. As in torchmetrics, predictions
outside [0, 1] are logits, the first of several largest probabilities is the top class, and values have no gradient.

Differences that avoid errors of torchmetrics:

- A confidence of exactly 1 is in the last bin, not in a bin of its own.
- Half precision is summed in float64, and a bin can have more than 2^24 samples.
- NaN in a batch makes the value NaN.
- Labels outside of the classes raise an error on the CPU. They do not count as wrong predictions.
- Ranks without data are allowed.
- `norm="l2"` returns a floating-point 0, not an integer, if the error is 0.

Other differences: confidences on the edge of a bin may be in the neighbouring bin, and a metric must be on the device
of its input.

The classes have the methods of torchcalib: `test()` returns noise floor, p-value and interval, and `plot()` draws the
reliability diagram.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import classification as theirs

from torchcalib.core.arguments import check_choice
from torchcalib.functional.binned import ece, mce, rmsce
from torchcalib.functional.estimator import declaration_of, factory_of
from torchcalib.metrics.errors import BinnedMetric

__all__ = [
    "BinaryCalibrationError",
    "CalibrationError",
    "MulticlassCalibrationError",
    "binary_calibration_error",
    "calibration_error",
    "multiclass_calibration_error",
]

Norm = Literal["l1", "l2", "max"]

_FUNCTION_OF_NORM: dict[str, Callable[..., Tensor]] = {"l1": ece, "l2": rmsce, "max": mce}


class _Replacement(BinnedMetric):
    """Calibration error of the confidences and outcomes that a metric of torchmetrics stores for a batch."""

    is_differentiable = False

    def __init__(self, reader: Any, **kwargs: Any) -> None:
        """Initialise from the metric of torchmetrics, which has checked the arguments."""
        check_choice("norm", reader.norm, tuple(_FUNCTION_OF_NORM))
        ours = _FUNCTION_OF_NORM[reader.norm]
        # Both tasks have binary events: the positive class or the top label, and its confidence.
        estimator = factory_of(ours)(task="binary", n_bins=reader.n_bins, validate_args=False).streamed(None)
        self._build(estimator, (), False, **kwargs)
        names = ("num_classes", "n_bins", "norm", "ignore_index", "validate_args")
        options = {name: getattr(reader, name) for name in names if hasattr(reader, name)}
        self.settings = {"task": "multiclass" if "num_classes" in options else "binary", **options}
        vars(self).update(vars(declaration_of(ours)))
        # Not set as attributes of a module: `num_classes` is a property, and the reader has no state to save or move.
        vars(self).update(options, _reader=reader, _dtype_of_value=torch.float32)

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]  # as in torchmetrics
        """Add a batch to the state.

        Args:
            preds: Probabilities, or logits if any value is outside [0, 1]; binary `(N, ...)`, multi-class
                `(N, C, ...)`.
            target: Labels `(N, ...)`.

        Raises:
            ValueError, RuntimeError: As in torchmetrics.
        """
        confidences, outcomes = self._events_of(preds, target)
        self.check_device(confidences)
        # Not `CalibrationMetric.update`: metrics in a collection share predictions, but these have been converted.
        p = self._read(self.input_format, confidences, outcomes, None)
        self._add(confidences, self.kind.from_predictions(p))
        vars(self)["_dtype_of_value"] = torch.promote_types(confidences.dtype, torch.float32)

    def _events_of(self, preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return confidences and outcomes of a batch, `(N,)` without ignored samples."""
        reader = self._reader
        try:
            reader.update(preds, target)
            return reader.confidences[0].detach(), reader.accuracies[0]
        finally:
            reader.reset()

    def compute(self) -> Tensor:
        """Return the calibration error for all updates, in [0, 1], over all ranks if `torch.distributed` is running.

        The dtype is that of the confidences, and at least float32. NaN without data.
        """
        return super().compute().to(self._dtype_of_value)


class BinaryCalibrationError(_Replacement):
    """Calibration error of a binary task; see `torchmetrics.classification.BinaryCalibrationError`.

    Args:
        n_bins: Number of bins of equal width.
        norm: `"l1"`, `"l2"` or `"max"` for the mean, root mean squared or maximum gap of the bins.
        ignore_index: Label of ignored samples.
        validate_args: Whether to check arguments and input.
        **kwargs: Arguments of `torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> metric = BinaryCalibrationError(n_bins=2, norm="l1")
        >>> metric(torch.tensor([0.25, 0.25, 0.55, 0.75, 0.75]), torch.tensor([0, 0, 1, 1, 1]))
        tensor(0.2900)
    """

    def __init__(
        self,
        n_bins: int = 15,
        norm: Norm = "l1",
        ignore_index: int | None = None,
        validate_args: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(theirs.BinaryCalibrationError(n_bins, norm, ignore_index, validate_args), **kwargs)


class MulticlassCalibrationError(_Replacement):
    """Calibration error of the top label; see `torchmetrics.classification.MulticlassCalibrationError`.

    Args:
        num_classes: Number of classes C.
        n_bins: Number of bins of equal width.
        norm: `"l1"`, `"l2"` or `"max"` for the mean, root mean squared or maximum gap of the bins.
        ignore_index: Label of ignored samples.
        validate_args: Whether to check arguments and input.
        **kwargs: Arguments of `torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> preds = torch.tensor([[0.25, 0.20, 0.55], [0.55, 0.05, 0.40], [0.10, 0.30, 0.60], [0.90, 0.05, 0.05]])
        >>> metric = MulticlassCalibrationError(num_classes=3, n_bins=3, norm="l1")
        >>> metric(preds, torch.tensor([0, 1, 2, 0]))
        tensor(0.2000)
    """

    plot_legend_name = "Class"

    def __init__(
        self,
        num_classes: int,
        n_bins: int = 15,
        norm: Norm = "l1",
        ignore_index: int | None = None,
        validate_args: bool = True,
        **kwargs: Any,
    ) -> None:
        reader = theirs.MulticlassCalibrationError(num_classes, n_bins, norm, ignore_index, validate_args)
        super().__init__(reader, **kwargs)

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return int(self.settings["num_classes"])

    def _events_of(self, preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        confidences, outcomes = super()._events_of(preds, target)
        if self.validate_args and target.is_cpu:  # elsewhere an error would synchronise the device
            is_wrong = (target < 0) | (target >= self.num_classes)
            if self.ignore_index is not None:
                is_wrong &= target != self.ignore_index
            if is_wrong.any():
                raise ValueError(
                    f"`target` must contain labels from 0 to {self.num_classes - 1}, got {int(target[is_wrong][0])}. "
                    "Pass ignore_index to ignore samples."
                )
        return confidences, outcomes.long()  # floating outcomes would be soft targets


class CalibrationError(theirs.CalibrationError):
    """Calibration error of a binary or multi-class task; see `torchmetrics.CalibrationError`.

    Args:
        task: `"binary"` or `"multiclass"`.
        n_bins: Number of bins of equal width.
        norm: `"l1"`, `"l2"` or `"max"` for the mean, root mean squared or maximum gap of the bins.
        num_classes: Number of classes C of a multi-class task.
        ignore_index: Label of ignored samples.
        validate_args: Whether to check arguments and input.
        **kwargs: Arguments of `torchmetrics.Metric`.

    Returns:
        A `BinaryCalibrationError` or a `MulticlassCalibrationError`.

    Example:
        >>> CalibrationError(task="multiclass", num_classes=3, norm="max")
        MulticlassCalibrationError(task='multiclass', num_classes=3, norm='max')
    """

    def __new__(  # type: ignore[misc]  # as in torchmetrics
        cls,
        task: Literal["binary", "multiclass"],
        n_bins: int = 15,
        norm: Norm = "l1",
        num_classes: int | None = None,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **kwargs: Any,
    ) -> BinaryCalibrationError | MulticlassCalibrationError:
        """Return the metric of the task."""
        options: dict[str, Any] = {"n_bins": n_bins, "norm": norm, "ignore_index": ignore_index}
        checked = theirs.CalibrationError(task, num_classes=num_classes, validate_args=validate_args, **options)
        if isinstance(checked, theirs.BinaryCalibrationError):
            return BinaryCalibrationError(validate_args=validate_args, **options, **kwargs)
        return MulticlassCalibrationError(int(num_classes or 0), validate_args=validate_args, **options, **kwargs)


def binary_calibration_error(
    preds: Tensor,
    target: Tensor,
    n_bins: int = 15,
    norm: Norm = "l1",
    ignore_index: int | None = None,
    validate_args: bool = True,
) -> Tensor:
    """Calibration error of a binary task; see `torchmetrics.functional.classification.binary_calibration_error`.

    Args:
        preds: Probabilities `(N, ...)`, or logits if any value is outside [0, 1].
        target: Labels `(N, ...)`.
        n_bins: Number of bins of equal width.
        norm: `"l1"`, `"l2"` or `"max"` for the mean, root mean squared or maximum gap of the bins.
        ignore_index: Label of ignored samples.
        validate_args: Whether to check arguments and input.

    Returns:
        A scalar in [0, 1] without gradient. NaN without data.

    Raises:
        ValueError, RuntimeError: As in torchmetrics.

    Example:
        >>> import torch
        >>> preds, target = torch.tensor([0.25, 0.25, 0.55, 0.75, 0.75]), torch.tensor([0, 0, 1, 1, 1])
        >>> binary_calibration_error(preds, target, n_bins=2, norm="max")
        tensor(0.3167)
    """
    return _value(BinaryCalibrationError(n_bins, norm, ignore_index, validate_args), preds, target)


def multiclass_calibration_error(
    preds: Tensor,
    target: Tensor,
    num_classes: int,
    n_bins: int = 15,
    norm: Norm = "l1",
    ignore_index: int | None = None,
    validate_args: bool = True,
) -> Tensor:
    """Calibration error of the top label; see `torchmetrics.functional.classification.multiclass_calibration_error`.

    Args:
        preds: Probabilities `(N, C, ...)`, or logits if any value is outside [0, 1].
        target: Labels `(N, ...)`.
        num_classes: Number of classes C.
        n_bins: Number of bins of equal width.
        norm: `"l1"`, `"l2"` or `"max"` for the mean, root mean squared or maximum gap of the bins.
        ignore_index: Label of ignored samples.
        validate_args: Whether to check arguments and input.

    Returns:
        A scalar in [0, 1] without gradient. NaN without data.

    Raises:
        ValueError, RuntimeError: As in torchmetrics.

    Example:
        >>> import torch
        >>> preds = torch.tensor([[0.25, 0.20, 0.55], [0.55, 0.05, 0.40], [0.10, 0.30, 0.60], [0.90, 0.05, 0.05]])
        >>> multiclass_calibration_error(preds, torch.tensor([0, 1, 2, 0]), num_classes=3, n_bins=3, norm="max")
        tensor(0.2333)
    """
    return _value(MulticlassCalibrationError(num_classes, n_bins, norm, ignore_index, validate_args), preds, target)


def calibration_error(
    preds: Tensor,
    target: Tensor,
    task: Literal["binary", "multiclass"],
    n_bins: int = 15,
    norm: Norm = "l1",
    num_classes: int | None = None,
    ignore_index: int | None = None,
    validate_args: bool = True,
) -> Tensor:
    """Calibration error of a binary or multi-class task; see `torchmetrics.functional.calibration_error`.

    Args:
        preds: Probabilities, or logits if any value is outside [0, 1]; binary `(N, ...)`, multi-class `(N, C, ...)`.
        target: Labels `(N, ...)`.
        task: `"binary"` or `"multiclass"`.
        n_bins: Number of bins of equal width.
        norm: `"l1"`, `"l2"` or `"max"` for the mean, root mean squared or maximum gap of the bins.
        num_classes: Number of classes C of a multi-class task.
        ignore_index: Label of ignored samples.
        validate_args: Whether to check arguments and input.

    Returns:
        A scalar in [0, 1] without gradient. NaN without data.

    Raises:
        ValueError, RuntimeError: As in torchmetrics.

    Example:
        >>> import torch
        >>> calibration_error(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    return _value(CalibrationError(task, n_bins, norm, num_classes, ignore_index, validate_args), preds, target)


def _value(metric: Any, preds: Tensor, target: Tensor) -> Tensor:
    metric.to(preds.device)
    value: Tensor = metric(preds, target)
    return value
