"""Command line interface. `COMMANDS` in `parser` lists the commands and their modules.

An error prints one line on stderr, `torchcalib: error: ...`, and returns exit code 2. Arguments, paths and headers of
files are checked before the module of the command imports torch. Help and these errors are therefore fast.
"""

import io
import sys
from collections.abc import Sequence
from importlib import import_module

from torchcalib.cli.inputs import check_places
from torchcalib.cli.messages import fail, line_of, warnings_in_one_line, working
from torchcalib.cli.options import check_counts
from torchcalib.cli.parser import Command, make_parser
from torchcalib.cli.ranks import joined


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, 1 for a failed check, 2 for an error, or 130."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal encoding may not support all characters
    try:
        with warnings_in_one_line(), joined() as ranks:
            with ranks.agreed():
                command: Command = arguments.declared
                check_counts(arguments)
                paths = command.find(arguments)
                if ranks.n_ranks == 1:  # otherwise each rank opens its share of the files
                    command.open(arguments, paths)
                if ranks.is_first:
                    check_places(arguments, command.places, paths)
                with working("loading torch", shown=ranks.is_first):
                    module = import_module(f"torchcalib.cli.{command.module}")
                    import_module("torchcalib.ops.threads").limit_threads()
            code: int | None = getattr(module, arguments.command)(arguments, paths, ranks)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return fail(line_of(error))
    return code or 0
