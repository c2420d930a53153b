"""The command line: `torchcalib report`, `torchcalib compare` and `torchcalib demo`. A room for each command.

Bad input ends with one line on stderr, `torchcalib: error: ...`, and exit code 2.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence

from torchcalib._version import __version__
from torchcalib.cli import compare, demo, report
from torchcalib.files import printable

COMMANDS = (report, compare, demo)
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
    except (ValueError, TypeError, ImportError, OSError) as error:
        return _failed(str(error) or type(error).__name__)
    except Exception as error:  # too large a number, no memory: whatever it is, it is one line
        return _failed(f"{type(error).__name__}: {error}")
    return 0


def _failed(message: str) -> int:
    line = printable(_as_options(" ".join(message.split())))
    print(f"torchcalib: error: {line}", file=sys.stderr)  # noqa: T201
    return 2


def _as_options(message: str) -> str:
    """Name the command's options where a message advises Python's keywords."""
    for keyword, option in (
        (r"Pass from_logits=True", "Pass --from-logits"),
        (r", class_axis=1 for class-first input,", ""),
        (r"ignore_index=(-?\d+)", r"--ignore-index \1"),
        (r"task='(\w+)'", r"--task \1"),
        (r"`n_bins`", "`--n-bins`"),
        (r"`epochs`", "`--epochs`"),
    ):
        message = re.sub(keyword, option, message)
    return message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcalib", description="How far can a classifier's probabilities be trusted?", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
