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
    "cli_pages",
    "metric_pages",
    "shared_arguments",
    "source_terms",
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
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "parallel": 2,
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("matplotlib", "example_figures"),
    "image_srcset": ["2x"],
    "ignore_repr_types": r"matplotlib",
    "reset_modules": ("matplotlib", "example_figures.set_defaults"),
    "reference_url": {"torchcalib": None},  # links from code to the API pages
}

html_theme = "furo"
html_title = f"torchcalib {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css", "gallery.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")


def setup(app: Any) -> None:
    """Display formulas without a network. As an extension, this package would prevent parallel builds."""
    import_module("sphinx-mathjax-offline").setup(app)
