"""A value, the values of its replicates, and what lies between their ends."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcalib.core.arguments import check_level


@dataclass(frozen=True, eq=False)
class Interval:
    """A value and what the bootstrap says of it.

    Attributes:
        value: of the data themselves `(...)`.
        replicates: of every replicate `(R, ...)`.
        level: share of data sets like this one whose interval holds the value of the population, as nearly as the
            bootstrap can tell.

    Raises:
        TypeError, ValueError: for a level that is not in (0, 1), or too few replicates for it.
    """

    value: Tensor
    replicates: Tensor
    level: float

    def __post_init__(self) -> None:
        check_level(self.level, len(self.replicates))

    @property
    def low(self) -> Tensor:
        """Lower end `(...)`; NaN where the value of a replicate is."""
        return self._in_order[self._outside - 1]

    @property
    def high(self) -> Tensor:
        """Upper end `(...)`; NaN where the value of a replicate is."""
        return self._in_order[-self._outside]

    @property
    def bias(self) -> Tensor:
        """Mean of the replicates less the value `(...)`: about how much the value is too high.

        Near 0 for a mean, such as the NLL. Binned errors of few samples a bin are too high, for chance gaps count like
        true ones; a replicate of the sample is so once more. Both ends of the interval share in that. Not so an error
        that takes off the noise of its bins (`rmsce(debiased=True)`): replicates repeat samples, which it takes for
        new ones, so that its interval lies too high and tells nothing.
        """
        return self.replicates.mean(0) - self.value

    @property
    def standard_error(self) -> Tensor:
        """Standard deviation of the replicates `(...)`."""
        return self.replicates.std(0)

    @property
    def _outside(self) -> int:
        return _outside(self.level, len(self.replicates))

    @property
    def _in_order(self) -> Tensor:
        # Values of replicates, never anything between two of them, of which one may be infinite.
        missing = self.replicates.isnan().any(0)
        return self.replicates.sort(0).values.masked_fill(missing, torch.nan)

    def __repr__(self) -> str:
        """Say the value and the ends."""
        return f"Interval(value={self.value}, low={self.low}, high={self.high}, level={self.level})"


def _outside(level: float, n_replicates: int) -> int:
    """Return which replicate from either end is that of the interval. The small number keeps 0.025 * 40 whole."""
    return math.floor((n_replicates + 1) * (1 - level) / 2 + 1e-9)
