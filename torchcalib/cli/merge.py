"""`torchcalib merge PART ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchcalib.cli.ranks import joined
from torchcalib.cli.results import add_result_options, check_places, finish
from torchcalib.io.paths import expanded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from torchcalib.reporting.building import ReportBuilder


def add_to(commands: Any) -> None:
    """Add the command."""
    merge = commands.add_parser(
        "merge",
        help="one report of parts that `torchcalib report --save-state` wrote",
        description="Print and write the report of several parts: that of one run over all their files, in this order.",
        allow_abbrev=False,
    )
    merge.add_argument(
        "files",
        nargs="+",
        metavar="PART",
        help="a file of `torchcalib report --save-state` or of `torchcalib merge --save-state`; a quoted pattern such "
        "as 'part*.pt' stands for all matches, sorted by name",
    )
    add_result_options(merge)
    merge.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> None:
    with joined() as ranks, ranks.agreed():
        if ranks.is_first:  # a launcher may have started others, which have no work
            paths = expanded(arguments.files)
            if len({path.resolve() for path in paths}) < len(paths):
                raise ValueError("every part must be named once, got one twice. Remove the repetition.")
            check_places(arguments, [path for path in paths if path.exists()])
            finish(_merged(paths), arguments)


def _merged(paths: Sequence[Path]) -> ReportBuilder:
    """Load the parts one by one and add them."""
    from torchcalib.reporting import terminal
    from torchcalib.reporting.saving import load_report_state

    with terminal.progress(len(paths), "merging") as advance:
        whole = load_report_state(paths[0])
        for path in paths[1:]:
            advance(1, f"merging {path.name}")
            part = load_report_state(path)
            try:
                whole.merge(part)
            except ValueError as error:
                raise ValueError(f"`{path}` cannot be merged with `{paths[0]}`: {error}") from error
    return whole
