"""Directives that document the command line from its parsers, so that the page cannot be out of date.

- `cli-options`: description, arguments and options of one command.
- `cli-names`: names of arrays and columns that are found without options.
"""

import argparse
import re
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torchcalib.cli.options
import torchcalib.cli.parser
import torchcalib.io.names as io_names

ROLES = {
    "logits": io_names.LOGITS,
    "probabilities": io_names.PROBS,
    "logits or probabilities": io_names.NEUTRAL,
    "targets": tuple(name for name in io_names.TARGETS if name not in io_names.CORRECT),
    "confidences": io_names.CONFIDENCES,
    "correctness (1 or 0)": io_names.CORRECT,
    "weights": io_names.WEIGHTS,
}


class Generated(SphinxDirective):
    """Directive whose content is Markdown text, generated from files."""

    files: ClassVar = [module.__file__ for module in (torchcalib.cli.parser, torchcalib.cli.options, io_names)]

    def text(self) -> str:
        """Return the Markdown text."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Parse the generated text; called by Sphinx."""
        for file in self.files:
            self.env.note_dependency(str(file))
        return self.parse_text_to_nodes(self.text())


class Options(Generated):
    """Options of one command."""

    required_arguments = 1

    def text(self) -> str:
        """Return the description and one `option` directive for each argument."""
        name = self.arguments[0]
        parser = torchcalib.cli.parser.make_parser().commands[name]
        options = [described(each) for each in parser._actions if not isinstance(each, argparse._HelpAction)]
        return "\n\n".join([escaped(parser.description or ""), f"```{{program}} torchcalib {name}\n```", *options])


def described(action: argparse.Action) -> str:
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


class Names(Generated):
    """Names of arrays and columns by role."""

    def text(self) -> str:
        """Return a table."""
        rows = [f"| {role} | {', '.join(f'`{name}`' for name in names)} |" for role, names in ROLES.items()]
        return "\n".join(["| content | names |", "|---|---|", *rows])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives; called by Sphinx."""
    app.add_directive("cli-options", Options)
    app.add_directive("cli-names", Names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
