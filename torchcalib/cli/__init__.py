"""Command line interface. `COMMANDS` in `commands` lists the commands and their modules.

An error prints one line on stderr, `torchcalib: error: ...`, and returns exit code 2. Arguments, paths and headers of
files are checked before the module of the command imports torch. Help and these errors are therefore fast.
"""

import gc
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from torchcalib.cli.commands import Command
from torchcalib.cli.inputs import check_places
from torchcalib.cli.messages import fail, line_of, warnings_in_one_line, working
from torchcalib.cli.options import check_options
from torchcalib.cli.parser import make_parser

_MOST_OBJECTS = 1_000_000
"""New objects after which Python searches for unused cycles, a search that visits all objects of torch."""

_WAIT_POLICY = "OMP_WAIT_POLICY"


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
        with warnings_in_one_line(), _fast_start():
            command: Command = arguments.declared
            check_options(arguments)
            paths = command.find(arguments)
            command.open(arguments, paths)
            check_places(arguments, command.places, paths)
            with working("loading torch"):
                module = import_module(f"torchcalib.cli.{command.module}")
                import_module("torchcalib.ops.threads").limit_threads()
            code: int | None = getattr(module, arguments.command)(arguments, paths)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return fail(line_of(error))
    return code or 0


@contextmanager
def _fast_start() -> Iterator[None]:
    """Start torch with sleeping threads and few searches for unused cycles, and restore both settings at the end.

    Waiting threads of OpenMP would use a CPU core that other processes need: on a busy machine, to compute a report of
    1,000 rows took 12 s of CPU time instead of 1 s. Rare searches save 0.1 s of imports and 0.4 s of a report.
    """
    policy, threshold = os.environ.get(_WAIT_POLICY), gc.get_threshold()
    os.environ.setdefault(_WAIT_POLICY, "passive")  # has no effect in a process that has already imported torch
    gc.set_threshold(_MOST_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        gc.freeze()  # with `unfreeze`, moves all objects to the oldest generation, which is not searched now
        gc.unfreeze()
        gc.set_threshold(*threshold)
        if policy is None:
            os.environ.pop(_WAIT_POLICY, None)
