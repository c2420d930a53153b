"""Directives of the page on names in the sources. Terms, expressions and the example are in `sources.toml`.

- `source-example`: the code that defines the data of the example.
- `source-terms`: table of the terms of one source, with values that are computed when the page is built.
"""

import base64
import math
import tomllib
import warnings
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from cli_pages import Generated
from metric_pages import cell
from sphinx.application import Sphinx

import torchcalib
from torchcalib.inference import Interval

CONTENTS = Path(__file__).parents[1] / "sources.toml"


class Term(NamedTuple):
    """Term of a source, its section or equation there, an expression that computes its value, and a remark."""

    name: str
    place: str
    call: str
    remark: str = ""


@cache
def contents() -> dict[str, Any]:
    """Return the contents of `sources.toml`."""
    return tomllib.loads(CONTENTS.read_text(encoding="utf-8"))


def terms(source: str) -> list[Term]:
    """Return the terms of a source, such as "ecd", in their order."""
    return [Term(*fields) for fields in contents()["sources"][source]["terms"]]


@cache
def example() -> dict[str, Any]:
    """Run the code of the example and return its namespace."""
    names: dict[str, Any] = {}
    exec(compile(contents()["example"], str(CONTENTS), "exec"), names)  # the code is part of the documentation
    return names


@cache
def value_of(call: str) -> Any:
    """Return the value of an expression in the namespace of the example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings of fits without an optimum
        return eval(call, dict(example()))


def shown(value: Any, name: str) -> str:
    """Return a value as Markdown text in one line; a diagram as an image."""
    if hasattr(value, "get_figure"):
        image = base64.b64encode(torchcalib.plots.to_png(value, dpi=110)).decode()
        return f'<img src="data:image/png;base64,{image}" alt="{name}" width="300">'
    if isinstance(value, Interval):
        return f"{shown(value.value, name)} ({shown(value.low, name)} to {shown(value.high, name)})"
    if isinstance(value, tuple):
        value = torch.stack([torch.as_tensor(part) for part in value])
    tensor = torch.as_tensor(value)
    if tensor.dim():
        return (", " if tensor.dim() == 1 else "; ").join(shown(part, name) for part in tensor)
    number = float(tensor)
    if math.isnan(number):
        return "empty"
    return f"{number if abs(number) > 1e-7 else 0:.4g}".replace("-", "−")


class Example(Generated):
    """The code of the example."""

    files: ClassVar = [CONTENTS, torchcalib.__file__]

    def text(self) -> str:
        """Return a block of code."""
        return f"```python\n{contents()['example'].strip()}\n```"


class Terms(Generated):
    """Table of the terms of one source."""

    files: ClassVar = [CONTENTS, torchcalib.__file__]
    required_arguments = 1

    def text(self) -> str:
        """Return the source and a table."""
        source = contents()["sources"][self.arguments[0]]
        title = f"[{source['title']}]({source['link']})" if "link" in source else source["title"]
        lines = [f"{source['authors']}: {title}.\n", "| name in the source | place | call | value |", "|---|---|---|---|"]
        for term in terms(self.arguments[0]):
            remark = f"<br>{term.remark}" if term.remark else ""
            value = shown(value_of(term.call), term.name)
            lines.append(f"| {term.name} | {term.place} | {cell(f'`{term.call}`')} | {value}{remark} |")
        return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives; called by Sphinx."""
    app.add_directive("source-example", Example)
    app.add_directive("source-terms", Terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
