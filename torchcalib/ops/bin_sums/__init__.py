"""Sums of weight, confidence and outcome over equal-width bins of the confidence.

An event is a pair of confidence and outcome. `event_bins` sums given events, and `class_bins` the one-vs-rest events of
every class. `segments.bin_index` defines the bins. Results do not depend on the number of threads. On a GPU the last
digits can vary between calls with `groups`, and without Triton.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import plain
from torchcalib.ops.bin_sums.formula import N_NOISE, Bins, Noise, Norm, class_formula, event_formula
from torchcalib.ops.bin_sums.plain import ClassRows, EventColumns
from torchcalib.ops.dispatch import Backend, choose, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused, gradient_of
from torchcalib.ops.segments import bin_index

if TYPE_CHECKING:
    from torchcalib.ops.softmax_stats import RowStatistics

__all__ = [
    "Bins",
    "Noise",
    "Norm",
    "bin_errors",
    "class_bins",
    "class_sums",
    "event_bins",
    "flatten_batch",
    "has_error_kernel",
]


def event_bins(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None = None,
    ecd: Tensor | None = None,
    *,
    n_bins: int,
    right: bool = False,
    noise: Noise = "none",
    copies: bool = True,
    groups: Tensor | None = None,
    n_groups: int = 1,
    backend: Backend = "auto",
) -> Tensor:
    """Return F sums over the events in every bin, `(..., F, B)`, or `(..., G, F, B)` with groups.

    The sums are weight, confidence, outcome, four for `noise` unless "none", and `ecd` if given. `confidence` is
    `(..., N)` in [0, 1]; NaN is added to the first bin, whose sum is then NaN. Events with weight 0 are ignored. `ecd`
    is the entropic calibration difference of every event. `groups` are int64 in [0, G).

    Let an event have confidence p, outcome o and weight w. The first sum of `noise` is of w p (1 - p). The second sums
    w v if weights are numbers of `copies`, and w^2 v otherwise. The variance v is p (1 - p) for "labels" and (o - p)^2
    for "shares". The third sum is of w if weights are `copies`, and of w^2 otherwise, and the fourth of w (o - p)^2.

    Gradient: in `confidence`, `outcome`, `weights` and `ecd`, in reverse and forward mode and of any order. Bin indices
    and the first two sums of `noise` are constants. The gradient is 0 where the weight is 0.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    given = confidence, outcome, weights, ecd, None if groups is None else groups.expand_as(confidence)
    sums: Tensor = _events(*given, Bins(n_bins, right, noise, copies, n_groups), backend=backend)
    return sums


def class_bins(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    rows: "RowStatistics",
    *,
    from_logits: bool,
    n_bins: int,
    right: bool = False,
    noise: bool = False,
    copies: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Return F sums over the one-vs-rest events of every class in every bin, `(..., C, F, B)` of dtype `wide_dtype`.

    The sums are those of `event_bins`, with `noise` as for "labels". At most B probabilities of a row are 1/B or more,
    because their sum is 1. These are added to their bins one by one. All other probabilities are in the first bin of
    their class, and are summed over whole columns. `rows` is the result of `softmax_stats.rows` for the same rows.
    Float64 on the CPU supports only the backend "torch".

    Gradient: in `values` and `weights`, in reverse and forward mode and of any order. Bin indices and the first two
    sums of `noise` are constants. The gradient is 0 in a row with a logit of +inf.
    """
    if weights is not None:
        weights = weights.to(wide_dtype(weights.device)).expand_as(target)
    # Detach the confidence: the gradient in it is already part of the gradient in `values`.
    columns = values, target, weights, rows.top, rows.confidence.detach()
    bins = Bins(n_bins, right, "labels" if noise else "none", copies)
    sums: Tensor = _classes(*columns, from_logits, bins, backend=backend)
    return sums


def bin_errors(sums: Tensor, norm: Norm, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the norm of the gaps of bins `(...)` from their sums `(..., F, B)`, in one launch of Triton.

    With share_b of the samples in bin b, "l1" is sum_b share_b |gap_b|, "l2" the root of sum_b share_b gap_b^2, and
    "signed" sum_b share_b gap_b. "mean" is the mean of |gap_b| over bins with samples, and "max" the largest one. The
    error is NaN without samples. "debiased_l1" and "debiased_l2" replace gap_b^2 by gap_b^2 - v_b with the variance v_b
    of the gap, and need the sums of `noise`; see `BinStats.gap_variance`. The launch also computes the gradient.
    `formula` is the same function of the sums in differentiable operations, for derivatives of higher order.
    """
    errors: Tensor = _errors(sums, norm, formula)[0]
    return errors


def has_error_kernel(sums: Any) -> bool:
    """Return whether `bin_errors` can compute errors from sums."""
    is_on_device = isinstance(sums, Tensor) and not sums.is_cpu and not torch.compiler.is_compiling()
    return is_on_device and choose("events", sums.device.type, sums.numel()) == "triton"


def _fill_errors(_: Backend, sums: Tensor, norm: Norm, __: Any) -> tuple[Tensor, Tensor]:
    from torchcalib.ops.bin_sums import triton

    found: tuple[Tensor, Tensor] = triton.bin_errors(sums.detach(), norm)
    return found


def _gradient_of_errors(
    _: Backend, __: list[Any], results: tuple[Tensor, ...], ___: list[int], grads: Tensor
) -> list[Tensor]:
    return [results[1] * grads[..., None, None]]


_errors = fused(_fill_errors, lambda sums, _, formula: (formula(sums),), _gradient_of_errors)


def _event_sums(
    backend: Backend,
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor | None,
    bins: Bins,
) -> Tensor:
    if not confidence.numel():
        return event_formula(confidence, outcome, weights, ecd, groups, bins)
    *lead, n = confidence.shape
    shape = 3 + N_NOISE * (bins.noise != "none") + (ecd is not None), bins.n_groups * bins.n_bins
    source = source_of("events", confidence.device.type, confidence.dtype, confidence.numel(), backend)
    events = EventColumns(*flatten_batch(n, confidence, outcome, weights, ecd, groups))  # type: ignore[arg-type]
    n_series, strides = len(events.confidence), events.confidence.stride()
    sums: Tensor
    has_labels = confidence.is_cpu and bins.noise != "shares" and not outcome.is_floating_point()
    if has_labels and groups is weights is ecd is None and strides == events.outcome.stride() == (1, n_series):
        found = source.column_sums(events.confidence.T, events.outcome.T, bins, shape[0])
        if found is not None:
            sums = found.view(shape[0], *lead, shape[1]).movedim(0, -2)
            return sums
    sums = source.event_sums(events, bins, shape)
    if groups is None:
        return sums.view(*lead, *shape)
    return sums.view(*lead, shape[0], bins.n_groups, bins.n_bins).movedim(-2, -3)


# Position of confidence, outcome and ECD among the arguments of `_events`: row of their sum in the result.
_SUM_ROW = {0: 1, 1: 2, 3: -1}


def _event_gradient(
    _: Backend,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradients in confidence, outcome and ECD: the weight times the gradient of the sum over the bin."""
    confidence, outcome, weights, _, groups, bins = arguments
    if 2 in needed:
        return gradient_of(event_formula, arguments, needed, grads)
    cell = bin_index(confidence, bins.n_bins, bins.right)
    if groups is not None:
        cell = groups * bins.n_bins + cell
        grads = grads.movedim(-3, -2).flatten(-2)
    input_grads = []
    for k in needed:
        slope = grads[..., _SUM_ROW[k], :].gather(-1, cell)
        if bins.noise != "none" and k < 2:  # of w (o - p)^2
            residual = outcome.to(slope.dtype) - confidence.to(slope.dtype)
            slope = slope + (4 * k - 2) * residual * grads[..., 6, :].gather(-1, cell)
        if weights is not None:
            slope = (slope * weights).masked_fill_(weights == 0, 0)
        input_grads.append(slope.to(arguments[k].dtype))
    return input_grads


_events = fused(_event_sums, event_formula, _event_gradient)


def class_sums(
    backend: Backend,
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    bins: Bins,
) -> Tensor:
    """Return the result of `class_bins`, given the top class of each row and its probability."""
    *lead, _, n_classes = values.shape
    shape = n_classes, 3 + N_NOISE * (bins.noise != "none"), bins.n_bins
    sums = torch.zeros((*lead, *shape), dtype=wide_dtype(values.device), device=values.device)
    source = source_of("classes", values.device.type, values.dtype, values.numel(), backend)
    for k, matrix, (labels, *columns) in _batch_elements(values, target, weights, top, confidence):
        source.class_sums(ClassRows(matrix, from_logits, *columns), labels, bins, sums.view(-1, *shape)[k])
    return sums


def _class_gradient(
    _: Backend,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradient in `values`; if `weights` need a gradient, differentiate `class_formula` instead."""
    values, target, weights, top, confidence, from_logits, bins = arguments
    if needed != [0]:
        given = values, target, weights, None, None, from_logits, bins
        return gradient_of(class_formula, given, needed, grads)
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    upstream, filled = grads.unsqueeze(0).flatten(0, -4), out.unsqueeze(0).flatten(0, -3)
    for k, matrix, (labels, *columns) in _batch_elements(values, target, weights, top, confidence):
        plain.class_gradient(ClassRows(matrix, from_logits, *columns), labels, bins.right, upstream[k], filled[k])
    return [out]


_classes = fused(class_sums, class_formula, _class_gradient)


def _batch_elements(values: Tensor, *columns: Tensor | None) -> Iterator[tuple[int, Tensor, list[Any]]]:
    """Yield the index of every batch element, its rows `(N, C)` and its part `(N,)` of each column `(..., N)`."""
    if not values.numel():
        return
    from torchcalib.ops.softmax_stats import matrices

    n = values.shape[-2]
    flat = flatten_batch(n, *columns)
    for part, matrix in matrices(values.detach()):
        for k in range(len(matrix) // n):
            element = part.start // n + k
            yield element, matrix[k * n : (k + 1) * n], [None if x is None else x[element] for x in flat]


def flatten_batch(n: int, *columns: Tensor | None) -> list[Tensor | None]:
    """Return columns `(..., n)` as `(S, n)`, without gradient."""
    flattened = list(columns)
    for k, x in enumerate(columns):
        if x is not None:
            flattened[k] = x.detach().reshape(-1, n)
    return flattened
