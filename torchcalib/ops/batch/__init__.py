"""Sums over one batch for all metrics that consist of sums: checks of values, statistics of rows, bins and scores.

`added` adds the sums of a batch to states without waiting for the device. With Triton one launch reads binary
predictions, and another one adds to the states. Multi-class predictions need one or two more for `softmax_stats`.
`value_with_gradient`, `events` and `ranked` need Triton. They compute an error or a mean score with its gradient,
events with their gradient, and the samples of rank-based metrics.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.batch.formula import BinnedError, Columns, MeanScore, Plan
from torchcalib.ops.dispatch import Backend, choose
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats import Detail, scores_and_tops

__all__ = [
    "BinnedError",
    "Columns",
    "MeanScore",
    "Plan",
    "added",
    "events",
    "ranked",
    "ranked_classes",
    "uses_triton",
    "value_with_gradient",
    "without_gradient",
]


def added(states: Tensor | None, columns: Columns, plan: Plan, backend: Backend = "auto") -> Tensor:
    """Return states `(n,)`, float64, one after another, plus those of a batch. No argument has a gradient.

    `states` are the last ones of the plan. Those before them have no data yet; None if all have none.
    Rows with invalid values are counted, and have no effect on other sums. Results have the same bits in every call
    with Triton. In plain torch on a GPU the last digits can vary.
    """
    source = import_module(f"{__name__}.{'triton' if uses_triton(columns.values, backend) else 'plain'}")
    result: Tensor = source.added(states, *_columns_and_rows(columns, _detail(plan), backend), plan)
    return result


def uses_triton(values: Tensor, backend: Backend = "auto") -> bool:
    """Return whether Triton reads the rows of a batch."""
    return choose("rows", values.device.type, values.numel(), backend) == "triton"


def value_with_gradient(
    states: Tensor | None,
    columns: Columns,
    plan: Plan,
    wanted: BinnedError | MeanScore,
    formula: Callable[[Tensor], Tensor],
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return an error or a mean score of a batch with Triton, with its gradient, and the result of `added`.

    Multi-class predictions and their gradient need seven launches, binary ones four. `formula` is the same function of
    the values in differentiable operations, for derivatives of higher order.
    """
    numbers = without_gradient(columns)
    value, after, *_ = _value(columns.values, states, numbers, plan, wanted, formula, backend=backend)
    return value, after


def events(
    columns: Columns, of_top: bool, formula: Callable[[Tensor], tuple[Tensor, ...]], backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidences, outcomes and weights of the events of a batch `(N,)` with Triton, each float64.

    They are 0.5, 0 and 0 in rows without weight, and the weight of an invalid row is NaN. Only confidences have a
    gradient. It must be 0 in rows without weight. `formula` is the same function of the values in differentiable
    operations, for derivatives of higher order. Multi-class predictions and their gradient need four launches, binary
    ones two.
    """
    numbers = without_gradient(columns)
    confidence, outcome, weight, *_ = _events(columns.values, numbers, of_top, formula, backend=backend)
    return confidence, outcome, weight


def ranked(columns: Columns, of_top: bool, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Return scores `(N,)`, NaN for ignored and invalid rows, and outcomes `(N,)`, uint8, of events with Triton.

    Scores are those of `events.reduce_to_scores`. The third result is [number of invalid rows, 0], float64.
    """
    triton: Any = import_module(f"{__name__}.triton")
    columns, rows = _columns_and_rows(columns, "top", backend)
    found: tuple[Tensor, Tensor, Tensor] = triton.ranked(columns, rows, of_top)
    return found


def ranked_classes(columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores and outcomes of the events of all classes `(C, N)` with Triton, as for `ranked`.

    Scores are probabilities, or log-odds of logits; see `ops.log_odds`.
    """
    triton: Any = import_module(f"{__name__}.triton")
    found: tuple[Tensor, Tensor, Tensor] = triton.ranked_classes(without_gradient(columns))
    return found


def _value_and_rows(
    backend: Backend, _: Tensor, states: Tensor | None, columns: Columns, plan: Plan, wanted: Any, __: Any
) -> tuple[Tensor, ...]:
    """Return the value, states, derivatives in the sums, and the scores and top classes of multi-class rows."""
    triton: Any = import_module(f"{__name__}.triton")
    columns, rows = _columns_and_rows(columns, _detail(plan) if plan.scores else "confidence", backend)
    compute = triton.binned_error if isinstance(wanted, BinnedError) else triton.mean_score
    return (*compute(states, columns, rows, plan, wanted), *(rows or ()))


def _gradient_of_value(
    _: Backend, arguments: list[Any], results: tuple[Tensor, ...], needed: list[int], upstream: Tensor
) -> list[Tensor]:
    triton: Any = import_module(f"{__name__}.triton")
    columns, plan, wanted = arguments[2:5]
    slopes, rows = results[2], results[3:] or None
    if isinstance(wanted, BinnedError):
        return [triton.binned_gradient(columns, rows, plan.rules[0], slopes, upstream, wanted) for _ in needed]
    return [triton.score_gradient(columns, rows, wanted, slopes, upstream) for _ in needed]


_value = fused(_value_and_rows, lambda values, *others: (others[-1](values),), _gradient_of_value)


def _events_and_rows(backend: Backend, _: Tensor, columns: Columns, of_top: bool, __: Any) -> tuple[Tensor, ...]:
    """Return the events of a batch, and the scores and top classes of multi-class rows."""
    triton: Any = import_module(f"{__name__}.triton")
    columns, rows = _columns_and_rows(columns, "confidence", backend)
    return (*triton.events(columns, rows, of_top), *(rows or ()))


def _gradient_of_events(
    _: Backend, arguments: list[Any], results: tuple[Tensor, ...], needed: list[int], upstream: Tensor
) -> list[Tensor]:
    triton: Any = import_module(f"{__name__}.triton")
    _, columns, of_top, _ = arguments
    rows = results[3:]
    return [triton.events_gradient(columns, rows or None, of_top, results[2], upstream) for _ in needed]


_events = fused(_events_and_rows, lambda values, *others: others[-1](values), _gradient_of_events)


def _columns_and_rows(
    columns: Columns, detail: Detail, backend: Backend
) -> tuple[Columns, tuple[Tensor, Tensor] | None]:
    """Return the columns with labels that the backend reads, and scores and top classes of multi-class rows."""
    values, target = columns.values, columns.target
    target = _integers(target) if uses_triton(values, backend) else target.long()
    options = columns.from_logits, columns.tolerance, detail
    of_rows = scores_and_tops(values, target, *options, backend=backend) if values.dim() > 1 else None
    return columns._replace(target=target), of_rows


def without_gradient(columns: Columns) -> Columns:
    """Return columns for Triton, with labels without the dtype bool, and values without gradient."""
    return columns._replace(values=columns.values.detach(), target=_integers(columns.target))


def _integers(target: Tensor) -> Tensor:
    """Return labels without the dtype bool, which Triton does not load."""
    return target.view(torch.uint8) if target.dtype == torch.bool else target


def _detail(plan: Plan) -> Detail:
    if "neg_entropy" in plan.scores:
        return "entropy"
    return "squares" if "squared_error" in plan.scores else "confidence" if "log_prob" in plan.scores else "top"
