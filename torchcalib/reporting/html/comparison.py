"""A `Comparison` as a page, and as a folder of files."""

import math

from matplotlib import style as matplotlib_style

from torchcalib.plots.differences import difference_plot
from torchcalib.reporting.contents import DIFFERENCE_WORDS, difference_table, facts, formatted, sources_of
from torchcalib.reporting.data import Comparison
from torchcalib.reporting.html.page import both_themes, filled, pictures


def render_comparison(comparison: Comparison) -> str:
    """Return the comparison as one HTML page that loads nothing from anywhere.

    Args:
        comparison: as made by `torchcalib.compare`.

    Returns:
        The page. The same comparison gives the same page.
    """
    others = comparison.systems[1:]
    label = (
        f"Differences of {', '.join(others)} to {comparison.baseline} with their 95 % intervals. "
        "The tables hold their values."
    )
    with matplotlib_style.context("default"):  # settings of the process must not change the page
        picture = both_themes(difference_plot, comparison, "differences", label)
    return filled(
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
    """Return the files of a comparison: `compare.json`, `compare.html`, `compare.png` and `compare.svg`."""
    files = {
        "compare.json": comparison.to_json().encode() + b"\n",
        "compare.html": render_comparison(comparison).encode(),
    }
    with matplotlib_style.context("default"):
        files |= pictures("compare", difference_plot(comparison))
    return files


def _sources(comparison: Comparison) -> dict[str, str]:
    """Return the files of each system, and the kind of its predictions."""
    found = {}
    for name, source in comparison.sources.items():
        files = list(source.get("files", []))
        found[name] = "; ".join([formatted(files, 3), *[str(source[k]) for k in ("predictions",) if k in source]])
    return found
