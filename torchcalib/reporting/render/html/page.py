"""Render templates, draw diagrams in light and dark colours, and write the files of a folder."""

import re
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes

from torchcalib.display.tables import to_html
from torchcalib.display.words import count, significant
from torchcalib.io.saved import write_all
from torchcalib.plots.canvas import DARK, LIGHT, to_png, to_svg

T = TypeVar("T")


def write_folder(files: Callable[[], Mapping[str, bytes]], out: str | Path) -> tuple[Path, ...]:
    """Write files into a folder, and create it if it is missing. Interrupted writes leave no incomplete files.

    Args:
        files: function that returns the contents by file name. It is called after the folder was created, because
            drawing the diagrams takes seconds.
        out: path of the folder.

    Returns:
        The paths of the files.

    Raises:
        NotADirectoryError: if `out` or one of its parents is a file.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"`path` must be a folder, got {str(folder)!r}: it or one of its parents is a file. Choose another folder."
        ) from error
    return write_all(folder, files())


def pictures(name: str, ax: Axes) -> dict[str, bytes]:
    """Return a diagram as the files `{name}.png` and `{name}.svg`, by file name."""
    return {f"{name}.png": to_png(ax), f"{name}.svg": to_svg(ax).encode()}


def render_template(template: str, **values: Any) -> str:
    """Return the text of a template with these values and the light and dark colours."""
    return _environment().get_template(template).render(**values, light=LIGHT, dark=DARK)


def _environment() -> Environment:
    # autoescape=True escapes values in every template, because file and class names are not trusted.
    environment = Environment(
        loader=PackageLoader("torchcalib.reporting.render", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=count, significant=significant, linked=_linked, table=lambda table: Markup(to_html(table))
    )
    return environment


_PLACES = re.compile(r"arXiv[: ](?P<arxiv>\d{4}\.\d{4,5})|(?:doi[: ])?(?P<doi>10\.\d{4,9}/[^\s,;()]+[^\s,;().])")
"""arXiv numbers and DOIs in the text of a source."""


def _linked(source: str) -> Markup:
    """Return a source as HTML, with links from its arXiv numbers and DOIs."""
    found, last = Markup(), 0
    for match in _PLACES.finditer(source):
        arxiv = match["arxiv"]
        url = f"https://arxiv.org/abs/{arxiv}" if arxiv else f"https://doi.org/{match['doi']}"
        link = Markup('<a href="{}">{}</a>').format(url, match[0])
        found, last = found + source[last : match.start()] + link, match.end()
    return found + source[last:]


def both_themes(draw: Callable[..., Axes], table: T, prefix: str, label: str) -> Markup:
    """Draw a diagram, and return it as two SVG elements, in light and in dark colours.

    Args:
        draw: plot function with the arguments `table` and `style`.
        table: first argument of `draw`.
        prefix: prefix of element ids, unique on the page.
        label: description for screen readers.
    """
    light = to_svg(draw(table, style=LIGHT))
    themes = (("light", light), ("dark", _darkened(light)))
    return Markup("\n").join(_inline(svg, f"{prefix}-{theme}-", label, theme) for theme, svg in themes)


def _darkened(svg: str) -> str:
    """Replace the colours of `LIGHT` in style attributes by the colours of `DARK`, without drawing again."""
    colours = dict(zip(astuple(LIGHT), astuple(DARK), strict=True))
    known = re.compile("|".join(colours))
    return re.sub(r' style="[^"]*"', lambda style: known.sub(lambda light: colours[light[0]], style[0]), svg)


def _inline(svg: str, prefix: str, label: str, theme: str) -> Markup:
    """Convert an SVG file to an HTML element with a label and unique ids, scaled to the page width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to groups, and curves of models share an id
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    (box,) = re.findall(r'viewBox="[^"]*"', svg)
    opening = Markup('<svg class="{}" role="img" aria-label="{}" {} xmlns:xlink="http://www.w3.org/1999/xlink">')
    return opening.format(theme, label, Markup(box)) + Markup(svg[svg.index(">") + 1 :].strip())
