"""Pictures of bin tables, the ECD, comparisons and a training, each drawn on the `ax` it is given and nowhere else.

Without an `ax` a figure of its own is made, outside pyplot: `ax.figure.savefig(...)`, or `to_svg(ax)` and `to_png(ax)`,
whose bytes are the same for the same picture. To see a picture with `plt.show()` pass `ax=plt.gca()`.
"""

try:
    import matplotlib  # noqa: F401 - every room below draws with it
except ImportError as error:
    raise ImportError(
        "`torchcalib.plots` must have matplotlib to draw with, got none. Install it: pip install 'torchcalib[plot]'."
    ) from error

from torchcalib.plots.canvas import DARK, LIGHT, Style
from torchcalib.plots.comparison import bin_comparison
from torchcalib.plots.corp import corp_diagram
from torchcalib.plots.differences import difference_plot
from torchcalib.plots.ecd import ECD_MINIMUM, ecd_curve
from torchcalib.plots.reliability import MAX_LABELLED_BINS, confidence_histogram, reliability_diagram
from torchcalib.plots.saving import to_png, to_svg
from torchcalib.plots.tce import tce_diagram
from torchcalib.plots.training import training_curve

__all__ = [
    "DARK",
    "ECD_MINIMUM",
    "LIGHT",
    "MAX_LABELLED_BINS",
    "Style",
    "bin_comparison",
    "confidence_histogram",
    "corp_diagram",
    "difference_plot",
    "ecd_curve",
    "reliability_diagram",
    "tce_diagram",
    "to_png",
    "to_svg",
    "training_curve",
]
