"""Configuration of the documentation, built by `make docs`."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parents[1])]  # extensions; benchmarks

import torchcalib  # noqa: E402

project = "torchcalib"
author = "The torchcalib authors"
copyright = author  # noqa: A001
release = version = torchcalib.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "api_reference",
    "directives",
    "example_gallery",
    "metric_pages",
]
exclude_patterns = ["_build", "gallery/*", "studies/*"]
templates_path = ["_templates"]
default_role = "py:obj"  # as in docstrings: a link if the name is documented, code otherwise
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4

autosummary_imported_members = True
autosummary_ignore_module_all = False
autosummary_filename_map = {"torchcalib.report": "torchcalib.report-function"}  # file systems may ignore case
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has no room for them; docstrings state types and shapes
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Gradient", "notes_style"), ("Reference", "notes_style")]

sphinx_gallery_conf = {
    "examples_dirs": ["gallery", "studies"],
    "gallery_dirs": ["examples", "topics"],
    "filename_pattern": r"\.py$",
    "download_all_examples": False,
    "remove_config_comments": True,
    "first_notebook_cell": "# Packages, if they are not installed\n"
    "%pip install --quiet 'torchcalib[demo] @ git+https://github.com/torchcalib/torchcalib'",
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "parallel": 2,
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("matplotlib", "example_gallery.save_figure"),
    "image_srcset": ["2x"],
    "ignore_repr_types": r"matplotlib",
    "reset_modules": ("matplotlib", "example_gallery.set_style"),
    "reference_url": {"torchcalib": None},  # links from code to the API pages
}

html_theme = "furo"
html_title = f"torchcalib {release}"
html_static_path = ["_static"]
html_extra_path = ["llms.txt", "../torchcalib/results/report.schema.json"]
html_css_files = ["custom.css", "gallery.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")


navigation: dict[tuple[str, ...], str] = {}


def simplify_navigation(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:  # noqa: ARG001
    """Leave the pages of single objects out of the navigation. It takes most of the time of a page, and is then shared.

    It depends on the page only by the relative links and by the marked parents.
    """
    if complete := context.get("toctree"):
        is_listed = not pagename.startswith("api/objects/")
        key = pagename if is_listed else "api/objects", *(parent["link"] for parent in context.get("parents", ()))

        def toctree(**options: Any) -> str:
            if key not in navigation:
                navigation[key] = str(complete(**options | {"maxdepth": 2}))
            return navigation[key]

        context["toctree"] = toctree


def setup(app: Any) -> None:
    """Display formulas without a network. As an extension, this package would prevent parallel builds."""
    import_module("sphinx-mathjax-offline").setup(app)
    app.connect("html-page-context", simplify_navigation, priority=400)  # before the theme
