"""Shared parts of all diagrams: colours, axes, panels, marks, number formats and image files."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import IO, Any, Literal, NamedTuple, Self, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Transform
from numpy.typing import NDArray

from torchcalib.core.bins import BinTable
from torchcalib.core.documentation import document, input_parameters, parameters_of

F = TypeVar("F", bound=Callable[..., Axes])

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Style:
    """Colours of a diagram. Colour-blind readers can distinguish the colours of `LIGHT` and `DARK` (Okabe and Ito).

    Attributes:
        paper: background.
        ink: text, axes and the diagonal.
        muted: secondary text.
        grid: grid lines.
        bar: bars of counts.
        above: frequency above confidence.
        below: frequency below confidence.
        outcome: mean outcome.
        rejected: predictions that a test rejects.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    bar: str
    above: str
    below: str
    outcome: str
    rejected: str


LIGHT = Style("#ffffff", "#1b1f24", "#5c646d", "#e3e6e9", "#8b95a0", "#0072b2", "#bf5200", "#009e73", "#b3123f")
DARK = Style("#15181c", "#e4e6e8", "#9aa3ac", "#2c3238", "#626c77", "#56b4e9", "#e69f00", "#33c49a", "#ff6b81")


def columns_of(table: BinTable, name: str = "table") -> SimpleNamespace:
    """Return the columns of one table as arrays, without the empty bins of no width that pad a batch."""
    if table.n.dim() != 1:
        raise ValueError(
            f"`{name}` must have no batch axes, got shape {tuple(table.n.shape)}. Draw one of the batch: `{name}[k]`."
        )
    columns = table.to_dict()
    real = (columns["n"] > 0) | (columns["upper"] > columns["lower"])
    return SimpleNamespace(**{name: column[real].astype(np.float64) for name, column in columns.items()})


_ARGUMENTS = """
        preds: Probabilities, or logits with `from_logits=True`; or an object that has the bins itself.
        target: Labels of predictions, see `torchcalib.functional.nll`; None for an object.
        mode: Kind of confidence, `"positive"`, `"top_label"` or `"classwise"`; None is the main one.
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the shapes.
        ax: Axes to draw on; by default those of a new figure. Further panels are insets, `ax.child_axes`.
        logit: Probabilities have a logit scale, which shows values near 0 and near 1. It ends at about 1 / (10 N) and
            1 - 1 / (10 N), because N samples cannot distinguish values beyond from 0 and 1. Such values are drawn at
            the ends.
        title: Title of the diagram.
        style: Colours. With `DARK`, give the figure of `ax` a dark face."""


def diagram(draw: F) -> F:
    """Document the arguments that all diagrams share."""
    parameters = parameters_of(draw)
    if any(p.kind is Parameter.VAR_KEYWORD for p in signature(draw).parameters.values()):
        parameters += input_parameters(without=["batch_dims"])
    document(draw, draw.__doc__, parameters, Axes, _ARGUMENTS)
    return draw


@dataclass(frozen=True)
class Canvas:
    """Axes in the colours of a style, with the marks that several diagrams share."""

    ax: Axes
    style: Style

    def __post_init__(self) -> None:
        """Draw two spines and a light grid in the colours of the style."""
        ax, style = self.ax, self.style
        ax.set_facecolor(style.paper)
        ax.set_axisbelow(True)
        ax.grid(True, color=style.grid, linewidth=0.6)
        ax.tick_params(color=style.muted, labelcolor=style.ink, which="both", labelsize="small")
        ax.xaxis.label.set_color(style.ink)
        ax.yaxis.label.set_color(style.ink)
        for side, spine in ax.spines.items():
            spine.set_color(style.muted)
            spine.set_visible(side in ("left", "bottom"))

    @classmethod
    def of(
        cls, ax: Axes | None, style: Style, title: str | None, size: tuple[float, float], top: float, **options: Any
    ) -> Self:
        """Return a canvas on `ax`, or on a new figure, with a title that has these options."""
        if ax is None:
            # pyplot does not know this figure, so that it opens no window and keeps nothing alive. Margins are fixed:
            # an automatic layout changes with every save, and saving crops the figure anyway.
            figure = Figure(figsize=size, facecolor=style.paper)
            ax = figure.subplots(gridspec_kw={"left": 0.15, "right": 0.96, "bottom": 0.12, "top": top})
        canvas = cls(ax, style)
        if title is not None:
            canvas.title(title, **{"fontsize": "medium", "pad": 6, **options})
        return canvas

    def title(self, text: str, **options: Any) -> None:
        """Write a title on the left, above the frame."""
        self.ax.set_title(text, loc="left", color=self.style.ink, **options)

    def only_panels(self) -> Self:
        """Hide everything but title and labels, for axes that only hold panels."""
        self.ax.grid(False)
        self.ax.spines[:].set_visible(False)
        self.ax.set(xticks=[], yticks=[])
        return self

    def panels(self, n: int, gap: float, *, columns: int = 1, left: float = 0, across: float = 0) -> "list[Canvas]":
        """Return `n` panels from the top down, column by column, with gaps down and across, beside a left margin."""
        rows = math.ceil(n / columns)
        width, height = (1 - left + across) / columns - across, (1 + gap) / rows - gap
        cells = (divmod(k, rows) for k in range(n))
        return [
            self.panel(left + column * (width + across), 1 - height - row * (height + gap), width, height)
            for column, row in cells
        ]

    def panel(self, left: float, bottom: float, width: float, height: float) -> "Canvas":
        """Return a canvas on a part of these axes."""
        return Canvas(self.ax.inset_axes((left, bottom, width, height)), self.style)

    @property
    def points(self) -> tuple[float, float]:
        """The present width and height of the frame in points, to decide which labels fit."""
        extent, scale = self.ax.get_window_extent(), 72 / self.ax.figure.dpi
        return float(extent.width * scale), float(extent.height * scale)

    def diagonal(self, low: float = 0.0, high: float = 1.0) -> None:
        """Draw the line of perfect calibration."""
        options: dict[str, Any] = {"color": self.style.ink, "linewidth": 0.8, "dashes": (5, 3), "zorder": 1.5}
        if not any(line.get_label() == "diagonal" for line in self.ax.lines):
            self.ax.plot([low, high], [low, high], label="diagonal", **options)

    def text(self, x: float, y: float, text: str, color: str, **options: Any) -> None:
        """Write small text."""
        self.ax.text(x, y, text, color=color, **{"fontsize": "small", **options})

    def no_data(self) -> Axes:
        """Write "no data" into the middle."""
        options = {"backgroundcolor": self.style.paper, "transform": self.ax.transAxes, "fontsize": None}
        self.text(0.5, 0.5, "no data", self.style.muted, ha="center", va="center", **options)
        return self.ax

    def annotate(self, text: str, x: float, y: float, offset: tuple[float, float], **options: Any) -> None:
        """Write small text at a distance of `offset` points."""
        options = {"textcoords": "offset points", "fontsize": "small", "annotation_clip": False, **options}
        self.ax.annotate(text, (x, y), offset, **options)

    def label_bar(self, text: str, x: float, height: float, color: str, **options: Any) -> None:
        """Write a tiny label on top of a bar."""
        self.annotate(text, x, height, (0, 1.5), color=color, ha="center", **{"fontsize": 6, **options})

    def legend(self, **options: Any) -> None:
        """Draw a legend in one line above the frame."""
        options = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "ncols": 3, **options}
        self.ax.legend(fontsize="small", labelcolor=self.style.ink, **options)


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
        odds = ends / (1 - ends) * np.exp([-0.4, 0.4])  # a margin
        low, high = odds / (1 + odds)
        return cls(float(low), float(high), is_logit=True)

    def clip(self, probabilities: Column) -> Column:
        """Move values beyond the limits to the ends."""
        return np.clip(probabilities, self.low, self.high)

    def apply(self, canvas: Canvas, which: Literal["x", "y"]) -> Transform:
        """Set scale, limits and ticks of an axis, and return its transform, from probabilities to even distances."""
        axis = canvas.ax.xaxis if which == "x" else canvas.ax.yaxis
        if self.is_logit:
            ticks = self._ticks(int(canvas.points[0] / 40 if which == "x" else canvas.points[1] / 15))
            canvas.ax.set(**{f"{which}scale": "logit"})
            axis.set_minor_locator(NullLocator())
            axis.set_ticks(ticks, [probability_label(tick) for tick in ticks])
        canvas.ax.set(**{f"{which}lim": (self.low, self.high)})
        return axis.get_transform()

    def _ticks(self, at_most: int) -> list[float]:
        """Return 0.5 and powers of ten from both ends; only every k-th power if there are too many."""
        ticks: list[float] = []
        powers = 10.0 ** -np.arange(1, 13)
        for step in range(1, 13):
            kept = powers[step - 1 :: step]
            ticks = [p for p in (*kept[::-1], 0.5, *(1 - kept)) if self.low <= p <= self.high]
            if len(ticks) <= max(1, at_most):
                break
        return ticks


# Numbers


def count_label(n: float) -> str:
    """Format a count in at most four characters: 876, 4.5k, 42k, 5.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.{1 if n < 9.95 * size else 0}f}{unit}"
    return f"{n:.3g}"


def percent_label(share: float) -> str:
    """Format a share in at most four characters. Only exact values are 0% or 100%."""
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def probability_label(probability: float) -> str:
    """Format a probability with two digits of its distance from 0 or 1: 0.25, 0.9904, 2.4e−6, 1−1.3e−4."""
    if probability in (0, 1):
        return f"{probability:.0f}"
    distance = min(probability, 1 - probability)
    if distance >= 1e-3:
        return f"{probability:.{1 - math.floor(math.log10(distance))}f}".rstrip("0")
    digits, exponent = f"{distance:.1e}".split("e")
    small = f"{digits.removesuffix('.0')}e−{-int(exponent)}"
    return small if probability < 0.5 else f"1−{small}"


# Files


def to_svg(ax: Axes) -> str:
    """Return the figure of `ax` as SVG without a date; text stays text. The same diagram gives the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "torchcalib", "svg.fonttype": "none"}):
        _save(ax, buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def to_png(ax: Axes, dpi: float = 200) -> bytes:
    """Return the figure of `ax` as PNG without a date. The same diagram gives the same bytes."""
    buffer = io.BytesIO()
    _save(ax, buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _save(ax: Axes, buffer: IO[Any], **options: Any) -> None:
    """Save the whole figure, even if `ax` lies on a subfigure."""
    ax.figure.canvas.figure.savefig(buffer, bbox_inches="tight", pad_inches=0.06, **options)
