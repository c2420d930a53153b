"""What every picture has: colours, a figure where none is given, axes in these colours, short counts."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Style:
    """Colours of a picture. `LIGHT` and `DARK` keep apart what must be for colour-blind readers (Okabe and Ito).

    Attributes:
        paper: background.
        ink: text, axes and the diagonal.
        muted: secondary text.
        grid: grid lines.
        bar: bars of counts.
        above: frequency above confidence.
        below: frequency below confidence.
        outcome: the mean outcome.
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


def new_axes(style: Style, width: float, height: float, top: float) -> Axes:
    """A figure that pyplot does not know of, so that none is kept alive and no window opens."""
    figure = Figure(figsize=(width, height), facecolor=style.paper)
    # Fixed margins: an automatic layout moves on with every save, and saving crops to what is drawn anyway.
    return figure.subplots(gridspec_kw={"left": 0.15, "right": 0.96, "bottom": 0.12, "top": top})


def dress(ax: Axes, style: Style, title: str | None, above_legend: bool = False) -> None:
    """Put axes into the colours of a style: two spines, a light grid, the title on the left."""
    ax.set_facecolor(style.paper)
    ax.set_axisbelow(True)
    ax.grid(True, color=style.grid, linewidth=0.6)
    ax.tick_params(color=style.muted, labelcolor=style.ink, which="both", labelsize="small")
    ax.xaxis.label.set_color(style.ink)
    ax.yaxis.label.set_color(style.ink)
    for side, spine in ax.spines.items():
        spine.set_color(style.muted)
        spine.set_visible(side in ("left", "bottom"))
    if title is not None:
        ax.set_title(title, loc="left", color=style.ink, fontsize="medium", pad=20 if above_legend else 6)


def say_no_data(ax: Axes, style: Style) -> None:
    """Write "no data" into the middle of the axes."""
    ax.text(
        0.5,
        0.5,
        "no data",
        color=style.muted,
        ha="center",
        va="center",
        transform=ax.transAxes,
        backgroundcolor=style.paper,
    )


def width_in_points(ax: Axes) -> float:
    """Return the width of the frame of `ax` as it is now, in points, to tell what fits into it."""
    return float(ax.get_window_extent().width / ax.figure.dpi * 72)


def height_in_points(ax: Axes) -> float:
    """Return the height of the frame of `ax` as it is now, in points."""
    return float(ax.get_window_extent().height / ax.figure.dpi * 72)


def compact(n: float) -> str:
    """A count of at most four characters: 876, 4.5k, 42k, 5.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.{1 if n < 9.95 * size else 0}f}{unit}"
    return f"{n:.3g}"
