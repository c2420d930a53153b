"""Base class of calibrators."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torchcalib._bridges import unknown_attribute
from torchcalib.core.arguments import Task, check_flag, is_int, task_of, with_own_names
from torchcalib.core.arrays import as_tensor
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.inputs import input_format_of, read_input
from torchcalib.core.mistakes import look_like_probabilities
from torchcalib.core.predictions import Predictions
from torchcalib.core.tasks import prepare
from torchcalib.io.errors import shown, warn
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.log_odds import log_ratio
from torchcalib.ops.logs import sigmoid, softmax, spread_infinite_logits, wide_dtype


class Calibrator(nn.Module, ABC):
    """Base class of calibrators, which are modules that map predictions to calibrated predictions of the same kind.

    The arguments of the constructor are the settings of the method, and `from_logits`, the default of this argument of
    `fit`. `fit` estimates the parameters. They are buffers: an optimizer does not train them, `.to(device)` moves them,
    and they stay float64 under `.half()` and `.to(dtype)`. The `state_dict` contains the parameters, the settings, the
    task and `from_logits`. A new calibrator of the same class can load it.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None before the fit.
        from_logits: whether predictions are logits. Calibrated predictions are then log-probabilities of classes, or
            log-odds for binary and multi-label predictions.
        class_axis: axis of the classes or labels in predictions.
        positive_classes: set of classes whose probability is calibrated; None for all classes.
        converged: whether the fit reached its optimum, bool of the batch shape of the fit.
        grad_norm: norm of the gradient at the end of the fit, of the batch shape; 0 for optima in closed form.

    Example:
        A subclass defines its parameters, the fit, and the map from predictions to calibrated predictions:

        >>> class Frequency(Calibrator):
        ...     tasks, initial = ("binary",), {"frequency": 0.5}
        ...
        ...     def parameters_for(self, p, weights):
        ...         w = sample_weights(p, weights)
        ...         frequency = (w * p.target).sum(-1) / w.sum(-1)
        ...         return {"frequency": frequency, "converged": frequency.isfinite()}
        ...
        ...     def calibrated(self, values, from_logits):
        ...         return self.frequency[..., None].to(values).expand_as(values)
        ...
        ...     def remarks(self):
        ...         return []
        >>> Frequency().fit([0.9, 0.8, 0.3], [1, 0, 1])([0.5, 0.6])
        tensor([0.6667, 0.6667], dtype=torch.float64)
    """

    name: ClassVar[str]
    """Name in reports and recommendations."""
    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass", "multilabel")
    """Tasks that the method supports."""
    whole_weights: ClassVar[bool] = False
    """Whether weights must be whole numbers."""
    in_log_odds: ClassVar[bool] = False
    """Whether binary predictions enter the fit only as log-odds."""
    contains_identity: ClassVar[bool] = False
    """Whether the fit maximises the likelihood in a family that contains the identity.

    `torchcalib.calibration.selection.likelihood_ratio` requires this.
    """
    assigns_zero: ClassVar[bool] = False
    """Whether the method can assign probability 0 although the prediction is positive.

    A probability of 0 can make the NLL of new data infinite. Fits by a proper score never do this.
    """
    largest_fit: ClassVar[tuple[int, float]] = 0, math.inf
    """Exponent k and limit of N * C^k for N samples of a multi-class task; see `is_slow_for`."""
    state_format: ClassVar[int] = 1
    """Version of the parameters in a `state_dict`. Increase it when their meaning changes: others raise an error."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments of the constructor, which are attributes."""
    attribute_of: ClassVar[Mapping[str, str]] = {}
    """Attributes of settings that have the name of a method of `torch.nn.Module`."""
    initial: ClassVar[Mapping[str, object]] = {}
    """Values of the parameters before the fit."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Smallest and largest value of parameters that have such limits. Loading checks them."""

    task: Task | None
    from_logits: bool
    class_axis: int
    positive_classes: tuple[int, ...] | None

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, *, from_logits: bool | None = None) -> None:
        super().__init__()
        if from_logits is not None:
            check_flag("from_logits", from_logits)
        self.declared_from_logits = from_logits
        self.task, self.from_logits, self.class_axis, self.positive_classes = None, False, -1, None
        for name, value in {"grad_norm": 0.0, "converged": False, **self.initial}.items():
            buffer = torch.tensor(value)
            # the registry of `nn.Module`; `register_buffer` looks up every attribute first
            self._buffers[name] = buffer.double() if buffer.is_floating_point() else buffer

    def fit(
        self,
        preds: Tensor,
        target: Tensor,
        task: Task | None = None,
        *,
        from_logits: bool | None = None,
        class_names: Sequence[str] | None = None,
        positive_classes: Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """Fit the calibrator to predictions and labels, or to soft targets.

        Each batch element (see `batch_dims`) and each label of a multi-label task has its own fit. The likelihood of
        a soft target is its cross entropy: a row counts as one row of each class, weighted by its target probability.
        Methods that need whole weights, such as isotonic calibration, do not support soft targets.

        Args:
            preds: Probabilities or logits: binary `(...)`, otherwise with a class axis.
            target: Labels, one per sample (multi-label: of the shape of `preds`), class names, or soft targets.
            task: `"binary"`, `"multiclass"` or `"multilabel"`. None infers it from the shapes.
            from_logits: `preds` are logits. None uses the argument of the constructor. If that is None too, names of
                columns decide, and else it is True if more than 5% of the values are negative.
            class_names: Names of the classes, if labels are text. None uses the column names of a DataFrame.
            positive_classes: Calibrate the probability of this set of classes against the rest. The fitted calibrator
                takes multi-class predictions, and returns the calibrated probability (or log-odds) of the set.
            **options: Other options of `torchcalib.functional.InputOptions`, such as `weights`.

        Returns:
            The calibrator itself. Its parameters have no gradient with respect to `preds`.

        Raises:
            TypeError, ValueError: for invalid input.

        Warns:
            UserWarning: the fit did not reach an optimum, a class has no samples, or a label has probability 0; see
                `remarks`.
        """
        if any(options.get(name) is not None for name in ("num_classes", "num_labels")):
            task = task_of(task, **options)
        if "sample_weight" in options:
            options = with_own_names(options)
        from_logits = self.declared_from_logits if from_logits is None else from_logits
        given = prepare(
            preds,
            target,
            task,
            class_names=class_names,
            positive_classes=positive_classes,
            from_logits=from_logits,
            ignore_index=options.get("ignore_index"),
        )
        options["from_logits"] = given.from_logits
        options["positive_classes"] = positive_classes
        p = self.read(given.preds, given.target, task=given.task, options=options)
        how = input_format_of(given.task, options)
        axis = how.resolved(given.preds, given.target, how.batch_dims).axis
        with torch.inference_mode(False):  # autograd cannot use tensors that are created in inference mode
            return self.adopt(self.fit_to(p, class_axis=axis, positive_classes=positive_classes))

    def adopt(self, fitted: Self) -> Self:
        """Take the parameters of a fitted copy, and warn about problems of its fit."""
        for name in (*dict(fitted.named_buffers(remove_duplicate=False)), *_KIND):
            setattr(self, name, getattr(fitted, name))
        self.warn()
        return self

    def read(self, preds: Tensor, target: Tensor, *, task: Task, options: Mapping[str, Any]) -> Predictions:
        """Check predictions and labels, and return them as `Predictions` for `fit_to`."""
        whole = self.whole_weights
        if self.declared_from_logits is not None:
            options = {"from_logits": self.declared_from_logits, **options}
        p = read_input(task, preds, target, options, hard_targets=whole, whole_weights=whole, needs_rows=False)
        if not (p.has_labels or p.n_annotators is not None or p.soft):
            # Floating targets can be 0 or 1 in all rows of positive weight. `p.target` would be kept for the labels.
            is_label = (p.input_target == 0) | (p.input_target == 1)
            if p.zero_weight is not None:
                is_label |= p.zero_weight
            if value_if_available(is_label.all()) is True:
                p = p.with_integer_labels()
        if p.task not in self.tasks:
            raise ValueError(
                f"`task` must be one of {', '.join(map(repr, self.tasks))} for {type(self).__name__}, got "
                f"{shown(p.task)}. "
                "Pass positive_classes=[k] for one class against the rest, or use AffineScaling."
            )
        return p

    def fit_to(
        self,
        p: Predictions,
        weights: Tensor | None = None,
        *,
        class_axis: int = -1,
        positive_classes: Sequence[int] | None = None,
    ) -> Self:
        """Return a copy that is fitted to checked predictions.

        Args:
            p: predictions.
            weights: weights `(R, ..., N)` of R replicates (folds or bootstrap samples), which replace the weights of
                `p`. The batch shape of the fit then starts with R.
            class_axis: axis of classes or labels in the predictions to calibrate.
            positive_classes: set of classes whose probability `p` contains; None for all classes.
        """
        with torch.no_grad():
            buffers = self.parameters_for(*((p, weights) if p.has_labels else _by_class(p, weights)))
        exact = torch.zeros_like(buffers["converged"], dtype=wide_dtype(p.input_preds.device))
        fitted = self._with_buffers({"grad_norm": exact, **buffers})
        fitted.task, fitted.from_logits, fitted.class_axis = p.task, p.from_logits, class_axis
        fitted.positive_classes = None if positive_classes is None else tuple(map(int, positive_classes))
        return fitted

    def _with_buffers(self, buffers: dict[str, Tensor]) -> Self:
        """Return a copy with these buffers. Hooks that are added later to the copy do not affect the original."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                vars(other)[name] = copy(value)
        other._buffers.update(buffers)
        return other

    @abstractmethod
    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return the fitted parameters and `converged` by name. For the arguments see `fit_to`."""

    @abstractmethod
    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Map values, `(..., N, C)` if multi-class, else `(..., N)`, to calibrated values of this shape."""

    def calibrated_by_fit(self, values: Tensor, from_logits: bool) -> Tensor:
        """Map values `(F, N, C)` of F fits, with the same rounding as in F calls of `calibrated`."""
        return self.calibrated(values, from_logits)

    @abstractmethod
    def remarks(self) -> list[str]:
        """Return one sentence for each problem of the fit."""

    def is_slow_for(self, p: Predictions) -> bool:
        """Return whether a fit to predictions is slow; see `largest_fit`. Reports omit such calibrators."""
        exponent, most = self.largest_fit
        return p.task == "multiclass" and p.target.numel() * p.num_classes**exponent > most

    def n_parameters(self, num_classes: int) -> float:  # noqa: ARG002
        """Return the number of fitted parameters for C classes (2 if binary); infinite if it grows with the data."""
        return math.inf

    def warn(self) -> None:
        """Issue each remark as a warning at the first caller outside this package."""
        for remark in self.remarks():
            warn(remark)

    def forward(self, preds: Tensor) -> Tensor:
        """Return calibrated predictions, of the shape of `preds` and of its dtype (at least float32).

        With `positive_classes` the class axis is removed.

        Args:
            preds: logits if the fit used logits, else probabilities. After a fit with batch axes `(..., N)`, the same
                batch axes are required. After a fit without batch axes, any leading axes are allowed.

        Raises:
            RuntimeError: the calibrator is not fitted.
            TypeError: `preds` is not floating-point of 16 to 64 bits.
            ValueError: too few axes, batch axes that differ from the fit, or logits instead of probabilities.

        Gradient:
            With respect to `preds`, where the calibration map is differentiable.
        """
        values, from_logits, dtype = self._canonical(preds)
        values = self.calibrated(values, from_logits)
        return self._as_given(sigmoid(values) if from_logits and not self.from_logits else values, dtype)

    def _canonical(self, preds: Tensor) -> tuple[Tensor, bool, torch.dtype]:
        """Check predictions, and return them with classes last and labels before samples.

        Also return whether they are logits, and the dtype of the result.
        """
        if self.task is None:
            raise RuntimeError(f"{type(self).__name__} must be fitted before use. Call fit(preds, target).")
        preds = as_tensor("preds", preds)
        if preds.dtype not in SUM_TOLERANCE:
            raise TypeError(
                f"`preds` must be floating-point of 16 to 64 bits, got {preds.dtype}. Pass predictions as in the fit, "
                "or convert them with preds.float()."
            )
        if preds.is_meta != self.grad_norm.is_meta:
            raise ValueError(
                f"`preds` must be on the device of the calibrator ({self.grad_norm.device}), got {preds.device}. Move "
                "them with preds.to(device)."
            )
        self._check_kind(preds)
        if self.positive_classes is None:
            values, from_logits = preds.to(torch.promote_types(preds.dtype, torch.float32)), self.from_logits
        else:
            values, from_logits = self._against_rest(preds)
        has_classes = self.task != "binary"
        if values.dim() < 1 + has_classes:
            raise ValueError(
                f"`preds` must have at least {1 + has_classes} axes for task={self.task!r}, got shape "
                f"{tuple(preds.shape)}. Add the missing axis with unsqueeze."
            )
        values = values.movedim(self.class_axis, -1) if has_classes else values
        # Every label has its own fit.
        values = values.transpose(-1, -2) if self.task == "multilabel" else values
        leading, batch = values.shape[: -2 if self.task == "multiclass" else -1], self.grad_norm.shape
        if leading[len(leading) - len(batch) :] != batch:
            raise ValueError(
                f"`preds` must have the leading axes {tuple(batch)} of the batch that the calibrator was fitted to"
                f"{', labels last' if self.task == 'multilabel' else ''}, got {tuple(leading)} of shape "
                f"{tuple(preds.shape)}. Take one of its calibrators with part(index), or set class_axis."
            )
        if self.task == "multiclass" and from_logits:
            values = spread_infinite_logits(values)
        return values, from_logits, torch.promote_types(preds.dtype, torch.float32)

    def _as_given(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert values in canonical form to the axes of the predictions, and to a dtype."""
        values = values.transpose(-1, -2) if self.task == "multilabel" else values
        values = values.movedim(-1, self.class_axis) if self.task != "binary" else values
        return values.to(dtype)

    def _check_kind(self, preds: Tensor) -> None:
        """Raise an error for logits after a fit to probabilities, and warn for probabilities after a fit to logits.

        Only values on the CPU are checked. On other devices the check would synchronise the device.
        """
        if preds.device.type != "cpu" or not preds.numel():
            return
        if not self.from_logits and value_if_available(((preds < -1e-6) | (preds > 1 + 1e-6)).any()):
            low, high = float(preds.min()), float(preds.max())
            percentages = "Divide percentages by 100. " if 0 <= low <= high <= 100 else ""
            raise ValueError(
                f"`preds` must be probabilities in [0, 1], as in the fit of {type(self).__name__}, got values from "
                f"{low:.4g} to {high:.4g}. {percentages}Convert logits with softmax or sigmoid."
            )
        is_multiclass = self.from_logits and self.task == "multiclass"
        if is_multiclass and look_like_probabilities(preds.movedim(self.class_axis, -1), per_class=True):
            warn(
                f"`preds` must be logits, as in the fit of {type(self).__name__}, got values that look like "
                "probabilities. Pass preds.log()."
            )

    def _against_rest(self, preds: Tensor) -> tuple[Tensor, bool]:
        """Return the probability of `positive_classes`, or its log-odds, without class axis; and True for log-odds."""
        values = preds.movedim(self.class_axis, -1)
        values = values.to(wide_dtype(values.device))
        if max(self.positive_classes or (0,)) >= values.shape[-1]:
            raise ValueError(
                f"`preds` must have the classes of the fit, with positive_classes={self.positive_classes}, got "
                f"{values.shape[-1]} classes. Pass predictions as in the fit."
            )
        outside = torch.ones(values.shape[-1], dtype=torch.bool, device=values.device)
        for k in self.positive_classes or ():  # indexing with a list would synchronise a GPU
            outside[k] = False
        if self.from_logits:
            values = spread_infinite_logits(values)
            return log_ratio(values.masked_fill(outside, -torch.inf), values.masked_fill(~outside, -torch.inf)), True
        inside, rest = (values.masked_fill(mask, 0).sum(-1) for mask in (outside, ~outside))
        if self.in_log_odds:  # accurate even if the probability of the set rounds to 1
            return inside.log() - rest.log(), True
        return inside.clamp(max=1), False

    def predict_proba(self, preds: Tensor) -> Tensor:
        """Return calibrated probabilities, of the shape that `forward` returns; P(y = 1) for a binary task."""
        values: Tensor = self(preds)
        if not self.from_logits:
            return values
        return softmax(values, self.class_axis) if self.task == "multiclass" else sigmoid(values)

    def part(self, index: int | slice) -> Self:
        """Return the calibrator at an index of the first batch axis."""
        return self._with_buffers({name: x[index] for name, x in self.named_buffers(remove_duplicate=False)})

    def get_extra_state(self) -> dict[str, Any]:
        """Return the class, the settings, the task and the format of predictions, for the `state_dict`."""
        values = {name: getattr(self, self.attribute_of.get(name, name)) for name in (*_KIND, *self.settings)}
        return {"kind": type(self).__name__, "format": self.state_format, **values}

    def set_extra_state(self, state: Any) -> None:
        """Restore the result of `get_extra_state`, after a check, because the file may be malicious."""
        self._check_extra_state(state)
        for name in (*_KIND, *self.settings):
            setattr(self, self.attribute_of.get(name, name), state[name])

    def _check_extra_state(self, state: Any) -> None:
        names = {"kind", *_KIND, *self.settings}
        if not isinstance(state, dict) or not names <= state.keys():
            raise ValueError(
                f"`state_dict` must have the class and the settings of a {type(self).__name__}, got {state!r:.80}. "
                "Pass the state_dict of a calibrator, or load a file of save_calibrator with load_calibrator."
            )
        if state["kind"] != type(self).__name__:
            raise ValueError(
                f"`state_dict` must be of {type(self).__name__}, got one of {state['kind']}. "
                "Load it with an instance of that class, or with load_calibrator."
            )
        if state.get("format", 1) != self.state_format:
            raise ValueError(
                f"`state_dict` must be of format {self.state_format} of {type(self).__name__}, got format "
                f"{shown(state.get('format', 1))}, whose parameters have another meaning. Fit and save it again."
            )
        type(self)(**{name: state[name] for name in self.settings})  # the constructor checks the settings
        classes = state["positive_classes"]
        is_set = classes is None or (isinstance(classes, tuple) and all(map(is_int, classes)))
        is_valid = state["task"] in (None, *self.tasks) and is_int(state["class_axis"]) and is_set
        if not is_valid or not isinstance(state["from_logits"], bool):
            found = {name: state[name] for name in _KIND}
            raise ValueError(f"`state_dict` must be of a fitted calibrator, got {found!r:.80}. The file is corrupt.")

    def extra_repr(self) -> str:
        """Return the settings, and after the fit the parameters and the task, for `repr`."""
        shown = [f"{name}={getattr(self, self.attribute_of.get(name, name))!r}" for name in self.settings]
        if self.task is not None:
            shown += [*self.shown_parameters(), f"task={self.task!r}", f"from_logits={self.from_logits}"]
        return ", ".join(shown)

    def shown_parameters(self) -> list[str]:
        """Return the fitted parameters as `name=value`, for `repr`."""
        return []

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Return the fitted parameters of one fit as a clause without a period; empty if they cannot be described.

        Args:
            class_names: names of the classes; empty if unknown.
        """
        return ""

    def __getattr__(self, name: str) -> Tensor:
        """Return a parameter. Advise on names of other packages, for which `hasattr` is False."""
        try:
            return super().__getattr__(name)  # type: ignore[return-value]  # a calibrator has no modules
        except AttributeError:
            raise unknown_attribute(self, name) from None

    # torch calls the next two methods. It has no documented hook to change shapes in loading, or dtypes in `.to(...)`.

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "_extra_state" in state_dict:  # check before any buffer changes
            self._check_extra_state(state_dict[prefix + "_extra_state"])
        for name, buffer in list(self.named_buffers(remove_duplicate=False)):
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor):  # the shape depends on the number of classes or knots
                self._check_parameter(name, saved, buffer.is_floating_point())
                setattr(self, name, buffer.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check_parameter(self, name: str, values: Tensor, is_floating: bool) -> None:
        low, high = {"grad_norm": (0, math.inf), **self.ranges}.get(name, (-math.inf, math.inf))
        if values.is_floating_point() != is_floating or bool(((values < low - 1e-9) | (values > high + 1e-9)).any()):
            raise ValueError(
                f"`{name}` must have {'floating' if is_floating else 'whole'} values from {low:g} to {high:g}, got "
                f"{shown(values.tolist())} of {values.dtype}. The file is corrupt."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        """Move the buffers to the device of `fn` in full precision: float16 would round a scale to 3 digits."""
        device = fn(torch.empty(0)).device
        for name, buffer in list(self.named_buffers(remove_duplicate=False)):
            dtype = wide_dtype(device) if buffer.is_floating_point() else None
            setattr(self, name, fn(buffer) if buffer.is_meta else buffer.to(device, dtype))
        return self


_KIND = ("task", "from_logits", "class_axis", "positive_classes")
"""Attributes that describe the predictions of the fit."""


def format_values(values: Tensor) -> str:
    """Format a tensor for `repr`: the first values with 4 digits, or the shape if it has several axes."""
    if values.dim() > 1:
        return f"<{' x '.join(map(str, values.shape))}>"
    if not values.dim():
        return f"{float(values):.4g}"
    numbers = [f"{value:.4g}" for value in values[:4].tolist()]
    return f"[{', '.join(numbers)}{', ...' if len(values) > 4 else ''}]"


def _by_class(p: Predictions, weights: Tensor | None) -> tuple[Predictions, Tensor]:
    """Return labels and weights `(..., N C)` for soft targets: one row for each class, weighted by its probability."""
    classes = torch.arange(p.num_classes, device=p.input_preds.device)
    shares = p.target if p.soft else torch.stack((1 - p.target, p.target), -1)
    w = sample_weights(p, weights).unsqueeze(-1)
    of_class = (w * shares).masked_fill(w == 0, 0)  # targets of rows with weight 0 may be NaN
    rows = torch.arange(p.samples[-1], device=classes.device).repeat_interleave(p.num_classes)
    labelled = replace(
        replace(p, weights=None, zero_weight=None).part(rows),
        input_target=classes.expand(*p.samples, -1).flatten(-2),
        has_labels=True,
        copies=False,
    )
    return labelled, of_class.flatten(-2)


def sample_weights(p: Predictions, weights: Tensor | None = None) -> Tensor:
    """Return `weights`, or else the weights of `p`, as `(..., N)`, or as `(R, ..., N)` for R replicates."""
    shape = p.samples
    if weights is None:
        weights = p.weights
    if weights is None:
        return torch.ones(shape, dtype=wide_dtype(p.input_preds.device), device=p.input_preds.device)
    return weights.expand(*weights.shape[: max(0, weights.dim() - len(shape))], *shape)
