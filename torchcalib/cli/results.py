"""What commands have in common whose results are written: where they go, and how a report gets there."""

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from torchcalib.calibration.calibrator import Transform
from torchcalib.calibration.saving import save_calibrator
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.data import Report
from torchcalib.reporting.saving import save_report_state


def add_result_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add where results go; return the group of what cannot be had together with a calibrator."""
    parser.add_argument("--out", metavar="DIR", help="write report.html, report.json and the diagrams there")
    parser.add_argument(
        "--save-state",
        metavar="PATH",
        help="write there, as a part of a larger report, what `torchcalib merge` takes; without --out or "
        "--save-calibrator nothing else is computed",
    )
    calibration = parser.add_mutually_exclusive_group()
    calibration.add_argument(
        "--save-calibrator",
        metavar="PATH",
        help="fit the recommended calibrator to all samples and write it there, for torchcalib.load_calibrator",
    )
    return calibration


def check_places(arguments: argparse.Namespace, inputs: Sequence[Path]) -> None:
    """Find out before the work is done whether results can be written, and what is needed for that is installed."""
    if arguments.out is not None:
        from torchcalib.reporting import html  # noqa: F401 - needs the extra `report`

        make_folder(arguments.out)
    for option in ("save_calibrator", "save_state"):
        place = getattr(arguments, option)
        if place is not None:
            _check_place(f"--{option.replace('_', '-')}", Path(place), inputs)
    calibrator, state = arguments.save_calibrator, arguments.save_state
    if calibrator is not None and state is not None and Path(calibrator).resolve() == Path(state).resolve():
        raise ValueError(f"`--save-state` must not be the file of `--save-calibrator`, got {state!r} for both.")


def make_folder(out: str) -> None:
    """Find out before the work is done whether there is a place for it."""
    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise ValueError(f"`--out` must be a folder, got {out!r}. Name another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)


def finish(builder: ReportBuilder, arguments: argparse.Namespace) -> None:
    """Write and print what was asked for. Before anything is printed all is written."""
    from torchcalib.reporting import terminal

    save = arguments.save_calibrator
    if arguments.save_state is not None:
        save_report_state(builder, arguments.save_state)
        if arguments.out is None and save is None:
            terminal.show_state(Path(arguments.save_state), builder.source)
            return
    finished = builder.report()
    if save is not None:
        save_calibrator(_fitted(builder, finished), save)
    paths: tuple[Path, ...] = ()
    if arguments.out is not None:
        from torchcalib.reporting import html

        paths = html.save_report(finished, arguments.out)
    terminal.show(finished)
    terminal.show_paths(paths)
    if save is not None and finished.calibration is not None:
        terminal.show_calibrator(Path(save), finished.calibration, finished.settings["from_logits"])
    if arguments.save_state is not None:
        terminal.show_state(Path(arguments.save_state), builder.source)


def no_calibrator(why: str) -> ValueError:
    """Say that there is none to save."""
    return ValueError(f"`--save-calibrator` must be given data that a calibrator can be tried on, got others: {why}.")


def _fitted(builder: ReportBuilder, report: Report) -> Transform:
    """Fit the calibrator that the report names to all samples."""
    if report.calibration is None:
        raise no_calibrator(builder.why_no_calibration() or report.notes[-1].removesuffix("."))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the notes of the report say what they say
        transform: Transform = builder.fit(report.calibration.calibrator)
    return transform


def _check_place(option: str, path: Path, inputs: Sequence[Path]) -> None:
    """Find out whether a file can be written there."""
    folder = path.parent
    if path.is_dir() or not path.name:
        raise ValueError(f"`{option}` must be a file, got the folder {str(path)!r}. Name a file in it.")
    if not folder.is_dir():
        raise ValueError(f"`{option}` must be in a folder that exists, got {str(path)!r}. Make the folder.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`{option}` must be in a folder that can be written to, got {str(path)!r}.")
    if any(path.exists() and path.samefile(other) for other in inputs):
        raise ValueError(f"`{option}` must not be a file that is read, got {str(path)!r}. Name another one.")
