"""Reliability diagrams, histograms of confidence, and diagrams of comparisons and training histories.

Each function draws on the matplotlib axes `ax`. Without `ax`, it creates a figure that pyplot does not manage. Save it
with `ax.figure.savefig(...)`, `to_svg(ax)` or `to_png(ax)`. The last two return equal bytes for equal diagrams. To use
`plt.show()`, pass `ax=plt.gca()`. Additional panels are inset axes, `ax.child_axes`. With `style=DARK`, give the figure
of `ax` a dark background.

With `logit=True`, the scale of N samples ends at about 1 / (10 N) and 1 - 1 / (10 N). More extreme values are drawn at
its ends.
"""

from typing import Any

try:
    import matplotlib  # noqa: F401 - fails early with the name of the extra
except ImportError as error:
    raise ImportError(
        "`torchcalib.plots` needs matplotlib, which is not installed. Install it: pip install 'torchcalib[plot]'."
    ) from error

from torchcalib._lazy import unknown_name
from torchcalib.plots.canvas import DARK, LIGHT, Style, to_png, to_svg
from torchcalib.plots.classwise import classwise_reliability_diagrams
from torchcalib.plots.comparison import bin_comparison
from torchcalib.plots.confidence import confidence_histogram
from torchcalib.plots.differences import difference_plot
from torchcalib.plots.ecd import ECD_MINIMUM, ecd_curve
from torchcalib.plots.reliability import MAX_LABELLED_BINS, corp_diagram, reliability_diagram
from torchcalib.plots.selective import risk_coverage_curve
from torchcalib.plots.tce import tce_diagram
from torchcalib.plots.training import training_curve

__all__ = [
    "DARK",
    "ECD_MINIMUM",
    "LIGHT",
    "MAX_LABELLED_BINS",
    "Style",
    "bin_comparison",
    "classwise_reliability_diagrams",
    "confidence_histogram",
    "corp_diagram",
    "difference_plot",
    "ecd_curve",
    "reliability_diagram",
    "risk_coverage_curve",
    "tce_diagram",
    "to_png",
    "to_svg",
    "training_curve",
]


def __getattr__(name: str) -> Any:
    raise unknown_name(__name__, name, __all__)
