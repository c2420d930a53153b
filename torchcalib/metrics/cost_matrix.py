"""What decisions cost, and which decision is the cheapest."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count
from torchcalib.ops.logs import wide_dtype

Costs = Tensor | Sequence[Sequence[float]]
LARGEST = 1e150  # differences of costs, and sums of them, are finite


@dataclass(frozen=True, repr=False)
class CostMatrix:
    """What each decision costs for each true class: a frozen value, which compares, hashes and pickles.

    Row = true class, column = decision. There may be more decisions than classes (a reject, a referral) or fewer.

    Args:
        costs: `(C, M)` numbers of size at most 1e150, C >= 2 classes, M >= 1 decisions; a tensor, an array or nested
            sequences.

    Raises:
        TypeError: for what holds no numbers.
        ValueError: for another shape, fewer than two classes, NaN, infinite or larger costs.

    Source:
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
        """Pickle the costs, without their copies on GPUs."""
        return type(self), (self.costs,)

    @classmethod
    def zero_one(cls, num_classes: int) -> Self:
        """Every error costs 1: the Bayes risk is the error rate of the most probable class."""
        check_count("num_classes", num_classes, at_least=2)
        return cls([[float(j != k) for j in range(num_classes)] for k in range(num_classes)])

    @classmethod
    def imbalanced(cls, num_classes: int, factor: float = 10.0, important: int = -1) -> Self:
        """Every error costs 1, and `factor` where the class `important` (by default the last) is the one missed."""
        check_count("num_classes", num_classes, at_least=2)
        check_count("important", important, at_least=-num_classes, at_most=num_classes - 1)
        if not _is_number(factor):
            raise TypeError(f"`factor` must be a number, got {factor!r}.")
        if not 0 <= factor <= LARGEST:
            raise ValueError(f"`factor` must be at least 0 and finite, got {factor!r}.")
        rows = [list(row) for row in cls.zero_one(num_classes).costs]
        rows[important] = [factor * cost for cost in rows[important]]
        return cls(rows)

    @classmethod
    def from_utilities(cls, utilities: Costs) -> Self:
        """Costs of utilities `(C, M)`: what a decision falls short of the best one for the class."""
        return cls([[max(row) - utility for utility in row] for row in _rows(utilities, "utilities")])

    def with_reject(self, cost: float | Sequence[float]) -> Self:
        """One more decision, the last column: the same cost for all classes, or one for each."""
        if hasattr(cost, "tolist"):  # a tensor or an array
            cost = cost.tolist()
        if not _is_number(cost) and not _is_row(cost):
            raise TypeError(f"`cost` must be a number or one for each class, got {cost!r}.")
        added = list(cost) if isinstance(cost, Sequence) else [cost] * self.num_classes
        if len(added) != self.num_classes:
            raise ValueError(
                f"`cost` must be a number or one for each of {self.num_classes} classes, got {len(added)}."
            )
        return type(self)([(*row, more) for row, more in zip(self.costs, added, strict=True)])

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.costs)

    @property
    def num_decisions(self) -> int:
        """M."""
        return len(self.costs[0])

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """`(C, M)` in the dtype of sums. It is copied to a GPU once, and the GPU is not waited for."""
        device = torch.device("cpu") if device is None else device
        if device in self._on_gpus:
            return self._on_gpus[device]
        costs = torch.tensor(self.costs, dtype=wide_dtype(device)).to(device, non_blocking=True)
        if device.type == "cuda" and not torch.compiler.is_compiling():
            with torch.inference_mode(False):  # kept for callers in no such mode too, whose backward pass may need it
                self._on_gpus[device] = costs = costs.clone()
        return costs

    def cheapest(self, probs: Tensor) -> Tensor:
        """Decide for class probabilities: the first decision of least expected cost.

        Expected costs that agree up to the rounding of their own sums are a tie. So whether two decisions tie does
        not depend on how a matrix product is cut up, which changes with the batch size.

        Args:
            probs: `(..., C)` of the dtype of sums.

        Returns:
            `(...)` int64 in [0, M). No gradient: a decision is a step.
        """
        # What a decision costs more than the best one for the class: it decides alike, and no term is negative, so
        # that a sum is off by no more than C roundings of its own size.
        costs = self.tensor(probs.device)
        expected = probs.detach() @ (costs - costs.amin(-1, keepdim=True))
        slack = 1 + 4 * (self.num_classes + 1) * torch.finfo(probs.dtype).eps
        return (expected <= slack * expected.amin(-1, keepdim=True)).to(torch.uint8).argmax(-1)

    def __repr__(self) -> str:
        """All costs, or of many their number and a checksum."""
        if self.num_classes * self.num_decisions <= 32:
            return f"CostMatrix({[list(row) for row in self.costs]})"
        return f"CostMatrix({self.num_classes} x {self.num_decisions}, {zlib.crc32(repr(self.costs).encode()):08x})"


def read_costs(cost: CostMatrix | Costs, num_classes: int) -> CostMatrix:
    """Return the costs of decisions about `num_classes` classes, or raise."""
    matrix = cost if isinstance(cost, CostMatrix) else CostMatrix(cost)
    if matrix.num_classes != num_classes:
        raise ValueError(
            f"`cost` must have one row per class, {num_classes}, got {matrix.num_classes} rows. "
            "Rows are true classes and columns decisions; transpose it if it is the other way round."
        )
    return matrix


def _rows(costs: Costs, name: str) -> tuple[tuple[float, ...], ...]:
    """Check a matrix of numbers and return its rows."""
    if hasattr(costs, "tolist"):  # a tensor or an array
        costs = costs.tolist()
    if isinstance(costs, str) or not isinstance(costs, Sequence) or not all(_is_row(row) for row in costs):
        raise TypeError(f"`{name}` must be a matrix of numbers (classes x decisions), got {costs!r}.")
    rows = tuple(tuple(_float(cost) for cost in row) for row in costs)
    lengths = {len(row) for row in rows}
    if len(rows) < 2 or len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`{name}` must have at least 2 rows (classes) of one length (decisions), got rows of length "
            f"{[len(row) for row in rows]}."
        )
    if wrong := [cost for row in rows for cost in row if not abs(cost) <= LARGEST]:
        raise ValueError(
            f"`{name}` must be finite (at most {LARGEST:g}), got {wrong[0]}. "
            "Give a decision that is ruled out a cost above all others."
        )
    return rows


def _is_row(row: object) -> bool:
    if hasattr(row, "tolist"):
        row = row.tolist()
    return isinstance(row, Sequence) and all(_is_number(cost) for cost in row)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(value: float) -> float:
    """Convert a number, an int of any size too."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
