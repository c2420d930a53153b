"""A `Report` or a `Comparison` as one self-contained page, and as a folder of files.

A page loads nothing: it contains its style and its pictures, each in a light and a dark version.
"""

try:
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "`torchcalib.reporting.html` must have jinja2 and matplotlib to make a page with, got an environment without. "
        "Install them: pip install 'torchcalib[report]'."
    ) from error

from torchcalib.reporting.html.comparison import render_comparison
from torchcalib.reporting.html.report import render

__all__ = ["render", "render_comparison"]
