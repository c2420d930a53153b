"""Axes of probabilities: linear from 0 to 1, or logit within the resolution of the sample."""

from typing import Literal, NamedTuple, Self

import numpy as np
from matplotlib.ticker import NullLocator

from torchcalib.plots.canvas import Canvas, Column, tick_label


class ProbabilityAxis(NamedTuple):
    """Limits and scale of an axis of probabilities. Values beyond the limits are drawn at the ends."""

    low: float = 0.0
    high: float = 1.0
    is_logit: bool = False

    @classmethod
    def logit_of(cls, probabilities: Column, n: float) -> Self:
        """Return a logit axis that shows these probabilities.

        It ends at about 1 / (10 n) and 1 - 1 / (10 n): n samples cannot distinguish values beyond from 0 and 1, and
        probabilities of 1e-19 would leave no room for the others.
        """
        finest = min(max(0.1 / n, 1e-12), 0.01)
        ends = np.clip([probabilities.min(), probabilities.max()], finest, 1 - finest)
        low, high = _expit(_logit(ends) + np.array([-0.4, 0.4]))
        return cls(float(low), float(high), is_logit=True)

    def place(self, probabilities: Column) -> Column:
        """Return positions on the axis, in units of its drawn length."""
        inside = np.clip(probabilities, self.low, self.high)
        return _logit(inside) if self.is_logit else inside

    def value(self, places: Column) -> Column:
        """Return the probabilities at these positions: the inverse of `place`."""
        return _expit(places) if self.is_logit else places

    def apply(self, canvas: Canvas, which: Literal["x", "y"]) -> None:
        """Set the scale, the limits and the ticks of an axis."""
        ax = canvas.ax
        if self.is_logit:
            axis = ax.xaxis if which == "x" else ax.yaxis
            width, height = canvas.points
            ticks = self._ticks(at_most=max(1, int(width / 40 if which == "x" else height / 15)))
            ax.set(**{f"{which}scale": "logit"})
            axis.set_minor_locator(NullLocator())
            axis.set_ticks(ticks, [tick_label(tick) for tick in ticks])
        ax.set(**{f"{which}lim": (self.low, self.high)})

    def _ticks(self, at_most: int) -> list[float]:
        """Return 0.5 and powers of ten from both ends; only every k-th power if there are too many."""
        ticks: list[float] = []
        powers = 10.0 ** -np.arange(1, 13)
        for step in range(1, 13):
            kept = powers[step - 1 :: step]
            ticks = [p for p in (*kept[::-1], 0.5, *(1 - kept)) if self.low <= p <= self.high]
            if len(ticks) <= at_most:
                break
        return ticks


def _logit(p: Column) -> Column:
    return np.log(p) - np.log1p(-p)


def _expit(x: Column) -> Column:
    return 1 / (1 + np.exp(-x))
