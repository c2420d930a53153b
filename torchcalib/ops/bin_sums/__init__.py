"""Sums over equal-width bins without contention: the same result in every run, on any number of threads.

One rule says which bin a value falls in, `bin_sums.bin_index`; implementations repeat it and are held to it by tests.
What rows of weight 0 hold is never read.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, choose, implementation
from torchcalib.ops.logs import spread_infinite_logits, through_softmax, wide_dtype
from torchcalib.ops.operation import is_plain, operation
from torchcalib.ops.segments import bin_index, bin_sums
from torchcalib.ops.softmax_stats import Rows, matrices, source_of

Noise = Literal["none", "labels", "shares"]
"""What two more sums say of chance, for outcomes that are labels or shares of votes; see `event_bins`."""


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
    """Sum over the events in each bin of their confidence, with `groups` those of each group apart.

    Args:
        confidence: `(..., N)` in [0, 1], floating. NaN falls in the first bin, and makes its sum NaN.
        outcome: `(..., N)` of any real dtype.
        weights: broadcastable to `(..., N)`, or None for all ones.
        ecd: `(..., N)` or None: a further quantity to sum.
        n_bins: B.
        right: see `bin_sums.bin_index`.
        noise: sum the variances of the outcomes o of events of confidence p too: w p (1 - p), and v w (with `copies`)
            or v w^2. Of "labels" v is p (1 - p), of "shares" (o - p)^2.
        copies: whether weights are numbers of copies.
        groups: the group of every event, int64 in [0, G) and broadcastable to `(..., N)`; None for no groups.
        n_groups: G. However many there are, every event is read once.
        backend: see `dispatch`.

    Returns:
        Weight, confidence, outcome, the two of `noise`, and ECD, if given: `(..., F, B)` in the dtype of sums; with
        groups `(..., G, F, B)`.

    Gradient: in all but the bin and the two of `noise`; a constant where the weight is 0. In reverse and in forward
    mode, of any order.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    # The compiler takes the operation as it is, and no function that has a forward mode.
    compiled = torch.compiler.is_compiling()
    take = event_sums.direct if compiled or is_plain(confidence, outcome, weights, ecd) else _EventBins.apply
    groups = None if groups is None else groups.expand_as(confidence)
    sums: Tensor = take(confidence, outcome, weights, ecd, groups, n_groups, n_bins, right, noise, copies, backend)
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
    """Sum over the rows in each bin of each class: one against the rest, for all classes in one pass.

    At most B - 1 entries of a row reach 1/B. These are put into their bins one by one; all others are in the first bin
    of their class, and add up as columns do.

    Args:
        values: logits or probabilities `(..., N, C)`, as `row_op.rows` reads them.
        target: labels `(..., N)`, int64.
        weights: `(..., N)` or None for all ones.
        rows: what `row_op.rows` found in the same rows.
        from_logits: whether `values` are logits.
        n_bins: B.
        right: see `bin_sums.bin_index`.
        noise: sum the variances of labels too; see `event_bins`.
        copies: whether weights are numbers of copies.
        backend: see `dispatch`; float64 on the CPU is read by "torch".

    Returns:
        Weight, confidence, outcome and, if asked for, the two of `noise`: `(..., C, F, B)` in the dtype of sums.

    Gradient: in `values` and `weights` for a given bin, in reverse and in forward mode, of any order; 0 in a row that
    holds the logit +inf, and in the two of `noise`.
    """
    if weights is not None:
        weights = weights.to(wide_dtype(weights.device)).expand_as(target)
    take = class_sums.direct if torch.compiler.is_compiling() or is_plain(values, weights) else _ClassBins.apply
    # A constant: the derivative of q_top is taken through `values`, as that of every other entry.
    sums: Tensor = take(
        values, target, weights, rows.top, rows.confidence.detach(), from_logits, n_bins, right, noise, copies, backend
    )
    return sums


# Events.


@operation(
    "event_sums(Tensor confidence, Tensor outcome, Tensor? weights, Tensor? ecd, Tensor? groups, int n_groups, "
    "int n_bins, bool right, str noise, bool copies, str backend) -> Tensor",
    fake=lambda confidence, outcome, weights, ecd, groups, n_groups, n_bins, right, noise, copies, backend: (  # noqa: ARG005
        confidence.new_empty(
            _shape_of_sums(confidence, ecd, groups, n_groups, n_bins, noise), dtype=wide_dtype(confidence.device)
        )
    ),
)
def event_sums(
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
    backend: Backend,
) -> Tensor:
    """Return what `event_bins` says, of tensors of one shape."""
    columns = [None if x is None else x.detach() for x in (confidence, outcome, weights, ecd, groups)]
    shape = _shape_of_sums(confidence, ecd, groups, n_groups, n_bins, noise)
    sums = torch.zeros(shape, dtype=wide_dtype(confidence.device), device=confidence.device)
    if confidence.numel():
        source = implementation("bins", choose("bins", confidence.device, backend).backend)
        n = confidence.shape[-1]
        *series, of_groups = [None if x is None else x.reshape(-1, n) for x in columns]
        if of_groups is None:
            source.event_sums(*series, right, noise, copies, sums.view(-1, *sums.shape[-2:]))
        else:
            source.group_sums(*series, of_groups, right, noise, copies, sums.view(-1, *sums.shape[-3:]))
    return sums


def _shape_of_sums(
    confidence: Tensor, ecd: Tensor | None, groups: Tensor | None, n_groups: int, n_bins: int, noise: Noise
) -> tuple[int, ...]:
    lead = (*confidence.shape[:-1], *(() if groups is None else (n_groups,)))
    return (*lead, _n_sums(ecd is not None, noise != "none"), n_bins)


def _cell(confidence: Tensor, groups: Tensor | None, n_bins: int, right: bool) -> Tensor:
    """Return the bin of every event, those of one group after those of the other."""
    index = bin_index(confidence, n_bins, right)
    return index if groups is None else groups * n_bins + index


def _n_sums(has_ecd: bool, has_noise: bool) -> int:
    return 3 + 2 * has_noise + has_ecd


def _differentiable(of_sums: Tensor, has_ecd: bool) -> Tensor:
    """Return, of `(..., F, B)`, those of weight, confidence, outcome and ECD."""
    parts = of_sums.unbind(-2)
    return torch.stack((*parts[:3], *(parts[-1:] if has_ecd else ())), -2)


def _with_constants(of_sums: Tensor, noise: bool) -> Tensor:
    """Return the same with zeros for the two of noise."""
    if not noise:
        return of_sums
    zeros = torch.zeros_like(of_sums[..., :2, :])
    return torch.cat((of_sums[..., :3, :], zeros, of_sums[..., 3:, :]), -2)


def _event_gradient(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor | None,
    n_bins: int,
    right: bool,
    noise: bool,
    grads: Tensor,
) -> list[Tensor | None]:
    """Return the gradients in the first four, by operations that have derivatives of their own."""
    grads = _differentiable(grads, ecd is not None) if noise else grads
    if groups is not None:
        grads = grads.movedim(-3, -2)
        grads = grads.reshape(*grads.shape[:-2], -1)
    index = _cell(confidence, groups, n_bins, right).unsqueeze(-2)
    at = grads.gather(-1, index.expand(*index.shape[:-2], grads.shape[-2], index.shape[-1])).unbind(-2)
    columns = [torch.ones_like(confidence), confidence, outcome, *(() if ecd is None else (ecd,))]
    of_weights = None
    if weights is not None:
        added = [column.to(grad.dtype) * grad for column, grad in zip(columns, at, strict=True)]
        of_weights = torch.stack(added).sum(0).masked_fill(weights == 0, 0)
        at = tuple((grad * weights).masked_fill(weights == 0, 0) for grad in at)
    of_columns = [
        grad.to(column.dtype) if column.is_floating_point() else None
        for column, grad in zip(columns[1:], at[1:], strict=True)
    ]
    return [*of_columns[:2], of_weights, of_columns[2] if ecd is not None else None]


def _keep_events(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *columns, ctx.n_groups, ctx.n_bins, ctx.right, ctx.noise, _, _ = inputs
    ctx.save_for_backward(*columns)


def _events_backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    confidence, outcome, weights, ecd, groups = ctx.saved_tensors
    options = ctx.n_bins, ctx.right, ctx.noise != "none"
    found = _event_gradient(confidence, outcome, weights, ecd, groups, *options, grads)
    wanted = (grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None,) * 7)


torch.library.register_autograd("torchcalib::event_sums", _events_backward, setup_context=_keep_events)


class _EventBins(torch.autograd.Function):
    """The operation for `torch.func` and forward mode, which know no derivative of a registered one."""

    generate_vmap_rule = True
    backward = staticmethod(_events_backward)

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """Return the sums."""
        sums: Tensor = event_sums.direct(*arguments)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the derivatives are made of."""
        _keep_events(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Return the sums of what each event adds."""
        confidence, outcome, weights, ecd, groups = ctx.saved_tensors
        wide = wide_dtype(confidence.device)
        changes = [None, *tangents[:2], *(() if ecd is None else (tangents[3],))]
        values = [torch.ones_like(confidence), confidence, outcome, *(() if ecd is None else (ecd,))]
        columns = []
        for value, change in zip(values, changes, strict=True):
            column = torch.zeros_like(confidence, dtype=wide)
            if change is not None and change.is_floating_point():
                column = column + (change.to(wide) if weights is None else change.to(wide) * weights)
            if weights is not None and tangents[2] is not None:
                column = column + value.to(wide) * tangents[2]
            columns.append(column if weights is None else column.masked_fill(weights == 0, 0))
        index = _cell(confidence, groups, ctx.n_bins, ctx.right)
        sums = bin_sums(index, columns, ctx.n_bins if groups is None else ctx.n_groups * ctx.n_bins)
        if groups is not None:
            sums = sums.reshape(*sums.shape[:-1], ctx.n_groups, ctx.n_bins).movedim(-2, -3)
        return _with_constants(sums, ctx.noise != "none")


# Classes.


@operation(
    "class_sums(Tensor values, Tensor target, Tensor? weights, Tensor top, Tensor confidence, bool from_logits, "
    "int n_bins, bool right, bool noise, bool copies, str backend) -> Tensor",
    fake=lambda values, target, weights, top, confidence, from_logits, n_bins, right, noise, copies, backend: (  # noqa: ARG005
        values.new_empty(
            (*values.shape[:-2], values.shape[-1], _n_sums(False, noise), n_bins), dtype=wide_dtype(values.device)
        )
    ),
)
def class_sums(
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
    backend: Backend,
) -> Tensor:
    """Return what `class_bins` says."""
    *lead, _, n_classes = values.shape
    shape = n_classes, _n_sums(False, noise), n_bins
    sums = torch.zeros((*lead, *shape), dtype=wide_dtype(values.device), device=values.device)
    source = source_of("bins", values, backend)
    for k, (matrix, columns) in enumerate(_series(values, target, weights, top, confidence)):
        source.class_sums(matrix, *columns, from_logits, right, copies, sums.view(-1, *shape)[k])
    return sums


@operation(
    "class_sums_backward(Tensor values, Tensor target, Tensor? weights, Tensor top, Tensor confidence, Tensor grads, "
    "bool from_logits, bool right, str backend) -> Tensor",
    fake=lambda values, *_: values.new_empty(values.shape),
)
def class_sums_backward(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    grads: Tensor,
    from_logits: bool,
    right: bool,
    backend: Backend,
) -> Tensor:
    """Return the gradient in `values`; `grads` is that in the sums of confidence, `(..., C, B)`."""
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if not out.numel():
        return out
    source = source_of("bins", values, backend)
    upstream, filled = grads.detach().reshape(-1, *grads.shape[-2:]), out.view(-1, *out.shape[-2:])
    for k, (matrix, columns) in enumerate(_series(values, target, weights, top, confidence)):
        source.class_sums_backward(matrix, *columns[1:], upstream[k], from_logits, right, filled[k])
    return out


def _series(values: Tensor, *columns: Tensor | None) -> Any:
    """Yield every matrix of `(..., N, C)`, with the columns `(..., N)` that belong to it."""
    if not values.numel():
        return
    n = values.shape[-2]
    flat = [None if x is None else x.detach().reshape(-1, n) for x in columns]
    for place, matrix in matrices(values.detach()):
        for k in range(len(matrix) // n):
            series = place.start // n + k
            yield matrix[k * n : (k + 1) * n], [None if x is None else x[series] for x in flat]


def _probabilities(values: Tensor, from_logits: bool) -> Tensor:
    x = values.to(wide_dtype(values.device))
    return spread_infinite_logits(x).softmax(-1) if from_logits else x


def _class_gradient(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    from_logits: bool,
    n_bins: int,
    right: bool,
    grads: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients in `values` and `weights`, by operations that have derivatives of their own."""
    if weights is not None:
        values = values.masked_fill((weights == 0).unsqueeze(-1), 0)
    q = _probabilities(values, from_logits)
    index = bin_index(q, n_bins, right).transpose(-1, -2)
    of_weight, of_confidence, of_outcome = (part.gather(-1, index).transpose(-1, -2) for part in grads.unbind(-2)[:3])
    of_weights = None
    found = of_confidence
    if weights is not None:
        hit = target.unsqueeze(-1) == torch.arange(q.shape[-1], device=q.device)
        of_weights = (of_weight + of_confidence * q + of_outcome * hit).sum(-1).masked_fill(weights == 0, 0)
        found = (found * weights.unsqueeze(-1)).masked_fill((weights == 0).unsqueeze(-1), 0)
    if from_logits:
        found = through_softmax(q, found, values)
    return found.to(values.dtype), of_weights


def _keep_classes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.from_logits, ctx.n_bins, ctx.right, ctx.noise, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _classes_backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    values, target, weights, top, confidence = ctx.saved_tensors
    of_weights = None
    if torch.is_grad_enabled() or ctx.needs_input_grad[2]:
        options = ctx.from_logits, ctx.n_bins, ctx.right
        found, of_weights = _class_gradient(values, target, weights, *options, grads)
    else:
        found = class_sums_backward(
            values, target, weights, top, confidence, grads[..., 1, :], ctx.from_logits, ctx.right, ctx.backend
        )
    return (found, None, of_weights, *(None,) * 8)


torch.library.register_autograd("torchcalib::class_sums", _classes_backward, setup_context=_keep_classes)


class _ClassBins(torch.autograd.Function):
    """The operation for `torch.func` and forward mode, which know no derivative of a registered one."""

    generate_vmap_rule = True
    backward = staticmethod(_classes_backward)

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """Return the sums."""
        sums: Tensor = class_sums.direct(*arguments)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the derivatives are made of."""
        _keep_classes(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Any) -> Tensor:
        """Return the sums of what each entry adds."""
        values, target, weights, _, _ = ctx.saved_tensors
        q = _probabilities(values, ctx.from_logits)
        change = torch.zeros_like(q) if tangent is None else tangent.to(q.dtype)
        if ctx.from_logits:
            change = through_softmax(q, change, values)
        columns = [torch.zeros_like(q), change, torch.zeros_like(q)]
        if weights is not None:
            columns[1] = change * weights.unsqueeze(-1)
            if others[1] is not None:
                hit = (target.unsqueeze(-1) == torch.arange(q.shape[-1], device=q.device)).to(q.dtype)
                more = others[1].unsqueeze(-1)
                columns = [columns[0] + more, columns[1] + q * more, hit * more]
            columns = [column.masked_fill((weights == 0).unsqueeze(-1), 0) for column in columns]
        index = bin_index(q, ctx.n_bins, ctx.right).transpose(-1, -2)
        sums = bin_sums(index, [column.transpose(-1, -2) for column in columns], ctx.n_bins)
        return _with_constants(sums, ctx.noise)
