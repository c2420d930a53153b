"""The parser of the command line, and suggestions for unknown commands and options. It does not import torch."""

import argparse
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchcalib._bridges import ARGUMENTS, OPTIONS, SHORTEST, nearest
from torchcalib._version import __version__
from torchcalib.cli import options
from torchcalib.cli.commands import COMMANDS, metric_named, metrics
from torchcalib.display.words import listed
from torchcalib.io.errors import limited, quoted, short_name
from torchcalib.io.paths import format_of

_SYNONYMS = {
    **dict.fromkeys(("evaluate", "eval", "score", "measure", "run"), "report"),
    **dict.fromkeys(("test", "assert", "gate", "ci"), "check"),
    **dict.fromkeys(("diagram", "draw", "reliability"), "plot"),
    **dict.fromkeys(("diff", "versus"), "compare"),
    **dict.fromkeys(("fit", "recalibrate"), "calibrate"),
    **dict.fromkeys(("transform", "predict"), "apply"),
    **dict.fromkeys(("combine", "join"), "merge"),
    **dict.fromkeys(("log", "logs", "llm"), "audit"),
    **dict.fromkeys(("monitor", "follow", "drift"), "watch"),
    "metrics": "metric",
    "example": "demo",
}
"""Commands, by other words for them."""


class _Parser(argparse.ArgumentParser):
    """Argument parser that suggests a known command or option in the error for an unknown one."""

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line, or exit with an error that shows the usage of the command."""
        given = list(sys.argv[1:] if args is None else args)
        words = [word for word in given if word == "-" or not word.startswith("-")]
        if words and words[0] not in self.commands:
            if not words[1:] or metric_named(words[0]) is None:
                self.error(_unknown_command(words[0]))
            given.insert(given.index(words[0]), "metric")  # `torchcalib ece FILE`
            words.insert(0, "metric")
        before = ""
        for word in given[given.index(words[0]) :] if words else ():
            option = word.partition("=")[0]
            if option == "--":
                break
            if re.fullmatch("-[-a-z][^ ]*", option, re.IGNORECASE) and option not in _options_of(words[0]):
                self.commands[words[0]].error(_unknown_option(option, words[0], before))
            before = word
        parsed, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self.commands.get(parsed.command, self).error(f"unrecognized arguments: {quoted(unknown)}.")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the usage and a message of at most 500 characters, and exit."""
        super().error(limited(message))


def _options_of(command: str) -> list[str]:
    """Return the options of a command."""
    declared = [option.name for option in COMMANDS[command].arguments if option.name.startswith("-")]
    return [*declared, "--json", "--help", "-h"]


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _takes_value(word: str, command: str) -> bool:
    """Return whether a word is an option that is followed by a value."""
    return word.startswith("-") and any(
        option.name == word and option.how.get("action") != "store_true" for option in COMMANDS[command].arguments
    )


def _unknown_option(option: str, command: str, before: str) -> str:
    """Return the error for an unknown option, with the option that a person means by it, also of other commands.

    If `before`, the preceding word, is an option with a value, a word with one hyphen is this value.
    """
    if not option.startswith("--") and _takes_value(before, command):
        value = short_name(option, 60)
        rule = f"`{before}` must be followed by = if its value starts with a hyphen"
        return f"{rule}, got {value}. Write {before}={value}."
    word = option.lstrip("-").lower().replace("-", "_")
    own = OPTIONS.get(word, word)
    known, name = _options_of(command), _dashed(own)
    meant = _dashed(ARGUMENTS.get(word, own))
    if " " in own:
        advice = own
    elif similar := meant if meant in known else nearest(_dashed(word), known):
        advice = f"Did you mean {similar}?"
    elif others := [each for each in COMMANDS if name in _options_of(each)]:
        advice = f"{name} is an option of torchcalib {listed(others)}."
    elif word in COMMANDS:
        advice = f"`torchcalib {word}` is a command."
    else:
        advice = f"See `torchcalib {command} --help`."
    return f"`{short_name(option, 60)}` must be an option of `torchcalib {command}`, got an unknown one. {advice}"


def _unknown_command(word: str) -> str:
    """Return the error for an unknown command, with the command that a person means by it."""
    name = word.lower()
    similar = nearest(name, COMMANDS, 0.7, table=_SYNONYMS)
    if metric := metric_named(word) or nearest(name, metrics(), shortest=SHORTEST):
        similar = f"metric {metric}"
    elif format_of(Path(word)) is not None or Path(word).exists():
        similar = f"report {short_name(word, 100)}"
    advice = f"Did you mean `torchcalib {similar}`?" if similar else "See `torchcalib --help`."
    return f"`COMMAND` must be one of {', '.join(COMMANDS)}, got {quoted([word])}. {advice}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. After parsing, `arguments.declared` is the `Command`."""
    kind: Any = partial(_Parser, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser: _Parser = kind(prog="torchcalib", description="Measure the calibration of classifiers.")
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=kind)
    parser.commands = commands.choices
    for name, command in COMMANDS.items():
        each = commands.add_parser(name, help=command.help, description=command.description, epilog=command.epilog)
        each.set_defaults(declared=command)
        options.add_options(each, command.arguments)
        each.add_argument("--json", action="store_true", help="print the result as JSON instead of text")
    return parser
