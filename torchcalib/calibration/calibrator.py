"""Base classes of all calibrators and of the transforms that they fit."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn

from torchcalib.core.arguments import InputOptions, Task, check_task
from torchcalib.core.arrays import as_tensors
from torchcalib.core.inputs import input_format_of, read_input
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import spread_infinite_logits, wide_dtype


class Transform(nn.Module, ABC):
    """A fitted calibrator: maps predictions to calibrated predictions of the same kind.

    Its parameters are buffers. The `state_dict` also holds its settings, so a transform made without arguments takes
    both from `load_state_dict`. Buffers stay float64 under `.half()` and `.to(dtype)` of a surrounding model. The
    arithmetic has the dtype of the predictions, at least float32.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        from_logits: whether it takes logits. It then returns logits: log-probabilities of classes, or log-odds for
            binary and multi-label predictions.
        class_axis: the axis of classes or labels.

    Attributes:
        converged: whether the fit reached its optimum, bool of the batch shape of the fit.
        grad_norm: norm of the gradient at the end of the fit, of the same shape; 0 for optima in closed form.
    """

    settings: ClassVar[tuple[str, ...]] = ("task", "from_logits", "class_axis")
    """Attributes that the `state_dict` holds beside the buffers."""
    initial: ClassVar[Mapping[str, object]]
    """Initial values of the buffers of a subclass."""

    grad_norm: Tensor
    converged: Tensor

    def __init__(self, task: Task = "binary", *, from_logits: bool = False, class_axis: int = -1) -> None:
        super().__init__()
        check_task(task)
        self.task: Task = task
        self.from_logits, self.class_axis = from_logits, class_axis
        for name, value in {"grad_norm": 0.0, "converged": True, **self.initial}.items():
            buffer = torch.tensor(value)
            self.register_buffer(name, buffer.double() if buffer.is_floating_point() else buffer)

    @classmethod
    def of(cls, p: Predictions, **buffers: Tensor) -> Self:
        """Return the transform of a fit to `p`, with these buffers."""
        transform = cls(p.task, from_logits=p.from_logits)
        transform.grad_norm = torch.zeros_like(buffers["converged"], dtype=wide_dtype(p.values.device))
        for name, value in buffers.items():
            setattr(transform, name, value)
        return transform

    @abstractmethod
    def calibrated(self, values: Tensor) -> Tensor:
        """Map values in canonical form: multi-class with classes last, otherwise with samples last."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """Return one sentence for each problem of the fit."""

    def warn(self) -> None:
        """Issue every remark as a warning, located at the first caller outside this package."""
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
            frame, level = frame.f_back, level + 1
        for remark in self.remarks():
            warnings.warn(remark, UserWarning, stacklevel=level)

    def forward(self, preds: Tensor) -> Tensor:
        """Return calibrated predictions, of the shape of `preds` and of its dtype (at least float32).

        Args:
            preds: predictions of the kind used in the fit; values are not checked. A transform fitted to a batch
                `(..., N)` takes this batch shape; one fitted to a single data set takes any leading axes.

        Raises:
            TypeError: `preds` is not floating.
            ValueError: too few axes, or leading axes other than the batch of the fit.

        Gradient:
            In `preds`, wherever the transform has one.
        """
        if not preds.is_floating_point():
            raise TypeError(f"`preds` must be floating, got {preds.dtype}. Pass predictions as in the fit.")
        has_classes = self.task != "binary"
        if preds.dim() < 1 + has_classes:
            raise ValueError(
                f"`preds` must have at least {1 + has_classes} axes for task={self.task!r}, got shape "
                f"{tuple(preds.shape)}. Add the missing axis with unsqueeze."
            )
        values = preds.to(torch.promote_types(preds.dtype, torch.float32))
        # To canonical form: classes last, labels before samples. Every label has its own fit.
        values = values.movedim(self.class_axis, -1) if has_classes else values
        values = values.transpose(-1, -2) if self.task == "multilabel" else values
        leading, batch = values.shape[: -2 if self.task == "multiclass" else -1], self.grad_norm.shape
        if leading[len(leading) - len(batch) :] != batch:
            raise ValueError(
                f"`preds` must have the leading axes {tuple(batch)} of the batch that the calibrator was fitted to"
                f"{', labels last' if self.task == 'multilabel' else ''}, got {tuple(leading)} of shape "
                f"{tuple(preds.shape)}. Take one of its transforms with part(index), or set class_axis."
            )
        if self.task == "multiclass" and self.from_logits:
            values = spread_infinite_logits(values)
        values = self.calibrated(values)
        values = values.transpose(-1, -2) if self.task == "multilabel" else values
        return values.movedim(-1, self.class_axis) if has_classes else values

    def part(self, index: int) -> Self:
        """Return the transform at an index of the first batch axis."""
        chosen = copy(self)
        chosen._buffers = {name: None if x is None else x[index] for name, x in self._buffers.items()}
        return chosen

    def get_extra_state(self) -> dict[str, Any]:
        """Return the class and the settings, for the `state_dict`."""
        return {"kind": type(self).__name__, **{name: getattr(self, name) for name in self.settings}}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the settings; anything else in a file, which may come from a stranger, is ignored."""
        for name in set(self.settings) & state.keys():
            setattr(self, name, state[name])

    def extra_repr(self) -> str:
        """Return the kind of predictions, for `repr`."""
        return f"task={self.task!r}, from_logits={self.from_logits}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in list(self._buffers.items()):
            saved = state_dict.get(prefix + name)
            if buffer is not None and isinstance(saved, Tensor):  # the saved shape has the number of classes or knots
                setattr(self, name, buffer.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            device = self._buffers[name].device  # type: ignore[union-attr]
            dtype = wide_dtype(device) if buffer.is_floating_point() else buffer.dtype
            if self._buffers[name].dtype != dtype:  # type: ignore[union-attr]
                # float16 would round a scale to 3 digits: move the original to the device, in full precision.
                self._buffers[name] = buffer.to(device, dtype)
        return self


T = TypeVar("T", bound=Transform, covariant=True)


class Calibrator(ABC, Generic[T]):
    """A calibration method with its settings. `fit` returns the fitted transform.

    Attributes:
        name: name for reports and recommendations; that of the class by default.
        tasks: tasks that it can be fitted to.
        whole_weights: whether weights must be whole numbers.
        in_log_odds: whether the fit depends on binary predictions only through their log-odds.
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass", "multilabel")
    whole_weights: ClassVar[bool] = False
    in_log_odds: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def fit(self, preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[InputOptions]) -> T:
        """Fit to predictions and labels.

        Args:
            preds: probabilities (or logits): binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`, or with further
                axes of samples. Every element of `batch_dims` and every label has its own fit, all in one solve.
            target: integer labels; see `torchcalib.functional.nll`.
            task: `"binary"`, `"multiclass"` or `"multilabel"`.
            **options: see `torchcalib.functional.InputOptions`. With `positive_classes` the transform takes the
                probability (or log-odds) of the set.

        Returns:
            The `Transform`, without gradient to `preds`.

        Raises:
            TypeError, ValueError: for invalid input.

        Warns:
            UserWarning: the fit has no optimum or did not reach it, a class has no samples, or a label has probability
                0; see `Transform.remarks`.
        """
        preds, target, _ = as_tensors(preds, target, None)
        p = self.read(preds, target, task=task, options=options)
        with torch.inference_mode(False):  # gradients could never pass tensors made in inference mode
            transform = self.fit_to(p)
        how = input_format_of(task, options)
        transform.class_axis = how.resolved(preds, target, how.batch_dims).axis
        transform.warn()
        return transform

    def read(self, preds: Tensor, target: Tensor, *, task: Task, options: InputOptions) -> Predictions:
        """Check and convert input for a fit of this calibrator."""
        p = read_input(task, preds, target, options, hard_targets=True, whole_weights=self.whole_weights)
        if p.task not in self.tasks:
            raise ValueError(
                f"`task` must be one of {', '.join(map(repr, self.tasks))} for {type(self).__name__}, got {p.task!r}. "
                "Pass positive_classes=[k] for one class against the rest, or use AffineScaling."
            )
        return p

    @abstractmethod
    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> T:
        """Fit to checked predictions.

        Args:
            p: predictions.
            weights: `(R, ..., N)`, replaces the weights of `p`: one fit for each of R weight vectors, such as folds or
                bootstrap replicates. The batch of the transform then begins with R.
        """


def sample_weights(p: Predictions, weights: Tensor | None = None) -> Tensor:
    """Return weights (by default those of `p`) expanded to `(..., N)`, or to `(R, ..., N)` for R replicates."""
    shape = p.target.shape
    if weights is None:
        weights = p.weights
    if weights is None:
        return torch.ones(shape, dtype=wide_dtype(p.values.device), device=p.values.device)
    return weights.expand(*weights.shape[: max(0, weights.dim() - len(shape))], *shape)
