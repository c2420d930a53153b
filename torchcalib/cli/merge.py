"""The command `torchcalib merge PART ...`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchcalib.cli.ranks import on_first
from torchcalib.cli.results import check_places, finish
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.render import terminal


@on_first
def run(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Load and merge saved states one by one, then write and print one report."""
    check_places(arguments, paths)
    with terminal.progress(len(paths), "merging") as advance:
        whole = ReportBuilder.load(paths[0])
        for path in paths[1:]:
            advance(1, f"merging {path.name}")
            part = ReportBuilder.load(path)
            try:
                whole.merge(part)
            except ValueError as error:
                raise ValueError(f"`{path}` cannot be merged with `{paths[0]}`: {error}") from error
    finish(whole, arguments)
