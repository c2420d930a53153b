"""Positions of text in a figure, in pixels."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg


def written(ax):
    """Return all text that is drawn, each with its box in pixels."""
    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    ax.figure.draw(renderer)
    found = []
    for axes in (ax, *ax.child_axes):
        texts = [*axes.texts, axes._left_title]
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                texts += [axis.label, *(label for label in axis.get_ticklabels() if label.get_visible())]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
        found += [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]
    return found


def overlaps(found) -> list[str]:
    """Return pairs of texts whose boxes overlap by more than half a pixel."""
    return [
        f"{one!r} and {other!r}"
        for (one, a), (other, b) in combinations(found, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]
