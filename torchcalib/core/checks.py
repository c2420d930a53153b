"""Rules for the values of predictions, targets and weights, and errors for rows that break a rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, methodcaller
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.core.linear_logits import LinearLogits
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import LEAST_WEIGHT, MOST_WEIGHT

SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest accepted distance from 1 of the sum of a row of probabilities, by dtype."""

MAX_COPIES = 2**53  # float64 represents all integers up to 2^53 exactly


class Problem(NamedTuple):
    """Violation of a rule, with its error message."""

    broken: Tensor  # mask of the rows that break the rule `(..., N)`
    explain: Callable[[Tensor], str]  # function from a mask of rows to the error message


@dataclass(frozen=True, eq=False)
class Rule:
    """Rule for the values of a tensor: pairs of a mask and a message, and faster ways to check them."""

    problems: Callable[[], list[Problem]]  # possible violations, in the order in which they are reported
    passes: Callable[[], Tensor | bool] | None = None  # whether no row breaks the rule, in fewer operations
    mask: Callable[[], Tensor] | None = None  # mask of the rows that break the rule `(..., N)`, if it is known

    def is_satisfied(self) -> Tensor | bool:
        """Return True, or a bool scalar tensor that is True, if no row breaks the rule."""
        return ~self.broken().any() if self.passes is None else self.passes()

    def broken(self) -> Tensor:
        """Return a mask of the rows that break the rule `(..., N)`."""
        if self.mask is not None:
            return self.mask()
        return reduce(torch.logical_or, (problem.broken for problem in self.problems()))


def all_satisfied(rules: Sequence[Rule]) -> bool | None:
    """Return whether all rows satisfy all rules; None if values are not available (`torch.compile`, `vmap`)."""
    satisfied: Tensor | bool = reduce(and_, map(methodcaller("is_satisfied"), rules))
    known: bool | None = value_if_available(satisfied) if isinstance(satisfied, Tensor) else satisfied
    return known


def enforce(
    rules: Sequence[Rule],
    weights: Tensor | None,
    absent: Tensor | None,
    drop_invalid: bool,
    wait: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Raise ValueError if a row breaks a rule. If values are not available, set the weights of such rows to NaN.

    Rules are not checked in `absent` rows (mask of weight 0). Two options prevent raising, without synchronising the
    device. `drop_invalid` sets the weights of broken rows to 0, and `wait=False` to NaN. Return the weights `(..., N)`,
    and a mask of the broken rows, None if the weights are unchanged.
    """
    if not rules or (wait and not drop_invalid and all_satisfied(rules)):
        return weights, None
    broken = reduce(torch.logical_or, (rule.broken() for rule in rules))
    broken = broken if absent is None else broken & ~absent
    any_broken = value_if_available(broken.any()) if wait and not drop_invalid else None
    if any_broken is None:
        filled = torch.ones_like(broken, dtype=wide_dtype(broken.device)) if weights is None else weights
        return filled.masked_fill(broken, 0 if drop_invalid else torch.nan), broken
    for problem in (problem for rule in rules for problem in rule.problems()) if any_broken else ():
        rows = problem.broken if absent is None else problem.broken & ~absent
        if bool(rows.any()):
            raise ValueError(problem.explain(rows))
    return weights, None


def _within(values: Tensor, low: float, high: float) -> Tensor | bool:
    """Return whether all values are in [low, high] and none is NaN: a bool scalar tensor, or a bool on the CPU."""
    if not values.numel():
        return True
    values = values.detach()
    # The order of multi-label input in memory, because torch copies transposed input
    least, greatest = (values.T if values.dim() == 2 and values.stride(0) == 1 else values).aminmax()
    if values.is_cpu and (first := value_if_available(least)) is not None:
        return bool(low <= first and greatest.item() <= high)  # faster than operations on scalar tensors
    return (least >= low) & (greatest <= high)


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    """Return a mask of the values that are NaN, or not in [low, high], in few operations."""
    return values != values.clamp(low, high)


def _found(rows: Tensor, values: Tensor) -> str:
    """Return the value in the first broken row and the number of broken rows, e.g. '3.2 (17 of 100 rows)'."""
    first = values.expand(rows.shape).reshape(-1)[int(rows.reshape(-1).int().argmax())]
    first = first.detach().cpu()
    first = first.float() if first.dtype == torch.bfloat16 else first  # numpy has no bfloat16
    shortest = str(first.numpy()[()])  # shortest decimal number that rounds to the value
    return f"{shortest} ({int(rows.sum())} of {rows.numel()} rows)"


def _nan_problem(name: str, values: Tensor) -> Problem:
    fix = "Pass nan_policy='drop' to leave these rows out."
    return Problem(values.isnan(), lambda rows: f"`{name}` must not contain NaN, got {_found(rows, values)}. {fix}")


def weight_rule(weights: Tensor, whole: bool = False) -> Rule:
    """Return the rule that weights are 0 or from 1e-150 to 1e150, or with `whole`, whole numbers up to 2^53.

    The squares of other weights would overflow or underflow in float64.
    """

    def problems() -> list[Problem]:
        if whole:  # float64 represents every whole number up to 2^53
            valid = (weights >= 0) & (weights <= 2**53) & (weights == weights.round())
            rule = "whole numbers for methods that count samples (weight k means k copies)"
            fix = "Use a method with equal-width bins. Integers would count as copies in tests."
        else:
            valid = (weights == 0) | ((weights >= LEAST_WEIGHT) & (weights <= MOST_WEIGHT))
            rule, fix = "finite and non-negative (0, or from 1e-150 to 1e150)", "Use 0 to ignore a row."
        return [Problem(~valid, lambda rows: f"`weights` must be {rule}, got {_found(rows, weights)}. {fix}")]

    def passes() -> Tensor | bool:  # fewer comparisons than in `problems`
        return _within(weights, 0, MOST_WEIGHT) & ((weights > 0) == (weights >= LEAST_WEIGHT)).all()

    if whole:
        return Rule(problems)
    return Rule(problems, passes, lambda: _outside(weights, LEAST_WEIGHT, MOST_WEIGHT) & (weights != 0))


def annotator_rule(n_annotators: Tensor, at_least: int) -> Rule:
    """Return the rule that annotator counts are not negative, and each row has at least `at_least` annotators.

    `n_annotators` is the number in each row, or a negative count; see `proportions_of_counts`.
    """

    def problems() -> list[Problem]:
        annotators, whole = f"{at_least} annotator" + "s" * (at_least > 1), n_annotators.long()
        return [
            Problem(
                (n_annotators < 0) | (n_annotators > 2**53),
                lambda rows: (
                    f"`target` must be annotator counts from 0 to 2^53, got {_found(rows, whole)}. Integers with a "
                    "class axis are annotator counts; drop the class axis for labels."
                ),
            ),
            Problem(
                (n_annotators >= 0) & (n_annotators < at_least),
                lambda rows: (
                    f"`target` must have at least {annotators} in every row, got {_found(rows, whole)}. Pass weight 0 "
                    "for these rows" + (", or nan_policy='drop'." if at_least == 1 else ".")
                ),
            ),
        ]

    return Rule(problems, lambda: _within(n_annotators, at_least, 2**53))


LABELS_ONLY = (
    "`priors`, tests, CORP, selective prediction, isotonic bins and calibrators support labels only: repeat other "
    "samples once per class, with weights."
)
"""Advice for soft targets where labels are required."""


def label_rule(target: Tensor, num_classes: int, absent: Tensor | None = None) -> Rule:
    """Return the rule that labels are whole numbers in [0, num_classes - 1].

    `absent` is a mask of ignored rows, with label 0.
    """

    def explain(rows: Tensor) -> str:
        from torchcalib.core.causes import cause_of_labels

        rule = f"`target` must be a class index in [0, {num_classes - 1}], got {_found(rows, target)}."
        return f"{rule} {cause_of_labels(target, rows, num_classes, absent)}"

    def problems() -> list[Problem]:
        outside = Problem((target < 0) | (target >= num_classes), explain)
        if not target.is_floating_point():
            return [outside]
        fractional = Problem(
            target != target.round(),
            lambda rows: f"`target` must be labels 0 and 1, got {_found(rows, target)}. {LABELS_ONLY}",
        )
        return [_nan_problem("target", target), outside, fractional]

    def passes() -> Tensor | bool:
        inside = _within(target, 0, num_classes - 1)
        return inside & (target == target.round()).all() if target.is_floating_point() else inside

    return Rule(problems, passes, None if target.is_floating_point() else lambda: _outside(target, 0, num_classes - 1))


def group_rule(groups: Tensor, num_groups: int) -> Rule:
    """Return the rule that group indices are in [0, num_groups - 1]. Rows without a group have weight 0."""
    return Rule(
        lambda: [
            Problem(
                (groups < 0) | (groups >= num_groups),
                lambda rows: (
                    f"`groups` must be in [0, {num_groups - 1}], or -1 for rows without a group, got "
                    f"{_found(rows, groups)}. Number the groups from 0, and pass `num_groups`."
                ),
            )
        ]
    )


def logit_rule(logits: Tensor, per_class: bool) -> Rule:
    """Return the rule that logits are not NaN, and each multi-class row has one above -inf. +inf is valid."""

    def problems() -> list[Problem]:
        if not per_class:
            return [_nan_problem("preds", logits)]
        top = logits.amax(-1)  # NaN if any logit in the row is NaN
        return [
            _nan_problem("preds", top),
            Problem(
                top == -torch.inf,
                lambda rows: (
                    f"`preds` must have a logit above -inf in every row, got only {_found(rows, top)}. "
                    "Leave at least one class unmasked."
                ),
            ),
        ]

    def passes() -> Tensor | bool:
        if not per_class:
            return _within(logits, -torch.inf, torch.inf)
        return _within(logits.detach().amax(-1), torch.finfo(logits.dtype).min, torch.inf)

    return Rule(problems, passes)


def hidden_rule(confidence: Tensor) -> Rule:
    """Return the rule that hidden states give logits without NaN, and one above -inf in each row.

    Otherwise `confidence`, the largest probability or another statistic of each row, is NaN.
    """
    return Rule(
        lambda: [
            Problem(
                confidence.isnan(),
                lambda rows: (
                    f"`hidden` must give logits without NaN, and above -inf for some class, got "
                    f"{int(rows.sum())} of {rows.numel()} rows that do not. Pass nan_policy='drop' to leave these rows "
                    "out."
                ),
            )
        ]
    )


def probability_rule(name: str, probs: Tensor, per_class: bool, tolerance: float) -> Rule:
    """Return the rule that probabilities or soft targets are in [0, 1], and each multi-class row sums to 1."""

    def sums() -> Tensor:  # in at least float32
        return probs.detach().sum(-1, dtype=torch.promote_types(probs.dtype, torch.float32))

    def problems() -> list[Problem]:
        from torchcalib.core.causes import cause_of_sums, cause_of_values

        low, high = (probs.amin(-1), probs.amax(-1)) if per_class else (probs, probs)
        outside = Problem(
            ~((low >= 0) & (high <= 1)),
            lambda rows: (
                f"`{name}` must be probabilities in [0, 1], got {_found(rows, torch.where(low < 0, low, high))}. "
                f"{cause_of_values(name, probs, rows, per_class)}"
            ),
        )
        if not per_class:
            return [_nan_problem(name, low), outside]
        total = sums()
        wrong_sum = Problem(
            ~((total - 1).abs() <= tolerance),
            lambda rows: (
                f"`{name}` must sum to 1 over the class axis (within {tolerance:g}), got {_found(rows, total)}. "
                f"{cause_of_sums(name, probs)}"
            ),
        )
        return [_nan_problem(name, low), outside, wrong_sum]

    def passes() -> Tensor | bool:
        inside = _within(probs, 0, 1)
        return inside & _within(sums() - 1, -tolerance, tolerance) if per_class else inside

    return Rule(problems, passes, None if per_class else lambda: _outside(probs.detach(), 0, 1))


def row_rule(log_prob: Tensor, of_preds: Rule, of_labels: Rule) -> Rule:
    """Return the rule that multi-class predictions and labels are valid: else the label has log-probability NaN.

    `of_preds` and `of_labels` only provide the error message. The last violation of `of_preds` is reported for all
    remaining rows, because rounding errors may affect the comparison of a row sum with the tolerance.
    """

    def problems() -> list[Problem]:
        *others, last = of_preds.problems()
        return [*others, *of_labels.problems(), last._replace(broken=log_prob.isnan())]

    # The sum is NaN, and the comparison False, if a log-probability is NaN.
    return Rule(problems, lambda: log_prob.detach().sum() <= 0, log_prob.isnan)


def pass_rule(rules: Sequence[Rule], passes: Callable[[], bool]) -> Rule:
    """Return one rule for rules that the pass over the values for the sums of a metric also checks.

    `passes` computes and caches the sums, and returns whether all values are valid. If it returns False, the rules are
    checked separately, which determines the error message.
    """
    return Rule(
        lambda: [problem for rule in rules for problem in rule.problems()],
        lambda: passes() or reduce(and_, map(methodcaller("is_satisfied"), rules)),
    )


def missing_rows(preds: Tensor, target: Tensor, from_logits: bool, per_class: bool) -> Tensor:
    """Return a mask of rows with missing predictions or soft targets `(..., N)`; classes are on the last axis.

    Missing values are NaN, infinite probabilities, and rows of logits that are all -inf.
    """
    missing = _missing(preds, from_logits, per_class)
    return missing | _missing(target, False, per_class) if target.is_floating_point() else missing


def _missing(values: Tensor, from_logits: bool, per_class: bool) -> Tensor:
    if isinstance(values, LinearLogits):
        return values.missing()
    values = values.detach()
    if from_logits:
        top = values.amax(-1) if per_class else values  # NaN if any logit in the row is NaN
        return top.isnan() | (top == -torch.inf) if per_class else top.isnan()
    low, high = (values.amin(-1), values.amax(-1)) if per_class else (values, values)
    return ~(low.isfinite() & high.isfinite())


def proportions_of_counts(counts: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Convert annotator counts to float64 proportions along `axis`, and return the number of annotators.

    A row without annotators has proportions 0. In a row with a negative count, the number of annotators is replaced by
    the smallest count, which `annotator_rule` rejects.
    """
    counts = counts.to(wide_dtype(counts.device))
    n, least = counts.sum(axis), counts.amin(axis)
    return counts / n.clamp(min=1).unsqueeze(axis), torch.where(least < 0, least, n)


def check_indices(name: str, numbers: object) -> None:
    """Raise TypeError unless `numbers`, the indices of groups or folds, is an integer tensor."""
    if not isinstance(numbers, Tensor) or numbers.is_floating_point() or numbers.is_complex():
        found = f"dtype {numbers.dtype}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"`{name}` must be a tensor of integers, got {found}. Number them from 0.")


def check_weights(weights: Tensor, shape: torch.Size) -> Tensor:
    """Check the shape and the values of weights, and return them in float64."""
    if weights.shape != shape:
        raise ValueError(f"`weights` must have one value per sample, shape {tuple(shape)}, got {tuple(weights.shape)}.")
    weights = weights.to(wide_dtype(weights.device))
    enforced, _ = enforce([weight_rule(weights)], weights, None, False)
    return weights if enforced is None else enforced


def read_priors(priors: Tensor | Sequence[float], num_classes: int) -> Tensor:
    """Check class priors and return them as float64 `(..., C)` that sum to 1."""
    values = priors if isinstance(priors, Tensor) else torch.as_tensor(priors, dtype=torch.float64, device="cpu")
    values = values.to(wide_dtype(values.device))
    if values.dim() == 0 or values.shape[-1] != num_classes:
        raise ValueError(
            f"`priors` must have one entry per class, {num_classes} on the last axis, got shape {tuple(values.shape)}."
        )
    if value_if_available(~((values >= 0).all() & ((values.sum(-1) - 1).abs() <= 1e-6).all())):
        raise ValueError(
            f"`priors` must be non-negative and sum to 1, got {shown(values.tolist())}. Divide them by their sum."
        )
    return values / values.sum(-1, keepdim=True)  # removes the rounding error of float32 priors


def are_counts(weights: Tensor | None) -> bool:
    """Return True if `weights` is None, or contains only whole numbers of at most 2^53."""
    if weights is None:
        return True
    w = weights.detach().double()
    return bool(((w == w.round()) & (w <= MAX_COPIES)).all())
