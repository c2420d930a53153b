"""Training penalties of events: errors over bins with soft membership, and kernel sums over pairs of confidences.

With Triton and events `(N,)`, a value takes two launches, and its gradient one. Only the confidences have a gradient.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, choose
from torchcalib.ops.operation import fused
from torchcalib.ops.penalties import formula
from torchcalib.ops.penalties.formula import Laplacian, SoftBinning

__all__ = ["Laplacian", "SoftBinning", "embedding_error", "soft_error"]

_MAX_BINS = 128  # largest number of soft bins whose sums fit into the registers of a program
_MAX_PAIRED = 4096  # largest number of events for which a sum over all pairs is faster than sorting


def soft_error(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor,
    bins: SoftBinning,
    of_sums: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    backend: Backend = "auto",
) -> Tensor:
    """Return the norm of the gaps of bins with soft membership, `(...)` of a dtype, for events `(..., N)`.

    `of_sums` is the same norm as a differentiable function of the sums of weight, confidence and outcome.
    """
    events = confidence, outcome, weights
    if bins.n_bins > _MAX_BINS or not _uses_triton(events, backend):
        return formula.soft_error(*events, bins, of_sums, dtype)
    value: Tensor = _soft_error(*events, bins, of_sums, dtype, backend=backend)[0]
    return value


def embedding_error(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor,
    kernel: Laplacian,
    dtype: torch.dtype,
    backend: Backend = "auto",
) -> Tensor:
    """Return the maximum mean calibration error `(...)` of a dtype, for events `(..., N)`; see `losses.mmce`."""
    events = confidence, outcome, weights
    if confidence.shape[-1] > _MAX_PAIRED or not _uses_triton(events, backend):
        return formula.embedding_error(*events, kernel, dtype)
    value: Tensor = _embedding_error(*events, kernel, dtype, backend=backend)[0]
    return value


def _uses_triton(events: tuple[Tensor, ...], backend: Backend) -> bool:
    """Return whether Triton computes the penalty of events of one batch element, whose confidences may have a gradient.

    On the CPU, only an explicit `backend` selects it.
    """
    confidence, *others = events
    is_given = not confidence.is_cpu or backend != "auto"
    is_flat = confidence.dim() == 1 and confidence.dtype == torch.float64 and confidence.numel() > 0
    if not is_given or not is_flat or torch.compiler.is_compiling() or any(x.requires_grad for x in others):
        return False
    return choose("events", confidence.device.type, confidence.numel(), backend) == "triton"


def _fill_soft_error(_: Backend, *arguments: Any) -> tuple[Tensor, ...]:
    triton: Any = import_module(f"{__name__}.triton")
    *events, bins, _, dtype = arguments
    found: tuple[Tensor, Tensor] = triton.soft_error(*events, bins, dtype)
    return found


def _gradient_of_soft_error(
    _: Backend, arguments: list[Any], results: tuple[Tensor, ...], __: list[int], upstream: Tensor
) -> list[Tensor]:
    triton: Any = import_module(f"{__name__}.triton")
    *events, bins, _, _ = arguments
    return [triton.soft_gradient(*events, bins, results[1], upstream)]


def _fill_embedding_error(_: Backend, *arguments: Any) -> tuple[Tensor, ...]:
    triton: Any = import_module(f"{__name__}.triton")
    found: tuple[Tensor, Tensor, Tensor] = triton.embedding_error(*arguments)
    return found


def _gradient_of_embedding_error(
    _: Backend, arguments: list[Any], results: tuple[Tensor, ...], __: list[int], upstream: Tensor
) -> list[Tensor]:
    triton: Any = import_module(f"{__name__}.triton")
    return [triton.embedding_gradient(*arguments[:3], *results[1:], upstream)]


_soft_error = fused(_fill_soft_error, lambda *given: (formula.soft_error(*given),), _gradient_of_soft_error)
_embedding_error = fused(
    _fill_embedding_error, lambda *given: (formula.embedding_error(*given),), _gradient_of_embedding_error
)
