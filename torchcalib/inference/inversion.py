"""From a test to an interval: the errors that it does not reject."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Inversion(NamedTuple):
    """A test of every error, by what replicates of it show.

    Near 0 it is one-sided and far from there two-sided (Feldman and Cousins), so that what it does not reject holds
    0 as often as the level says.

    Attributes:
        level: of the interval.
        observed: what the test goes by `(g)`.
        edge: up to which replicates of a calibrated model reach at this level `(g)`; None for a signed error, of which
            every test is two-sided.
    """

    level: float
    observed: Tensor
    edge: Tensor | None

    @classmethod
    def of(cls, level: float, observed: Tensor, calibrated: Tensor, *, signed: bool) -> "Inversion":
        """Make it from replicates of a calibrated model `(R, g)`."""
        n_replicates = len(calibrated)
        place = min(math.ceil(level * (n_replicates + 1)), n_replicates) - 1
        return cls(level, observed, None if signed else calibrated.sort(0).values[place])

    def too_low(self, replicates: Tensor) -> Tensor:
        """Return how far an error with these replicates `(R, ...)` is from being rejected as too low, below 0 if it is.

        In standard deviations of a normal variable.
        """
        above = _deviate(replicates >= self.observed - self._rounding)
        return above - self._edge_of((1 - self.level) * (1 - self._sidedness(replicates) / 2))

    def too_high(self, replicates: Tensor) -> Tensor:
        """Return the same of being rejected as too high."""
        below = _deviate(replicates <= self.observed + self._rounding)
        return below - self._edge_of((1 - self.level) * self._sidedness(replicates) / 2)

    @property
    def _rounding(self) -> Tensor:
        return rounding_of(self.observed)

    def _sidedness(self, replicates: Tensor) -> Tensor:
        """From 0 for errors that cannot be told from calibration, to 1 for those that always can."""
        if self.edge is None:
            return torch.ones_like(replicates[0])
        power = (replicates > self.edge + rounding_of(self.edge)).to(self.edge.dtype).mean(0)
        return ((power - (1 - self.level)) / self.level).clamp(0, 1)

    def _edge_of(self, share: Tensor) -> Tensor:
        deviate: Tensor = torch.special.ndtri(share.clamp(min=1e-12))
        return deviate


def rounding_of(observed: Tensor) -> Tensor:
    """Return how far apart errors may be that are equal."""
    return 1e-9 * observed.abs() + 1e-12  # the latter for those that are 0 but for the order of a sum


def _deviate(counted: Tensor) -> Tensor:
    """Standard normal quantile of the share of replicates `(R, ...)` of which something is true."""
    share = (counted.to(torch.float64).sum(0) + 0.5) / (len(counted) + 1)
    deviate: Tensor = torch.special.ndtri(share)
    return deviate
