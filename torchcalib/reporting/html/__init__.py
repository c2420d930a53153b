"""Render a `Report` or a `Comparison` as an HTML page, and as a folder of files.

A page is self-contained: it includes its style sheet, and each diagram in a light and a dark version.
"""

try:
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "`torchcalib.reporting.html` needs jinja2 and matplotlib, which are not installed. "
        "Install them: pip install 'torchcalib[report]'."
    ) from error

from torchcalib.reporting.html.comparison import render_comparison
from torchcalib.reporting.html.report import render

__all__ = ["render", "render_comparison"]
