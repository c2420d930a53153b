"""Training penalties by Triton kernels: of events of a batch, and of class vectors.

With given events a value takes two launches, and its gradient one. From predictions as class vectors, a value takes
three launches, and its gradient two. `losses` defines the penalties, and computes those of other batches and devices.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend
from torchcalib.ops.operation import fused
from torchcalib.ops.penalties.options import Canonical, Embedding, Options, SoftBinning, Squared

__all__ = ["Canonical", "Embedding", "Options", "SoftBinning", "Squared", "error"]

_KERNELS: dict[type, tuple[str, str]] = {
    SoftBinning: ("penalties", "soft"),
    Embedding: ("penalties", "embedding"),
    Canonical: ("class_vectors", "canonical"),
    Squared: ("class_vectors", "squared"),
}
"""Folder and name of the functions `<name>_error` and `<name>_gradient`."""


def error(
    x: Tensor, others: tuple[Any, ...], options: Options, dtype: torch.dtype, formula: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a penalty in a dtype. Its gradient is in `x`: the confidences of events, or predictions.

    `others` are outcomes and weights of the events, or the `batch.Columns` of the predictions, without gradient.
    Rows without weight have no effect. The penalty is NaN if a weight is NaN, or without weight. `formula` is the same
    function of `x` in differentiable operations, for derivatives of higher order, which the squared error lacks.
    """
    value: Tensor = _error(x, others, options, dtype, formula)[0]
    return value


def _fill_error(
    _: Backend, x: Tensor, others: tuple[Any, ...], options: Options, dtype: torch.dtype, __: Any
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _function(options, "error")(x, others, options, dtype)
    return found


def _gradient(
    _: Backend, arguments: list[Any], results: tuple[Tensor, ...], needed: list[int], upstream: Tensor
) -> list[Tensor]:
    x, others, options, _, _ = arguments
    return [_function(options, "gradient")(x, others, options, results, upstream) for _ in needed]


def _function(options: Options, kind: str) -> Callable[..., Any]:
    folder, name = _KERNELS[type(options)]
    found: Callable[..., Any] = getattr(import_module(f"torchcalib.ops.{folder}.triton"), f"{name}_{kind}")
    return found


_error = fused(_fill_error, lambda x, *others: (others[-1](x),), _gradient)
