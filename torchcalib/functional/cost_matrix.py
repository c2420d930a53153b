"""Cost matrices for decisions, and decisions that minimise the expected cost."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import check_count
from torchcalib.io.errors import shown
from torchcalib.ops.logs import wide_dtype

Costs = Tensor | Sequence[Sequence[float]]
MAX_COST = 1e150  # sums and differences of costs are below the float64 maximum


@dataclass(frozen=True, repr=False)
class CostMatrix:
    """Matrix with the cost of each decision for each true class.

    Rows are true classes, columns are decisions. The number of decisions may differ from the number of classes, for
    example with a reject option. Cost matrices are immutable; they can be compared, hashed and pickled.

    Args:
        costs: Tensor, array or nested sequences `(C, M)` for C >= 2 classes and M >= 1 decisions. Absolute values are
            at most 1e150.

    Raises:
        TypeError: If `costs` is not a matrix of numbers.
        ValueError: For rows of different lengths, fewer than two classes, or NaN, infinite or larger costs.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1.

    Example:
        >>> CostMatrix.zero_one(2).with_reject(0.1)
        CostMatrix([[0.0, 1.0, 0.1], [1.0, 0.0, 0.1]])
    """

    costs: tuple[tuple[float, ...], ...]
    _on_gpus: dict[torch.device, Tensor] = field(compare=False)

    def __init__(self, costs: Costs) -> None:
        object.__setattr__(self, "costs", _rows(costs, "cost"))
        object.__setattr__(self, "_on_gpus", {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Exclude the cached copies on GPUs from pickling."""
        return type(self), (self.costs,)

    @classmethod
    def zero_one(cls, num_classes: int) -> Self:
        """Return the zero-one costs `(C, C)`: every error costs 1. The Bayes risk is then the error rate."""
        check_count("num_classes", num_classes, at_least=2)
        return cls([[float(j != k) for j in range(num_classes)] for k in range(num_classes)])

    @classmethod
    def imbalanced(cls, num_classes: int, factor: float = 10.0, important: int = -1) -> Self:
        """Return zero-one costs `(C, C)`, except that errors for the class `important` cost `factor`.

        Args:
            num_classes: Number of classes C.
            factor: Cost of a wrong decision for a sample of the class `important`, at least 0.
            important: Index of the important class; the default is the last class.
        """
        check_count("num_classes", num_classes, at_least=2)
        check_count("important", important, at_least=-num_classes, at_most=num_classes - 1)
        if not _is_number(factor):
            raise TypeError(f"`factor` must be a number, got {shown(factor)}. Pass a float such as 10.0.")
        if not 0 <= factor <= MAX_COST:
            raise ValueError(
                f"`factor` must be from 0 to {MAX_COST:g}, got {shown(factor)}. Pass a float such as 10.0."
            )
        rows = [list(row) for row in cls.zero_one(num_classes).costs]
        rows[important] = [factor * cost for cost in rows[important]]
        return cls(rows)

    @classmethod
    def from_utilities(cls, utilities: Costs) -> Self:
        """Convert utilities `(C, M)` to costs: the largest utility in each row minus the utility."""
        return cls([[max(row) - utility for utility in row] for row in _rows(utilities, "utilities")])

    def with_reject(self, cost: float | Sequence[float]) -> Self:
        """Return a cost matrix `(C, M + 1)` with an additional decision, such as a reject option, as its last column.

        Args:
            cost: Cost of the decision, one number or one number per class.
        """
        if hasattr(cost, "tolist"):  # a tensor or an array
            cost = cost.tolist()
        if not _is_number(cost) and not _is_row(cost):
            raise TypeError(
                f"`cost` must be a number, or one number per class, got {shown(cost)}. Pass 0.1, for example."
            )
        added = list(cost) if isinstance(cost, Sequence) else [cost] * self.num_classes
        if len(added) != self.num_classes:
            raise ValueError(
                f"`cost` must be a number, or one number for each of {self.num_classes} classes, got {len(added)} "
                "numbers. Pass a float to use the same cost for all classes."
            )
        return type(self)([(*row, more) for row, more in zip(self.costs, added, strict=True)])

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.costs)

    @property
    def num_decisions(self) -> int:
        """Number of decisions M."""
        return len(self.costs[0])

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """Return a copy of the costs `(C, M)`, in float64 if the device supports it."""
        return self.shared_tensor(torch.device("cpu") if device is None else device).clone()

    def shared_tensor(self, device: torch.device) -> Tensor:
        """Return the costs `(C, M)` like `tensor`, but cached. They must not be modified."""
        if device in self._on_gpus:
            return self._on_gpus[device]
        if torch.compiler.is_compiling():
            return torch.tensor(self.costs, dtype=wide_dtype(device), device="cpu").to(device, non_blocking=True)
        costs = torch.from_numpy(self._array).to(device, wide_dtype(device), non_blocking=True)
        if device.type != "cpu":
            with torch.inference_mode(False):  # the cached tensor must also be usable in a backward pass
                self._on_gpus[device] = costs = costs.clone()
        return costs

    @cached_property
    def _array(self) -> "np.ndarray[Any, Any]":
        """Costs as an array, cached because the conversion of tuples is slow for many classes."""
        return np.array(self.costs)

    def cheapest(self, probs: Tensor) -> Tensor:
        """Return the decision with the smallest expected cost for class probabilities; the first one on ties.

        Expected costs that agree up to rounding errors are treated as ties. The decision therefore does not depend on
        the order of summation, which may change with the batch size.

        Args:
            probs: Class probabilities `(..., C)` in the dtype of `tensor()`.

        Returns:
            Decisions `(...)`, int64 in [0, M), without gradient.
        """
        # Subtracting the smallest cost of each row does not change the decision. All terms are then non-negative. This
        # limits the relative rounding error of a sum to about C eps (machine epsilon).
        costs = self.shared_tensor(probs.device)
        expected = probs.detach() @ (costs - costs.amin(-1, keepdim=True))
        slack = 1 + 4 * (self.num_classes + 1) * torch.finfo(probs.dtype).eps
        return (expected <= slack * expected.amin(-1, keepdim=True)).to(torch.uint8).argmax(-1)

    def screened(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 decisions, and a mask of the rows in which rounding errors cannot change them.

        Args:
            probs: Class probabilities `(N, C)`, float32 on the CPU, with relative errors of at most 128 eps. The error
                of float32 `exp` is a few eps.

        Returns:
            Decisions `(N,)`, int64, and a mask `(N,)`. Where it is True, the decision equals that of `cheapest`.
        """
        # A gain is the largest cost of a row minus a cost. The decision with the smallest cost has the largest gain.
        # Most gains are 0 for zero-one costs. Columns with one gain are multiplied without a matrix product.
        classes, factors, order, matrix = self._gains
        columns = [probs @ matrix] if matrix.numel() else []
        if len(classes):
            columns.append(probs.index_select(-1, classes).mul_(factors))
        gains = torch.cat(columns, -1) if len(columns) == 2 else columns[0]
        best, place = gains.max(-1)
        # All terms are non-negative. The relative error of a gain is at most (C + 1) eps from its sum, in any order.
        # The probabilities add 128 eps. Numbers below 1e-35 can round to 0. Costs are at most 1 in units of the
        # largest gain, and `cheapest` has a relative tolerance. The limits below are twice as large.
        relative = 2 * (self.num_classes + 130) * torch.finfo(torch.float32).eps
        absolute = 16 * (self.num_classes + 1) * torch.finfo(torch.float64).eps + self.num_classes * 1e-35
        second = gains.scatter_(-1, place.unsqueeze(-1), -torch.inf).amax(-1)
        return order[place], best - second > relative * best + absolute

    @cached_property
    def _gains(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Class and gain of columns with at most one gain `(M - K,)`, column order `(M,)`, and gains `(C, K)`.

        The last entry contains the other columns. Gains are float32, in units of the largest one. Columns with at most
        one gain are last in the order.
        """
        gains = torch.from_numpy(self._array.max(-1, keepdims=True) - self._array)
        gains = (gains / gains.max().clamp(min=1e-300)).float()
        is_sparse = (gains != 0).sum(0) <= 1
        order = is_sparse.to(torch.uint8).sort(stable=True).indices
        sparse, dense = gains[:, is_sparse].max(0), gains[:, ~is_sparse].contiguous()
        return sparse.indices, sparse.values, order, dense

    def __repr__(self) -> str:
        """Return the costs as text, or shape and checksum for more than 32 costs."""
        if self.num_classes * self.num_decisions <= 32:
            return f"CostMatrix({[list(row) for row in self.costs]})"
        return f"CostMatrix({self.num_classes} x {self.num_decisions}, {zlib.crc32(repr(self.costs).encode()):08x})"


def read_costs(cost: CostMatrix | Costs, num_classes: int) -> CostMatrix:
    """Convert `cost` to a `CostMatrix`. Raise ValueError if the number of rows is not `num_classes`."""
    matrix = cost if isinstance(cost, CostMatrix) else CostMatrix(cost)
    if matrix.num_classes != num_classes:
        raise ValueError(
            f"`cost` must have one row per class, {num_classes}, got {matrix.num_classes} rows. "
            "Rows are true classes and columns are decisions. Transpose the matrix if they are swapped."
        )
    return matrix


def _rows(costs: Costs, name: str) -> tuple[tuple[float, ...], ...]:
    """Validate a matrix of numbers, and return its rows as tuples of floats."""
    if hasattr(costs, "tolist"):  # a tensor or an array
        costs = costs.tolist()
    if isinstance(costs, str) or not isinstance(costs, Sequence) or not all(_is_row(row) for row in costs):
        raise TypeError(
            f"`{name}` must be a matrix of numbers (classes x decisions), got "
            f"{shown(costs)}. Pass nested lists or a tensor."
        )
    rows = tuple(tuple(_float(cost) for cost in row) for row in costs)
    lengths = {len(row) for row in rows}
    if len(rows) < 2 or len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`{name}` must have at least 2 rows (classes) of equal length (decisions), got rows of length "
            f"{[len(row) for row in rows]}. Specify one cost for each class and decision."
        )
    if wrong := [cost for row in rows for cost in row if not abs(cost) <= MAX_COST]:
        raise ValueError(
            f"`{name}` must be finite (at most {MAX_COST:g}), got {wrong[0]}. "
            "To forbid a decision, use a large finite cost."
        )
    return rows


def _is_row(row: object) -> bool:
    if hasattr(row, "tolist"):
        row = row.tolist()
    return isinstance(row, Sequence) and all(_is_number(cost) for cost in row)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(value: float) -> float:
    """Convert a number to a float. Integers beyond the float range become inf, which `_rows` rejects."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
