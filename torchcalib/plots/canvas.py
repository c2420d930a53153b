"""Functions that several diagrams share: colours, axes, panels, marks, number formats and image files."""

import io
import math
from dataclasses import dataclass
from textwrap import wrap
from types import SimpleNamespace
from typing import IO, Any, Literal, NamedTuple, Self

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox, Transform
from numpy.typing import NDArray

from torchcalib.core.bins import BinTable
from torchcalib.display.words import printable, short_probability

Column = NDArray[np.float64]

Kind = Literal["model", "side", "other"]
"""Kind of an entry in the legend: the curve of a model, one of two colours of a diagram, or another explanation."""

_MARKS = "osD^vX"
_DASHES = ((1, 0), (5, 1.5), (1.5, 1.2), (7, 1.5, 1.5, 1.5), (3, 1, 3, 3), (10, 2))
"""Mark and dashes of each curve, which distinguish the curves without colours."""
DIAGONAL = "Perfectly calibrated"
"""Label of the diagonal, as in scikit-learn."""

_NARROW, _WIDE, _NAME_WIDTH = 130, 160, 26
"""Width of a legend beside the axes in small and in normal type, in points, and of its lines, in characters."""

_FULL_SIZE, _LEAST_SCALE = 200, 0.6
"""Width or height of given axes in points below which text is smaller, and the smallest factor of its size."""

_MARGINS = 44, 34, 8, 24
"""Estimated space for labels at the left, bottom, right and top of a diagram, in points."""

_FITS, _ACCURACY = 8, 0.3
"""Largest number of steps in which a diagram is fitted into its place, and the change in points after which they end.

Each step reduces the error to about a fifth.
"""

_BESIDE = 1.3
"""Smallest ratio of width and height of given axes with a legend beside the diagram."""

_CHARACTER = 0.52
"""Estimated mean width of a character, divided by the font size."""


@dataclass(frozen=True)
class Style:
    """Colours of a diagram. `LIGHT` and `DARK` use colours for colour-blind readers, based on Okabe and Ito.

    Args:
        paper: background.
        ink: text, axes and the diagonal.
        muted: secondary text.
        grid: grid lines.
        bar: bars of counts.
        above: marks with frequency above confidence.
        below: marks with frequency below confidence.
        outcome: mean outcome.
        rejected: predictions that a test rejects.
        other: a further curve.

    Example:
        >>> from dataclasses import replace
        >>> replace(LIGHT, bar="#cccccc").bar
        '#cccccc'
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
    other: str


LIGHT = Style(
    "#ffffff", "#1b1f24", "#5c646d", "#e3e6e9", "#8b95a0", "#0072b2", "#bf5200", "#009e73", "#b3123f", "#7b4b94"
)
DARK = Style(
    "#15181c", "#e4e6e8", "#9aa3ac", "#2c3238", "#7d8893", "#56b4e9", "#e69f00", "#33c49a", "#ff6b81", "#cf9fe6"
)


def columns_of(table: BinTable, name: str = "table") -> SimpleNamespace:
    """Return the columns of a table as float64 arrays `(B,)`, without the empty bins of width 0 that pad batches."""
    if table.n.dim() != 1:
        raise ValueError(
            f"`{name}` must have no batch axes, got shape {tuple(table.n.shape)}. Draw one table: `{name}[k]`."
        )
    columns = table.to_dict()
    real = (columns["n"] > 0) | (columns["upper"] > columns["lower"])
    return SimpleNamespace(**{name: column[real].astype(np.float64) for name, column in columns.items()})


class Place:
    """Axes locator of matplotlib that keeps a diagram, with its labels and panels, within the place of its axes.

    Without it, labels, panels and legends would cover the other axes of a figure. It computes the position for every
    drawing, because layout engines and later titles change the space.
    """

    def __init__(self, ax: Axes) -> None:
        self.ax = ax
        self._outer: Any = ax.get_axes_locator()  # of inset axes
        self._trial: Bbox | None = None
        self._last: tuple[Bbox, Bbox] | None = None  # place and frame of the last drawing
        ax.set_axes_locator(self)
        outer = self.box()
        margins = np.minimum(np.array(_MARGINS) * scale_of(outer), np.tile(outer.size, 2) / 3)
        ax.apply_aspect(self._position(_within(outer, margins)))

    @classmethod
    def of(cls, ax: Axes) -> Self:
        """Return the place of axes. At the first call, the axes shrink to leave space for labels."""
        place: Any = ax.get_axes_locator()
        return place if cls.is_set(ax) else cls(ax)

    @classmethod
    def is_set(cls, ax: Axes) -> bool:
        """Return whether axes have a place, because the caller provided them for an earlier diagram."""
        return isinstance(ax.get_axes_locator(), cls)

    def get_subplotspec(self) -> Any:
        """Return the cell of the grid, which `Figure.tight_layout` reads from locators."""
        return self.ax.get_subplotspec()

    def box(self, renderer: Any = None) -> Bbox:
        """Return the rectangle in points in which the diagram is drawn."""
        position = self._outer(self.ax, renderer) if self._outer else self.ax.get_position(original=True)
        return self._in_points(position.transformed(self.ax.figure.transSubfigure))

    def __call__(self, ax: Any, renderer: Any) -> Bbox:
        """Return the position of the frame: the place without the space that the labels require."""
        if self._trial is not None:  # called by `get_tightbbox` below
            return self._trial
        outer, frame = self.box(renderer), self._in_points(ax.bbox)
        if self._last is not None and not ax.stale and np.allclose(self._last[0], outer):
            return self._position(self._last[1])
        try:
            # The space for panels and ticks depends on the size of the frame.
            margins = np.zeros(4)
            for step in range(_FITS):
                self._trial = self._position(frame)
                drawn, inner = (self._in_points(box).get_points() for box in (ax.get_tightbbox(renderer), ax.bbox))
                before, margins = margins, np.concatenate([inner[0] - drawn[0], drawn[1] - inner[1]])
                if step >= 2:  # other ticks can alternate between two sizes
                    margins = np.maximum(before, margins)
                frame = _within(outer, np.clip(margins, 0, 0.85 * np.tile(outer.size, 2)))
                if np.abs(margins - before).max() < _ACCURACY:
                    break
        finally:
            self._trial = None
        self._last = outer, frame
        return self._position(frame)

    def _position(self, points: Bbox) -> Bbox:
        pixels = Bbox(points.get_points() * self.ax.figure.dpi / 72)
        return pixels.transformed(self.ax.figure.transSubfigure.inverted())

    def _in_points(self, pixels: Any) -> Bbox:
        return Bbox(pixels.get_points() * 72 / self.ax.figure.dpi)


def _within(outer: Bbox, margins: NDArray[np.float64]) -> Bbox:
    """Return a rectangle without margins (left, bottom, right, top)."""
    low, high = outer.min + margins[:2], outer.max - margins[2:]
    return Bbox([low, np.maximum(high, low + 1)])


def given_box(ax: Any) -> Bbox | None:
    """Return the rectangle in points of axes that the caller provides; None without axes, or for a figure."""
    return Place.of(ax).box() if isinstance(ax, Axes) else None


def _has_curves(ax: Axes) -> bool:
    return any(str(line.get_gid()).startswith("torchcalib-") for line in ax.lines)


def scale_of(box: Bbox) -> float:
    """Return the factor of font sizes and distances for a diagram in a rectangle in points."""
    return float(np.clip(min(box.size) / _FULL_SIZE, _LEAST_SCALE, 1))


@dataclass(frozen=True)
class Canvas:
    """Axes in the colours of a style, with methods for the marks that several diagrams share.

    `is_given` means that the caller provides the axes. `scale` is a factor of font sizes and distances, below 1 for
    small axes of the caller.
    """

    ax: Axes
    style: Style
    is_given: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        ax, style = self.ax, self.style
        ax.set_facecolor(style.paper)
        ax.set_axisbelow(True)
        ax.grid(True, color=style.grid, linewidth=0.6)
        ax.tick_params(color=style.muted, labelcolor=style.ink, which="both", labelsize=self.size("small"))
        for axis in (ax.xaxis, ax.yaxis):
            axis.label.set(color=style.ink, fontsize=self.size("medium"))
        for side, spine in ax.spines.items():
            spine.set_color(style.muted)
            spine.set_visible(side in ("left", "bottom"))

    @classmethod
    def create(
        cls,
        ax: Axes | Figure | None,
        style: Style,
        title: str | None,
        size: tuple[float, float],
        top: float,
        left: float = 0.15,
        **options: Any,
    ) -> Self:
        """Create a canvas on `ax`, on an empty figure, or on a new figure if it is None, and draw the title.

        `size` is in inches. `top` and `left` of the axes are fractions of it. `options` are those of `Axes.set_title`.
        """
        if ax is None:
            # pyplot would open a window and store a reference to the figure.
            ax = Figure()
        # A further curve on axes of this module does not change their place.
        is_own = isinstance(ax, Figure) or (isinstance(ax, Axes) and _has_curves(ax) and not Place.is_set(ax))
        if isinstance(ax, Figure):
            # Margins are fixed, because an automatic layout would change with every save.
            ax.set_size_inches(size)
            ax.set_facecolor(style.paper)
            ax = ax.subplots(gridspec_kw={"left": left, "right": 0.96, "bottom": 0.12, "top": top})
        if not hasattr(ax, "figure"):
            raise TypeError(f"`ax` must be matplotlib axes, got {ax!r:.80}. Pass options such as task= by name.")
        canvas = cls(ax, style) if is_own else cls(ax, style, True, scale_of(Place.of(ax).box()))
        if title is not None:
            canvas.title(title, **{"fontsize": "medium", "pad": 6, **options})
        return canvas

    def size(self, font: str | float) -> float:
        """Return a font size in points, for a name of matplotlib such as "small", or for full-sized axes."""
        return self.scale * float(FontProperties(size=font).get_size_in_points())

    def lines(self, text: str, font: str | float, length: float) -> str:
        """Break text into lines that fit into `length` points of given axes."""
        if not self.is_given:
            return text
        width = max(8, int(length / (_CHARACTER * self.size(font))))
        return "\n".join(part for line in text.split("\n") for part in wrap(line, width) or [""])

    def title(self, text: str, *, fontsize: str = "medium", pad: float = 6, **options: Any) -> None:
        """Write a title above the frame, at the left."""
        text = self.lines(text, fontsize, self.points[0])
        size, pad = self.size(fontsize), pad * self.scale
        self.ax.set_title(text, loc="left", color=self.style.ink, fontsize=size, pad=pad, **options)

    def label(self, x: str = "", y: str = "", pads: tuple[float | None, float | None] = (None, None)) -> None:
        """Write the names of the axes, at distances `pads` from the ticks in points."""
        for axis, text, length, pad in zip((self.ax.xaxis, self.ax.yaxis), (x, y), self.points, pads, strict=True):
            axis.set_label_text(self.lines(text, "medium", length))
            axis.labelpad = (axis.labelpad if pad is None else pad) * self.scale

    def only_panels(self) -> Self:
        """Hide the grid, frame and ticks of axes that contain only inset axes, and return the canvas."""
        self.ax.grid(False)
        self.ax.spines[:].set_visible(False)
        self.ax.set(xticks=[], yticks=[])
        return self

    def panels(self, n: int, gap: float, *, columns: int = 1, left: float = 0, across: float = 0) -> "list[Canvas]":
        """Create `n` inset axes in a grid. Return their canvases column by column, each from top to bottom.

        Vertical `gap`, horizontal gap `across` and margin `left` are fractions of the size of these axes.
        """
        rows = math.ceil(n / columns)
        width, height = (1 - left + across) / columns - across, (1 + gap) / rows - gap
        cells = (divmod(k, rows) for k in range(n))
        return [
            self.panel(left + column * (width + across), 1 - height - row * (height + gap), width, height)
            for column, row in cells
        ]

    def panel(self, left: float, bottom: float, width: float, height: float) -> "Canvas":
        """Create a canvas on inset axes. Position and size are fractions of the size of these axes."""
        return Canvas(self.ax.inset_axes((left, bottom, width, height)), self.style, self.is_given, self.scale)

    @property
    def points(self) -> tuple[float, float]:
        """Width and height of the axes in points (1/72 inch)."""
        extent, scale = self.ax.get_window_extent(), 72 / self.ax.figure.dpi
        return float(extent.width * scale), float(extent.height * scale)

    def diagonal(self, low: float = 0.0, high: float = 1.0) -> None:
        """Draw the diagonal, which marks perfect calibration. If the axes already contain it, adapt its ends."""
        options: dict[str, Any] = {"color": self.style.ink, "linewidth": 0.8, "dashes": (5, 3), "zorder": 1.5}
        for line in self.ax.lines:
            if line.get_label() == DIAGONAL:
                line.set_data([low, high], [low, high])
                return
        self.ax.plot([low, high], [low, high], label=DIAGONAL, **options)

    def curve(self, x: Column, y: Column, name: str, *, marked: bool = False, **options: Any) -> None:
        """Draw the curve of a model. Its colour differs from the curves before it, and its marks or its dashes too.

        The legend omits an empty name. `options` of `Axes.plot` replace parts of this look.
        """
        look = self.look(self.next_look, marked=marked)
        if "linestyle" in options:
            look.pop("dashes", None)  # they would replace it
        label = "\n".join(map(printable, name.split("\n"))) or "_"
        self.ax.plot(x, y, **{"label": label, **look, **options, "gid": self._id("model")})

    @property
    def next_look(self) -> int:
        """Number of looks that the curves on the axes use. A diagram with two colours uses two."""
        return len(self.curves) + len(self._of_kind("side")) // 2

    def look(self, index: int, *, marked: bool = False) -> dict[str, Any]:
        """Return the options of `Axes.plot` for the curve of a model, by the number of curves before it."""
        style = self.style
        colors = (style.above, style.below, style.outcome, style.other, style.rejected, style.muted)
        color = colors[index % len(colors)]
        if not marked:
            return {"color": color, "linewidth": 1.5, "dashes": _DASHES[index % len(_DASHES)]}
        return {
            "color": color,
            "linewidth": 1.0,
            "linestyle": "-" if index < len(colors) else "--",
            "marker": _MARKS[index % len(_MARKS)],
            "markersize": 5,
            "markerfacecolor": style.paper if index % 2 == 0 else color,
            "markeredgecolor": color,
            "markeredgewidth": 1.1,
        }

    def key(self, label: str, kind: Kind = "other", **options: Any) -> None:
        """Add an entry to the legend. Without `options` of a line or mark, it is text.

        The kind "model" counts as the curve of a model, and two entries of the kind "side" as a further colour.
        """
        self.ax.plot([], [], label=label, gid=self._id(kind), **{"linestyle": "none", **options})

    def curve_legend(self) -> None:
        """Write a legend of all curves with names and of the keys.

        It is beside the axes if there is space, or else in the corner with the fewest data. In small axes, it contains
        only the curves of models, and it is omitted if it is wider than the axes.
        """
        handles, style = self.keys, self.style
        if self.scale < 1:
            handles = [line for line in handles if line in self.curves]
        if not handles:
            return
        space = self.space
        where: dict[str, Any] = {"loc": "best", "framealpha": 0.85}
        if space >= _NARROW:
            where = {"loc": "upper left", "bbox_to_anchor": (1.03, 1), "borderaxespad": 0, "frameon": False}
        size = self.size("small" if space >= _WIDE else "x-small")
        is_dashed = any(line.get_linestyle() != "None" and line.get_marker() in ("None", "") for line in handles)
        length = 3.2 if is_dashed and self.scale == 1 else 1.6  # two periods of most dashes
        is_inside = self.is_given and not space
        room = (0.85 * self.points[0] / size - length - 2) / _CHARACTER if is_inside else _NAME_WIDTH
        labels = [wrapped(str(line.get_label()), int(np.clip(room, 6, _NAME_WIDTH))) for line in handles]
        options: dict[str, Any] = {
            "labelspacing": 0.7,
            "handlelength": length,
            "fontsize": size,
            "labelcolor": style.ink,
            "facecolor": style.paper,
            "edgecolor": style.grid,
            **where,
        }
        legend = self.ax.legend(handles, labels, **options)
        for text in legend.get_texts():
            text.set_parse_math(False)
        if is_inside and self.extent(legend).width > 0.9 * self.points[0]:
            legend.remove()  # it would cover the whole diagram

    @property
    def space(self) -> float:
        """Width in points of the space for a legend to the right of the axes; 0 in figures with other axes."""
        if self.is_given:
            return _NARROW if self.outer.width >= _BESIDE * self.outer.height and self.scale == 1 else 0.0
        figure = self.ax.figure
        if figure.axes != [self.ax]:
            return 0.0
        self.ax.apply_aspect()
        return float(figure.bbox.x1 - self.ax.get_window_extent().x1) * 72 / figure.dpi

    @property
    def outer(self) -> Bbox:
        """Rectangle in points that the caller provides for the diagram and its labels."""
        return Place.of(self.ax).box()

    @property
    def keys(self) -> list[Line2D]:
        """Curves with names and further entries of the legend."""
        lines = self._of_kind("model", "side", "other")
        return [line for line in lines if not str(line.get_label()).startswith("_")]

    @property
    def curves(self) -> list[Line2D]:
        """Curves of models, also those that an earlier call drew on the same axes."""
        return self._of_kind("model")

    def _id(self, kind: Kind) -> str:
        """Return a group id for the next line, unique within the axes, because it is an id in SVG files."""
        return f"torchcalib-{kind}-{len(self.ax.lines)}"

    def _of_kind(self, *kinds: Kind) -> list[Line2D]:
        prefixes = tuple(f"torchcalib-{kind}-" for kind in kinds)
        return [line for line in self.ax.lines if str(line.get_gid()).startswith(prefixes)]

    def text(self, x: float, y: float, text: str, color: str, **options: Any) -> None:
        """Write small text at the point (x, y)."""
        self.ax.text(x, y, text, color=color, **self._sized("small", options))

    def no_data(self) -> Axes:
        """Write "no data" in the middle, and return the axes."""
        options = {"backgroundcolor": self.style.paper, "transform": self.ax.transAxes, "fontsize": "medium"}
        self.text(0.5, 0.5, "no data", self.style.muted, ha="center", va="center", **options)
        return self.ax

    def annotate(self, text: str, x: float, y: float, offset: tuple[float, float], **options: Any) -> None:
        """Write small text at a distance of `offset` points (right, up) from (x, y)."""
        options = {"textcoords": "offset points", "annotation_clip": False, **self._sized("small", options)}
        self.ax.annotate(text, (x, y), (offset[0] * self.scale, offset[1] * self.scale), **options)

    def _sized(self, font: str, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "fontsize": self.size(options.get("fontsize", font))}

    def label_bar(self, text: str, x: float, height: float, color: str, **options: Any) -> None:
        """Write a small label on top of a bar."""
        self.annotate(text, x, height, (0, 1.5), color=color, ha="center", **{"fontsize": 6, **options})

    def legend(self, **options: Any) -> Legend:
        """Draw a legend above the frame: in one row, or in more rows if given axes are narrow."""
        options = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "ncols": 3, **options}
        # In given axes, tick labels can need more than the estimated space.
        width = room = (0.8 if self.is_given else 1.0) * self.points[0]
        while True:
            legend = self.ax.legend(fontsize=self.size("small"), labelcolor=self.style.ink, **options)
            if options["ncols"] == 1:
                for text in legend.get_texts():
                    text.set_text(self.lines(text.get_text(), "small", room))
                room *= 0.8
            if not self.is_given or self.extent(legend).width <= width or room < width / 3:
                return legend
            options["ncols"] = max(1, options["ncols"] - 1)

    def extent(self, artist: Artist) -> Bbox:
        """Return the rectangle of an artist in points."""
        return Bbox(artist.get_window_extent().get_points() * 72 / self.ax.figure.dpi)


class ProbabilityAxis(NamedTuple):
    """Limits and scale of an axis of probabilities. Values beyond the limits are drawn at the ends."""

    low: float = 0.0
    high: float = 1.0
    is_logit: bool = False

    @classmethod
    def logit_of(cls, probabilities: Column, n: float) -> Self:
        """Create a logit axis for these probabilities, with limits at least about 1 / (10 n) from 0 and 1.

        Without this margin, a probability of 1e-19 would compress all other values.
        """
        finest = min(max(0.1 / n, 1e-12), 0.01)
        ends = np.clip([probabilities.min(), probabilities.max()], finest, 1 - finest)
        odds = ends / (1 - ends) * np.exp([-0.4, 0.4])  # margin of 0.4 in log-odds
        low, high = odds / (1 + odds)
        return cls(float(low), float(high), is_logit=True)

    def clip(self, probabilities: Column) -> Column:
        """Clip probabilities to the limits."""
        return np.clip(probabilities, self.low, self.high)

    def apply(self, canvas: Canvas, which: Literal["x", "y"]) -> Transform:
        """Set scale, limits and ticks of an axis. Return the transform from probabilities to the scale of the axis."""
        axis = canvas.ax.xaxis if which == "x" else canvas.ax.yaxis
        if self.is_logit:
            ticks = self._ticks(int(canvas.points[0] / 36 if which == "x" else canvas.points[1] / 15))
            canvas.ax.set(**{f"{which}scale": "logit"})
            axis.set_minor_locator(NullLocator())
            axis.set_ticks(ticks, [short_probability(tick) for tick in ticks])
        canvas.ax.set(**{f"{which}lim": (self.low, self.high)})
        return axis.get_transform()

    def _ticks(self, at_most: int) -> list[float]:
        """Return up to `at_most` ticks: 0.5, 10^-m and 1 - 10^-m for every k-th m, with the smallest k that fits."""
        ticks: list[float] = []
        powers = 10.0 ** -np.arange(1, 13)
        for step in range(1, 13):
            small = powers[step - 1 :: step]
            ticks = [p for p in (*small[::-1], 0.5, *(1 - small)) if self.low <= p <= self.high]
            if len(ticks) <= max(1, at_most):
                break
        return ticks


def wrapped(text: str, width: int = _NAME_WIDTH) -> str:
    """Break the first line of a text, such as the name of a model, into up to two lines for a legend."""
    first, *rest = text.split("\n")
    lines = wrap(first, width, max_lines=2, placeholder="…", break_long_words=True)
    return "\n".join([*lines, *rest])


# Image files


def to_svg(ax: Axes) -> str:
    """Return the figure of `ax` as SVG text. Equal diagrams give equal text, because the file contains no date.

    Args:
        ax: Axes that a function of this module returned.

    Example:
        >>> from torchcalib.plots import ecd_curve
        >>> "ECD (nats)" in to_svg(ecd_curve())
        True
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "torchcalib", "svg.fonttype": "none"}):
        _save(ax, buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def to_png(ax: Axes, dpi: float = 200) -> bytes:
    """Return the figure of `ax` as PNG bytes. Equal diagrams give equal bytes, because the file contains no date.

    Args:
        ax: Axes that a function of this module returned.
        dpi: Dots per inch.

    Example:
        >>> from torchcalib.plots import ecd_curve
        >>> to_png(ecd_curve(), dpi=50)[1:4]
        b'PNG'
    """
    buffer = io.BytesIO()
    _save(ax, buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _save(ax: Axes, buffer: IO[Any], **options: Any) -> None:
    """Save the figure that contains `ax`, also if `ax` is in a subfigure."""
    figure = ax.figure.canvas.figure
    # "tight" draws the figure twice, which only a layout engine needs, because it moves the axes.
    box = "tight" if figure.get_layout_engine() else figure.get_tightbbox().padded(0.06)
    figure.savefig(buffer, bbox_inches=box, pad_inches=0.06, **options)
