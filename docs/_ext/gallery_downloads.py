"""Make the downloads of the gallery self-contained, and link each example to its notebook in Google Colab.

The module `example_data` is inserted where an example imports it. The workflow `docs` publishes the notebooks, which
the build writes to `docs/_build/notebooks`, in the branch `notebooks`.
"""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from sphinx.application import Sphinx

MODULE = Path(__file__).with_name("example_data.py")
IMPORT = "from example_data import predictions\n"
FOOTER = "    .. container:: sphx-glr-download sphx-glr-download-jupyter\n"
NOTEBOOKS = "https://colab.research.google.com/github/torchcalib/torchcalib/blob/notebooks"


def complete_script(content: bytes) -> bytes:
    """Return a script, or other text, with the module instead of its import."""
    code = MODULE.read_text(encoding="utf-8").partition('"""\n\n')[2]  # without its docstring
    return content.decode().replace(IMPORT, f"# Data of the examples\n{code}\n# Example\n").encode()


def complete_notebook(content: bytes) -> bytes:
    """Return a notebook with the module instead of its import."""
    notebook = json.loads(content)
    for cell in notebook["cells"]:
        cell["source"] = [complete_script(text.encode()).decode() for text in cell["source"]]
    return json.dumps(notebook, indent=1).encode()


def complete_archive(content: bytes) -> bytes:
    """Return a ZIP archive with complete scripts and notebooks."""
    written = BytesIO()
    with ZipFile(BytesIO(content)) as archive, ZipFile(written, "w", ZIP_DEFLATED) as new:
        for member in archive.infolist():
            complete = COMPLETE.get(Path(member.filename).suffix, bytes)
            new.writestr(member, complete(archive.read(member)))
    return written.getvalue()


COMPLETE: dict[str, Callable[[bytes], bytes]] = {
    ".py": complete_script,
    ".ipynb": complete_notebook,
    ".zip": complete_archive,
}
"""Function that completes a file, by its suffix."""


def complete_downloads(app: Sphinx, exception: Exception | None) -> None:
    """Complete all downloads after a build, and copy the notebooks; called by Sphinx."""
    if exception is not None:
        return
    notebooks = Path(app.outdir).with_name("notebooks")
    notebooks.mkdir(exist_ok=True)
    for path in Path(app.outdir, "_downloads").glob("*/plot_*"):
        content = COMPLETE[path.suffix](path.read_bytes())
        path.write_bytes(content)
        if path.suffix == ".ipynb":
            (notebooks / path.name).write_bytes(content)


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
