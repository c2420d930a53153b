"""What one row of multi-class predictions yields, from one read of it; the gradient from one more.

Everything that scores and top-label bins ask of a row `(q_1 .. q_C)` with the label h, without a tensor of the size of
the input on the way. An implementation fills in columns; shapes and derivatives are here, the same for all.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, Op, choose, implementation
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain, operation
from torchcalib.ops.softmax_stats.reference import gradient

_N_SCORES = 4


class Rows(NamedTuple):
    """What rows yield, each `(..., N)`; all but `top` in the dtype of sums, and NaN in a row that holds NaN.

    Attributes:
        log_prob: log q_h, in nats; -inf where q_h is 0.
        squared_error: sum_k (q_k - 1[h = k])^2, without cancellation where q_h is next to 1.
        neg_entropy: sum_k q_k log q_k, in nats, with 0 log 0 = 0.
        confidence: max_k q_k.
        top: the class of that, the first one on ties; int64.
    """

    log_prob: Tensor
    squared_error: Tensor
    neg_entropy: Tensor
    confidence: Tensor
    top: Tensor


def rows(
    values: Tensor, target: Tensor, *, from_logits: bool, tolerance: float = math.inf, backend: Backend = "auto"
) -> Rows:
    """Read every row once.

    A row is computed by itself: the others, their number and the place in memory change no bit of it. Arithmetic is
    float32 for float32 and narrower, over blocks of entries float64: within 2e-6 of exact arithmetic, relative to each
    result, where logits lie up to 20 below the largest of their row, and beyond in proportion. Float64 stays float64.

    Args:
        values: logits or probabilities `(..., N, C)` of any floating dtype and with any strides. Logits may be +inf,
            over which the mass is spread, and -inf.
        target: labels `(..., N)`, int64. A label that is no class gives NaN in what it is asked for.
        from_logits: whether `values` are logits.
        tolerance: if it is finite, all is NaN in a row of probabilities that holds a number outside [0, 1] or whose sum
            is further from 1. Logits that are not NaN are fine, but for a row that is -inf all over: it gives NaN.
        backend: see `dispatch`; float64 on the CPU is read by "torch". All agree within the bound above.

    Gradient: everywhere, in reverse and in forward mode, of any order. As of `row_stats.safe_log` 0 where a probability
    is 0 and only its log is asked for; 0 in a row that holds the logit +inf. At ties for the top the confidence is that
    of the first. A row in which all gradients are 0 is not read on the way back: it may hold NaN.
    """
    # The compiler takes the operation as it is, and no function that has a forward mode.
    read = row_forward.direct if torch.compiler.is_compiling() or is_plain(values) else _RowOp.apply
    scores, top = read(values, target, from_logits, tolerance, backend)
    log_prob, squared_error, neg_entropy, confidence = scores.unbind(-2)
    return Rows(log_prob, squared_error, neg_entropy, confidence, top)


def _no_scores(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of scores `(..., 4, N)` and top classes `(..., N)`."""
    *lead, n = values.shape[:-1]
    scores = values.new_empty((*lead, _N_SCORES, n), dtype=wide_dtype(values.device))
    return scores, values.new_empty((*lead, n), dtype=torch.int64)


@operation(
    "row_forward(Tensor values, Tensor target, bool from_logits, float tolerance, str backend) -> (Tensor, Tensor)",
    fake=_no_scores,
)
def row_forward(
    values: Tensor, target: Tensor, from_logits: bool, tolerance: float, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Return `Rows` as one tensor of scores `(..., 4, N)`, and the top classes `(..., N)`."""
    *lead, n, _ = values.shape
    top = torch.empty((*lead, n), dtype=torch.int64, device=values.device)
    scores = torch.empty((_N_SCORES, *top.shape), dtype=wide_dtype(values.device), device=values.device)
    source = source_of("rows", values, backend)
    columns = target.reshape(-1), scores.view(_N_SCORES, -1), top.view(-1)
    for matrix, labels, of_rows, tops in _alongside(values, *columns):
        source.forward(matrix, labels, from_logits, tolerance, of_rows, tops)
    return scores.movedim(0, -2).contiguous(), top


@operation(
    "row_backward(Tensor values, Tensor target, Tensor scores, Tensor top, Tensor grads, bool from_logits, str backend)"
    " -> Tensor",
    fake=lambda values, *_: values.new_empty(values.shape),
)
def row_backward(
    values: Tensor,
    target: Tensor,
    scores: Tensor,
    top: Tensor,
    grads: Tensor,
    from_logits: bool,
    backend: Backend,
) -> Tensor:
    """Return the gradient in `values` from what `row_forward` returned and the gradient in its scores."""
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    source = source_of("rows", values, backend)
    found, upstream = (x.detach().movedim(-2, 0).reshape(_N_SCORES, -1) for x in (scores, grads))
    columns = target.reshape(-1), found, top.reshape(-1), upstream, out.view(-1, out.shape[-1]).T
    for matrix, labels, of_rows, tops, of_scores, filled in _alongside(values, *columns):
        source.backward(matrix, labels, from_logits, of_rows, tops, of_scores, filled.T)
    return out


def source_of(op: Op, values: Tensor, backend: Backend) -> ModuleType:
    """Return the implementation that reads the entries of `values`; numba's loops are float32."""
    if values.dtype == torch.float64 and values.device.type == "cpu" and backend in ("auto", "numba"):
        if backend == "numba":
            raise ValueError(
                f"`backend` must be 'auto' or 'torch' for float64 on the CPU, got {backend!r}. Leave it at 'auto'."
            )
        backend = "torch"
    return implementation(op, choose(op, values.device, backend).backend)


def _alongside(values: Tensor, *columns: Tensor) -> Iterator[list[Tensor]]:
    """Cut `(..., N, C)` into matrices, each with what belongs to its rows in columns over all of them, by views."""
    for rows, matrix in matrices(values.detach()):
        whole = len(matrix) == columns[0].shape[-1]
        yield [matrix, *(columns if whole else [x[..., rows] for x in columns])]


def matrices(values: Tensor, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Cut `(..., N, C)` into matrices that are views of it: which rows of all they hold, and the rows."""
    if not values.numel():
        return
    if values.dim() == 2:
        yield slice(start, start + len(values)), values
        return
    try:
        matrix = values.view(-1, values.shape[-1])
    except RuntimeError:  # no one stride leads from row to row
        for part in values:
            yield from matrices(part, start)
            start += part.numel() // part.shape[-1]
    else:
        yield slice(start, start + len(matrix)), matrix


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, target, ctx.from_logits, _, ctx.backend = inputs
    ctx.save_for_backward(values, target, *output)


def _backward(ctx: Any, grads: Tensor, _: None) -> tuple[Tensor, None, None, None, None]:
    values, target, scores, top = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradient will be differentiated
        found = gradient(values, target, ctx.from_logits, grads)
    else:
        found = row_backward(values, target, scores, top, grads, ctx.from_logits, ctx.backend)
    return found, None, None, None, None


torch.library.register_autograd("torchcalib::row_forward", _backward, setup_context=_keep)


class _RowOp(torch.autograd.Function):
    """The operation for `torch.func` and forward mode, which know no derivative of a registered one."""

    generate_vmap_rule = True
    backward = staticmethod(_backward)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Return scores and top classes."""
        found: tuple[Tensor, Tensor] = row_forward.direct(*arguments)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the derivatives are made of."""
        _keep(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2], *output)  # the same tensors: the rule for `vmap` keeps one list of axes
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, None]:
        """Return the product of the gradient of each score with the tangent."""
        values, target, _, _ = ctx.saved_tensors
        units = torch.eye(_N_SCORES, dtype=wide_dtype(values.device), device=values.device).unsqueeze(-1)
        ones = torch.ones_like(tangent[..., 0], dtype=units.dtype).unsqueeze(-2)
        wide = tangent.to(units.dtype)
        products = [
            (gradient(values.to(units.dtype), target, ctx.from_logits, unit * ones) * wide).sum(-1) for unit in units
        ]
        return torch.stack(products, -2), None
