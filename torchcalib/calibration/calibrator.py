"""What every calibrator and every fitted transform has."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn

from torchcalib.core.arguments import InputOptions, Task, check_task
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import spread_infinite_logits, wide_dtype


class Transform(nn.Module, ABC):
    """A fitted calibrator: predictions to calibrated predictions of the same kind.

    Its numbers are buffers, which a `state_dict` carries together with what kind of predictions it takes: a transform
    made without arguments takes all of it from `load_state_dict`. They stay float64 whatever `.half()` or
    `.to(dtype)` do to the model around them. Arithmetic is that of the predictions, at least float32.

    Args:
        task: what the predictions are of.
        from_logits: whether it takes logits. It then returns logits: log-probabilities of classes, log-odds where
            there is one value for a sample or label.
        class_axis: the axis of classes or labels.

    Attributes:
        converged: whether the fit reached its optimum, bool of the shape of the batch it was fitted to.
        grad_norm: norm of the gradient where the fit ended, of that shape; 0 where the optimum has a formula.
    """

    grad_norm: Tensor
    converged: Tensor

    def __init__(self, task: Task = "binary", *, from_logits: bool = False, class_axis: int = -1) -> None:
        super().__init__()
        check_task(task)
        self.task: Task = task
        self.from_logits, self.class_axis = from_logits, class_axis
        self.register_buffer("grad_norm", torch.zeros((), dtype=torch.float64))
        self.register_buffer("converged", torch.ones((), dtype=torch.bool))

    @abstractmethod
    def calibrated(self, values: Tensor) -> Tensor:
        """Map canonical values, classes last, or samples last where a sample has one value."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """Return what there is to say against the fit, a sentence for each thing; empty if there is nothing."""

    def warn(self) -> None:
        """Warn of what there is to say against the fit, at the line outside this package that asked for it."""
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
            frame, level = frame.f_back, level + 1
        for remark in self.remarks():
            warnings.warn(remark, UserWarning, stacklevel=level)

    def forward(self, preds: Tensor) -> Tensor:
        """Return calibrated predictions, of the shape of `preds` and of its dtype (at least float32).

        Args:
            preds: as those that it was fitted to; values are not checked. A transform that was fitted to a batch
                `(..., N)` of series takes that batch; one that was fitted to a single series takes any leading axes.

        Raises:
            TypeError: `preds` is not floating.
            ValueError: too few axes, or other leading axes than those of the batch that it was fitted to.

        Gradient:
            In `preds`, wherever the transform has one.
        """
        if not preds.is_floating_point():
            raise TypeError(f"`preds` must be floating, got {preds.dtype}. Pass what the calibrator was fitted to.")
        self._check_axes(preds)
        values = preds.to(torch.promote_types(preds.dtype, torch.float32))
        if self.task == "binary":
            return self.calibrated(values)
        values = values.movedim(self.class_axis, -1)
        if self.task == "multiclass":
            values = spread_infinite_logits(values) if self.from_logits else values
            return self.calibrated(values).movedim(-1, self.class_axis)
        return self.calibrated(values.transpose(-1, -2)).transpose(-1, -2).movedim(-1, self.class_axis)

    def _check_axes(self, preds: Tensor) -> None:
        n_axes, batch = 1 + (self.task != "binary"), self.grad_norm.shape
        if preds.dim() < n_axes:
            raise ValueError(
                f"`preds` must have at least {n_axes} axes for task={self.task!r}, got shape {tuple(preds.shape)}. "
                "Add the missing axis with unsqueeze."
            )
        samples = preds if self.task == "binary" else preds.movedim(self.class_axis, -1)
        # Of labels, which are series, the axis comes before that of the samples.
        leading = samples.shape[:-2] + samples.shape[-1:] if self.task == "multilabel" else samples.shape[:-n_axes]
        if len(leading) < len(batch) or leading[len(leading) - len(batch) :] != batch:
            raise ValueError(
                f"`preds` must have the leading axes {tuple(batch)} of the batch that the calibrator was fitted to"
                f"{', labels last' if self.task == 'multilabel' else ''}, got {tuple(leading)} of shape "
                f"{tuple(preds.shape)}. Take one of its transforms with part(index), or set class_axis."
            )

    def part(self, index: int) -> Self:
        """Return the transform of one entry of the first batch axis."""
        chosen = copy(self)
        chosen._buffers = {name: None if x is None else x[index] for name, x in self._buffers.items()}
        return chosen

    def get_extra_state(self) -> dict[str, Any]:
        """Return what kind of transform it is, and what kind of predictions it takes, for the `state_dict`."""
        taken = {"task": self.task, "from_logits": self.from_logits, "class_axis": self.class_axis}
        return {"kind": type(self).__name__, **taken}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_extra_state` returned."""
        for name in self.get_extra_state().keys() & state.keys() - {"kind"}:  # and nothing else: files come from others
            setattr(self, name, state[name])

    def extra_repr(self) -> str:
        """Return the kind of predictions, for `repr`."""
        return f"task={self.task!r}, from_logits={self.from_logits}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in list(self._buffers.items()):
            saved = state_dict.get(prefix + name)
            if buffer is not None and isinstance(saved, Tensor):  # how many classes or knots is part of the state
                setattr(self, name, buffer.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            device = self._buffers[name].device  # type: ignore[union-attr]
            dtype = wide_dtype(device) if buffer.is_floating_point() else buffer.dtype
            if self._buffers[name].dtype != dtype:  # type: ignore[union-attr]
                # A half keeps three digits of a scale: move the numbers, and leave them as they are.
                self._buffers[name] = buffer.to(device, dtype)
        return self


T = TypeVar("T", bound=Transform, covariant=True)


class Calibrator(ABC, Generic[T]):
    """Says what to fit. `fit` does so.

    Attributes:
        tasks: what it can be fitted to.
        whole_weights: whether weights must be counts of copies.
        in_log_odds: whether the fit depends on binary predictions only through their log-odds.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass", "multilabel")
    whole_weights: ClassVar[bool] = False
    in_log_odds: ClassVar[bool] = False

    def fit(self, preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[InputOptions]) -> T:
        """Fit to predictions and labels.

        Args:
            preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
                Leading axes are series, and labels are too: each has a fit of its own, all in one solve.
            target: integer labels; see `torchcalib.nll`.
            task: `"binary"`, `"multiclass"` or `"multilabel"`.
            **options: see `torchcalib.InputOptions`. With `positive_classes` the transform takes the probability (or
                log-odds) of the set.

        Returns:
            The `Transform`, without gradient to `preds`.

        Raises:
            TypeError, ValueError: for bad input; the message says what must hold.

        Warns:
            UserWarning: the fit has no optimum or did not reach it, a class has no samples, a label was given
                probability 0; see `Transform.remarks`.
        """
        p = self.read(preds, target, task=task, options=options)
        with torch.inference_mode(False):  # whose tensors no gradient could ever pass
            transform = self.fit_to(p)
        transform.class_axis = options.get("class_axis", -1)
        transform.warn()
        return transform

    def read(self, preds: Tensor, target: Tensor, *, task: Task, options: InputOptions) -> Predictions:
        """Read input that this calibrator can be fitted to."""
        p = read_input(task, preds, target, options, hard_targets=True, whole_weights=self.whole_weights)
        if p.task not in self.tasks:
            raise ValueError(
                f"`task` must be one of {', '.join(map(repr, self.tasks))} for {type(self).__name__}, got {p.task!r}. "
                "Pass positive_classes=[k] for one class against the rest, or use DPCalibration."
            )
        return p

    @abstractmethod
    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> T:
        """Fit to what has been read.

        Args:
            p: predictions.
            weights: in place of those of `p`, `(R, ..., N)`: a fit for each of R weightings, such as folds or
                bootstrap replicates. The transform's batch then begins with R.
        """


def series_weights(p: Predictions, weights: Tensor | None) -> Tensor:
    """Return weights `(..., N)` of every series, or `(R, ..., N)` as given."""
    shape = p.target.shape
    if weights is None:
        weights = p.weights
    if weights is None:
        return torch.ones(shape, dtype=wide_dtype(p.values.device), device=p.values.device)
    return weights.expand(*weights.shape[: max(0, weights.dim() - len(shape))], *shape)
