"""The command line: `torchcalib report FILE ...`, `merge PART ...`, `compare FILE ...` and `demo`. A room for each.

Bad input ends with one line on stderr, `torchcalib: error: ...`, and exit code 2.
"""

import argparse
import io
import sys
from collections.abc import Sequence

from torchcalib._version import __version__
from torchcalib.cli import compare, demo, merge, report
from torchcalib.cli.errors import fail, line_of

COMMANDS = (report, merge, compare, demo)
"""Each adds its parser, whose default `run` takes the arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for input that cannot be used."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that the terminal cannot show must not lose the report
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return fail(line_of(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcalib", description="How far can a classifier's probabilities be trusted?", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
