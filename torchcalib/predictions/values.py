"""Rules that values must keep, as masks over rows, and what happens to rows that break them."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.kernels.looking import look
from torchcalib.kernels.row_stats import wide_dtype

SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-3}
"""Rounding leaves the sum of a row of probabilities this far from 1 and no further, unless something is wrong."""


class Problem(NamedTuple):
    """One rule that rows may break: which rows break it, and the sentence for whoever sent them."""

    broken: Tensor
    explain: Callable[[Tensor], str]


def settle(
    problems: list[Problem],
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
    seen = look(broken.any())
    if seen is None:
        return torch.where(broken, torch.nan, ones if weights is None else weights), None
    for problem in problems if seen else ():
        rows = problem.broken if absent is None else problem.broken & ~absent
        if bool(rows.any()):
            raise ValueError(problem.explain(rows))
    return weights, None


def _found(rows: Tensor, values: Tensor) -> str:
    """Describe the first broken row: '3.2 (17 of 100 rows)'."""
    first = values.expand(rows.shape).reshape(-1)[int(rows.reshape(-1).int().argmax())]
    shortest = str(first.detach().cpu().numpy()[()])  # digits that tell the value from its neighbours, and no more
    return f"{shortest} ({int(rows.sum())} of {rows.numel()} rows)"


def _nan_problem(name: str, values: Tensor) -> Problem:
    fix = "Look for where they became NaN, or give these rows weight 0."
    return Problem(values.isnan(), lambda rows: f"`{name}` must not hold NaN, got {_found(rows, values)}. {fix}")


def weight_problem(weights: Tensor) -> Problem:
    """Weights that are negative, infinite or NaN, or so large or small that sums of them would overflow or vanish."""
    fine = (weights == 0) | ((weights >= 1e-150) & (weights <= 1e150))
    return Problem(
        ~fine,
        lambda rows: (
            "`weights` must be finite and non-negative (0, or from 1e-150 to 1e150), got "
            f"{_found(rows, weights)}. Use 0 to leave a row out."
        ),
    )


def whole_weight_problem(weights: Tensor) -> Problem:
    """Weights that are no counts. Up to 2^53 every whole number is one of float64."""
    fine = (weights >= 0) & (weights <= 2**53) & (weights == weights.round())
    return Problem(
        ~fine,
        lambda rows: (
            "`weights` must be whole numbers here, where weight k stands for k copies of a sample, got "
            f"{_found(rows, weights)}. Bins of a sorted sample count."
        ),
    )


def label_problem(target: Tensor, num_classes: int) -> Problem:
    """Labels that name no class."""

    def explain(rows: Tensor) -> str:
        found = _found(rows, target)
        return (
            f"`target` must be a class index in [0, {num_classes - 1}], got {found}. "
            f"Pass ignore_index={found.split()[0]} if that value marks rows to drop."
        )

    return Problem((target < 0) | (target >= num_classes), explain)


def logit_problems(logits: Tensor, per_class: bool) -> list[Problem]:
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


def probability_problems(name: str, probs: Tensor, per_class: bool, tolerance: float) -> list[Problem]:
    """NaN, values outside [0, 1] and, over classes, sums that are not 1."""
    low, high = (probs.amin(-1), probs.amax(-1)) if per_class else (probs, probs)
    fix = "Pass from_logits=True if these are logits." if name == "preds" else "Soft targets are shares of votes."
    outside = Problem(
        ~((low >= 0) & (high <= 1)),
        lambda rows: (
            f"`{name}` must be probabilities in [0, 1], got {_found(rows, torch.where(low < 0, low, high))}. {fix}"
        ),
    )
    if not per_class:
        return [_nan_problem(name, low), outside]
    total = probs.sum(-1)
    off = Problem(
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


def check_weights(weights: Tensor, shape: torch.Size) -> Tensor:
    """Check weights for samples of `shape` and return them in the dtype of sums."""
    if weights.shape != shape:
        raise ValueError(f"`weights` must have one value per sample, shape {tuple(shape)}, got {tuple(weights.shape)}.")
    weights = weights.to(wide_dtype(weights.device))
    settled, _ = settle([weight_problem(weights)], weights, None, False, weights.dtype)
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
