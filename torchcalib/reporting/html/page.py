"""What pages have in common: templates, pictures for light and dark, numbers in words, the folder they go to."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes

from torchcalib.inference.words import p_words
from torchcalib.io.errors import printable
from torchcalib.io.saved import write_whole
from torchcalib.plots.canvas import DARK, LIGHT, to_png, to_svg

T = TypeVar("T")

group_of = attrgetter("group")
"""The group of a line, by which tables have sections."""


def write_folder(files: Mapping[str, bytes], out: str | Path) -> tuple[Path, ...]:
    """Write files into a folder, which is made if it is missing; each is there whole or not at all.

    Raises:
        NotADirectoryError: if `out`, or something above it, is a file.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"`out` must be a folder, got {str(folder)!r}, which is a file or lies below one. Name another folder."
        ) from error
    return tuple(write_whole(folder / name, content) for name, content in files.items())


def pictures(name: str, ax: Axes) -> dict[str, bytes]:
    """Return a picture as two files, by their names."""
    return {f"{name}.png": to_png(ax), f"{name}.svg": to_svg(ax).encode()}


def filled(template: str, **values: Any) -> str:
    """Return a page: a template with values, among them the colours of both themes."""
    return _environment().get_template(template).render(**values, light=LIGHT, dark=DARK)


def _environment() -> Environment:
    # Escape everything, whatever a template is called: names of files and classes come from others.
    made = Environment(
        loader=PackageLoader("torchcalib.reporting", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        number=number,
        four_decimals=four_decimals,
        count=count,
        percent=percent,
        edge=edge,
        gain=gain,
        p_value=p_words,
        printable=printable,
    )
    return made


def both_themes(draw: Callable[..., Axes], table: T, prefix: str, label: str) -> Markup:
    """Draw a picture, and return it for light and for dark, as two elements of a page.

    Args:
        draw: takes the table and a `style`.
        table: what is drawn.
        prefix: of ids, which no other picture of the page has.
        label: what the picture shows, for those who cannot see it.
    """
    light = to_svg(draw(table, style=LIGHT))
    themes = (("light", light), ("dark", _in_the_dark(light)))
    return Markup("\n").join(_inline(svg, f"{prefix}-{theme}-", label, theme) for theme, svg in themes)


def _in_the_dark(svg: str) -> str:
    """Return a picture in `LIGHT` as it is in `DARK`; drawing it again would take as long. Text stays as it is."""
    colours = dict(zip(astuple(LIGHT), astuple(DARK), strict=True))
    known = re.compile("|".join(colours))
    return re.sub(r' style="[^"]*"', lambda style: known.sub(lambda light: colours[light[0]], style[0]), svg)


def _inline(svg: str, prefix: str, label: str, theme: str) -> Markup:
    """Turn a file into an element of the page: it scales, has a name, and shares no id with another picture."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    (box,) = re.findall(r'viewBox="[^"]*"', svg)
    opening = Markup('<svg class="{}" role="img" aria-label="{}" {} xmlns:xlink="http://www.w3.org/1999/xlink">')
    return opening.format(theme, label, Markup(box)) + Markup(svg[svg.index(">") + 1 :].strip())


def number(value: float) -> str:
    """Write four significant digits, or words for what is no number."""
    if 0 < abs(value) < 1e-6:
        return "≈ 0"
    is_whole = float(value).is_integer() or abs(value) >= 1e3
    return _signed(value, f"{abs(value):,.0f}" if is_whole else f"{abs(value):#.4g}".rstrip("."))


def four_decimals(value: float, signed: bool = False) -> str:
    """Write four decimals, for columns; with `signed` a plus too."""
    return _signed(value, f"{abs(value):.4f}", "+" if signed else "")


def _signed(value: float, digits: str, plus: str = "") -> str:
    if math.isnan(value):
        return "undefined"
    if float(digits.replace(",", "")) == 0:
        return digits
    return ("−" if value < 0 else plus) + ("infinite" if math.isinf(value) else digits)


def count(n: float) -> str:
    """Write a count without decimals; a sum of fractional weights with two."""
    return f"{n:,.0f}" if float(n).is_integer() else f"{n:,.2f}"


def percent(share: float) -> str:
    """Write a share in percent."""
    return "undefined" if math.isnan(share) else f"{share:.2%}"


def gain(rcl: float) -> str:
    """Write what a calibrator gains in percent, or words where the score is or becomes infinite."""
    if not math.isfinite(rcl):
        return "undefined" if math.isnan(rcl) else "−infinite"
    return _signed(rcl, f"{abs(rcl):.1f}") + "%"


def edge(value: float) -> str:
    """Write the edge of a bin, as short as it is."""
    return f"{value:.4f}".rstrip("0").rstrip(".")
