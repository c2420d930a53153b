"""The command `torchcalib audit LOG [LOG ...]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcalib.cli.files import check_pages, report_settings
from torchcalib.cli.messages import computing, output, working
from torchcalib.reporting.audit import audit as audited
from torchcalib.reporting.render import terminal

_OPTIONS = ["confidence", "correct", "target", "pred", "id", "by", "gold", "select", "scale", "as_published"]
"""Options that are arguments of the function."""


def audit(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Read logs, and print and write the calibration under each definition of the confidence."""
    if arguments.out is not None:
        check_pages(arguments.out)
    with computing("reading the log, and computing values and intervals"):
        found: Any = audited(
            *(paths if len(paths) > 1 and not arguments.pools else [arguments.pools or paths[0]]),
            **{name: getattr(arguments, name) for name in _OPTIONS},
            words=dict(arguments.word or ()),
            **report_settings(arguments),
            names=None if arguments.names is None else arguments.names.split(","),
        )
    written: tuple[Path, ...] = ()
    if arguments.out is not None:
        with working("writing the files"):
            written = found.save(arguments.out, pages=arguments.pages)
    if arguments.json:
        output(found.to_json())
    else:
        terminal.show(found)
        terminal.show_paths(written)
