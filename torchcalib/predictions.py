"""Raw tensors in, `Predictions` out: the only place that checks or converts input.

`InputFormat` says how tensors are to be read; it is a frozen value, so two metrics with equal formats can share one
reading. `Predictions` holds what every score and every bin is computed from, each row quantity computed once.

Axes: `...` batch, `N` samples, `C` classes (or labels).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, get_args

import torch
from torch import Tensor

from torchcalib.kernels import row_stats
from torchcalib.kernels.row_stats import wide_dtype

Task = Literal["binary", "multiclass", "multilabel"]
Average = Literal["macro"]
_TASKS: tuple[Task, ...] = get_args(Task)

# Rounding leaves the sum of a row of probabilities this far from 1 and no further, unless something is wrong.
_SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-3}


class InputOptions(TypedDict, total=False):
    """How `preds` and `target` are to be read; every metric function takes these as keywords.

    - `from_logits` (default False): `preds` are logits. Declared, never guessed from the values.
    - `weights` (default None): non-negative, of the samples' shape; weight k equals k copies of the row, 0 equals none.
    - `ignore_index` (default None): rows with this target are dropped; the class stays in the softmax.
    - `class_axis` (default -1): the axis of classes or labels in `preds` (and in soft or multi-label targets).
    - `validate_args` (default True): look at the values and raise on bad ones. Under `torch.compile` and `vmap` values
      cannot be looked at: there a bad row makes the result NaN. False trusts the input.
    """

    from_logits: bool
    weights: Tensor | None
    ignore_index: int | None
    class_axis: int
    validate_args: bool


T = TypeVar("T")


class _once(Generic[T]):  # noqa: N801 - used as a decorator
    """`functools.cached_property`, which in Python 3.11 takes a lock that `torch.compile` cannot trace."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, p: "Predictions", owner: type | None = None) -> T:
        if self.name not in p.computed:
            p.computed[self.name] = self.compute(p)
        value: T = p.computed[self.name]
        return value


@dataclass(frozen=True)
class Predictions:
    """Checked predictions in canonical form. Made by `InputFormat.read`.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        from_logits: whether `values` are logits.
        values: at least float32. Multi-class `(..., N, C)`; binary `(..., N)`; multi-label `(..., L, N)`, which is
            binary with the labels as one more batch axis.
        target: multi-class labels int64 `(..., N)` or soft targets `(..., N, C)`; else P(y=1) of the observation,
            floating, of the shape of `values`.
        weights: `(..., N)` of the sums' dtype, broadcastable to `target`, or None for all ones. 0 marks a row that is
            left out, whose values mean nothing.
        n_invalid: how many rows were bad and are left out, int64 scalar; None where bad rows raise.
        computed: row quantities that were asked for, so that each is computed once.
    """

    task: Task
    from_logits: bool
    values: Tensor
    target: Tensor
    weights: Tensor | None
    n_invalid: Tensor | None
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_classes(self) -> int:
        """C; 2 where every row is P(y=1) alone."""
        return self.values.shape[-1] if self.task == "multiclass" else 2

    @property
    def soft(self) -> bool:
        """Whether multi-class targets are distributions rather than labels."""
        return self.task == "multiclass" and self.target.is_floating_point()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that results are given in."""
        return self.values.dtype

    @_once
    def log_probs(self) -> Tensor:
        """Multi-class log q `(..., N, C)`; from logits it never passes through q, so it is exact where q is 0 or 1."""
        return self.values.log_softmax(-1) if self.from_logits else row_stats.safe_log(self.values)

    @_once
    def probs(self) -> Tensor:
        """Multi-class q `(..., N, C)`, or P(y=1) `(..., N)`."""
        if not self.from_logits:
            return self.values
        return self.log_probs.exp() if self.task == "multiclass" else self.values.sigmoid()

    @_once
    def binary_log_probs(self) -> tuple[Tensor, Tensor]:
        """Binary log P(y=1) and log P(y=0), each `(..., N)`."""
        return row_stats.binary_log_probs(self.values, self.from_logits)

    @_once
    def log_prob_of_label(self) -> Tensor:
        """Multi-class log q_h `(..., N)` for labels h."""
        rows = self.log_probs if self.from_logits else self.values
        of_label = rows.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)
        return of_label if self.from_logits else row_stats.safe_log(of_label)

    @_once
    def cross_entropy(self) -> Tensor:
        """-sum_k t_k log q_k per sample, in nats."""
        if self.task != "multiclass":
            return row_stats.binary_cross_entropy(*self.binary_log_probs, self.target)
        return row_stats.cross_entropy(self.log_probs, self.target) if self.soft else 0 - self.log_prob_of_label

    @_once
    def neg_entropy(self) -> Tensor:
        """sum_k q_k log q_k per sample, in nats."""
        if self.task != "multiclass":
            return row_stats.binary_neg_entropy(*self.binary_log_probs)
        return row_stats.neg_entropy(self.probs, self.log_probs)

    @_once
    def squared_error(self) -> Tensor:
        """sum_k (q_k - t_k)^2 per sample; binary (p - t)^2."""
        if self.soft:
            return (self.probs - self.target).square().sum(-1)
        if self.task == "multiclass":
            label = self.target.unsqueeze(-1)
            miss = (
                -torch.expm1(self.log_prob_of_label) if self.from_logits else 1 - self.probs.gather(-1, label)[..., 0]
            )
            return row_stats.squared_error_of_label(self.probs, miss, self.target)
        if self.from_logits:  # 1 - p as sigmoid(-z), which does not cancel
            return ((1 - self.target) * self.probs - self.target * (-self.values).sigmoid()).square()
        return (self.probs - self.target).square()

    def clipped_cross_entropy(self, eps: float) -> Tensor:
        """-sum_k t_k log max(q_k, eps) per sample."""
        floor = math.log(eps)
        if self.task != "multiclass":
            log_p, log_not_p = self.binary_log_probs
            return row_stats.binary_cross_entropy(log_p.clamp(min=floor), log_not_p.clamp(min=floor), self.target)
        if self.soft:
            return row_stats.cross_entropy(self.log_probs.clamp(min=floor), self.target)
        return 0 - self.log_prob_of_label.clamp(min=floor)


class _Problem(NamedTuple):
    """One rule that rows may break: which rows break it, and the sentence for whoever sent them."""

    broken: Tensor
    explain: Callable[[Tensor], str]


@dataclass(frozen=True)
class InputFormat:
    """How raw tensors are to be read: the options of `InputOptions` but `weights`, and what the metric demands.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`; given, never inferred from the values.
        num_classes: C (or L) that `preds` must have; None accepts any.
        hard_targets: whether `target` must be integer or bool labels.
    """

    task: Task
    from_logits: bool = False
    ignore_index: int | None = None
    class_axis: int = -1
    num_classes: int | None = None
    validate_args: bool = True
    hard_targets: bool = False

    def __post_init__(self) -> None:
        if self.task not in _TASKS:
            raise ValueError(f"`task` must be one of {', '.join(map(repr, _TASKS))}, got {self.task!r}.")
        for name in ("from_logits", "validate_args"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        if not (self.ignore_index is None or _is_int(self.ignore_index)):
            raise TypeError(f"`ignore_index` must be an int or None, got {self.ignore_index!r}.")
        if not _is_int(self.class_axis):
            raise TypeError(f"`class_axis` must be an int, got {self.class_axis!r}.")
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
    ) -> Predictions:
        """Check and convert one batch of input.

        Args:
            preds: binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`; floating.
            target: binary `(..., N)`, multi-class `(..., N)` integer or soft `(..., N, C)`, multi-label `(..., N, L)`.
            weights: `(..., N)`.
            batch_shape: None keeps leading axes as a batch. A tuple names the leading axes to keep apart; all others
                but the class axis are samples and are flattened.
            drop_invalid: count bad rows and leave them out instead of raising, without waiting for the device.

        Raises:
            TypeError: for a wrong dtype or a thing that is no tensor.
            ValueError: for a wrong shape or a bad value.
        """
        self._check_kinds(preds, target, weights)
        tolerance = _SUM_TOLERANCE[preds.dtype]
        preds, target, weights = self._shaped(preds, target, weights, batch_shape)

        wide = wide_dtype(preds.device)
        ignored = None if self.ignore_index is None else target == self.ignore_index
        preds = preds.to(torch.promote_types(preds.dtype, torch.float32))
        target = target.long() if not target.is_floating_point() else target.to(preds.dtype)
        problems: list[_Problem] = []
        if weights is not None:
            weights = weights.to(wide)
            problems.append(_weight_problem(weights))
        if ignored is not None:
            ones = torch.ones((), dtype=wide, device=preds.device)
            weights = torch.where(ignored, 0.0, ones if weights is None else weights)

        if self.validate_args:
            problems += self._value_problems(preds, target, tolerance)
        absent = None if weights is None else weights == 0
        weights, n_invalid = _settle(problems, weights, absent, drop_invalid, wide)
        if weights is not None and not target.is_floating_point():  # an absent row's label must not index anything
            target = target.masked_fill((weights == 0) | weights.isnan(), 0)

        if self.task != "multiclass":
            target = target.to(preds.dtype)
        elif self.from_logits:
            preds = row_stats.spread_infinite_logits(preds)
        return Predictions(self.task, self.from_logits, preds, target, weights, n_invalid)

    def _check_kinds(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> None:
        """Types, dtypes and devices."""
        named = {"preds": preds, "target": target, **({} if weights is None else {"weights": weights})}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}. Convert it with torch.as_tensor."
                )
            if tensor.layout != torch.strided:
                raise TypeError(f"`{name}` must be a dense tensor, got layout {tensor.layout}. Call .to_dense() on it.")
            if tensor.is_complex():
                raise TypeError(f"`{name}` must be real, got {tensor.dtype}.")
            if tensor.device != preds.device:
                raise ValueError(
                    f"`{name}` must be on the device of `preds` ({preds.device}), got {tensor.device}. "
                    f"Move it with {name}.to(preds.device)."
                )
        if preds.dtype not in _SUM_TOLERANCE:
            raise TypeError(
                f"`preds` must be float16, bfloat16, float32 or float64, got {preds.dtype}. "
                "Pass probabilities or logits; hard decisions carry no confidence."
            )
        if self.hard_targets and target.is_floating_point():
            raise TypeError(
                f"`target` must be integer labels where `priors` are given, got {target.dtype}: a soft target "
                "belongs to no single class. Convert 0/1 targets with target.long(); repeat voted samples once per "
                "class, weighted."
            )

    def _shaped(
        self, preds: Tensor, target: Tensor, weights: Tensor | None, batch_shape: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Check shapes; move classes last (multi-label: labels before samples) and flatten samples if asked."""
        has_classes = self.task != "binary"
        if preds.dim() < 1 + has_classes and not (batch_shape is not None and preds.dim() == has_classes):
            raise ValueError(
                f"`preds` must have at least {1 + has_classes} axes for task={self.task!r}, "
                f"got shape {tuple(preds.shape)}. Add the missing axis with unsqueeze."
            )
        soft = False
        if has_classes:
            if not -preds.dim() <= self.class_axis < preds.dim():
                raise ValueError(
                    f"`class_axis` must name an axis of `preds` {tuple(preds.shape)}, got {self.class_axis}."
                )
            soft = self._check_class_shapes(preds, target)
            preds = preds.movedim(self.class_axis, -1)
            target = target.movedim(self.class_axis, -1) if soft else target
        elif target.shape != preds.shape:
            raise ValueError(
                f"`target` must have the shape of `preds` {tuple(preds.shape)} for task='binary', got "
                f"{tuple(target.shape)}. For scores of several classes pass task='multiclass'."
            )
        samples = preds.shape[:-1] if has_classes else preds.shape
        if weights is not None and weights.shape != samples:
            raise ValueError(
                f"`weights` must have one value per sample, shape {tuple(samples)}, got {tuple(weights.shape)}."
            )
        if batch_shape is not None:
            if samples[: len(batch_shape)] != batch_shape:
                raise ValueError(f"`preds` must begin with batch_shape={batch_shape}, got samples {tuple(samples)}.")
            preds = preds.reshape(*batch_shape, -1, preds.shape[-1]) if has_classes else preds.reshape(*batch_shape, -1)
            target = target.reshape(preds.shape if soft else preds.shape[: len(batch_shape) + 1])
            weights = None if weights is None else weights.reshape(*batch_shape, -1)
        if self.task == "multilabel":
            preds, target = preds.transpose(-1, -2), target.transpose(-1, -2)
            weights = None if weights is None else weights.unsqueeze(-2)
        return preds, target, weights

    def _check_class_shapes(self, preds: Tensor, target: Tensor) -> bool:
        """Check C and the shape of `target`; return whether `target` has the class axis too."""
        what = "L" if self.task == "multilabel" else "C"
        n_classes = preds.shape[self.class_axis]
        if n_classes != (self.num_classes or n_classes):
            raise ValueError(
                f"`preds` must have {self.num_classes} entries on its class axis ({self.class_axis}), got shape "
                f"{tuple(preds.shape)}. Set class_axis if the classes are on another axis."
            )
        if n_classes < 2 and self.task == "multiclass":
            raise ValueError(
                f"`preds` must have at least 2 classes, got shape {tuple(preds.shape)}. "
                "Pass P(y=1) without the class axis and task='binary'."
            )
        axis = self.class_axis % preds.dim()
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
            raise ValueError(
                f"`target` must have shape {expected} for `preds` {tuple(preds.shape)} with class_axis="
                f"{self.class_axis}, got {tuple(target.shape)}. For class-first input (N, {what}, ...) pass "
                "class_axis=1."
            )
        if self.task == "multiclass":
            if not target.is_floating_point():
                raise TypeError(
                    f"`target` with a class axis must be floating (soft targets), got {target.dtype}. "
                    "Pass target.argmax(class_axis) for one-hot labels, or target.float() for distributions."
                )
            if self.ignore_index is not None:
                raise ValueError(
                    f"`ignore_index` must be None for soft multi-class targets, got {self.ignore_index}. "
                    "Give the rows to drop weight 0."
                )
        return True

    def _value_problems(self, preds: Tensor, target: Tensor, tolerance: float) -> list[_Problem]:
        """Every rule on values, as masks over rows."""
        per_class = self.task == "multiclass"
        if self.from_logits:
            problems = _logit_problems(preds, per_class)
        else:
            problems = _probability_problems("preds", preds, per_class, tolerance)
        if target.is_floating_point():
            return problems + _probability_problems("target", target, per_class, tolerance)
        return [*problems, _label_problem(target, preds.shape[-1] if per_class else 2)]


def check_count(name: str, value: int, at_least: int = 1) -> None:
    """Raise unless `value` is an int of at least `at_least`."""
    if not _is_int(value):
        raise TypeError(f"`{name}` must be an int, got {value!r}.")
    if value < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, got {value}.")


def read_priors(priors: Tensor | Sequence[float], num_classes: int) -> Tensor:
    """Check class priors and return them as float64 `(..., C)` that sum to 1."""
    values = torch.as_tensor(priors)
    values = values.to(wide_dtype(values.device))
    if values.dim() == 0 or values.shape[-1] != num_classes:
        raise ValueError(
            f"`priors` must have one entry per class, {num_classes} on the last axis, got shape {tuple(values.shape)}."
        )
    if _look(~((values >= 0).all() & ((values.sum(-1) - 1).abs() <= 1e-6).all())):
        raise ValueError(
            f"`priors` must be non-negative and sum to 1, got {values.tolist()}. Divide them by their sum."
        )
    return values / values.sum(-1, keepdim=True)  # what float32 priors lack to 1 would show in every digit after


def check_weights(weights: Tensor, shape: torch.Size) -> Tensor:
    """Check weights for samples of `shape` and return them in the dtype of sums."""
    if weights.shape != shape:
        raise ValueError(f"`weights` must have one value per sample, shape {tuple(shape)}, got {tuple(weights.shape)}.")
    weights = weights.to(wide_dtype(weights.device))
    settled, _ = _settle([_weight_problem(weights)], weights, None, False, weights.dtype)
    return weights if settled is None else settled


def check_average(average: object, has_outputs: bool) -> None:
    """Raise unless `average` is "macro", or None where there is an axis of classes or labels to keep."""
    if average not in ("macro", None):
        raise ValueError(f"`average` must be 'macro' or None, got {average!r}.")
    if average is None and not has_outputs:
        raise ValueError(
            "`average` must be 'macro' where there is a single value, got None. Values per class come from "
            "reduction='classwise', values per label from task='multilabel'."
        )


def count_of_outputs(task: Task, num_classes: int | None, num_labels: int | None) -> int | None:
    """Return the number of classes or labels, from the argument that the task takes."""
    wrong = {
        "binary": {"num_classes", "num_labels"},
        "multiclass": {"num_labels"},
        "multilabel": {"num_classes"},
    }
    for name, value in (("num_classes", num_classes), ("num_labels", num_labels)):
        if value is not None and name in wrong.get(task, ()):
            raise ValueError(f"`{name}` must be None for task={task!r}, got {value!r}.")
    return num_labels if task == "multilabel" else num_classes


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _look(flag: Tensor) -> bool | None:
    """Return the value of a boolean scalar, or None where values cannot be looked at (`torch.compile`, `vmap`)."""
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError:  # vmap refuses to branch on values, and has no public way to ask beforehand
        return None


def _settle(
    problems: list[_Problem],
    weights: Tensor | None,
    absent: Tensor | None,
    drop_invalid: bool,
    wide: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Raise on broken rows; or weigh them 0 and count them; or, where values cannot be looked at, weigh them NaN."""
    if not problems:
        return weights, None
    broken = reduce(torch.logical_or, (problem.broken for problem in problems))
    broken = broken if absent is None else broken & ~absent
    ones = torch.ones((), dtype=wide, device=broken.device)
    if drop_invalid:
        return torch.where(broken, 0.0, ones if weights is None else weights), broken.sum()
    seen = _look(broken.any())
    if seen is None:
        return torch.where(broken, torch.nan, ones if weights is None else weights), None
    for problem in problems if seen else ():
        rows = problem.broken if absent is None else problem.broken & ~absent
        if bool(rows.any()):
            raise ValueError(problem.explain(rows))
    return weights, None


def _found(rows: Tensor, values: Tensor) -> str:
    """Describe the worst value of the first broken row: '3.2 (17 of 100 rows)'."""
    first = values.expand(rows.shape).reshape(-1)[int(rows.reshape(-1).int().argmax())]
    return f"{first.item():.6g} ({int(rows.sum())} of {rows.numel()} rows)"


def _nan_problem(name: str, values: Tensor) -> _Problem:
    fix = "Look for where they became NaN, or give these rows weight 0."
    return _Problem(values.isnan(), lambda rows: f"`{name}` must not hold NaN, got {_found(rows, values)}. {fix}")


def _weight_problem(weights: Tensor) -> _Problem:
    return _Problem(
        ~((weights >= 0) & (weights < torch.inf)),
        lambda rows: (
            f"`weights` must be finite and non-negative, got {_found(rows, weights)}. Use 0 to leave a row out."
        ),
    )


def _label_problem(target: Tensor, num_classes: int) -> _Problem:
    def explain(rows: Tensor) -> str:
        found = _found(rows, target)
        return (
            f"`target` must be a class index in [0, {num_classes - 1}], got {found}. "
            f"Pass ignore_index={found.split()[0]} if that value marks rows to drop."
        )

    return _Problem((target < 0) | (target >= num_classes), explain)


def _logit_problems(logits: Tensor, per_class: bool) -> list[_Problem]:
    """NaN, and rows without any finite or infinite evidence. +inf and -inf are legal."""
    if not per_class:
        return [_nan_problem("preds", logits)]
    top = logits.amax(-1)  # is NaN if any logit is
    return [
        _nan_problem("preds", top),
        _Problem(
            top == -torch.inf,
            lambda rows: (
                f"`preds` must have a logit above -inf in every row, got only {_found(rows, top)}. "
                "Mask all classes but one, not all of them."
            ),
        ),
    ]


def _probability_problems(name: str, probs: Tensor, per_class: bool, tolerance: float) -> list[_Problem]:
    """NaN, values outside [0, 1] and, over classes, sums that are not 1."""
    low, high = (probs.amin(-1), probs.amax(-1)) if per_class else (probs, probs)
    fix = "Pass from_logits=True if these are logits." if name == "preds" else "Soft targets are shares of votes."
    outside = _Problem(
        ~((low >= 0) & (high <= 1)),
        lambda rows: (
            f"`{name}` must be probabilities in [0, 1], got {_found(rows, torch.where(low < 0, low, high))}. {fix}"
        ),
    )
    if not per_class:
        return [_nan_problem(name, low), outside]
    total = probs.sum(-1)
    off = _Problem(
        ~((total - 1).abs() <= tolerance),
        lambda rows: (
            f"`{name}` must sum to 1 over the class axis (within {tolerance:g}), got {_found(rows, total)}. "
            + (
                "Pass from_logits=True for logits, class_axis=1 for class-first input, or task='multilabel' for labels "
                "that do not exclude each other."
                if name == "preds"
                else "Divide votes by their number."
            )
        ),
    )
    return [_nan_problem(name, low), outside, off]
