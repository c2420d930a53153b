"""Checks and conversion of predictions, targets and weights to `Predictions`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    InputOptions,
    NanPolicy,
    Task,
    check_choice,
    check_count,
    check_flag,
    check_positive_classes,
    check_task,
    count_of_outputs,
    is_int,
    task_of,
    unknown_argument,
)
from torchcalib.core.arrays import are_plain, check_has_values
from torchcalib.core.checks import (
    LABELS_ONLY,
    SUM_TOLERANCE,
    Rule,
    all_satisfied,
    annotator_rule,
    enforce,
    hidden_rule,
    label_rule,
    logit_rule,
    missing_rows,
    pass_rule,
    probability_rule,
    proportions_of_counts,
    row_rule,
    weight_rule,
)
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.core.predictions import Predictions, zero_in_all_replicates
from torchcalib.core.tasks import as_tensors, without_single_axes
from torchcalib.io.errors import shown
from torchcalib.io.names import single_axis
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype

if TYPE_CHECKING:
    from torchcalib.core.mistakes import Evidence
    from torchcalib.ops.softmax_stats import Detail

_OPTIONS = frozenset(InputOptions.__annotations__)
_MAX_CHECKED = 2**28  # largest number of values that are checked for mistakes, which needs a few bytes for each


@dataclass(frozen=True)
class InputFormat:
    """Checked input options (`InputOptions` without `weights`) and the requirements of a metric."""

    task: Task  # `"binary"`, `"multiclass"` or `"multilabel"`
    from_logits: bool = False
    ignore_index: int | None = None
    class_axis: int | None = None
    batch_dims: int = 0
    num_classes: int | None = None  # number of classes or labels that `preds` must have; None accepts any
    validate_args: bool = True
    # Whether `target` must contain labels. Floating labels 0 and 1 of a binary or multi-label task are converted to
    # integers.
    hard_targets: bool = False
    whole_weights: bool = False  # whether `weights` must be whole numbers
    positive_classes: Sequence[int] | None = None
    nan_policy: NanPolicy = "raise"
    # Minimum number of annotators for each target. 0 accepts all targets, 1 rejects soft targets, and 2 requires
    # annotator counts.
    min_annotators: int = 0
    # Whether statistics of multi-class rows are computed in any case, so that they can replace the checks of values
    needs_rows: bool = True
    # class axis of earlier batches of a stream, -1 or 1, for batches whose shapes allow both axes
    likely_axis: int | None = field(default=None, compare=False)
    # class axis; for `class_axis=None` the last axis, until `resolved` infers it
    axis: int = field(init=False, compare=False)
    _variants: dict[Any, "InputFormat"] = field(default_factory=dict, init=False, repr=False, compare=False)
    # for each dtype of predictions, whether `core.pieces` may read batches
    simple_dtypes: dict[torch.dtype, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_task(self.task)
        if self.positive_classes is not None:
            object.__setattr__(self, "positive_classes", check_positive_classes(self.task, self.positive_classes))
        check_flag("from_logits", self.from_logits)
        check_flag("validate_args", self.validate_args)
        check_choice("nan_policy", self.nan_policy, get_args(NanPolicy))
        if not (self.ignore_index is None or is_int(self.ignore_index)):
            raise TypeError(f"`ignore_index` must be an int or None, got {shown(self.ignore_index)}.")
        if self.ignore_index is not None and not -(2**63) <= self.ignore_index < 2**63:
            raise ValueError(f"`ignore_index` must fit in 64 bits, as labels do, got {shown(self.ignore_index)}.")
        if not (self.class_axis is None or is_int(self.class_axis)):
            raise TypeError(f"`class_axis` must be an int or None, got {shown(self.class_axis)}.")
        object.__setattr__(self, "axis", -1 if self.class_axis is None else self.class_axis)
        check_count("batch_dims", self.batch_dims, at_least=0)
        if self.num_classes is not None:
            check_count("num_classes", self.num_classes, at_least=1 if self.task == "multilabel" else 2)

    def read(
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        batch_shape: tuple[int, ...] | None = None,
        drop_invalid: bool = False,
        wait: bool = True,
        evidence: "Evidence | None" = None,
        checked_by: Callable[[Predictions], bool] | None = None,
        detail: "Detail" = "entropy",
    ) -> Predictions:
        """Check one batch and convert it to `Predictions`. All axes except batch and class axes are samples.

        `preds` are binary `(N,)` or `(N, 1)`, multi-class `(N, C)` or multi-label `(N, L)`, with any further sample
        axes. `target` has labels with the shape of the samples, soft targets with the shape of `preds`, or annotator
        counts. `weights` have the shape of the samples, and without `batch_shape` possibly a leading axis of R
        replicates. `batch_shape` are the required sizes of the leading batch axes; None uses the first `batch_dims`
        axes.

        Two options replace raising for invalid rows, without synchronising the device. `drop_invalid` counts and
        ignores them, and `wait=False` sets their weights to NaN. The batch is added to `evidence` for mistakes in
        earlier batches. `checked_by` is the method `checks` of an accumulator, which checks the values of binary
        and multi-label input in the pass that computes its sums. `detail` are the statistics of rows that it needs.
        """
        if not are_plain((preds, target) if weights is None else (preds, target, weights)):
            preds, target, weights = as_tensors(preds, target, weights, **self.conversion)
        if preds.is_meta and wait and not drop_invalid:
            check_has_values("preds", preds)
        is_linear = isinstance(preds, LinearLogits)
        if is_linear:
            self._check_linear(target)
        if self.task == "binary":
            if preds.dim() > 1 or target.dim() > 1 or (weights is not None and weights.dim() > 1):
                preds, target, weights = _aligned(preds, target, weights)
        elif self.class_axis is None and preds.dim() > 2:
            resolved = self.resolved(preds, target, self.batch_dims if batch_shape is None else len(batch_shape))
            return resolved.read(
                preds,
                target,
                weights,
                batch_shape=batch_shape,
                drop_invalid=drop_invalid,
                wait=wait,
                evidence=evidence,
                checked_by=checked_by,
                detail=detail,
            )
        if self.task == "multiclass" and target.dim() == preds.dim():
            target = self.without_class_axis(preds, target)
        has_counts = self.check(preds, target, weights)
        preds, target, n_annotators, weights = self._rearranged(preds, target, weights, batch_shape, has_counts)
        dtype = torch.promote_types(preds.dtype, torch.float32)
        weighted, has_labels = weights is not None, not target.is_floating_point()
        copies = weights is None or not weights.is_floating_point()
        target_tolerance = SUM_TOLERANCE.get(target.dtype, 0.0)
        # Convert before the comparison with `ignore_index`, which would overflow an 8-bit dtype.
        if n_annotators is None:
            target = target.long() if has_labels else target.to(dtype)
        rules: list[Rule] = []
        if weights is not None:
            weights = weights.to(wide_dtype(preds.device))
            rules.append(weight_rule(weights, self.whole_weights))
        if self.ignore_index is not None:
            own = torch.ones_like(target, dtype=wide_dtype(preds.device)) if weights is None else weights
            weights = own.masked_fill(target == self.ignore_index, 0)
        samples = preds.dim() - (self.task == "multiclass")
        zero_weight = None if weights is None else zero_in_all_replicates(weights, samples)
        if zero_weight is not None and has_labels:  # replace the label of an ignored row by a valid index
            target = target.masked_fill(zero_weight, 0)
        p = Predictions(
            self.task,
            self.from_logits,
            preds,
            target,
            weights,
            dtype,
            n_invalid=None,
            weighted=weighted,
            has_labels=has_labels,
            sum_tolerance=SUM_TOLERANCE[preds.dtype] if self.validate_args else math.inf,
            n_annotators=n_annotators,
            copies=copies,
            zero_weight=zero_weight,
            detail=detail,
        )
        if self.nan_policy == "drop":
            p = self._without_missing(p, target_tolerance, wait and not drop_invalid, checked_by)
            zero_weight = None if p.weights is None else zero_in_all_replicates(p.weights, samples)
        if self.validate_args:
            rules += self._value_rules(p, target_tolerance, checked_by)
            # On other devices, reading values would wait for the device.
            if wait and not drop_invalid and preds.is_cpu and 0 < preds.numel() <= _MAX_CHECKED and not is_linear:
                # The first value rules out mistakes in most input, so that few checks read further values.
                first = value_if_available(preds[(0,) * preds.dim()])
                if first is not None and (first in (0, 1) or (self.from_logits and 0 <= first <= 1)):
                    from torchcalib.core.mistakes import check_mistakes

                    check_mistakes(p, evidence)
                elif first is not None and evidence is not None:
                    evidence.probabilities = evidence.decisions = None
        if self.hard_targets and not has_labels:
            p = p.with_integer_labels()
        weights, broken = enforce(rules, p.weights, zero_weight, drop_invalid, wait)
        p = p if broken is None else p.without(broken, weights, counted=drop_invalid)
        return p if self.positive_classes is None else p.set_against_rest(tuple(self.positive_classes))

    def columns(
        self, preds: Tensor, target: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Check types and shapes of binary or multi-class rows, but no values, and flatten the axes of samples.

        Return the columns of a batch, with classes on the last axis; None if targets are annotator counts.
        """
        if self.task == "binary":
            preds, target, weights = _aligned(preds, target, weights)
        how = self.resolved(preds, target)
        target = how.without_class_axis(preds, target)
        if how.check(preds, target, weights):
            return None
        preds, target, _, weights = how._rearranged(preds, target, weights, (), False)
        return preds, target, weights

    def _check_linear(self, target: Tensor) -> None:
        """Raise ValueError unless the format is that of the logits of hidden states."""
        required = {"task": "multiclass", "from_logits": True, "positive_classes": None}
        for name, value in required.items():
            if (found := getattr(self, name)) != value:
                raise ValueError(
                    f"`{name}` must be {value!r} for hidden states, whose classes are those of the head, got {found!r}."
                    f" Create the metric with {name}={value!r}."
                )
        if target.is_floating_point():
            raise TypeError(f"`target` must be integer labels for hidden states, got {target.dtype}. Pass logits.")

    def resolved(self, preds: Tensor, target: Tensor | None = None, n_batch: int = 0) -> "InputFormat":
        """Return the format with a class axis, inferred from shapes unless `class_axis` is given.

        Candidates are the last axis and, without batch axes (`n_batch` is 0), axis 1. The class axis must agree with
        the number of classes and the shape of the target. If both are possible, use `likely_axis` or raise ValueError.
        """
        if self.class_axis is not None or self.task == "binary" or preds.dim() <= 2:
            return self
        last = preds.dim() - 1
        axes = [last] if n_batch or last < 2 or isinstance(preds, LinearLogits) else [1, last]
        if self.num_classes is not None:
            axes = [axis for axis in axes if preds.shape[axis] == self.num_classes]
        if target is not None and target.shape != preds.shape and self.task == "multiclass":
            axes = [axis for axis in axes if target.shape in _label_shapes(preds, axis)]
        if len(axes) > 1 and self.likely_axis is not None:
            axes = [self.likely_axis % preds.dim()]
        if len(axes) > 1:
            shapes = f"{tuple(preds.shape)}" + ("" if target is None else f" and `target` {tuple(target.shape)}")
            raise ValueError(
                f"`class_axis` must be given for `preds` {shapes}, got None: the classes can be axis 1 or the last "
                "axis. Pass class_axis=1 for class-first input, or class_axis=-1."
            )
        axis = axes[0] - preds.dim() if axes and axes[0] == last else axes[0] if axes else -1
        if axis not in self._variants:
            self._variants[axis] = replace(self, class_axis=axis)
        return self._variants[axis]

    def preferring(self, axis: int) -> "InputFormat":
        """Return the format with a `likely_axis`, unless the class axis is given or known from earlier batches."""
        if self.task == "binary" or self.class_axis is not None or self.likely_axis is not None:
            return self
        if ("likely", axis) not in self._variants:
            self._variants["likely", axis] = replace(self, likely_axis=axis)
        return self._variants["likely", axis]

    def following(self, preds: Tensor, target: Tensor, n_batch: int = 0) -> "InputFormat":
        """Return the format for the batches of a stream that follow this one: `likely_axis` is its class axis."""
        if preds.dim() < 3 or n_batch or self.class_axis is not None or self.likely_axis is not None:
            return self
        return self.preferring(self.resolved(preds, target).axis)

    def without_class_axis(self, preds: Tensor, target: Tensor) -> Tensor:
        """Return `target` without a class axis of size 1, as in multi-class labels `(N, 1)` and `(B, 1, H, W)`."""
        has_axis = self.task == "multiclass" and -preds.dim() <= self.axis < preds.dim() == target.dim()
        if not has_axis or target.shape == preds.shape:
            return target
        return target.squeeze(self.axis) if target.shape in _label_shapes(preds, self.axis) else target

    def missing_in(self, preds: Tensor, target: Tensor) -> Tensor:
        """Return a mask of missing predictions or targets (`nan_policy`), multi-class without the class axis."""
        per_class = self.task == "multiclass"
        no_annotators = self.proportions_in(target)[1] == 0 if self.has_annotator_counts(preds, target) else None
        if per_class:
            preds = preds.movedim(self.axis, -1)
            target = target.movedim(self.axis, -1) if target.is_floating_point() else target
        missing = missing_rows(preds, target, self.from_logits, per_class)
        return missing if no_annotators is None else missing | no_annotators

    def has_annotator_counts(self, preds: Tensor, target: Tensor) -> bool:
        """Return whether `target` contains annotator counts: integers with one more axis than labels.

        Multi-class counts are `(..., N, C)`. For other tasks the last axis contains the counts of no and yes: binary
        `(..., N, 2)`, multi-label `(..., N, L, 2)`.
        """
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            return False
        if self.task != "multiclass":
            return target.shape == (*preds.shape, 2)
        if target.shape != preds.shape or not -preds.dim() <= self.axis < preds.dim():
            return False
        return preds.shape[self.axis] > 1

    def proportions_in(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return soft targets and the number of annotators per target, computed from annotator counts."""
        shares, n_annotators = proportions_of_counts(target, self.axis if self.task == "multiclass" else -1)
        return (shares if self.task == "multiclass" else shares[..., 1]), n_annotators

    def samples_of(self, preds: Tensor, target: Tensor | None = None, n_batch: int = 0) -> tuple[int, ...]:
        """Return the shape of the samples: the shape of `preds` without the class axis, as inferred by `resolved`."""
        shape = list(preds.shape)
        if self.task != "binary":
            del shape[self.resolved(preds, target, n_batch).axis]
        return tuple(shape)

    def check_axis(self, preds: Tensor) -> None:
        """Raise ValueError unless `class_axis` is an axis of `preds`."""
        if self.task != "binary" and not -preds.dim() <= self.axis < preds.dim():
            raise ValueError(f"`class_axis` must be an axis of `preds` {tuple(preds.shape)}, got {self.axis}.")

    @property
    def conversion(self) -> dict[str, Any]:
        """Options of `core.tasks.data_of` for one batch."""
        return {"task": self.task, "from_logits": self.from_logits, "ignore_index": self.ignore_index}

    @property
    def has_simple_rows(self) -> bool:
        """Whether `core.pieces` may read batches of labels."""
        is_plain = self.nan_policy == "raise" and self.min_annotators < 2 and self.batch_dims == 0
        return is_plain and self.task != "multilabel" and self.positive_classes is None

    @property
    def read_as(self) -> Task:
        """Task of the converted predictions: binary if `positive_classes` is given, else `task`."""
        return self.task if self.positive_classes is None else "binary"

    def shareable(self, weighted: bool, floating: bool) -> "InputFormat":
        """Return the format without the requirements that do not affect the conversion.

        Metrics whose shareable formats are equal can share one conversion.
        """
        demands_whole, demands_labels = self.whole_weights and weighted, self.hard_targets and floating
        if ("shared", demands_whole, demands_labels) not in self._variants:
            least = self.min_annotators if self.min_annotators > 1 else 0  # at least 1 annotator is always required
            shared = replace(
                self, num_classes=None, hard_targets=demands_labels, whole_weights=demands_whole, min_annotators=least
            )
            self._variants["shared", demands_whole, demands_labels] = shared
        return self._variants["shared", demands_whole, demands_labels]

    def check(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> bool:
        """Check types, devices and requirements, but not values. Return whether `target` has annotator counts."""
        arguments = {"preds": preds, "target": target, **({} if weights is None else {"weights": weights})}
        for name, tensor in arguments.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}. Convert it with torch.as_tensor."
                )
            if tensor.device != preds.device:
                raise ValueError(
                    f"`{name}` must be on the device of `preds` ({preds.device}), got {tensor.device}. "
                    f"Move it with {name}.to(preds.device)."
                )
        if preds.dtype not in SUM_TOLERANCE:
            from torchcalib.core.mistakes import wrong_dtype

            raise wrong_dtype(preds, target, self.task)
        has_axis = -preds.dim() <= self.axis < preds.dim()
        n_expected = None if self.task == "binary" or not has_axis else self.num_classes
        if n_expected is not None and preds.shape[self.axis] != n_expected:
            possible = range(preds.dim()) if target.shape == preds.shape else _class_axes(preds, target)
            fitting = [axis for axis in possible if preds.shape[axis] == n_expected]
            advice = f"Pass class_axis={fitting[0]}" if fitting else "Set class_axis"
            raise _misfit(
                preds,
                target,
                f"`preds` must have {n_expected} entries on its class axis ({self.axis}), got shape "
                f"{tuple(preds.shape)}. {advice} if the classes are on another axis.",
            )
        has_counts = target.dim() >= preds.dim() and self.has_annotator_counts(preds, target)
        if self.hard_targets and (has_counts or (self.task == "multiclass" and target.is_floating_point())):
            found = f"annotator counts {tuple(target.shape)}" if has_counts else f"{target.dtype} {tuple(target.shape)}"
            raise _misfit(
                preds,
                target,
                f"`target` must be integer labels, got {found}. {LABELS_ONLY} Convert class indices with "
                "target.long(), and one-hot labels with target.argmax(class_axis).",
                TypeError,
            )
        if (self.min_annotators and target.is_floating_point()) or (self.min_annotators > 1 and not has_counts):
            axes = "(..., N, C)" if self.task == "multiclass" else f"{(*preds.shape, 2)} (no, yes)"
            raise TypeError(
                f"`target` must be annotator counts, integers {axes}, to correct for few annotators, got "
                f"{target.dtype} {tuple(target.shape)}. Pass annotator counts: proportions do not give the number of "
                "annotators."
            )
        return has_counts

    def _rearranged(
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None,
        batch_shape: tuple[int, ...] | None,
        has_counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Check shapes, flatten sample axes, and move the class axis to the end, or a label axis before the samples.

        Return predictions, targets (soft targets for annotator counts), number of annotators or None, and weights or
        None.
        """
        has_classes = self.task != "binary"
        target, n_annotators = self.proportions_in(target) if has_counts else (target, None)
        if preds.dim() < 1 + has_classes and not (batch_shape is not None and preds.dim() == has_classes):
            raise _misfit(
                preds,
                target,
                f"`preds` must have at least {1 + has_classes} axes for task={self.task!r}, got shape "
                f"{tuple(preds.shape)}. " + ("Pass task='binary' for P(y=1)." if has_classes else "Pass a 1-D tensor."),
            )
        if n_annotators is not None and self.ignore_index is not None:
            raise ValueError(
                f"`ignore_index` must be None for annotator counts, got {self.ignore_index}. "
                "Pass weight 0 for the rows to drop."
            )
        soft = False
        if has_classes:
            if not -preds.dim() <= self.axis < preds.dim():
                self.check_axis(preds)
            soft = self._check_class_shapes(preds, target)
            n_classes = preds.shape[self.axis]
            chosen = self.positive_classes
            if chosen is not None and (max(chosen) >= n_classes or len(chosen) == n_classes):
                raise ValueError(
                    f"`positive_classes` must be some but not all of the {n_classes} classes, got "
                    f"{shown(list(chosen))}."
                )
        elif target.shape != preds.shape:
            raise _misfit(
                preds,
                target,
                f"`target` must have the shape of `preds` {tuple(preds.shape)} for task='binary', got "
                f"{tuple(target.shape)}. For scores of several classes pass task='multiclass'; annotator counts have "
                f"shape {(*preds.shape, 2)} (no, yes).",
            )
        samples = preds.shape
        if has_classes:
            axis = self.axis % preds.dim()
            samples = preds.shape[:axis] + preds.shape[axis + 1 :]
        if weights is not None:
            replicates = max(0, weights.dim() - len(samples)) if batch_shape is None else 0
            if weights.shape[replicates:] != samples:
                raise ValueError(
                    f"`weights` must have one value per sample, shape {tuple(samples)}, got {tuple(weights.shape)}."
                )
        if batch_shape is None:
            if self.batch_dims and self.batch_dims >= len(samples):
                raise ValueError(
                    f"`batch_dims` must be less than {len(samples)}, the number of axes of `preds` "
                    f"{tuple(preds.shape)} without the class axis, got {self.batch_dims}."
                )
            batch_shape = samples[: self.batch_dims]
        elif samples[: len(batch_shape)] != batch_shape:
            raise ValueError(f"`preds` must have the leading axes batch_shape={batch_shape}, got {tuple(samples)}.")
        flat = samples
        if len(samples) != len(batch_shape) + 1:
            flat = torch.Size((*batch_shape, math.prod(samples[len(batch_shape) :])))
        labels = self.task == "multilabel"
        if flat == samples and not labels and self.axis in (-1, preds.dim() - 1):
            return preds, target, n_annotators, weights

        def arranged(x: Tensor, with_classes: bool) -> Tensor:
            if with_classes and self.axis not in (-1, x.dim() - 1):
                x = x.movedim(self.axis, -1)
            if flat != samples:
                lead = x.shape[: x.dim() - len(samples) - with_classes]  # replicate axes of weights
                x = x.reshape(lead + flat + x.shape[-1:] if with_classes else lead + flat)
            return x.transpose(-1, -2) if with_classes and labels else x

        preds, target = arranged(preds, has_classes), arranged(target, soft)
        n_annotators = None if n_annotators is None else arranged(n_annotators, labels)
        weights = None if weights is None else arranged(weights, False)
        return preds, target, n_annotators, weights.unsqueeze(-2) if weights is not None and labels else weights

    def _check_class_shapes(self, preds: Tensor, target: Tensor) -> bool:
        """Check the number of classes and the shape of `target`; return whether `target` has a class axis."""
        axis_name = "L" if self.task == "multilabel" else "C"
        n_classes = preds.shape[self.axis]
        if n_classes < 2 and self.task == "multiclass":
            raise ValueError(
                f"`preds` must have at least 2 classes, got shape {tuple(preds.shape)}. "
                "Pass P(y=1) without the class axis and task='binary'."
            )
        axis = self.axis % preds.dim()
        labels = preds.shape[:axis] + preds.shape[axis + 1 :]
        if self.task == "multiclass" and target.shape == labels:
            if target.is_floating_point():
                raise TypeError(
                    f"`target` must be integer class indices when it has no class axis, got {target.dtype}. "
                    "Convert it with target.long()."
                )
            return False
        if target.shape != preds.shape:
            expected = f"{tuple(preds.shape)}" if self.task == "multilabel" else f"{tuple(labels)}"
            counts = f"{(*preds.shape, 2)}" if self.task == "multilabel" else f"{tuple(preds.shape)}"
            fitting = _class_axes(preds, target)
            if fitting and self.task == "multiclass":
                advice = f"Pass class_axis={fitting[0]} for class-first input."
            elif preds.dim() > 2:
                advice = (
                    f"For class-first input (N, {axis_name}, ...) pass class_axis=1; annotator counts are {counts}."
                )
            else:
                advice = f"Pass one label per sample of `preds`; annotator counts have shape {counts}."
            raise _misfit(
                preds,
                target,
                f"`target` must have shape {expected} for `preds` {tuple(preds.shape)} with class_axis="
                f"{self.axis}, got {tuple(target.shape)}. {advice}",
            )
        if self.task == "multiclass":
            if not target.is_floating_point():
                raise TypeError(
                    f"`target` with a class axis must be integer (annotator counts) or floating (soft targets), got "
                    f"{target.dtype}. Pass target.argmax(class_axis) for one-hot labels, or target.long() for counts."
                )
            if self.ignore_index is not None:
                raise ValueError(
                    f"`ignore_index` must be None for soft multi-class targets, got {self.ignore_index}. "
                    "Pass weight 0 for the rows to drop."
                )
        return True

    def _without_missing(
        self,
        p: Predictions,
        target_tolerance: float,
        wait: bool,
        checked_by: Callable[[Predictions], bool] | None,
    ) -> Predictions:
        if wait and self.validate_args and all_satisfied(self._value_rules(p, target_tolerance, checked_by)):
            return p  # a missing row would break a rule
        missing = missing_rows(p.input_preds, p.input_target, self.from_logits, self.task == "multiclass")
        if p.n_annotators is not None:
            missing = missing | (p.n_annotators == 0)
        if p.zero_weight is not None:
            missing = missing & ~p.zero_weight
        return p if wait and value_if_available(missing.any()) is False else p.without_missing(missing)

    def _value_rules(
        self, p: Predictions, target_tolerance: float, checked_by: Callable[[Predictions], bool] | None
    ) -> list[Rule]:
        per_class = self.task == "multiclass"
        preds_rule: Rule = (
            hidden_rule(p.rows.confidence)
            if isinstance(p.input_preds, LinearLogits)
            else logit_rule(p.input_preds, per_class)
            if self.from_logits
            else probability_rule("preds", p.input_preds, per_class, p.sum_tolerance)
        )
        if p.has_labels or self.hard_targets:
            of_labels = label_rule(p.input_target, p.num_classes, p.zero_weight)
            if per_class and (self.needs_rows or not self.from_logits):
                return [row_rule(p.rows.log_prob, preds_rule, of_labels)]
            rules: list[Rule] = [preds_rule, of_labels]
        elif p.n_annotators is not None:
            return [preds_rule, annotator_rule(p.n_annotators, max(1, self.min_annotators))]
        else:
            rules = [preds_rule, probability_rule("target", p.input_target, per_class, target_tolerance)]
        return rules if checked_by is None or per_class else [pass_rule(rules, partial(checked_by, p))]


def _misfit(preds: Tensor, target: Tensor, message: str, kind: type[Exception] = ValueError) -> Exception:
    """Return the error for predictions and targets that do not fit, or raise ValueError if they seem to be swapped."""
    from torchcalib.core.mistakes import check_not_swapped

    check_not_swapped(preds, target)
    return kind(message)


def _class_axes(preds: Tensor, target: Tensor) -> list[int]:
    """Return the possible class axes for labels of the shape of `target`."""
    return [axis for axis in range(preds.dim()) if target.shape in _label_shapes(preds, axis)]


def _label_shapes(preds: Tensor, axis: int) -> tuple[torch.Size, torch.Size]:
    """Return the possible shapes of labels for a class axis: without this axis, or with size 1 on it."""
    axis %= preds.dim()
    before, after = preds.shape[:axis], preds.shape[axis + 1 :]
    return before + after, torch.Size((*before, 1, *after))


def _aligned(preds: Tensor, target: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Give binary predictions, targets and weights the same shape. The last axis or axis 1 of one may be extra."""
    if target.shape not in (preds.shape, (*preds.shape, 2)):
        preds, target = without_single_axes(preds, target)
    n_axes = preds.dim()
    if weights is not None and weights.shape[-n_axes:] != preds.shape:  # weights may have a leading axis
        extra = single_axis(weights.shape[-n_axes - 1 :], preds.shape)
        missing = single_axis(preds.shape, weights.shape[1 - n_axes :]) if n_axes > 1 else None
        if extra is not None:
            weights = weights.squeeze(-1 if extra == -1 else -n_axes)
        elif missing is not None:
            weights = weights.unsqueeze(-1 if missing == -1 else 1 - n_axes)
    return preds, target, weights


def check_option_names(options: Mapping[str, Any], known: Iterable[str] = (), where: str = "this function") -> None:
    """Raise TypeError if an option is not in `InputOptions`; also suggest similar names in `known`."""
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise unknown_argument(unknown[0], {*_OPTIONS, *known}, where)


def input_format_of(task: Any, options: Mapping[str, Any], **requirements: Any) -> InputFormat:
    """Return the input format for `InputOptions` and the requirements of a metric; they may imply a task of None."""
    check_option_names(options)
    task = task_of(task, **options)
    given = {name: value for name, value in options.items() if name not in ("weights", "num_labels")}
    if "num_classes" in options or "num_labels" in options:
        given["num_classes"] = count_of_outputs(task, options.get("num_classes"), options.get("num_labels"))
    return InputFormat(task, **given, **requirements)


def read_input(
    task: Task | None,
    preds: Tensor,
    target: Tensor,
    options: Mapping[str, Any],
    *,
    wait: bool = True,
    **requirements: Any,
) -> Predictions:
    """Convert predictions, targets and the weights in `options` to `Predictions`; see `InputFormat.read`."""
    input_format = input_format_of(task, options, **requirements)
    return input_format.read(preds, target, options.get("weights"), wait=wait)


def flattened(
    task: Task, preds: Tensor, target: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Reshape the input to one sample axis, with classes last, and return options for the new shapes.

    Predictions are `(*B, N)`, `(*B, N, C)` or `(*B, N, L)` with batch axes B. Weights in the options are `(*B, N)` or
    `(R, *B, N)`. The options have no `class_axis`.
    """
    check_option_names(options)
    preds, target, weights = as_tensors(preds, target, options.get("weights"))
    if task == "binary":
        preds, target, weights = _aligned(preds, target, weights)
    batch_dims = options.get("batch_dims", 0)
    layout = input_format_of(task, options)
    layout = layout.resolved(preds, target, batch_dims)
    target = layout.without_class_axis(preds, target)
    layout.check(preds, target, weights)
    layout.check_axis(preds)
    samples = layout.samples_of(preds)
    flat = (*samples[:batch_dims], -1)

    def flatten(x: Tensor) -> Tensor:
        if x.dim() == preds.dim() and task != "binary":
            n_samples, n_classes = math.prod(samples[batch_dims:]), x.shape[layout.axis]
            return x.movedim(layout.axis, -1).reshape(*flat[:-1], n_samples, n_classes)
        return x.reshape(*flat, *x.shape[len(samples) :])

    rest = {name: value for name, value in options.items() if name not in ("class_axis", "weights")}
    if weights is not None:
        rest["weights"] = weights.reshape(*weights.shape[: max(0, weights.dim() - len(samples))], *flat)
    return flatten(preds), flatten(target), rest
