"""Training penalties of class vectors with Triton: kernel sums over all pairs of rows.

A value takes three launches, and its gradient two. Other batches and devices are computed by `functional.kernel`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.batch import Columns
from torchcalib.ops.class_vectors.options import Density, Similarity
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.operation import fused

__all__ = ["Density", "Similarity", "has_kernel", "mean_over_pairs"]

_MAX_ENTRIES = 2**30  # largest number of differences for which the kernels are faster than matrix products


def has_kernel(columns: Columns, options: Density | Similarity) -> bool:
    """Return whether the kernels are fast enough for the number of rows and classes.

    They compute the terms of all pairs of rows for each range of classes.
    """
    n = len(columns.values)
    n_classes = columns.values.numel() // n
    return n * n * n_classes * -(-n_classes // options.width(n_classes)) <= _MAX_ENTRIES


def mean_over_pairs(
    columns: Columns,
    options: Density | Similarity,
    dtype: torch.dtype,
    formula: Callable[[Tensor], Tensor],
    backend: Backend = "auto",
) -> Tensor:
    """Return the canonical or the biased squared kernel calibration error of a batch in a dtype, NaN with invalid rows.

    `formula` is the same function of the values in differentiable operations, for derivatives of higher order. The
    canonical error, of a `Density`, needs whole weights, and counts a single sample twice.
    """
    value: Tensor = _error(columns.values, _without_gradient(columns), options, dtype, formula, backend=backend)[0]
    return value


def _without_gradient(columns: Columns) -> Columns:
    """Return the columns without gradient, and without labels of the dtype bool, which Triton does not load."""
    target = columns.target
    target = target.view(torch.uint8) if target.dtype == torch.bool else target
    return columns._replace(values=columns.values.detach(), target=target)


def _fill_error(
    _: Backend, __: Tensor, columns: Columns, options: Density | Similarity, dtype: torch.dtype, ___: Any
) -> tuple[Tensor, ...]:
    triton: Any = import_module(f"{__name__}.triton")
    compute = triton.canonical_error if isinstance(options, Density) else triton.squared_error
    found: tuple[Tensor, ...] = compute(columns, options, dtype)
    return found


def _gradient_of_error(
    _: Backend, arguments: list[Any], results: tuple[Tensor, ...], needed: list[int], upstream: Tensor
) -> list[Tensor]:
    triton: Any = import_module(f"{__name__}.triton")
    columns, options = arguments[1:3]
    compute = triton.canonical_gradient if isinstance(options, Density) else triton.squared_gradient
    return [compute(columns, options, results, upstream) for _ in needed]


_error = fused(_fill_error, lambda values, *others: (others[-1](values),), _gradient_of_error)
