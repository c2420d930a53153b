"""Sums over the cells that `smoothing_grids` tells of: with these alone a sample can be rounded to any of the grids."""

from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.dispatch import Backend, choose, implementation
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain, operation
from torchcalib.ops.segments import bin_sums
from torchcalib.ops.smoothing.grids import N_CELLS


def cell_index(confidence: Tensor, backend: Backend = "auto") -> Tensor:
    """Return the cell of every confidence in [0, 1]: how many nodes of the grids lie at it or below, 0 not counted.

    A node that several grids share counts for each, and so leaves cells that are empty. A confidence that rounding puts
    on the wrong side of a node adds the same to the nodes, for what it adds is continuous.

    Args:
        confidence: floating, of any shape; NaN goes to the first cell.
        backend: see `dispatch`.

    Returns:
        int64 in 0 to `N_CELLS` - 1.
    """
    index: Tensor = _cell_index.direct(confidence.detach(), backend)
    return index


def smoothing_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None = None,
    *,
    noise: Noise = "none",
    copies: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Sum over the events in each cell 1, p, y, p (1 - p), `noise` if asked for, and p y: confidence p, outcome y.

    Args:
        confidence: `(..., N)` in [0, 1], floating. NaN falls in the first cell, and makes its sums NaN.
        outcome: `(..., N)` of any real dtype.
        weights: broadcastable to `(..., N)`, or None for all ones. What events of weight 0 hold is never read.
        noise: sum the variances of the outcomes too; see `bin_op.event_bins`, of whose two this is the second.
        copies: whether weights are numbers of copies.
        backend: see `dispatch`.

    Returns:
        `(..., 5, K)`, or `(..., 6, K)` with noise, K = `N_CELLS`, in the dtype of sums.

    Gradient: in all but the cell and the noise; a constant where the weight is 0. In reverse and in forward mode, of
    any order.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    # The compiler takes the operation as it is, and no function that has a forward mode.
    compiled = torch.compiler.is_compiling()
    take = sums_of_cells.direct if compiled or is_plain(confidence, outcome, weights) else _SmoothingSums.apply
    sums: Tensor = take(confidence, outcome, weights, noise, copies, backend)
    return sums


@operation(
    "smoothing_cells(Tensor confidence, str backend) -> Tensor",
    fake=lambda confidence, backend: torch.empty_like(confidence, dtype=torch.int64),  # noqa: ARG005
)
def _cell_index(confidence: Tensor, backend: Backend) -> Tensor:
    index = torch.empty(confidence.shape, dtype=torch.int64, device=confidence.device)
    if index.numel():
        source = implementation("smoothing", choose("smoothing", confidence.device, backend).backend)
        source.cells(confidence.reshape(-1), index.view(-1))
    return index


@operation(
    "smoothing_sums(Tensor confidence, Tensor outcome, Tensor? weights, str noise, bool copies, str backend) -> Tensor",
    fake=lambda confidence, outcome, weights, noise, copies, backend: confidence.new_empty(  # noqa: ARG005
        _shape_of_sums(confidence, noise), dtype=wide_dtype(confidence.device)
    ),
)
def sums_of_cells(
    confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool, backend: Backend
) -> Tensor:
    """Return what `smoothing_sums` says, of tensors of one shape."""
    shape = _shape_of_sums(confidence, noise)
    sums = torch.zeros(shape, dtype=wide_dtype(confidence.device), device=confidence.device)
    if confidence.numel():
        source = implementation("smoothing", choose("smoothing", confidence.device, backend).backend)
        series = _series(confidence, outcome, weights)
        source.sums(*series, noise, copies, sums.view(-1, *shape[-2:]))
    return sums


@operation(
    "smoothing_sums_backward(Tensor confidence, Tensor outcome, Tensor? weights, Tensor grads, str backend) -> Tensor",
    fake=lambda confidence, *_: confidence.new_empty(confidence.shape),
)
def sums_of_cells_backward(
    confidence: Tensor, outcome: Tensor, weights: Tensor | None, grads: Tensor, backend: Backend
) -> Tensor:
    """Return the gradient in the confidences; `grads` is that in all sums."""
    found = torch.empty(confidence.shape, dtype=confidence.dtype, device=confidence.device)
    if found.numel():
        source = implementation("smoothing", choose("smoothing", confidence.device, backend).backend)
        _, of_p, _, of_spread, *_, of_product = grads.detach().reshape(-1, *grads.shape[-2:]).unbind(-2)
        of_sums = torch.stack((of_p, of_spread, of_product), -2)
        source.sums_backward(*_series(confidence, outcome, weights), of_sums, found.view(-1, found.shape[-1]))
    return found


def _series(*columns: Tensor | None) -> list[Tensor | None]:
    """Return columns `(..., N)` as `(S, N)`."""
    return [None if x is None else x.detach().reshape(-1, x.shape[-1]) for x in columns]


def _shape_of_sums(confidence: Tensor, noise: Noise) -> tuple[int, ...]:
    return (*confidence.shape[:-1], 5 + (noise != "none"), N_CELLS)


def _gradient(
    confidence: Tensor, outcome: Tensor, weights: Tensor | None, grads: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients in the first three, by operations that have derivatives of their own."""
    index = cell_index(confidence).unsqueeze(-2)
    at = grads.gather(-1, index.expand(*index.shape[:-2], grads.shape[-2], index.shape[-1]))
    of_n, of_p, of_y, of_spread, *_, of_product = at.unbind(-2)
    p, y = confidence.to(grads.dtype), outcome.to(grads.dtype)
    if weights is not None:
        never = weights == 0
        p, y = p.masked_fill(never, 0), y.masked_fill(never, 0)
    in_confidence, in_outcome = of_p + of_spread * (1 - 2 * p) + of_product * y, of_y + of_product * p
    in_weights = None
    if weights is not None:
        in_weights = of_n + of_p * p + of_y * y + of_spread * (p * (1 - p)) + of_product * (p * y)
        in_weights = in_weights.masked_fill(never, 0)
        in_confidence, in_outcome = ((x * weights).masked_fill(never, 0) for x in (in_confidence, in_outcome))
    return (
        in_confidence.to(confidence.dtype),
        in_outcome.to(outcome.dtype) if outcome.is_floating_point() else None,
        in_weights,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *columns, ctx.noise, _, ctx.backend = inputs
    ctx.save_for_backward(*columns)


def _backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    confidence, outcome, weights = ctx.saved_tensors
    if torch.is_grad_enabled() or any(ctx.needs_input_grad[1:3]):
        found = _gradient(confidence, outcome, weights, grads)
    else:
        found = (sums_of_cells_backward(confidence, outcome, weights, grads, ctx.backend), None, None)
    wanted = (grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=False))
    return (*wanted, None, None, None)


torch.library.register_autograd("torchcalib::smoothing_sums", _backward, setup_context=_keep)


class _SmoothingSums(torch.autograd.Function):
    """The operation for `torch.func` and forward mode, which know no derivative of a registered one."""

    generate_vmap_rule = True
    backward = staticmethod(_backward)

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """Return the sums."""
        sums: Tensor = sums_of_cells.direct(*arguments)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the derivatives are made of."""
        _keep(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Return the sums of what each event adds."""
        confidence, outcome, weights = ctx.saved_tensors
        wide = wide_dtype(confidence.device)
        p, y = confidence.to(wide), outcome.to(wide)
        zeros = torch.zeros_like(p)
        dp, dy, dw = (zeros if x is None or not x.is_floating_point() else x.to(wide) for x in tangents[:3])
        columns = [zeros, dp, dy, (1 - 2 * p) * dp, y * dp + p * dy]
        if weights is not None:
            values = [torch.ones_like(p), p, y, p * (1 - p), p * y]
            columns = [c * weights + v * dw for c, v in zip(columns, values, strict=True)]
            columns = [column.masked_fill(weights == 0, 0) for column in columns]
        if ctx.noise != "none":
            columns.insert(4, zeros)
        return bin_sums(cell_index(confidence), columns, N_CELLS)
