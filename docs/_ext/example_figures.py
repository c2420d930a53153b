"""Figures of the example galleries: sphinx-gallery finds those that pyplot does not manage, and their defaults."""

from pathlib import PurePosixPath
from typing import Any
from weakref import WeakSet

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from sphinx_gallery.scrapers import figure_rst

DPI = 110  # dots per inch; the text of a diagram then has about the size of the text on the page
_saved: WeakSet[Figure] = WeakSet()


def scrape(_block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any], **_: Any) -> str:
    """Save the figure that is the value of the last expression of a code block, at one and two times the resolution."""
    value = block_vars["example_globals"].get("___")  # sphinx-gallery stores the last value under this name
    if isinstance(value, Axes):
        value = value.figure
    # Blocks without an expression at the end keep the value of an earlier block.
    if not isinstance(value, Figure) or value in _saved or _is_managed(value):
        return ""
    _saved.add(value)
    path = PurePosixPath(next(block_vars["image_path_iterator"]))
    double = path.with_stem(f"{path.stem}_2_00x")
    value.savefig(double, dpi=2 * DPI, bbox_inches="tight", pad_inches=0.06)
    with Image.open(double) as drawn:  # drawing again would take longer
        drawn.reduce(2).save(path)
    titles = [text for ax in value.axes for where in ("left", "center") if (text := ax.get_title(loc=where))]
    rst: str = figure_rst([path], gallery_conf["src_dir"], ", ".join(titles), [{0: path, 2.0: double}])
    return rst


def _is_managed(figure: Figure) -> bool:
    """Return True if the scraper of sphinx-gallery finds a figure."""
    from matplotlib import pyplot as plt

    return any(plt.figure(number) is figure for number in plt.get_fignums())


def _get_sg_image_scraper() -> Any:
    """Return the scraper; called by sphinx-gallery for the name of this module."""
    return scrape


def set_defaults(*_: Any) -> None:
    """Set the style of figures that an example draws itself; called before each example."""
    matplotlib.rcParams.update(
        {
            "figure.figsize": (6.2, 4.2),
            "figure.dpi": DPI,
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e4e4e4",
            "axes.titlelocation": "left",
            "legend.frameon": False,
        }
    )
