"""Sums over equal-width bins: of events, and of every class of rows.

The result is the same in every run and on any number of threads; only on a GPU, for groups or without Triton, the last
digits may vary. All implementations follow the edge rule of `segments.bin_index`, which tests compare them with.
Values of rows of weight 0 are never read.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from torchcalib.ops.bin_sums.reference import class_formula, class_gradient, event_formula
from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused, gradient_of
from torchcalib.ops.segments import bin_index
from torchcalib.ops.softmax_stats import Rows, matrices

Noise = Literal["none", "labels", "shares"]
"""Whether two more sums estimate the sampling noise, for outcomes that are labels or shares; see `event_bins`."""


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
    """Sum over the events in each bin of confidence, separately for each group if there are `groups`.

    Args:
        confidence: `(..., N)` in [0, 1], floating. NaN falls in the first bin, and makes its sum NaN.
        outcome: `(..., N)` of any real dtype.
        weights: broadcastable to `(..., N)`, or None for all ones.
        ecd: `(..., N)` or None: a further quantity to sum.
        n_bins: B.
        right: see `segments.bin_index`.
        noise: also sum variances of the outcomes o of events of confidence p: w p (1 - p), and v w (with `copies`) or
            v w^2. For "labels" v is p (1 - p), for "shares" (o - p)^2.
        copies: whether weights are numbers of copies.
        groups: the group of every event, int64 in [0, G) and broadcastable to `(..., N)`; None for no groups.
        n_groups: G.
        backend: see `dispatch`.

    Returns:
        Weight, confidence, outcome, the two of `noise`, and ECD, if given: `(..., F, B)` in the dtype of sums; with
        groups `(..., G, F, B)`.

    Gradient: in confidence, outcome, weights and ECD for given bins, in reverse and forward mode, of any order. It is 0
    where the weight is 0; the sums of `noise` are constants.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    given = confidence, outcome, weights, ecd, None if groups is None else groups.expand_as(confidence)
    sums: Tensor = _events(*given, n_groups, n_bins, right, noise, copies, backend=backend)
    return sums


def class_bins(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    rows: Rows,
    *,
    from_logits: bool,
    n_bins: int,
    right: bool = False,
    noise: bool = False,
    copies: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Sum over the rows in each bin of each class, one class against the rest, for all classes in one pass.

    At most B - 1 entries of a row reach 1/B. They are put into their bins one by one. All other entries are in the
    first bin of their class, and are added as whole columns.

    Args:
        values: logits or probabilities `(..., N, C)`, as for `softmax_stats.rows`.
        target: labels `(..., N)`, int64.
        weights: `(..., N)` or None for all ones.
        rows: the result of `softmax_stats.rows` for the same rows.
        from_logits: whether `values` are logits.
        n_bins: B.
        right: see `segments.bin_index`.
        noise: also sum the variances of labels; see `event_bins`.
        copies: whether weights are numbers of copies.
        backend: see `dispatch`; float64 on the CPU runs by "torch".

    Returns:
        Weight, confidence, outcome and the two of `noise`, if given: `(..., C, F, B)` in the dtype of sums.

    Gradient: in `values` and `weights` for given bins, in reverse and forward mode, of any order. It is 0 in a row with
    a logit of +inf; the sums of `noise` are constants.
    """
    if weights is not None:
        weights = weights.to(wide_dtype(weights.device)).expand_as(target)
    # The confidence is a constant: its derivative is that of the entry in `values`.
    columns = values, target, weights, rows.top, rows.confidence.detach()
    sums: Tensor = _classes(*columns, from_logits, n_bins, right, noise, copies, backend=backend)
    return sums


def _event_sums(
    backend: Backend,
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor | None,
    n_groups: int,
    n_bins: int,
    right: bool,
    noise: Noise,
    copies: bool,
) -> Tensor:
    """Compute `event_bins` of tensors of one shape."""
    *lead, n = confidence.shape
    n_sums = 3 + 2 * (noise != "none") + (ecd is not None)
    shape = *lead, n_sums, n_groups * n_bins
    sums = torch.zeros(shape, dtype=wide_dtype(confidence.device), device=confidence.device)
    if confidence.numel():
        source = source_of("events", confidence.device.type, confidence.dtype, backend)
        columns = _by_series(n, confidence, outcome, weights, ecd, groups)
        source.event_sums(*columns, n_bins, right, noise, copies, sums.view(-1, *shape[-2:]))
    return sums if groups is None else sums.view(*lead, n_sums, n_groups, n_bins).movedim(-2, -3)


_ROW_OF = {0: 1, 1: 2, 3: -1}
"""The sum of confidence, outcome and ECD, by their positions among the arguments."""


def _event_gradient(
    _: Backend,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradients in confidence, outcome and ECD: that of the sum of the event's bin, times the weight."""
    confidence, weights, groups = arguments[0], arguments[2], arguments[4]
    n_bins, right = arguments[6], arguments[7]
    if 2 in needed:
        return gradient_of(event_formula, arguments, needed, grads)
    cell = bin_index(confidence, n_bins, right)
    if groups is not None:
        cell = groups * n_bins + cell
        grads = grads.movedim(-3, -2).flatten(-2)
    found = []
    for k in needed:
        slope = grads[..., _ROW_OF[k], :].gather(-1, cell)
        if weights is not None:
            slope = (slope * weights).masked_fill_(weights == 0, 0)
        found.append(slope.to(arguments[k].dtype))
    return found


_events = fused(_event_sums, event_formula, _event_gradient)


def _class_sums(
    backend: Backend,
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    n_bins: int,
    right: bool,
    noise: bool,
    copies: bool,
) -> Tensor:
    """Compute `class_bins`, one series after another."""
    *lead, _, n_classes = values.shape
    shape = n_classes, 3 + 2 * noise, n_bins
    sums = torch.zeros((*lead, *shape), dtype=wide_dtype(values.device), device=values.device)
    source = source_of("classes", values.device.type, values.dtype, backend)
    for k, matrix, columns in _series(values, target, weights, top, confidence):
        source.class_sums(matrix, *columns, from_logits, right, copies, sums.view(-1, *shape)[k])
    return sums


def _class_gradient(
    backend: Backend,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradient in `values` in chunks, or those in `values` and `weights` by the formula."""
    values, target, weights, top, confidence, from_logits, n_bins, right, _, copies = arguments
    if needed != [0]:
        given = values, target, weights, None, None, from_logits, n_bins, right, False, copies
        return gradient_of(class_formula, given, needed, grads[..., :3, :])  # the sums of noise are constants
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    upstream, filled = (x.unsqueeze(0).flatten(0, -3) for x in (grads[..., 1, :], out))
    source = source_of("classes", values.device.type, values.dtype, backend)
    fill = getattr(source, "class_gradient", class_gradient)  # Triton has none
    for k, matrix, (w, first, largest) in _series(values, weights, top, confidence):
        fill(matrix, w, first, largest, from_logits, right, upstream[k], filled[k])
    return [out]


_classes = fused(_class_sums, class_formula, _class_gradient)


def _series(values: Tensor, *columns: Tensor | None) -> Iterator[tuple[int, Tensor, list[Any]]]:
    """Yield the number of every series of `(..., N, C)`, its rows, and its part of columns `(..., N)`."""
    if not values.numel():
        return
    n = values.shape[-2]
    flat = _by_series(n, *columns)
    for held, matrix in matrices(values.detach()):
        for k in range(len(matrix) // n):
            series = held.start // n + k
            yield series, matrix[k * n : (k + 1) * n], [None if x is None else x[series] for x in flat]


def _by_series(n: int, *columns: Tensor | None) -> list[Tensor | None]:
    """Return columns `(..., N)` as `(S, N)`."""
    found = list(columns)
    for k, x in enumerate(columns):
        if x is not None:
            found[k] = x.detach().reshape(-1, n)
    return found
