"""Command line: `torchcalib report FILE ...`, `merge PART ...`, `compare FILE ...` and `demo`, one module each.

Bad input ends with one line on stderr, `torchcalib: error: ...`, and exit code 2. Only the module of a command imports
torch, after its arguments and paths have been checked: help and wrong paths take little time.
"""

import io
import sys
from collections.abc import Sequence
from importlib import import_module

from torchcalib.cli.errors import fail, line_of
from torchcalib.cli.parser import make_parser
from torchcalib.cli.progress import working
from torchcalib.cli.ranks import joined


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for bad input."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack letters of a name
    try:
        with joined() as ranks:
            with ranks.agreed():
                paths = arguments.find(arguments)
                with working("loading torch", shown=ranks.is_first):
                    command = import_module(f"torchcalib.cli.{arguments.command}")
            command.run(arguments, paths, ranks)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return fail(line_of(error))
    return 0
