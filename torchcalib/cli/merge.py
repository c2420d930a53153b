"""`torchcalib merge PART ...`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcalib.cli.ranks import together
from torchcalib.cli.results import add_result_options, check_places, finish
from torchcalib.io.finding import expanded
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.saving import load_report_state


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
        help="what `torchcalib report --save-state`, or merge itself, wrote; a quoted pattern such as 'part*.pt' "
        "stands for all that it matches, in the order of their names",
    )
    add_result_options(merge)
    merge.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> None:
    from torchcalib.reporting import terminal  # noqa: F401 - needs the extra `report`, as does the page

    with together() as ranks, ranks.agreed():
        if ranks.is_first:  # the others, should a launcher have started them, have nothing to do
            paths = expanded(arguments.files)
            if len({path.resolve() for path in paths}) < len(paths):
                raise ValueError("every part must be named once, got one twice. Leave the repetition out.")
            check_places(arguments, [path for path in paths if path.exists()])
            finish(_merged(paths), arguments)


def _merged(paths: Sequence[Path]) -> ReportBuilder:
    """Read parts one by one, and add them up."""
    from torchcalib.reporting import terminal

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
