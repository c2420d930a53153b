"""Reliability diagrams, histograms of confidence, and diagrams of comparisons and training histories.

Each function draws on the matplotlib axes `ax`. Without `ax`, it creates a figure that pyplot does not manage. Save it
with `ax.figure.savefig(...)`, `to_svg(ax)` or `to_png(ax)`. The last two return equal bytes for equal diagrams. To use
`plt.show()`, pass `ax=plt.gca()`. Additional panels are inset axes, `ax.child_axes`. With `style=DARK`, give the figure
of `ax` a dark background.

With `logit=True`, the scale of N samples ends at about 1 / (10 N) and 1 - 1 / (10 N). More extreme values are drawn at
its ends.
"""

try:
    import matplotlib  # noqa: F401 - fails early with the name of the extra
except ImportError as error:
    raise ImportError(
        "`torchcalib.plots` needs matplotlib, which is not installed. Install it: pip install 'torchcalib[plot]'."
    ) from error

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
