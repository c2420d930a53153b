"""A `Comparison` as a page, and as a folder of files."""

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import style as matplotlib_style

from torchcalib.plots.differences import difference_plot
from torchcalib.reporting.comparison.data import DIFFERENCE_WORDS, Comparison
from torchcalib.reporting.html.page import both_themes, count, filled, group_of, pictures, write_folder


def render_comparison(comparison: Comparison) -> str:
    """Return the comparison as one HTML page that loads nothing from anywhere.

    Args:
        comparison: as made by `torchcalib.compare`.

    Returns:
        The page. The same comparison gives the same page.
    """
    label = (
        f"Differences of {', '.join(comparison.systems[1:])} to {comparison.baseline} with their 95 % intervals. "
        "The tables hold their values."
    )
    with matplotlib_style.context("default"):  # what the process has set must not show in a page
        picture = both_themes(difference_plot, comparison, "differences", label)
    return filled(
        "comparison.html.jinja",
        comparison=comparison,
        facts=_facts(comparison),
        picture=picture,
        groups=[(name, list(lines)) for name, lines in groupby(comparison.lines, group_of)],
        sources=list(dict.fromkeys(line.source for line in comparison.lines if line.source)),
        words=DIFFERENCE_WORDS,
        has_infinite=any(math.isinf(value) for line in comparison.lines for value in line.values.values()),
    )


def save_comparison(comparison: Comparison, out: str | Path) -> tuple[Path, ...]:
    """Write the comparison into a folder: `compare.json`, `compare.html`, `compare.png` and `compare.svg`.

    A file is there whole or not at all; one of the same name is replaced.

    Args:
        comparison: as made by `torchcalib.compare`.
        out: the folder; made if it is missing.

    Returns:
        The files written.

    Raises:
        NotADirectoryError: if `out`, or something above it, is a file.
    """
    files = {
        "compare.json": comparison.to_json().encode() + b"\n",
        "compare.html": render_comparison(comparison).encode(),
    }
    with matplotlib_style.context("default"):
        files |= pictures("compare", difference_plot(comparison))
    return write_folder(files, out)


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was read, and how, as pairs of a name and words."""
    settings = comparison.settings
    is_multilabel = comparison.task == "multilabel"
    facts = [(name, _files(comparison.sources[name])) for name in comparison.systems if name in comparison.sources]
    facts.append(("task", comparison.task))
    facts.append(("labelled entries" if is_multilabel else "samples", count(comparison.n)))
    if comparison.n_dropped:
        facts.append(("rows left out", count(comparison.n_dropped)))
    facts.append(("labels" if is_multilabel else "classes", count(comparison.num_classes)))
    facts.append(("bins", f"{settings['n_bins']} of equal width, {'(a, b]' if settings['right'] else '[a, b)'}"))
    facts.append(("replicates", f"{settings['n_replicates']:,}, the same for all systems"))
    return facts


def _files(source: Mapping[str, Any]) -> str:
    """Name the first files of a system, and how they were read."""
    files = [str(file) for file in source.get("files", [])]
    more = [f"and {len(files) - 3} more"] if len(files) > 3 else []
    return "; ".join([", ".join([*files[:3], *more]), *[str(source[k]) for k in ("predictions",) if k in source]])
