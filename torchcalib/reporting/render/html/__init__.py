"""Render a `Report` or a `Comparison` as an HTML page, and as a folder of files.

A page is self-contained: it includes its style sheet, and each diagram in a light and a dark version.
"""

try:
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "`torchcalib.reporting.render.html` needs jinja2 and matplotlib, which are not installed. "
        "Install them: pip install 'torchcalib[report]'."
    ) from error

from torchcalib.reporting.render.html.comparison import comparison_files, render_comparison
from torchcalib.reporting.render.html.page import write_folder
from torchcalib.reporting.render.html.report import render, report_files

__all__ = ["comparison_files", "render", "render_comparison", "report_files", "write_folder"]
