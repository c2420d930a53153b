"""Figures and downloads of the example galleries.

Downloads run without other files: the module `example_data` is inserted where an example imports it. The build writes
the notebooks to `docs/_build/notebooks`. The workflow `docs` publishes them in the branch `notebooks`, from which each
example is opened in Google Colab.
"""

import json
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from metric_figures import STYLE
from PIL import Image
from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst

DPI = 110  # dots per inch; the text of a diagram then has about the size of the text on the page
MODULE = Path(__file__).with_name("example_data.py")
IMPORT = "from example_data import predictions\n"
FOOTER = "    .. container:: sphx-glr-download sphx-glr-download-jupyter\n"
NOTEBOOKS = "https://colab.research.google.com/github/torchcalib/torchcalib/blob/notebooks"


def set_style(*_: Any) -> None:
    """Set the style of figures that an example draws itself; called before each example."""
    matplotlib.rcParams.update({**STYLE, "figure.figsize": (6.2, 4.2), "figure.dpi": DPI})


def save_figure(_block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the figure that is the value of a code block, at one and two times the resolution; called after the block.

    The scraper of sphinx-gallery only finds figures of pyplot.
    """
    names = block_vars["example_globals"]
    value = names.get("___")  # sphinx-gallery stores the last value under this name
    figure = value.figure if isinstance(value, Axes) else value
    if not isinstance(figure, Figure):
        return ""
    names["___"] = None  # blocks without an expression at the end keep the value of an earlier block
    path = PurePosixPath(next(block_vars["image_path_iterator"]))
    double = path.with_stem(f"{path.stem}_2_00x")
    figure.savefig(double, dpi=2 * DPI, bbox_inches="tight", pad_inches=0.06)
    with Image.open(double) as drawn:  # drawing again would take longer
        drawn.reduce(2).save(path)
    titles = [text for ax in figure.axes for where in ("left", "center") if (text := ax.get_title(loc=where))]
    return str(figure_rst([path], gallery_conf["src_dir"], ", ".join(titles), [{0: path, 2.0: double}]))


def completed(name: str, content: bytes) -> bytes:
    """Return a script, a notebook or an archive of them with the module `example_data` instead of its import."""
    if name.endswith(".zip"):
        written = BytesIO()
        with ZipFile(BytesIO(content)) as archive, ZipFile(written, "w", ZIP_DEFLATED) as new:
            for member in archive.infolist():
                new.writestr(member, completed(member.filename, archive.read(member)))
        return written.getvalue()
    code = MODULE.read_text(encoding="utf-8").partition('"""\n\n')[2]  # without its docstring
    before, after = IMPORT, f"# Data of the examples\n{code}\n# Example\n"
    if name.endswith(".ipynb"):  # code is text in a JSON file
        before, after = (json.dumps(text)[1:-1] for text in (before, after))
    return content.replace(before.encode(), after.encode())


def complete_downloads(app: Sphinx, exception: Exception | None) -> None:
    """Complete all downloads after a build, and copy the notebooks; called by Sphinx."""
    notebooks = Path(app.outdir).with_name("notebooks")
    notebooks.mkdir(exist_ok=True)
    for path in Path(app.outdir, "_downloads").glob("*/plot_*") if exception is None else ():
        path.write_bytes(completed(path.name, path.read_bytes()))
        if path.suffix == ".ipynb":
            (notebooks / path.name).write_bytes(path.read_bytes())


def add_launch_link(_: Sphinx, page: str, source: list[str]) -> None:
    """Add a link to the notebook in Colab to the downloads of an example; called by Sphinx."""
    name = page.rpartition("/")[2]
    if name.startswith("plot_"):
        before, footer, after = source[0].partition(FOOTER)
        if not footer:
            raise ValueError(f"the page of an example must contain {FOOTER.strip()!r}, got none in {page}")
        link = f"    .. container:: sphx-glr-download\n\n      `Run in Google Colab <{NOTEBOOKS}/{name}.ipynb>`__\n\n"
        source[0] = f"{before}{link}{footer}{after}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handlers; called by Sphinx."""
    app.connect("source-read", add_launch_link)
    app.connect("build-finished", complete_downloads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
