"""`torchcalib demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcalib.cli.results import make_folder

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Add the command."""
    demo = commands.add_parser(
        "demo",
        help="train a small classifier until it is over-confident, and report on it",
        description="Train a small classifier on scikit-learn's digits and print its calibration in every epoch.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "--out", metavar="DIR", default="demo-report", help="folder of the results (default: demo-report)"
    )
    demo.add_argument("--epochs", type=int, default=40, help="default: 40")
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from torchcalib.cli.demo_report import Demo
    from torchcalib.core.arguments import check_count
    from torchcalib.reporting import html, terminal  # need the extra `demo`

    check_count("epochs", arguments.epochs)
    make_folder(arguments.out)
    run = Demo(arguments.seed)
    terminal.show_epochs(run.epochs(arguments.epochs), title="Validation, epoch by epoch")
    terminal.show_warnings(run.monitor.history)
    finished = run.report()
    paths = (*html.save_report(finished, arguments.out), run.save_predictions(Path(arguments.out)))
    terminal.show(finished)
    terminal.show_paths(paths)
