"""`torchcalib report FILE ...`."""

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcalib.calibrators import Transform, save_calibrator
from torchcalib.cli.reading import PIECE_BYTES, add_input_options, make_folder, opened, source_of
from torchcalib.predictions import check_count
from torchcalib.report import Report, ReportBuilder, check_size


def add_to(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report",
        help="scores, calibration errors, tables and diagrams of a file of predictions",
        description="Read predictions and targets, print how well calibrated they are, and write a full report.",
        allow_abbrev=False,
    )
    report.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .csv, .parquet (several are shards of one data set), or a pair of .npy files",
    )
    report.add_argument("--out", metavar="DIR", help="write report.html, report.json and the diagrams there")
    calibration = report.add_mutually_exclusive_group()
    calibration.add_argument(
        "--save-calibrator",
        metavar="PATH",
        help="fit the recommended calibrator to all samples and write it there, for torchcalib.load_calibrator",
    )
    calibration.add_argument(
        "--no-calibration", action="store_true", help="try no calibrators, which takes longer than all the rest"
    )
    report.add_argument("--no-intervals", action="store_true", help="no bootstrap intervals, which take some seconds")
    add_input_options(report)
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    from torchcalib import terminal  # needs the extra `report`, as does the page

    if arguments.out is not None:
        from torchcalib import html

        make_folder(arguments.out)
    check_count("n_bins", arguments.n_bins)
    files = opened(arguments, arguments.files)
    check_size(files.task, files.shape[-1], arguments.n_bins)  # before the first row is read
    builder = ReportBuilder(
        task=files.task,
        n_bins=arguments.n_bins,
        right=arguments.right,
        with_calibration=not arguments.no_calibration,
        with_intervals=not arguments.no_intervals,
        from_logits=files.from_logits,
        ignore_index=arguments.ignore_index,
    )
    save = arguments.save_calibrator
    if save is not None:
        _check_place(Path(save), files.paths)
    with terminal.progress(files.n_rows, f"reading {files.paths[0].name}") as advance:
        first = 1
        for preds, target, weights in files.chunks(PIECE_BYTES):
            try:
                builder.update(preds, target, weights=weights)
            except ValueError as error:
                raise ValueError(f"in rows {first:,} to {first + len(preds) - 1:,}: {error}") from error
            first += len(preds)
            if save is not None and (why_not := builder.why_no_calibration()):
                raise ValueError(_no_calibrator(why_not))
            advance(len(preds))
    finished = builder.report(source=source_of(files))
    if save is not None:
        save_calibrator(_fitted(builder, finished), save)
    paths = () if arguments.out is None else html.save_report(finished, arguments.out)  # before anything is printed
    terminal.show(finished)
    terminal.show_paths(paths)
    if save is not None and finished.calibration is not None:
        terminal.show_calibrator(Path(save), finished.calibration, files.from_logits)


def _fitted(builder: ReportBuilder, report: Report) -> Transform:
    """Fit the calibrator that the report names to all samples."""
    if report.calibration is None:
        raise ValueError(_no_calibrator(report.notes[-1].removesuffix(".")))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the notes of the report say what they say
        transform: Transform = builder.fit(report.calibration.calibrator)
    return transform


def _no_calibrator(why: str) -> str:
    return f"`--save-calibrator` must be given data that a calibrator can be tried on, got others: {why}."


def _check_place(path: Path, inputs: Sequence[Path]) -> None:
    """Find out before the work is done whether a file can be written there."""
    folder = path.parent
    if path.is_dir() or not path.name:
        raise ValueError(f"`--save-calibrator` must be a file, got the folder {str(path)!r}. Name a file in it.")
    if not folder.is_dir():
        raise ValueError(f"`--save-calibrator` must be in a folder that exists, got {str(path)!r}. Make the folder.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`--save-calibrator` must be in a folder that can be written to, got {str(path)!r}.")
    if any(path.exists() and path.samefile(other) for other in inputs):
        raise ValueError(f"`--save-calibrator` must not be a file that is read, got {str(path)!r}. Name another one.")
