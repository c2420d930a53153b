"""Downloads of the example gallery run without other files of the repository. Dead links of the site are found."""

import ast
import importlib
import json
import sys
from io import BytesIO
from zipfile import ZipFile

import pytest
from processes import ROOT

from docs.check_links import dead_links, main

EXAMPLES = sorted((ROOT / "docs/gallery").glob("plot_*.py"))
PACKAGES = {"matplotlib", "numpy", "sklearn", "torch", "torchcalib"}


@pytest.fixture(scope="module")
def downloads():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/_ext"))
        yield pytest.importorskip("example_gallery", reason="needs Sphinx", exc_type=ImportError)


def test_scripts_import_only_packages(downloads):
    assert len(EXAMPLES) >= 17
    for path in EXAMPLES:
        tree = ast.parse(downloads.completed(path.name, path.read_bytes()))
        nodes = list(ast.walk(tree))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in names} <= PACKAGES | sys.stdlib_module_names, path.name


def test_notebooks_and_archives_contain_the_data(downloads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHCALIB_DATA", raising=False)
    monkeypatch.delitem(sys.modules, "example_data", raising=False)
    source = f"{downloads.IMPORT}\nsystem = predictions('cifar10_resnet20')\n"
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": [source]}]})
    with ZipFile(archive := BytesIO(), "w") as file:
        file.writestr("plot.py", source)
        file.writestr("plot.ipynb", notebook)
    with ZipFile(BytesIO(downloads.completed("plot.zip", archive.getvalue()))) as file:
        scripts = [file.read("plot.py").decode(), json.loads(file.read("plot.ipynb"))["cells"][0]["source"][0]]
    for script in scripts:
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("downloaded", None))
        monkeypatch.setitem(sys.modules, "downloaded", module)  # the decorator of a data class looks it up
        exec(script, vars(module))
        assert module.system.preds.shape == (10_000, 10)
        assert str(module.system).startswith("Simulated")


def test_examples_link_to_their_notebook_in_colab(downloads):
    page = [f".. only:: html\n\n{downloads.FOOTER}\n      :download:`Notebook <plot_01_x.ipynb>`\n"]
    downloads.add_launch_link(None, "examples/plot_01_x", page)
    assert f"`Run in Google Colab <{downloads.NOTEBOOKS}/plot_01_x.ipynb>`__\n\n{downloads.FOOTER}" in page[0]
    other = ["text"]
    downloads.add_launch_link(None, "guide/numerics", other)
    assert other == ["text"]
    with pytest.raises(ValueError, match="must contain"):
        downloads.add_launch_link(None, "examples/plot_02_y", ["text"])


PAGE = "<html><head><link rel='canonical' href='http://a'/></head><body>{}</body></html>"
LIVING = ("#", "#here", "sub/", "sub/index.html#top-of-sub", "https://example.org/#x", "mailto:a@b", "data:,", "?q=1")
PICTURE = "<p id='here'/><img src='a%20b.png' srcset='a%20b.png, a%20b.png 2x'>"
DEAD = {
    "<a href='none.html'>": "no such file",
    "<a href='/index.html'>": "no such file",
    "<a href='#none'>": "no such anchor",
    "<a href='sub/#none'>": "no such anchor",
    "<img src='none.png'>": "no such file",
    "<img srcset='a%20b.png, none.png 2x'>": "no such file",
    "<script src='none.js'></script>": "no such file",
    "<link rel='stylesheet' href='none.css'>": "no such file",
    "<a href='http://example.org'>": "not https",
    "<script src='//example.org/x.js'></script>": "not https",
}


def test_dead_links_are_found_and_living_ones_accepted(tmp_path, capsys):
    assert main(tmp_path) == 1, "a folder without pages"
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b.png").touch()
    (tmp_path / "sub" / "index.html").write_text(PAGE.format("<h1 id='top-of-sub'>Sub</h1>"))
    page = tmp_path / "index.html"
    page.write_text(PAGE.format("".join(f"<a href='{link}'></a>" for link in LIVING) + PICTURE))
    assert dead_links(tmp_path) == (len(LIVING) + 3, [])
    assert main(tmp_path) == 0
    assert "of which 0 are dead" in capsys.readouterr().out
    for element, why in DEAD.items():
        page.write_text(PAGE.format(f"<p>\n{element}"))
        assert main(tmp_path) == 1, element
        assert capsys.readouterr().out.startswith("index.html:2: "), element
        assert dead_links(tmp_path)[1][0].endswith(why), element
