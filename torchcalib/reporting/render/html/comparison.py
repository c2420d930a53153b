"""Render a `Comparison` as an HTML page, and as the files of a folder."""

import math
from dataclasses import replace

from matplotlib import style as matplotlib_style

from torchcalib.display.words import listed
from torchcalib.io.errors import short_name
from torchcalib.plots.differences import difference_plot
from torchcalib.reporting.render.html.page import both_themes, pictures, render_template
from torchcalib.results.comparison import Comparison
from torchcalib.results.contents import DIFFERENCE_WORDS, facts, formatted, input_line, sources_of
from torchcalib.results.tables import compared_verdict, difference_table, system_table


def render_comparison(comparison: Comparison) -> str:
    """Return a comparison as a self-contained HTML page. Equal comparisons have identical pages."""
    others = comparison.systems[1:]
    label = (
        f"Differences between {', '.join(others)} and {comparison.baseline} with 95% intervals. "
        "The tables below contain the values."
    )
    with matplotlib_style.context("default"):  # ignore matplotlib settings of the caller
        picture = both_themes(difference_plot, comparison, "differences", label)
        overview = both_themes(difference_plot, _overview(comparison), "overview", label)
    verdict, colour = _verdict(comparison)
    return render_template(
        "comparison.html.jinja",
        results=comparison,
        title=f"Comparison of {listed([short_name(name) for name in comparison.systems])}",
        about=input_line(comparison),
        verdict=verdict,
        colour=colour,
        systems=system_table(comparison),
        facts=facts(comparison, _sources(comparison)),
        overview=overview,
        picture=picture,
        tables=[difference_table(comparison, name) for name in others],
        sources=sources_of(comparison),
        words=DIFFERENCE_WORDS,
        has_infinite=any(math.isinf(value) for line in comparison.lines for value in line.values.values()),
    )


def _overview(comparison: Comparison) -> Comparison:
    """Return a comparison with the lines of the first screen only, in the order of the table of systems."""
    lines = map(comparison.line, ("ece", "nll", "brier", "accuracy"))
    return replace(comparison, lines=tuple(line for line in lines if line is not None))


def _verdict(comparison: Comparison) -> tuple[str, str]:
    """Return the verdict on the second system, or the number of better systems, and its CSS class."""
    others = comparison.systems[1:]
    first = short_name(comparison.baseline)
    verdicts = [compared_verdict(comparison, name) for name in others]
    better = sum("better calibrated" in words for words in verdicts)
    worse = sum("worse calibrated" in words for words in verdicts)
    colour = "good" if better and not worse else "bad" if worse and not better else "unknown"
    if len(others) > 1:
        if worse and not better:
            return f"{worse} of {len(others)} systems are worse calibrated than {first}", colour
        counts = f"{better} of {len(others)} systems are better calibrated than {first}"
        return f"{counts}, {worse} worse" if worse else counts, colour
    name = short_name(others[0])
    if better or worse:
        return f"{name} is {'better' if better else 'worse'} calibrated than {first}", colour
    return f"{name} and {first} do not differ significantly in calibration", colour


def comparison_files(comparison: Comparison) -> dict[str, bytes]:
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
