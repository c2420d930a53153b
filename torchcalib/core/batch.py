"""States of metrics after a batch on an accelerator, and errors of a batch with gradients, by `ops.batch`.

Each operation on an accelerator takes the host several microseconds. `InputFormat.read` and the accumulators need many
of them for a batch of any kind. For labels, this module adds the batch to all states in a few operations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.events import Mode
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.state import Samples, SampleState, SumState
from torchcalib.core.sums import has_noise_flag
from torchcalib.ops.batch import (
    BinnedError,
    Columns,
    MeanScore,
    Plan,
    added,
    events,
    ranked,
    ranked_classes,
    uses_triton,
    value_with_gradient,
)
from torchcalib.ops.batch.formula import FIRST_SCORE, INVALID, WEIGHT, BinRule, Demand, Terms, plan, term_indices
from torchcalib.ops.bin_sums import Norm
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain, mode_of

T = TypeVar("T")


class Batch(NamedTuple):
    """Arguments of a call for a batch, and the backend of its operations."""

    input_format: InputFormat
    preds: Tensor
    target: Tensor
    weights: Tensor | None
    backend: Backend = "auto"


def states_after(
    input_format: InputFormat,
    kinds: Sequence[Any],
    states: Sequence[Tensor | None],
    preds: Tensor,
    target: Tensor,
    weights: Tensor | None,
    backend: Backend = "auto",
) -> list[Tensor] | None:
    """Return the states of metrics after a batch, whose invalid rows are counted and ignored, as views of one tensor.

    A state may be None for the state without data, if all states before it are.
    Return None if the batch needs derivatives or has no labels, or if `ops.batch` lacks sums of a state.
    `InputFormat.read` then converts the batch. It also does so on the CPU, unless `backend` is given.
    """
    if not _takes(input_format, preds, target, backend):
        return None
    if not all(has_sums_of_batch(kind, input_format.task) for kind in kinds) or not is_plain(preds, target, weights):
        return None
    batch = _columns_of(input_format, preds, target, weights)
    if batch is None:
        return None
    copies = weights is None or not weights.is_floating_point()
    given = [state for state in states if state is not None]
    before = given[0] if len(given) == 1 else torch.cat(given) if given else None
    after = added(before, batch, _plan(tuple(kinds), input_format.task, copies, preds.device), backend)
    return list(torch.split(after, [kind.size for kind in kinds]))


def error_of_batch(
    input_format: InputFormat,
    kind: Any,
    norm: Norm | Literal["score"] | None,
    state: Tensor | None,
    preds: Tensor,
    target: Tensor,
    weights: Tensor | None,
    formula: Callable[..., Tensor],
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor] | None:
    """Return the norm of the gaps over bins of a batch, with its gradient, and the state after it, by Triton.

    The norm "score" is the mean of a score over a batch, which needs a state. Invalid rows are ignored as in
    `states_after`. Without a state they make the error NaN, and the second result is the state of the batch. Return
    None for other batches and devices, and if `norm` is None. `formula` is the same differentiable function of the
    format, predictions, targets and weights.
    """
    task = input_format.task
    if norm is None or not has_sums_of_batch(kind, task):
        return None
    coefficients = kind.accumulator.demand(task, True).coefficients
    if norm == "score" and not any(coefficients[:-1]):
        preds = preds.detach()  # hits have no gradient
    columns = _columns_with_gradient(input_format, preds, target, weights, backend)
    if columns is None:
        return None
    copies = weights is None or not weights.is_floating_point()
    plan = _plan((kind,) if state is None else (kind, kind), task, copies, preds.device)
    dtype = torch.promote_types(preds.dtype, torch.float32) if state is None else torch.float64
    sums = slice(kind.size - math.prod(kind.shape), kind.size)
    wanted = MeanScore(coefficients, sums) if norm == "score" else BinnedError(norm, sums, state is not None, dtype)
    of_values = _of_values(input_format, columns, formula)
    value, after = value_with_gradient(state, columns, plan, wanted, of_values, backend)
    return value, after[-kind.size :]


def events_of_batch(
    batch: Batch, mode: Mode, formula: Callable[[Predictions], tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return confidences, outcomes and weights of the events of a batch `(N,)`, float64, by Triton.

    Rows without weight have the confidence 0.5 and the outcome 0. Invalid rows have the weight NaN. Only confidences
    have a gradient. Return None for other batches, modes and devices. `formula` is the same differentiable function of
    the predictions.
    """
    if mode not in ("positive", "top_label"):
        return None
    found = columns_with_gradient(batch, formula)
    return None if found is None else events(found[0], mode == "top_label", found[1], batch.backend)


def columns_with_gradient(
    batch: Batch, formula: Callable[[Predictions], T]
) -> tuple[Columns, Callable[[Tensor], T]] | None:
    """Return the columns of a batch of labels that Triton reads, whose predictions may have a gradient.

    The second result is `formula`, a function of the predictions, as a function of the values of the columns. Invalid
    rows then have the weight NaN. Return None for other batches and devices.
    """
    columns = _columns_with_gradient(*batch)
    if columns is None:
        return None

    def of_batch(how: InputFormat, *given: Any) -> T:
        return formula(how.read(*given, batch_shape=(), wait=False))

    return columns, _of_values(batch.input_format, columns, of_batch)


def _columns_with_gradient(
    input_format: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None, backend: Backend
) -> Columns | None:
    """Return the columns of a batch of labels that Triton reads, whose predictions may have a gradient; else None."""
    if not _takes(input_format, preds, target, backend) or not is_plain(target, weights):
        return None
    if mode_of(preds) == "formula" or not uses_triton(preds, backend):
        return None
    return _columns_of(input_format, preds, target, weights)


def _of_values(input_format: InputFormat, columns: Columns, formula: Callable[..., T]) -> Callable[[Tensor], T]:
    """Return a function of the format, predictions, targets and weights as one of the values of columns."""
    how = input_format if input_format.task == "binary" else replace(input_format, class_axis=-1)
    return lambda values: formula(how, values, columns.target, columns.weights)


def samples_of(
    input_format: InputFormat,
    kind: Any,
    preds: Tensor,
    target: Tensor,
    weights: Tensor | None,
    backend: Backend = "auto",
) -> Samples | None:
    """Return the state of a rank-based metric for a batch of labels in few launches of Triton.

    Return None for other batches and devices, as `states_after` does.
    """
    if weights is not None or not _takes(input_format, preds, target, backend):
        return None
    if type(kind) is not SampleState:
        return None
    mode, is_own = kind.accumulator.mode, type(kind.accumulator) is ExactSample and not kind.accumulator.with_ecd
    if mode not in ("positive", "top_label") and (mode, input_format.task) != ("classwise", "multiclass"):
        return None
    if not is_own or not is_plain(preds, target) or not uses_triton(preds, backend):
        return None
    columns = _columns_of(input_format, preds, target, None)
    lead = columns.values.shape[1:] if mode == "classwise" and columns is not None else ()
    if columns is None or kind.leading_shape != tuple(lead):
        return None
    if mode == "classwise":
        score, outcome, n_ignored = ranked_classes(columns)
    else:
        score, outcome, n_ignored = ranked(columns, mode == "top_label", backend)
    return Samples([score], [outcome], [outcome.new_empty((*lead, 0), dtype=torch.int64)], n_ignored)


def _columns_of(input_format: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None) -> Columns | None:
    """Return the columns of a batch of labels; None if targets are annotator counts."""
    columns = input_format.columns(preds, target, weights)
    options = input_format.from_logits, input_format.ignore_index, SUM_TOLERANCE[preds.dtype]
    return None if columns is None else Columns(*columns, *options)


def has_sums_of_batch(kind: Any, task: Task) -> bool:
    """Return whether the operations of `ops.batch` can add a batch of labels to a state."""
    has_demand = type(kind) is SumState and len(kind.shape) == 2 and hasattr(kind.accumulator, "demand")
    return has_demand and kind.accumulator.demand(task, True) is not None


def _takes(input_format: InputFormat, preds: Tensor, target: Tensor, backend: Backend) -> bool:
    """Return whether targets are labels of binary or multi-class rows with the usual rules for values.

    Return False on the CPU, unless `backend` is given.
    """
    if preds.is_cpu and backend == "auto":
        return False
    has_usual_rules = input_format.nan_policy == "raise" and input_format.validate_args
    has_own_classes = input_format.task != "multilabel" and input_format.positive_classes is None
    has_values = preds.numel() > 0 and preds.dtype in SUM_TOLERANCE and wide_dtype(preds.device) == torch.float64
    are_tensors = type(preds) is type(target) is Tensor
    are_labels = are_tensors and input_format.min_annotators < 2 and not target.is_floating_point()
    return has_usual_rules and has_own_classes and has_values and are_labels


@lru_cache(maxsize=64)
def _plan(kinds: tuple[Any, ...], task: Task, copies: bool, device: torch.device) -> Plan:
    """Return the sums that states consist of. `copies` is False for floating weights."""
    demands: list[Demand] = [kind.accumulator.demand(task, copies) for kind in kinds]
    rules = tuple(dict.fromkeys(demand.rule for demand in demands if demand.rule is not None))
    terms: list[Terms] = []
    for kind, demand in zip(kinds, demands, strict=True):
        flag: list[Terms] = [() if copies else ((WEIGHT, 1.0),)] if has_noise_flag(kind.accumulator) else []
        terms += [((INVALID, 1.0),), (), *flag, *_sums(demand, rules)]
    return plan(rules, terms, device)


def _sums(demand: Demand, rules: tuple[BinRule, ...]) -> list[Terms]:
    """Return the terms of the sums of a state."""
    if demand.rule is None:
        score = tuple((FIRST_SCORE + k, factor) for k, factor in enumerate(demand.coefficients) if factor)
        return [((WEIGHT, 1.0),), score]
    return [((k, 1.0),) for quantity in demand.quantities for k in term_indices(rules, demand.rule, quantity)]
