"""Rules that values must keep, as masks over rows, and what happens to rows that break them."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.logs import wide_dtype

SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-3}
"""Rounding leaves the sum of a row of probabilities this far from 1 and no further, unless something is wrong."""


class Problem(NamedTuple):
    """One rule that rows may break: which rows break it, and the sentence for whoever sent them."""

    broken: Tensor
    explain: Callable[[Tensor], str]


class Rules(NamedTuple):
    """The rules on one tensor, cheapest question first.

    Attributes:
        kept: whether no row breaks any, a boolean scalar.
        broken: which rows do, a mask.
        problems: which rows break which.
    """

    kept: Callable[[], Tensor]
    broken: Callable[[], Tensor]
    problems: Callable[[], list[Problem]]


def _rules(kept: Callable[[], Tensor], problems: Callable[[], list[Problem]]) -> Rules:
    return Rules(kept, lambda: reduce(torch.logical_or, (problem.broken for problem in problems())), problems)


def keeps(rules: Sequence[Rules]) -> bool | None:
    """Return whether no row breaks any rule, or None where values cannot be looked at."""
    return look(reduce(torch.logical_and, [rule.kept() for rule in rules]))


def settle(
    rules: Sequence[Rules],
    weights: Tensor | None,
    absent: Tensor | None,
    drop_invalid: bool,
    wide: torch.dtype,
    wait: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Raise on broken rows; or weigh them 0; or, where values cannot or, not to `wait`, must not be looked at, NaN.

    Returns:
        The weights, and a mask of the rows that were broken, or None if there was none.
    """
    if not rules or (wait and not drop_invalid and keeps(rules)):
        return weights, None
    broken = reduce(torch.logical_or, (rule.broken() for rule in rules))
    broken = broken if absent is None else broken & ~absent
    ones = torch.ones((), dtype=wide, device=broken.device)
    if drop_invalid:
        return torch.where(broken, 0.0, ones if weights is None else weights), broken
    seen = look(broken.any()) if wait else None
    if seen is None:
        return torch.where(broken, torch.nan, ones if weights is None else weights), broken
    for problem in (problem for rule in rules for problem in rule.problems()) if seen else ():
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
    first = first.float() if first.dtype == torch.bfloat16 else first  # which numpy lacks
    shortest = str(first.numpy()[()])  # digits that tell the value from its neighbours, and no more
    return f"{shortest} ({int(rows.sum())} of {rows.numel()} rows)"


def _nan_problem(name: str, values: Tensor) -> Problem:
    fix = "Look for where they became NaN, or give these rows weight 0."
    return Problem(values.isnan(), lambda rows: f"`{name}` must not hold NaN, got {_found(rows, values)}. {fix}")


def missing_rows(preds: Tensor, target: Tensor, from_logits: bool, per_class: bool) -> Tensor:
    """Rows whose predictions or soft targets are missing, classes on the last axis; see `InputOptions`."""
    missing = _missing(preds, from_logits, per_class)
    return missing | _missing(target, False, per_class) if target.is_floating_point() else missing


def shares_of_votes(counts: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Read counts of votes, classes on `axis`, as shares; both results are of the sums' dtype.

    Returns:
        Shares, of the shape of `counts`, and the numbers of votes, without that axis. Of a row that holds a negative
        count the number is the least of its counts, which tells it; of a row without votes all shares are 0.
    """
    counts = counts.to(wide_dtype(counts.device))
    n, least = counts.sum(axis), counts.amin(axis)
    return counts / n.clamp(min=1).unsqueeze(axis), torch.where(least < 0, least, n)


def _missing(values: Tensor, from_logits: bool, per_class: bool) -> Tensor:
    """Rows that hold NaN, or that are no distribution because of an infinity."""
    values = values.detach()
    if from_logits:
        top = values.amax(-1) if per_class else values  # is NaN if any logit is
        return top.isnan() | (top == -torch.inf) if per_class else top.isnan()
    low, high = (values.amin(-1), values.amax(-1)) if per_class else (values, values)
    return ~(low.isfinite() & high.isfinite())


def weight_rules(weights: Tensor, whole: bool) -> Rules:
    """Weights of samples; with `whole` counts of copies."""
    problem = _whole_weight_problem(weights) if whole else _weight_problem(weights)
    return _rules(lambda: ~problem.broken.any(), lambda: [problem])


def _weight_problem(weights: Tensor) -> Problem:
    """Weights that are negative, infinite or NaN, or so large or small that sums of them would overflow or vanish."""
    fine = (weights == 0) | ((weights >= 1e-150) & (weights <= 1e150))
    return Problem(
        ~fine,
        lambda rows: (
            "`weights` must be finite and non-negative (0, or from 1e-150 to 1e150), got "
            f"{_found(rows, weights)}. Use 0 to leave a row out."
        ),
    )


def _whole_weight_problem(weights: Tensor) -> Problem:
    """Weights that are no counts. Up to 2^53 every whole number is one of float64."""
    fine = (weights >= 0) & (weights <= 2**53) & (weights == weights.round())
    return Problem(
        ~fine,
        lambda rows: (
            "`weights` must be whole numbers here, where weight k stands for k copies of a sample, got "
            f"{_found(rows, weights)}. Scale them to counts of copies and round them."
        ),
    )


def vote_rules(n_votes: Tensor, at_least: int) -> Rules:
    """Numbers of votes as `shares_of_votes` returns them. Up to 2^53 every whole number is one of float64."""

    def problems() -> list[Problem]:
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

    return _rules(lambda: _within(n_votes, at_least, 2**53), problems)


def label_rules(target: Tensor, num_classes: int) -> Rules:
    """Labels that name a class."""
    return _rules(lambda: _within(target, 0, num_classes - 1), lambda: [_label_problem(target, num_classes)])


def _label_problem(target: Tensor, num_classes: int) -> Problem:
    """Labels that name no class."""

    def explain(rows: Tensor) -> str:
        found = _found(rows, target)
        return (
            f"`target` must be a class index in [0, {num_classes - 1}], got {found}. "
            f"Pass ignore_index={found.split()[0]} if that value marks rows to drop."
        )

    return Problem((target < 0) | (target >= num_classes), explain)


def group_rules(groups: Tensor, num_groups: int) -> Rules:
    """Numbers of groups; a row that has none is left out already."""
    problem = Problem(
        (groups < 0) | (groups >= num_groups),
        lambda rows: (
            f"`groups` must be numbers in [0, {num_groups - 1}], or -1 for a row of no group, got "
            f"{_found(rows, groups)}. Number the groups from 0, and pass `num_groups`."
        ),
    )
    return _rules(lambda: ~problem.broken.any(), lambda: [problem])


def logit_rules(logits: Tensor, per_class: bool) -> Rules:
    """Logits, of which +inf and -inf are legal; over classes, rows with a logit above -inf."""

    def kept() -> Tensor:
        if not per_class:
            return _within(logits, -torch.inf, torch.inf)
        return _within(logits.detach().amax(-1), torch.finfo(logits.dtype).min, torch.inf)

    return _rules(kept, lambda: _logit_problems(logits, per_class))


def row_rules(log_prob: Tensor, of_preds: Rules, target: Tensor, num_classes: int) -> Rules:
    """Rows of classes and their labels, from what was read of them: a score that is NaN where either is bad.

    The rules on predictions are asked for words alone. The last of them has all that is left: a sum next to the
    tolerance may come out on either side of it.
    """

    def problems() -> list[Problem]:
        *others, last = of_preds.problems()
        return [*others, _label_problem(target, num_classes), last._replace(broken=log_prob.isnan())]

    return Rules(lambda: log_prob.detach().sum() <= 0, log_prob.isnan, problems)  # a sum of NaN is not


def _logit_problems(logits: Tensor, per_class: bool) -> list[Problem]:
    """NaN, and rows without any finite or infinite evidence. +inf and -inf are legal."""
    if not per_class:
        return [_nan_problem("preds", logits)]
    top = logits.amax(-1)  # is NaN if any logit is
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


def probability_rules(name: str, probs: Tensor, per_class: bool, tolerance: float) -> Rules:
    """Probabilities; over classes, rows of sum 1."""

    def kept() -> Tensor:
        inside = _within(probs, 0, 1)
        return inside & _within(_total(probs.detach()) - 1, -tolerance, tolerance) if per_class else inside

    return _rules(kept, lambda: _probability_problems(name, probs, per_class, tolerance))


def _total(probs: Tensor) -> Tensor:
    """Return the sums of rows; of half types they would be rounded to these."""
    return probs.sum(-1, dtype=torch.promote_types(probs.dtype, torch.float32))


def _probability_problems(name: str, probs: Tensor, per_class: bool, tolerance: float) -> list[Problem]:
    """NaN, values outside [0, 1] and, over classes, sums that are not 1."""
    low, high = (probs.amin(-1), probs.amax(-1)) if per_class else (probs, probs)
    fix = (
        "Pass from_logits=True if these are logits."
        if name == "preds"
        else "Soft targets are shares of votes; pass counts of votes as integers."
    )
    outside = Problem(
        ~((low >= 0) & (high <= 1)),
        lambda rows: (
            f"`{name}` must be probabilities in [0, 1], got {_found(rows, torch.where(low < 0, low, high))}. {fix}"
        ),
    )
    if not per_class:
        return [_nan_problem(name, low), outside]
    total = _total(probs)
    off = Problem(
        ~((total - 1).abs() <= tolerance),
        lambda rows: (
            f"`{name}` must sum to 1 over the class axis (within {tolerance:g}), got {_found(rows, total)}. "
            + (
                "Pass from_logits=True for logits, class_axis=1 for class-first input, or task='multilabel' for labels "
                "that do not exclude each other."
                if name == "preds"
                else "Divide votes by their number, or pass their counts as integers."
            )
        ),
    )
    return [_nan_problem(name, low), outside, off]


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
    settled, _ = settle([weight_rules(weights, whole=False)], weights, None, False, weights.dtype)
    return weights if settled is None else settled


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
    return values / values.sum(-1, keepdim=True)  # what float32 priors lack to 1 would show in every digit after
