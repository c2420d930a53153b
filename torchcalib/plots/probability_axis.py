"""A probability as an axis: linear from 0 to 1, or logit as far as the samples can tell it from 0 and 1."""

import math
from typing import Literal, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from torchcalib.plots.canvas import height_in_points, width_in_points
from torchcalib.plots.series import Column

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class ProbabilityAxis(NamedTuple):
    """From where to where an axis of probabilities runs, and on which scale. What lies beyond is drawn at its ends."""

    low: float = 0.0
    high: float = 1.0
    is_logit: bool = False

    @classmethod
    def logit_of(cls, probabilities: Column, n: float) -> Self:
        """Return a logit axis that shows these probabilities.

        It ends at 1 / (10 n) and 1 minus that, at the latest: n samples cannot tell what lies beyond from 0 and 1, and
        probabilities of 1e-19 would leave no room for the others.
        """
        finest = min(max(0.1 / n, 1e-12), 0.01)
        ends = np.clip([probabilities.min(), probabilities.max()], finest, 1 - finest)
        low, high = _expit(_logit(ends) + np.array([-0.4, 0.4]))
        return cls(float(low), float(high), is_logit=True)

    def place(self, probabilities: Column) -> Column:
        """Return where on the axis probabilities lie, in units of its length on paper."""
        inside = np.clip(probabilities, self.low, self.high)
        return _logit(inside) if self.is_logit else inside

    def value(self, places: Column) -> Column:
        """Return the probabilities at these places: the inverse of `place`."""
        return _expit(places) if self.is_logit else places

    def apply(self, ax: Axes, which: Literal["x", "y"]) -> None:
        """Give an axis of `ax` this scale, its limits and its ticks."""
        if self.is_logit:
            axis = ax.xaxis if which == "x" else ax.yaxis
            room = width_in_points(ax) / 40 if which == "x" else height_in_points(ax) / 15
            ticks = self._ticks(at_most=max(1, int(room)))
            ax.set(**{f"{which}scale": "logit"})
            axis.set_minor_locator(NullLocator())
            axis.set_ticks(ticks, [_power(tick) for tick in ticks])
        ax.set(**{f"{which}lim": (self.low, self.high)})

    def _ticks(self, at_most: int) -> list[float]:
        """Powers of ten from both ends and a half; every second, third ... power where they would be too many."""
        ticks: list[float] = []
        powers = 10.0 ** -np.arange(1, 13)
        for step in range(1, 13):
            kept = powers[step - 1 :: step]
            ticks = [p for p in (*kept[::-1], 0.5, *(1 - kept)) if self.low <= p <= self.high]
            if len(ticks) <= at_most:
                break
        return ticks


def short(probability: float) -> str:
    """Write a probability with two digits of its distance from 0 or 1: 0.25, 0.9904, 2.4e−6, 1−1.3e−4."""
    if probability in (0, 1):
        return f"{probability:.0f}"
    distance = min(probability, 1 - probability)
    if distance >= 1e-3:
        return f"{probability:.{1 - math.floor(math.log10(distance))}f}".rstrip("0")
    digits, exponent = f"{distance:.1e}".split("e")
    small = f"{digits.removesuffix('.0')}e−{-int(exponent)}"
    return small if probability < 0.5 else f"1−{small}"


def _power(probability: float) -> str:
    """Write a tick: 0.01, 10⁻⁴, 0.99, 1−10⁻⁴."""
    distance = min(probability, 1 - probability)
    if distance > 5e-3:
        return f"{probability:.2g}"
    power = "10" + str(round(math.log10(distance))).translate(_SUPERSCRIPTS)
    return power if probability < 0.5 else f"1−{power}"


def _logit(p: Column) -> Column:
    return np.log(p) - np.log1p(-p)


def _expit(x: Column) -> Column:
    return 1 / (1 + np.exp(-x))
