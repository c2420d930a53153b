"""Render a `Comparison` as an HTML page, and as the files of a folder."""

import math

from matplotlib import style as matplotlib_style

from torchcalib.plots.differences import difference_plot
from torchcalib.reporting.contents import DIFFERENCE_WORDS, difference_table, facts, formatted, sources_of
from torchcalib.reporting.data import Comparison
from torchcalib.reporting.html.page import both_themes, pictures, render_template


def render_comparison(comparison: Comparison) -> str:
    """Return a comparison as a self-contained HTML page. Equal comparisons have identical pages."""
    others = comparison.systems[1:]
    label = (
        f"Differences between {', '.join(others)} and {comparison.baseline} with 95% intervals. "
        "The tables below contain the values."
    )
    with matplotlib_style.context("default"):  # ignore matplotlib settings of the caller
        picture = both_themes(difference_plot, comparison, "differences", label)
    return render_template(
        "comparison.html.jinja",
        results=comparison,
        title=f"Comparison of {', '.join(comparison.systems)}",
        facts=facts(comparison, _sources(comparison)),
        picture=picture,
        tables=[difference_table(comparison, name) for name in others],
        sources=sources_of(comparison),
        words=DIFFERENCE_WORDS,
        has_infinite=any(math.isinf(value) for line in comparison.lines for value in line.values.values()),
    )


def files_of(comparison: Comparison) -> dict[str, bytes]:
    """Return the contents of `compare.json`, `compare.html`, `compare.png` and `compare.svg`, by file name."""
    files = {
        "compare.json": comparison.to_json().encode() + b"\n",
        "compare.html": render_comparison(comparison).encode(),
    }
    with matplotlib_style.context("default"):
        files |= pictures("compare", difference_plot(comparison))
    return files


def _sources(comparison: Comparison) -> dict[str, str]:
    found = {}
    for name, source in comparison.sources.items():
        files = list(source.get("files", []))
        found[name] = "; ".join([formatted(files, 3), *[str(source[k]) for k in ("predictions",) if k in source]])
    return found
