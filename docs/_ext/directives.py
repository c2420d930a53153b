"""Directives whose content is Markdown text that is computed, so that pages cannot be out of date.

- `cli-options`: description, arguments and options of one command, from its parser.
- `cli-names`: names of arrays and columns that are found without options.
- `file-layouts`: the files in `layouts.toml`, and what is found in each.
- `source-terms`: table of the terms of one source in `sources.toml`, with their values.
"""

import argparse
import base64
import math
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from docutils import nodes
from metric_pages import DOCS, cell, contents
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torchcalib
import torchcalib.cli.options
import torchcalib.cli.parser
import torchcalib.io.names as io_names
from torchcalib.inference import Interval
from torchcalib.io.opening import open_predictions

MODULES = (torchcalib, torchcalib.cli.options, torchcalib.cli.commands, io_names)
FILES = (DOCS / "sources.toml", DOCS / "layouts.toml", *(module.__file__ for module in MODULES))
ROLES = {
    "logits": io_names.LOGITS,
    "probabilities": io_names.PROBS,
    "logits or probabilities": io_names.NEUTRAL,
    "targets": tuple(name for name in io_names.TARGETS if name not in io_names.CORRECT),
    "confidences": io_names.CONFIDENCES,
    "correctness (1 or 0)": io_names.CORRECT,
    "weights": io_names.WEIGHTS,
}
FOUND = ("task", "predictions", "targets", "predicted labels", "weights", "classes", "not used")


def options_of(command: str) -> str:
    """Return the description of a command and one `option` directive for each argument."""
    parser = torchcalib.cli.parser.make_parser().commands[command]
    options = [option_of(each) for each in parser._actions if not isinstance(each, argparse._HelpAction)]
    program = f"```{{program}} torchcalib {command}\n```"
    return "\n\n".join([escaped(parser.description or ""), program, *options])


def option_of(action: argparse.Action) -> str:
    """Return an `option` directive for one argument of a parser."""
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    if not value and action.nargs != 0:
        value = action.dest.upper()
    name = f"{value} ..." if action.nargs == "+" else value
    signature = ", ".join(f"{option} {value}".strip() for option in action.option_strings) or name
    text = escaped(action.help or "")
    text = text[:1].upper() + text[1:] + ("" if text.endswith((".", ")")) else ".")
    if action.default not in (None, False) and "default" not in text:
        text += f" (default: {action.default})"
    return f"````{{option}} {signature}\n{text}\n````"


def escaped(text: str) -> str:
    """Return the text in one line, with code for quoted patterns and options, and without other markup."""
    parts = re.split(r"(`[^`]*`|'[^']*'|--[a-z][a-z-]*)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*_\[\]<>$])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [part if part.startswith("`") else f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def table_of_names() -> str:
    """Return a table of the names of arrays and columns by role."""
    rows = [f"| {role} | {', '.join(f'`{name}`' for name in names)} |" for role, names in ROLES.items()]
    return "\n".join(["| content | names |", "|---|---|", *rows])


def layouts() -> str:
    """Return the files in `layouts.toml`, and what is found in each."""
    parts = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # percentages are divided, and rows left out
        for title, name, text in contents("layouts")["layouts"]:
            path = Path(folder, name)
            path.write_text(text.lstrip(), encoding="utf-8")
            files = open_predictions([path])
            found = {"task": files.task_of_report, **files.source.in_words()}
            shown = {key: found[key] for key in FOUND if found.get(key) not in (None, [], "none")}
            words = "; ".join(f"{key}: {x if isinstance(x, str) else ', '.join(x)}" for key, x in shown.items())
            parts.append(f"**{title}** (`{name}`)\n\n```text\n{text.strip()}\n```\n\n{words}.")
    return "\n\n".join(parts)


class Term(NamedTuple):
    """Term of a source, its section or equation there, an expression that computes its value, and a remark."""

    name: str
    place: str
    call: str
    remark: str = ""


def terms(source: str) -> list[Term]:
    """Return the terms of a source, such as "ecd", in their order."""
    return [Term(*fields) for fields in contents("sources")["sources"][source]["terms"]]


@cache
def example() -> dict[str, Any]:
    """Run the code of the example and return its namespace."""
    names: dict[str, Any] = {}
    exec(compile(contents("sources")["example"], "sources.toml", "exec"), names)  # code of the page
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


def table_of_terms(name: str) -> str:
    """Return a source and a table of its terms."""
    source = contents("sources")["sources"][name]
    title = f"[{source['title']}]({source['link']})" if "link" in source else source["title"]
    rows = [
        f"| {term.name} | {term.place} | {cell(f'`{term.call}`')} "
        f"| {shown(value_of(term.call), term.name)}{f'<br>{term.remark}' if term.remark else ''} |"
        for term in terms(name)
    ]
    head = ["| name in the source | place | call | value |", "|---|---|---|---|"]
    return "\n".join([f"{source['authors']}: {title}.", "", *head, *rows])


TEXTS = {
    "cli-options": options_of,
    "cli-names": table_of_names,
    "file-layouts": layouts,
    "source-terms": table_of_terms,
}
"""Function that returns the text of each directive."""


class Computed(SphinxDirective):
    """Directive with the text of a function."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the text; called by Sphinx."""
        for file in FILES:
            self.env.note_dependency(str(file))
        return self.parse_text_to_nodes(TEXTS[self.name](*self.arguments))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives; called by Sphinx."""
    for name in TEXTS:
        app.add_directive(name, Computed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
