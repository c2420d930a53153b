"""Mistakes in input of valid types, shapes and values: swapped arguments, decisions, and probabilities as logits.

A rule must not apply to valid input by chance. It therefore requires a minimum number of rows. The rows may be those of
several batches: a stream keeps its `Evidence`.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.core.predictions import Predictions
from torchcalib.io.errors import warn
from torchcalib.io.names import MAX_LOGIT
from torchcalib.ops.host_values import value_if_available

MIN_ROWS = 20
"""Smallest number of rows of multi-class probabilities that are recognised, and of swapped arguments."""

MIN_VALUES = 100
"""Smallest number of binary or multi-label probabilities, and of rows of decisions, that are recognised."""

_NEAR = 0.005  # largest distance from 0 and 1 of the smallest and the largest of many probabilities
_FEW_TARGETS = 2  # number of different soft targets with label smoothing
_DECISIONS = (
    "These seem to be decisions, which have no calibration. Pass probabilities: predict_proba(X) in scikit-learn, or "
    "the output of a softmax or sigmoid."
)


@dataclass(frozen=True)
class _Probabilities:
    """Values that should be logits but are in [0, 1]; multi-class rows sum to 1. `+` combines batches."""

    n_rows: int = 0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def from_values(cls, values: Tensor, per_class: bool) -> "_Probabilities | None":
        """Return the evidence from a batch, or None if a value is outside [0, 1] or a row does not sum to 1."""
        if not values.numel():
            return cls()
        values = values.detach()
        low, high = values.aminmax()
        if value_if_available((low >= 0) & (high <= 1)) is not True:
            return None
        if per_class:
            total = values.sum(-1, dtype=torch.promote_types(values.dtype, torch.float32))
            if value_if_available(((total - 1).abs() <= SUM_TOLERANCE[values.dtype]).all()) is not True:
                return None
        return cls(n_rows(values, per_class), float(low), float(high))

    def __add__(self, other: "_Probabilities") -> "_Probabilities":
        return _Probabilities(self.n_rows + other.n_rows, min(self.low, other.low), max(self.high, other.high))

    def suffice(self, per_class: bool) -> bool:
        """Return whether the rows are probabilities; see `look_like_probabilities`."""
        if per_class:
            return self.n_rows >= MIN_ROWS
        return self.n_rows >= MIN_VALUES and self.low <= _NEAR and self.high >= 1 - _NEAR


@dataclass(frozen=True)
class _Decisions:
    """Predictions that are 0 or 1, and their targets. `+` combines batches."""

    n_rows: int = 0  # number of rows
    rows: frozenset[tuple[float, ...]] = frozenset()  # two different rows, or fewer if all rows are equal
    n_targets: int = 0  # number of targets
    n_scores: int = 0  # number of targets that are probabilities or logits
    scores: frozenset[float] = frozenset()  # up to `_FEW_TARGETS` + 1 different ones

    @classmethod
    def from_predictions(cls, p: Predictions) -> "_Decisions | None":
        """Return the evidence from a batch, or None if a value is neither 0 nor 1."""
        values, per_class = p.input_preds.detach(), p.task == "multiclass"
        if value_if_available(((values == 0) | (values == 1)).all()) is not True:
            return None
        rows = values.reshape(-1, values.shape[-1] if per_class else 1)
        differs = (rows != rows[0]).any(-1)
        examples = rows[[0, int(differs.int().argmax())]].tolist()
        has_scores = not p.has_labels and p.n_annotators is None
        scores = _scores_in(p.input_target) if has_scores else p.input_target.new_empty(0)
        return cls(
            len(rows),
            frozenset(map(tuple, examples)),
            p.input_target.numel(),
            scores.numel(),
            frozenset(torch.unique(scores)[: _FEW_TARGETS + 1].tolist()),
        )

    def __add__(self, other: "_Decisions") -> "_Decisions":
        return _Decisions(
            self.n_rows + other.n_rows,
            frozenset(list(self.rows | other.rows)[:2]),
            self.n_targets + other.n_targets,
            self.n_scores + other.n_scores,
            frozenset(list(self.scores | other.scores)[: _FEW_TARGETS + 1]),
        )

    @property
    def are_labels(self) -> bool:
        """Whether these are labels, because most targets are probabilities or logits."""
        enough = self.n_rows >= MIN_ROWS and len(self.rows) > 1
        return enough and 2 * self.n_scores > self.n_targets and len(self.scores) > _FEW_TARGETS

    @property
    def suffice(self) -> bool:
        """Whether there are enough different rows to recognise decisions."""
        return self.n_rows >= MIN_VALUES and len(self.rows) > 1


@dataclass
class Evidence:
    """Evidence for mistakes in all batches of a stream so far. It is neither state nor configuration.

    A batch that rules out a mistake removes the evidence for it: None. Later batches are then checked on their own.
    """

    probabilities: _Probabilities | None = field(default_factory=_Probabilities)
    decisions: _Decisions | None = field(default_factory=_Decisions)


def check_mistakes(p: Predictions, earlier: Evidence | None = None) -> None:
    """Raise ValueError for swapped arguments, and warn for decisions and for probabilities that are passed as logits.

    `p` is on the CPU. Its first values rule out most mistakes. The batch is added to the evidence of earlier batches.
    """
    per_class = p.task == "multiclass"
    first = p.input_preds[(0,) * (p.input_preds.dim() - 1)][:8].tolist()
    may_be_probabilities = p.from_logits and min(first) >= 0 and max(first) <= 1
    decisions = _Decisions.from_predictions(p) if all(x in (0, 1) for x in first) else None
    probabilities = _Probabilities.from_values(p.input_preds, per_class) if may_be_probabilities else None
    if earlier is not None:
        earlier.decisions = earlier.decisions + decisions if earlier.decisions and decisions else None
        earlier.probabilities = (
            earlier.probabilities + probabilities if earlier.probabilities and probabilities else None
        )
        decisions, probabilities = earlier.decisions or decisions, earlier.probabilities or probabilities
    if decisions is not None and decisions.n_scores:
        target = p.input_target
        is_invalid = bool(((target < 0) | (target > 1)).any()) and has_scores(target)  # in any number of rows
        if is_invalid or decisions.are_labels:
            raise swapped("only 0 and 1", target, may_be_valid=not is_invalid)
    if decisions is not None and decisions.suffice:
        warn(f"`preds` must be probabilities or logits, got only 0 and 1. {_DECISIONS}")
    elif probabilities is not None and probabilities.suffice(per_class):
        sums = "rows sum to 1" if per_class else "some are near 0 and near 1"
        warn(
            "`preds` must be logits with from_logits=True, got values that look like probabilities: all are in [0, 1], "
            f"and {sums}. Omit from_logits=True for probabilities."
        )


def n_rows(values: Tensor, per_class: bool) -> int:
    """Return the number of rows of predictions, whose last axis contains classes with `per_class`."""
    return values.numel() // max(1, values.shape[-1]) if per_class else values.numel()


def look_like_probabilities(values: Tensor, per_class: bool) -> bool:
    """Return whether values that should be logits are probabilities; classes are last if `per_class`.

    Multi-class rows are probabilities if all values are in [0, 1], all rows sum to 1, and there are at least `MIN_ROWS`
    rows. Other values are probabilities if all of at least `MIN_VALUES` are in [0, 1], the smallest is at most 0.005,
    and the largest at least 0.995. Logits exceed this interval, or fill only a part of it.
    """
    found = _Probabilities.from_values(values, per_class)
    return found is not None and found.suffice(per_class)


def _scores_in(target: Tensor) -> Tensor:
    """Return the floating targets that are not labels: those with a fraction."""
    return target[target.isfinite() & (target != target.round())] if target.is_floating_point() else target[:0]


def has_scores(target: Tensor) -> bool:
    """Return whether most targets are probabilities or logits, with more different values than label smoothing."""
    scores = _scores_in(target)
    return 2 * scores.numel() > target.numel() and torch.unique(scores).numel() > _FEW_TARGETS


def swapped(found: str, target: Tensor, may_be_valid: bool = False) -> ValueError:
    """Return the error for swapped arguments; `may_be_valid` if predictions may be saturated, with soft targets."""
    scores = _scores_in(target).flatten()
    example = f", and {float(scores[0]):.6g} in `target`" if scores.numel() else ""
    valid = (
        " If these are predictions with soft targets, pass validate_args=False to a metric or report."
        if may_be_valid
        else ""
    )
    return ValueError(
        f"`preds` must be probabilities or logits, got {found}{example}. The arguments seem to be "
        f"swapped. Pass the predictions first, then the targets. For scorers of scikit-learn, use "
        f"torchcalib.sklearn.get_scorer.{valid}"
    )


def check_not_swapped(preds: Tensor, target: Tensor) -> None:
    """Raise ValueError if invalid predictions contain only whole numbers, and most targets probabilities or logits.

    Call it before an error about shapes or values. Values that cannot be read are not checked.
    """
    is_floating = preds.is_floating_point()
    if preds.is_meta or (is_floating and preds.dtype not in SUM_TOLERANCE) or isinstance(preds, LinearLogits):
        return
    if (not is_floating or value_if_available((preds == preds.round()).all())) and has_scores(target):
        raise swapped("only whole numbers", target)


def no_samples() -> ValueError:
    """Return the error for data without rows that count."""
    return ValueError(
        "`preds` must contain at least one sample with a positive weight, got none. Check that there are rows, and "
        "that `ignore_index`, `weights` or missing values do not exclude all of them."
    )


def wrong_dtype(preds: Tensor, target: Tensor, task: str) -> Exception:
    """Return the error for predictions of a dtype that is not floating, with the likely cause."""
    if has_scores(target):
        return swapped(f"{preds.dtype}", target)
    rule = f"`preds` must be float16, bfloat16, float32 or float64, got {preds.dtype}"
    if preds.is_floating_point():  # for example float8
        return TypeError(f"{rule}. Convert them with preds.float().")
    if preds.dtype == torch.bool or not preds.numel():
        return TypeError(f"{rule}. {_DECISIONS}")
    preds, target = preds.cpu().double(), target.cpu().double()  # torch does not compare unsigned integers
    low, high = (int(end) for end in preds.aminmax())
    # Class indices are as large as labels.
    is_index = (task == "multiclass" and preds.dim() < 2) or (target.numel() > 0 and 1 < high <= int(target.max()))
    if not is_index and low >= 0 and MAX_LOGIT < high <= 100:  # smaller ones may be class indices or ratings
        return TypeError(f"{rule} with values from {low} to {high}. If these are percentages, pass preds / 100.")
    if not is_index and (low < 0 or high > 100):
        return TypeError(f"{rule} with values from {low} to {high}. Convert logits with preds.float().")
    return TypeError(f"{rule}. {_DECISIONS}")
