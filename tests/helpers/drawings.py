"""Texts of a diagram and their overlaps."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg


def drawn_texts(ax):
    """Return all visible texts with their bounding boxes in pixels."""
    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    ax.figure.draw(renderer)
    texts = []
    for axes in (ax, *ax.child_axes):
        texts += [*axes.texts, axes._left_title, *(axes.get_legend().get_texts() if axes.get_legend() else ())]
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            texts += [axis.label, *(label for label in axis.get_ticklabels() if label.get_visible())]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]


def overlaps(found) -> list[str]:
    """Return pairs of texts whose bounding boxes overlap by more than half a pixel."""
    return [
        f"{one!r} and {other!r}"
        for (one, a), (other, b) in combinations(found, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


def legend_of(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]
