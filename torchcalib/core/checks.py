"""Rules for the values of input, as masks over rows, and the treatment of rows that break them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, methodcaller
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.core.causes import cause_of_labels, cause_of_sums, cause_of_values
from torchcalib.ops.host_values import look
from torchcalib.ops.logs import wide_dtype

SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-3}
"""Rounding keeps the sum of a row of probabilities this close to 1."""


class Problem(NamedTuple):
    """The rows that break one rule, and the error message for them."""

    broken: Tensor
    explain: Callable[[Tensor], str]


class Rule(ABC):
    """A rule for the values of one tensor."""

    def kept(self) -> Tensor:
        """Return whether all rows keep the rule, a boolean scalar."""
        return ~self.broken().any()

    def broken(self) -> Tensor:
        """Return which rows break the rule."""
        return reduce(torch.logical_or, (problem.broken for problem in self.problems()))

    @abstractmethod
    def problems(self) -> list[Problem]:
        """Return the ways to break the rule."""


def all_kept(rules: Sequence[Rule]) -> bool | None:
    """Return whether all rows keep all rules, or None where values cannot be read."""
    return look(reduce(and_, map(methodcaller("kept"), rules)))


def enforce(
    rules: Sequence[Rule],
    weights: Tensor | None,
    absent: Tensor | None,
    drop_invalid: bool,
    wait: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Raise an error for broken rows. Where values cannot be read, give these rows NaN weights instead.

    Args:
        rules: the rules.
        weights: weights of the rows `(..., N)`, or None for 1.
        absent: rows of weight 0, which may break any rule; None for none.
        drop_invalid: give broken rows weight 0, and do not wait for the device.
        wait: read values; False never waits for the device.

    Returns:
        The weights, and a mask of the broken rows, or None if there is none.
    """
    if not rules or (wait and not drop_invalid and all_kept(rules)):
        return weights, None
    broken = reduce(torch.logical_or, (rule.broken() for rule in rules))
    broken = broken if absent is None else broken & ~absent
    own = torch.ones((), dtype=wide_dtype(broken.device), device=broken.device) if weights is None else weights
    if drop_invalid:
        return torch.where(broken, 0.0, own), broken
    found = look(broken.any()) if wait else None
    if found is None:
        return torch.where(broken, torch.nan, own), broken
    for problem in (problem for rule in rules for problem in rule.problems()) if found else ():
        rows = problem.broken if absent is None else problem.broken & ~absent
        if bool(rows.any()):
            raise ValueError(problem.explain(rows))
    return weights, None


def _within(values: Tensor, low: float, high: float) -> Tensor:
    """Return whether all values lie in [low, high], a boolean scalar. NaN does not."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, greatest = values.detach().aminmax()
    return (least >= low) & (greatest <= high)


def _found(rows: Tensor, values: Tensor) -> str:
    """Describe the first broken row: '3.2 (17 of 100 rows)'."""
    first = values.expand(rows.shape).reshape(-1)[int(rows.reshape(-1).int().argmax())]
    first = first.detach().cpu()
    first = first.float() if first.dtype == torch.bfloat16 else first  # numpy has no bfloat16
    shortest = str(first.numpy()[()])  # the fewest digits that identify the value
    return f"{shortest} ({int(rows.sum())} of {rows.numel()} rows)"


def _nan_problem(name: str, values: Tensor) -> Problem:
    fix = "Pass nan_policy='drop' to leave these rows out."
    return Problem(values.isnan(), lambda rows: f"`{name}` must not hold NaN, got {_found(rows, values)}. {fix}")


@dataclass(frozen=True, eq=False)
class WeightRule(Rule):
    """Weights of samples; if `whole`, counts of copies."""

    weights: Tensor
    whole: bool = False

    def problems(self) -> list[Problem]:
        """Return weights that are no counts, or that are negative, not finite, or overflow or vanish in sums."""
        weights = self.weights
        if self.whole:  # float64 holds every whole number up to 2^53
            fine = (weights >= 0) & (weights <= 2**53) & (weights == weights.round())
            rule = "whole numbers here, where weight k stands for k copies of a sample"
            fix = "Scale them to counts of copies and round them."
        else:
            fine = (weights == 0) | ((weights >= 1e-150) & (weights <= 1e150))
            rule, fix = "finite and non-negative (0, or from 1e-150 to 1e150)", "Use 0 to leave a row out."
        return [Problem(~fine, lambda rows: f"`weights` must be {rule}, got {_found(rows, weights)}. {fix}")]


@dataclass(frozen=True, eq=False)
class VoteRule(Rule):
    """Numbers of votes behind the rows, as `shares_of_votes` returns them."""

    n_votes: Tensor
    at_least: int

    def kept(self) -> Tensor:
        """Return whether all numbers are in range."""
        return _within(self.n_votes, self.at_least, 2**53)

    def problems(self) -> list[Problem]:
        """Return numbers that are no counts, and too small ones."""
        n_votes, at_least = self.n_votes, self.at_least
        votes, whole = f"{at_least} vote" + "s" * (at_least > 1), n_votes.long()
        return [
            Problem(
                (n_votes < 0) | (n_votes > 2**53),
                lambda rows: (
                    f"`target` must be counts of votes, from 0 to 2^53 a row, got {_found(rows, whole)}. Integers "
                    "with a class axis are votes; drop the class axis for labels."
                ),
            ),
            Problem(
                (n_votes >= 0) & (n_votes < at_least),
                lambda rows: (
                    f"`target` must count at least {votes} in every row, got {_found(rows, whole)}. Give these rows "
                    "weight 0" + (", or pass nan_policy='drop'." if at_least == 1 else ".")
                ),
            ),
        ]


@dataclass(frozen=True, eq=False)
class LabelRule(Rule):
    """Labels in [0, num_classes - 1]."""

    target: Tensor
    num_classes: int

    def kept(self) -> Tensor:
        """Return whether all labels are in range."""
        return _within(self.target, 0, self.num_classes - 1)

    def problems(self) -> list[Problem]:
        """Return labels out of range."""

        def explain(rows: Tensor) -> str:
            rule = f"`target` must be a class index in [0, {self.num_classes - 1}], got {_found(rows, self.target)}."
            return f"{rule} {cause_of_labels(self.target, rows, self.num_classes)}"

        return [Problem((self.target < 0) | (self.target >= self.num_classes), explain)]


@dataclass(frozen=True, eq=False)
class GroupRule(Rule):
    """Numbers of groups in [0, num_groups - 1]. Rows without a group are absent already."""

    groups: Tensor
    num_groups: int

    def problems(self) -> list[Problem]:
        """Return numbers out of range."""
        outside = (self.groups < 0) | (self.groups >= self.num_groups)
        return [
            Problem(
                outside,
                lambda rows: (
                    f"`groups` must be numbers in [0, {self.num_groups - 1}], or -1 for a row of no group, got "
                    f"{_found(rows, self.groups)}. Number the groups from 0, and pass `num_groups`."
                ),
            )
        ]


@dataclass(frozen=True, eq=False)
class LogitRule(Rule):
    """Logits. +inf and -inf are legal; over classes, a row must have a logit above -inf."""

    logits: Tensor
    per_class: bool

    def kept(self) -> Tensor:
        """Return whether all logits are legal."""
        if not self.per_class:
            return _within(self.logits, -torch.inf, torch.inf)
        return _within(self.logits.detach().amax(-1), torch.finfo(self.logits.dtype).min, torch.inf)

    def problems(self) -> list[Problem]:
        """Return NaN, and rows that are all -inf."""
        if not self.per_class:
            return [_nan_problem("preds", self.logits)]
        top = self.logits.amax(-1)  # NaN if any logit is
        return [
            _nan_problem("preds", top),
            Problem(
                top == -torch.inf,
                lambda rows: (
                    f"`preds` must have a logit above -inf in every row, got only {_found(rows, top)}. "
                    "Mask all classes but one, not all of them."
                ),
            ),
        ]


@dataclass(frozen=True, eq=False)
class ProbabilityRule(Rule):
    """Probabilities of predictions or soft targets; over classes, a row must sum to 1."""

    name: str
    probs: Tensor
    per_class: bool
    tolerance: float

    def kept(self) -> Tensor:
        """Return whether all values are in range, and all sums 1."""
        inside = _within(self.probs, 0, 1)
        if not self.per_class:
            return inside
        return inside & _within(self._total() - 1, -self.tolerance, self.tolerance)

    def problems(self) -> list[Problem]:
        """Return NaN, values outside [0, 1] and, over classes, sums that are not 1."""
        name, probs = self.name, self.probs
        low, high = (probs.amin(-1), probs.amax(-1)) if self.per_class else (probs, probs)
        outside = Problem(
            ~((low >= 0) & (high <= 1)),
            lambda rows: (
                f"`{name}` must be probabilities in [0, 1], got {_found(rows, torch.where(low < 0, low, high))}. "
                f"{cause_of_values(name, probs, rows, self.per_class)}"
            ),
        )
        if not self.per_class:
            return [_nan_problem(name, low), outside]
        total = self._total()
        off = Problem(
            ~((total - 1).abs() <= self.tolerance),
            lambda rows: (
                f"`{name}` must sum to 1 over the class axis (within {self.tolerance:g}), got {_found(rows, total)}. "
                f"{cause_of_sums(name, probs)}"
            ),
        )
        return [_nan_problem(name, low), outside, off]

    def _total(self) -> Tensor:
        """Return the sums of rows, in at least float32."""
        return self.probs.detach().sum(-1, dtype=torch.promote_types(self.probs.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class RowRule(Rule):
    """Rows of multi-class predictions and labels, by their log-probability: it is NaN where either is bad.

    The rules for predictions only name the problem. The last of their problems gets all remaining rows, because a sum
    close to the tolerance may come out on either side of it.
    """

    log_prob: Tensor
    of_preds: Rule
    of_labels: LabelRule

    def kept(self) -> Tensor:
        """Return whether no log-probability is NaN. A sum that contains NaN compares false."""
        return self.log_prob.detach().sum() <= 0

    def broken(self) -> Tensor:
        """Return the rows whose log-probability is NaN."""
        return self.log_prob.isnan()

    def problems(self) -> list[Problem]:
        """Return the problems of predictions and of labels."""
        *others, last = self.of_preds.problems()
        return [*others, *self.of_labels.problems(), last._replace(broken=self.log_prob.isnan())]


def missing_rows(preds: Tensor, target: Tensor, from_logits: bool, per_class: bool) -> Tensor:
    """Return the rows whose predictions or soft targets are missing, with classes on the last axis.

    A row is missing if it contains NaN, or an infinity that leaves no distribution.
    """
    missing = _missing(preds, from_logits, per_class)
    return missing | _missing(target, False, per_class) if target.is_floating_point() else missing


def _missing(values: Tensor, from_logits: bool, per_class: bool) -> Tensor:
    values = values.detach()
    if from_logits:
        top = values.amax(-1) if per_class else values  # NaN if any logit is
        return top.isnan() | (top == -torch.inf) if per_class else top.isnan()
    low, high = (values.amin(-1), values.amax(-1)) if per_class else (values, values)
    return ~(low.isfinite() & high.isfinite())


def shares_of_votes(counts: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Convert counts of votes, classes on `axis`, to shares in the dtype of sums.

    Returns:
        Shares, of the shape of `counts`, and the numbers of votes, without that axis. The number of a row with a
        negative count is the least of its counts, so that `VoteRule` finds it. Without votes all shares are 0.
    """
    counts = counts.to(wide_dtype(counts.device))
    n, least = counts.sum(axis), counts.amin(axis)
    return counts / n.clamp(min=1).unsqueeze(axis), torch.where(least < 0, least, n)


def check_numbering(name: str, numbers: object) -> None:
    """Raise unless these are numbers of groups or folds: a tensor of integers."""
    if not isinstance(numbers, Tensor) or numbers.is_floating_point() or numbers.is_complex():
        what = f"dtype {numbers.dtype}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"`{name}` must be a tensor of integers, got {what}. Number them from 0.")


def check_weights(weights: Tensor, shape: torch.Size) -> Tensor:
    """Check weights for samples of `shape` and return them in the dtype of sums."""
    if weights.shape != shape:
        raise ValueError(f"`weights` must have one value per sample, shape {tuple(shape)}, got {tuple(weights.shape)}.")
    weights = weights.to(wide_dtype(weights.device))
    enforced, _ = enforce([WeightRule(weights)], weights, None, False)
    return weights if enforced is None else enforced


def read_priors(priors: Tensor | Sequence[float], num_classes: int) -> Tensor:
    """Check class priors and return them as float64 `(..., C)` that sum to 1."""
    values = priors if isinstance(priors, Tensor) else torch.as_tensor(priors, dtype=torch.float64)
    values = values.to(wide_dtype(values.device))
    if values.dim() == 0 or values.shape[-1] != num_classes:
        raise ValueError(
            f"`priors` must have one entry per class, {num_classes} on the last axis, got shape {tuple(values.shape)}."
        )
    if look(~((values >= 0).all() & ((values.sum(-1) - 1).abs() <= 1e-6).all())):
        raise ValueError(
            f"`priors` must be non-negative and sum to 1, got {values.tolist()}. Divide them by their sum."
        )
    return values / values.sum(-1, keepdim=True)  # rounded float32 priors would shift every digit after the seventh
