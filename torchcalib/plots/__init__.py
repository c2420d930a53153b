"""Diagrams of bin tables, the ECD, comparisons and trainings. Each draws only on the `ax` that it is given.

Without an `ax` it draws on a new figure outside pyplot. Save it with `ax.figure.savefig(...)`, `to_svg(ax)` or
`to_png(ax)`; the last two give the same bytes for the same diagram. To use `plt.show()`, pass `ax=plt.gca()`.
"""

try:
    import matplotlib  # noqa: F401 - all modules below draw with it
except ImportError as error:
    raise ImportError(
        "`torchcalib.plots` needs matplotlib, which is not installed. Install it: pip install 'torchcalib[plot]'."
    ) from error

from torchcalib.plots.canvas import DARK, LIGHT, Style, to_png, to_svg
from torchcalib.plots.comparison import bin_comparison
from torchcalib.plots.differences import difference_plot
from torchcalib.plots.ecd import ECD_MINIMUM, ecd_curve
from torchcalib.plots.reliability import MAX_LABELLED_BINS, confidence_histogram, corp_diagram, reliability_diagram
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
