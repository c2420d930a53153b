"""Command line: `torchcalib report FILE ...`, `merge PART ...`, `compare FILE ...` and `demo`, one module each.

Bad input ends with one line on stderr, `torchcalib: error: ...`, and exit code 2. The modules import torch only inside
of functions, so that help and wrong paths need no time.
"""

import argparse
import io
import sys
from collections.abc import Sequence

from torchcalib._version import __version__
from torchcalib.cli import compare, demo, merge, report
from torchcalib.cli.errors import fail, line_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="torchcalib", description="Measure the calibration of classifiers.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (report, merge, compare, demo):
        command.add_to(commands)
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack letters of a name
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return fail(line_of(error))
    return 0
