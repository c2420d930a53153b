"""Checked predictions with cached per-row quantities."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.ops import logs
from torchcalib.ops.host_values import once, value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain

if TYPE_CHECKING:
    from torchcalib.ops.binary_scores import Kind
    from torchcalib.ops.softmax_stats import Detail, RowStatistics

_FEW = 2**12  # largest number of probabilities whose logarithms take less time than a second call for the entropy


@dataclass(frozen=True, eq=False)
class Predictions:
    """Checked predictions, targets and weights of a batch, returned by `InputFormat.read`."""

    task: Task
    from_logits: bool  # whether `values` are logits
    # Probabilities or logits in the dtype of the input: multi-class `(..., N, C)`, binary `(..., N)`. Multi-label
    # predictions `(..., L, N)` are binary with the labels as a batch axis.
    input_preds: Tensor
    # Multi-class labels, int64 `(..., N)`, or soft targets `(..., N, C)`. Otherwise the shape of `input_preds`.
    input_target: Tensor
    # Float64 `(..., N)`, broadcastable to `target`, or None for 1. A row with weight 0 is ignored, and its values are
    # never used. R replicates add a leading axis to weights and results: `(R, ..., N)`.
    weights: Tensor | None
    dtype: torch.dtype  # dtype of results: the input dtype, at least float32
    n_invalid: Tensor | None  # number of ignored invalid rows, int64 scalar; None if invalid rows raise an error
    weighted: bool = False  # whether the caller passed weights; otherwise weights are 0 or 1, and 0 marks ignored rows
    has_labels: bool = True  # whether targets are labels
    sum_tolerance: float = math.inf  # largest accepted |1 - sum| of a row of probabilities; infinite to skip the check
    n_dropped: Tensor | None = None  # number of ignored missing rows, int64 scalar; None if none are ignored
    n_annotators: Tensor | None = None  # for each target, float64 `(..., N)`; None if targets were not counts
    copies: bool = True  # whether weights are integers that count copies of a row; floating ones express importance
    groups: Tensor | None = None  # group index of each sample, int64 `(..., N)`, broadcastable to `target`
    zero_weight: Tensor | None = None  # mask of rows with weight 0 in all replicates `(..., N)`; None without weights
    # P(y=0) for input with positive classes: the sum over all other classes, float64 `(..., N)`. None if P(y=0) is
    # 1 - P(y=1).
    complement: Tensor | None = None
    detail: "Detail" = "entropy"  # statistics that are computed together for multi-class rows
    computed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # cache of the properties
    num_classes: int = field(init=False)  # number of classes C; 2 for binary and multi-label
    soft: bool = field(init=False)  # whether multi-class targets are soft
    samples: torch.Size = field(init=False)  # shape of the samples, `(..., N)`
    replicates: torch.Size = field(init=False)  # shape of the replicate axes, `()` without replicate weights

    @once
    def values(self) -> Tensor:
        """Probabilities or logits with the shape of `input_preds`: multi-class in `dtype`, otherwise in float64.

        In a multi-class row with logits of +inf, these become 0 and all other logits -inf, the limit of the softmax.
        """
        per_class = self.task == "multiclass"
        values = self.input_preds.to(self.dtype) if per_class else self._wide(self.input_preds)
        if self.zero_weight is not None and values.requires_grad:  # the gradient at NaN is NaN, even with weight 0
            absent = self.zero_weight.unsqueeze(-1) if per_class else self.zero_weight
            values = values.masked_fill(absent, 0 if self.from_logits else 0.5)
        if not per_class:
            return values
        return logs.spread_infinite_logits(values) if self.from_logits else values

    @once
    def target(self) -> Tensor:
        """Multi-class labels or soft targets. For other tasks, labels 0 and 1 or probabilities of y=1, in float64."""
        return self.input_target if self.task == "multiclass" else self._wide(self.input_target)

    def __post_init__(self) -> None:
        per_class = self.task == "multiclass"
        samples = self.input_preds.shape[:-1] if per_class else self.input_preds.shape
        weights = () if self.weights is None else self.weights.shape
        derived = {
            "num_classes": self.input_preds.shape[-1] if per_class else 2,
            "soft": per_class and self.input_target.is_floating_point(),
            "samples": samples,
            "replicates": torch.Size(weights[: max(0, len(weights) - len(samples))]),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def without(self, broken: Tensor, weights: Tensor | None, counted: bool) -> "Predictions":
        """Return predictions with new weights (0 or NaN in the rows of the mask `broken`) and label 0 in these rows."""
        target = self.input_target
        if self.has_labels:
            target = target.masked_fill(in_all_replicates(broken, len(self.samples)), 0)
        n_invalid = broken.sum() if counted else self.n_invalid
        return self._replaced(weights=weights, input_target=target, n_invalid=n_invalid)

    def without_missing(self, missing: Tensor) -> "Predictions":
        """Return predictions in which the rows of a mask `(..., N)` have weight 0 and valid values."""

        def filled(x: Tensor, with_classes: bool, valid: float) -> Tensor:
            return x.masked_fill(missing.unsqueeze(-1) if with_classes else missing, valid)

        per_class = self.task == "multiclass"
        wide = wide_dtype(self.input_preds.device)
        ones = torch.ones((), dtype=wide, device=self.input_preds.device)
        return replace(
            self,
            input_preds=filled(self.input_preds, per_class, 0 if self.from_logits else 1 / self.num_classes),
            input_target=filled(self.input_target, self.soft, 1 / self.num_classes if self.soft else 0),
            weights=torch.where(missing, 0.0, ones if self.weights is None else self.weights),
            n_dropped=missing.sum(),
            n_annotators=None if self.n_annotators is None else filled(self.n_annotators, False, 1),
        )

    def with_integer_labels(self) -> "Predictions":
        """Return the same rows with integer targets, for floating targets that must be labels."""
        target = self.input_target.long()
        target = target if self.zero_weight is None else target.masked_fill(self.zero_weight, 0)
        return self._replaced(input_target=target, has_labels=True)

    def with_weights(self, weights: Tensor) -> "Predictions":
        """Return the same rows with other weights. The cache is shared."""
        return self._replaced(weights=weights, weighted=True)

    def in_groups(self, groups: Tensor | None, weights: Tensor | None, n_invalid: Tensor | None) -> "Predictions":
        """Return the same rows with group indices `(..., N)`, and with weights that are 0 in rows without a group."""
        return self._replaced(groups=groups, weights=weights, n_invalid=n_invalid)

    def _replaced(self, **changes: Any) -> "Predictions":
        """Return the same rows with other attributes. The cache is shared."""
        other = replace(self, **changes)  # `torch.compile` of older torch versions cannot trace `copy.copy`
        object.__setattr__(other, "computed", self.computed)
        return other

    def with_values(self, values: Tensor) -> "Predictions":
        """Return the same samples with new predictions, for example calibrated ones."""
        return replace(self, input_preds=values, complement=None)

    def part(self, samples: slice | Tensor) -> "Predictions":
        """Return the samples at these positions of the last sample axis; without replicates, groups and counts."""
        rows = (..., samples, slice(None))
        weights = None if self.weights is None else self.weights.expand(self.samples)[..., samples]
        return replace(
            self,
            input_preds=self.input_preds[rows] if self.task == "multiclass" else self.input_preds[..., samples],
            input_target=self.input_target[rows] if self.soft else self.input_target[..., samples],
            weights=weights,
            complement=None if self.complement is None else self.complement[..., samples],
            groups=None,
            zero_weight=None,
            n_annotators=None,
        )

    def set_in_log_odds(self) -> "Predictions":
        """Return predictions of a set of classes as log-odds, accurate near probability 1; else `self`."""
        if self.complement is None:
            return self
        log_p, log_not_p = self.binary_log_probs
        return replace(self, from_logits=True, input_preds=log_p - log_not_p, complement=None)

    def resampled(self, counts: Tensor) -> "Predictions":
        """Return the same rows with resampling counts `(R, N)` as replicate weights, shared by all batch elements."""
        counts = counts.reshape(len(counts), *[1] * (len(self.samples) - 1), counts.shape[-1])
        return self.with_weights(counts if self.weights is None else counts * self.weights)

    def set_against_rest(self, classes: tuple[int, ...]) -> "Predictions":
        """Return binary predictions for the event that the true class is in `classes`.

        P(y=1) is the sum over `classes`, and P(y=0) the sum over all other classes, without normalisation. Near
        P(y=1) = 1, the difference 1 - P(y=1) would be mostly rounding error.
        """
        inside = torch.zeros(self.num_classes, dtype=torch.bool, device=self.values.device)
        for k in classes:  # indexing with a list would synchronise a GPU
            inside[k] = True
        if self.from_logits:  # log-odds are accurate where probabilities round to 1
            from torchcalib.ops.log_odds import log_ratio

            logits = self._wide(self.values)
            values = log_ratio(logits.masked_fill(~inside, -torch.inf), logits.masked_fill(inside, -torch.inf))
            complement = None
        else:
            q = self._wide(self.values)
            values, complement = (q.masked_fill(outside, 0).sum(-1).clamp(max=1) for outside in (~inside, inside))
        if self.soft:
            target = self._wide(self.target).masked_fill(~inside, 0).sum(-1).clamp(max=1)
        else:
            known = (self.target >= 0) & (self.target < self.num_classes)
            target = (known & inside[self.target.masked_fill(~known, 0)]).to(values.dtype)
        return Predictions(
            "binary",
            self.from_logits,
            values,
            target,
            self.weights,
            self.dtype,
            self.n_invalid,
            self.weighted,
            self.has_labels,
            n_dropped=self.n_dropped,
            n_annotators=self.n_annotators,
            copies=self.copies,
            complement=complement,
        )

    def _wide(self, x: Tensor) -> Tensor:
        """Convert to float64 before exp, log or sigmoid.

        The float32 result for an element depends on its position in memory, because vectorised and scalar code differ
        in the last digit. The bin of a sample could therefore depend on the batch size.
        """
        return x.to(wide_dtype(x.device))

    @once
    def log_probs(self) -> Tensor:
        """Multi-class log-probabilities log q `(..., N, C)`; from logits accurate even where q rounds to 0 or 1."""
        return self.values.log_softmax(-1) if self.from_logits else logs.safe_log(self._wide(self.values))

    @once
    def probs(self) -> Tensor:
        """Multi-class probabilities q `(..., N, C)`, or P(y=1) `(..., N)`."""
        if not self.from_logits:
            return self.values
        return self._wide(self.log_probs).exp() if self.task == "multiclass" else self.values.sigmoid()

    @once
    def not_probs(self) -> Tensor:
        """Binary P(y=0) `(..., N)`; for logits and sets of classes accurate even where P(y=1) is near 1."""
        if self.from_logits:
            return (-self.values).sigmoid()
        return 1 - self.values if self.complement is None else self.complement

    @once
    def predicts_one(self) -> Tensor:
        """Whether y=1 is more probable than y=0, bool `(..., N)`. A tie counts as y=0."""
        if self.from_logits:
            return self.values > 0
        return self.values > (0.5 if self.complement is None else self.complement)

    @once
    def binary_log_probs(self) -> tuple[Tensor, Tensor]:
        """Binary log P(y=1) and log P(y=0), each `(..., N)`."""
        if self.complement is not None:
            return logs.safe_log(self.values), logs.safe_log(self.complement)
        return logs.binary_log_probs(self.values, self.from_logits)

    @once
    def rows(self) -> "RowStatistics":
        """Statistics of multi-class rows with labels, computed in one pass; see `ops.softmax_stats.RowStatistics`."""
        return self._rows_with(self._detail)

    @once
    def _detail(self) -> "Detail":
        """Statistics in `rows`. The entropy of many probabilities is omitted: it takes longer than the others."""
        omits = self.detail == "entropy" and not self.from_logits and self.input_preds.numel() > _FEW
        return "squares" if omits else self.detail

    def _rows_with(self, detail: "Detail") -> "RowStatistics":
        detail = "confidence" if detail in ("classes", "top") else detail  # the log-probability of invalid rows is NaN
        if isinstance(self.input_preds, LinearLogits):
            return self.input_preds.rows(self.input_target, detail, self.zero_weight)
        from torchcalib.ops import softmax_stats

        return softmax_stats.rows(
            self.input_preds, self.input_target, from_logits=self.from_logits, tolerance=self.sum_tolerance,
            detail=detail,
        )  # fmt: skip

    @once
    def cross_entropy(self) -> Tensor:
        """Cross entropy -sum_k t_k log q_k of each prediction q and target t `(..., N)`, in nats."""
        if self.task != "multiclass":
            return logs.binary_cross_entropy(*self.binary_log_probs, self.target)
        return logs.cross_entropy(self.log_probs, self.target) if self.soft else 0 - self.rows.log_prob

    @once
    def neg_entropy(self) -> Tensor:
        """Negative entropy sum_k q_k log q_k of each prediction q `(..., N)`, in nats."""
        if self.task != "multiclass":
            return logs.binary_neg_entropy(*self.binary_log_probs)
        if self.soft:
            return logs.neg_entropy(self.probs, self.log_probs)
        return (self.rows if self._detail == "entropy" else self._rows_with("entropy")).neg_entropy

    @once
    def ecd(self) -> Tensor:
        """Entropic calibration difference `(..., N)`, in nats: cross entropy minus entropy of the prediction."""
        return self.neg_entropy + self.cross_entropy

    @once
    def squared_error(self) -> Tensor:
        """Squared error sum_k (q_k - t_k)^2 of each prediction q and target t `(..., N)`; (p - t)^2 for p = P(y=1)."""
        if self.soft:
            return (self.probs - self.target).square().sum(-1, dtype=wide_dtype(self.values.device))
        if self.task == "multiclass":
            return (self.rows if self._detail in ("squares", "entropy") else self._rows_with("squares")).squared_error
        if self.from_logits or self.complement is not None:  # avoid the cancellation in 1 - p
            return ((1 - self.target) * self.probs - self.target * self.not_probs).square()
        return (self.probs - self.target).square()

    def score_sum(self, kind: "Kind") -> Tensor | None:
        """Return the sum over the samples of a score of binary or multi-label predictions, float64 `(...)`.

        "log" sums `cross_entropy`, "square" sums `squared_error`. None if a value is invalid, or if one pass cannot
        compute the sum: with weights, with derivatives and outside the CPU.
        """
        if self.weights is not None or self.complement is not None or not self.input_preds.is_cpu:
            return None
        if self.task == "multiclass" or not is_plain(self.input_preds, self.input_target):
            return None
        if ("sum", kind) not in self.computed:
            from torchcalib.ops.binary_scores import score_sums

            sums = score_sums(self.input_preds, self.input_target, kind, from_logits=self.from_logits)
            self.computed["sum", kind] = None if bool(sums.isnan().any()) else sums
        found: Tensor | None = self.computed["sum", kind]
        return found

    def clipped_cross_entropy(self, eps: float) -> Tensor:
        """Return the cross entropy with clipped probabilities, -sum_k t_k log max(q_k, eps), `(..., N)` in nats."""
        floor = math.log(eps)
        if self.task != "multiclass":
            log_p, log_not_p = self.binary_log_probs
            return logs.binary_cross_entropy(log_p.clamp(min=floor), log_not_p.clamp(min=floor), self.target)
        if self.soft:
            return logs.cross_entropy(self.log_probs.clamp(min=floor), self.target)
        return 0 - self.rows.log_prob.clamp(min=floor)


_MAX_AT_ONCE = 2**22  # maximum number of float64 values in memory (32 MB) for the replicates of one call


def by_replicates(function: Callable[[Predictions], Tensor], p: Predictions, elements: int) -> Tensor:
    """Apply a function to R replicates, a few at a time to bound the memory. Return values `(*p.replicates, *)`.

    The function maps predictions with weights `(r, ..., N)` to values `(r, *)`, and stores `elements` values for each
    replicate.
    """
    if p.weights is None or not p.replicates:
        return function(p)
    weights = p.weights.flatten(0, len(p.replicates) - 1)
    chunks = torch.split(weights, replicates_at_once(elements))
    values = torch.cat([function(p.with_weights(chunk)) for chunk in chunks])
    return values.reshape(*p.replicates, *values.shape[1:])


def replicates_at_once(elements: int) -> int:
    """Return the number of replicates to compute at a time if each requires `elements` values in memory."""
    return max(1, _MAX_AT_ONCE // max(1, elements))


def in_all_replicates(mask: Tensor, samples: int) -> Tensor:
    """Reduce a mask `(*R, ..., N)` over its replicate axes R by logical "and"; the last `samples` axes remain."""
    return mask if mask.dim() <= samples else mask.flatten(0, mask.dim() - samples - 1).all(0)


_FIRST = 32  # number of replicates in which almost every sample that can be drawn is drawn


def zero_in_all_replicates(weights: Tensor, samples: int) -> Tensor:
    """Return a mask of the samples with weight 0 in all replicates `(..., N)`; see `in_all_replicates`."""
    if weights.dim() <= samples:
        return weights == 0
    first = weights.flatten(0, weights.dim() - samples - 1)[:_FIRST]
    absent = in_all_replicates(first == 0, samples)
    if weights.is_cpu and value_if_available(absent.any()) is False:  # usual, so that the other weights are not read
        return absent
    return in_all_replicates(weights == 0, samples)
