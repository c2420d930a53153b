"""A picture as text or bytes: the same for the same picture."""

import io
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes


def to_svg(ax: Axes) -> str:
    """Return the figure that `ax` is on as SVG, text as text; the same bytes for the same picture, without a date."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "torchcalib", "svg.fonttype": "none"}):
        _save(ax, buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def to_png(ax: Axes, dpi: float = 200) -> bytes:
    """Return the figure that `ax` is on as PNG; the same bytes for the same picture, without a date."""
    buffer = io.BytesIO()
    _save(ax, buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _save(ax: Axes, buffer: IO[Any], **options: Any) -> None:
    # The canvas knows the whole figure even if `ax` lies on a part of one.
    ax.figure.canvas.figure.savefig(buffer, bbox_inches="tight", pad_inches=0.06, **options)
