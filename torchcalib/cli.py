"""The command line: `torchcalib report FILE ...` and `torchcalib demo`.

Bad input ends with one line on stderr, `torchcalib: error: ...`, and exit code 2.
"""

import argparse
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from torchcalib._version import __version__
from torchcalib.calibrators import Transform, save_calibrator
from torchcalib.files import PredictionFiles, open_predictions
from torchcalib.predictions import Task, check_count
from torchcalib.report import Report, ReportBuilder

# A class-wise bin needs some 40 bytes for every 4-byte prediction while a piece is worked on.
_PIECE_BYTES = 4 * 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for input that cannot be used."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that the terminal cannot show must not lose the report
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, ImportError, OSError) as error:
        return _failed(str(error) or type(error).__name__)
    except Exception as error:  # too large a number, no memory: whatever it is, it is one line
        return _failed(f"{type(error).__name__}: {error}")
    return 0


def _failed(message: str) -> int:
    print(f"torchcalib: error: {_as_options(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201
    return 2


def _as_options(message: str) -> str:
    """Name the command's options where a message advises Python's keywords."""
    for keyword, option in (
        (r"Pass from_logits=True", "Pass --from-logits"),
        (r", class_axis=1 for class-first input,", ""),
        (r"ignore_index=(-?\d+)", r"--ignore-index \1"),
        (r"task='(\w+)'", r"--task \1"),
        (r"`n_bins`", "`--n-bins`"),
        (r"`epochs`", "`--epochs`"),
    ):
        message = re.sub(keyword, option, message)
    return message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcalib", description="How far can a classifier's probabilities be trusted?", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

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
    report.add_argument("--preds", metavar="NAME", help="key or column of the predictions (default: found by name)")
    report.add_argument("--target", metavar="NAME", help="key or column of the targets (default: found by name)")
    report.add_argument("--weights", metavar="NAME", help="key or column of the weights (default: found by name)")
    kind = report.add_mutually_exclusive_group()
    kind.add_argument("--from-logits", action="store_true", help="predictions are logits (default: by their name)")
    kind.add_argument("--from-probs", action="store_true", help="predictions are probabilities (default: by name)")
    report.add_argument("--task", choices=get_args(Task), help="what is predicted (default: by the shapes)")
    report.add_argument(
        "--n-bins",
        type=int,
        default=15,
        metavar="B",
        help="bins of equal width, and for ACE of equal mass (default: 15)",
    )
    report.add_argument("--right", action="store_true", help="bins are (a, b] instead of [a, b)")
    report.add_argument("--ignore-index", type=int, metavar="K", help="drop rows with this target")
    report.set_defaults(run=_report)

    demo = commands.add_parser(
        "demo",
        help="train a small classifier, watch it become over-confident, and report on it",
        description="Train a small classifier on scikit-learn's digits and show its calibration epoch by epoch.",
        allow_abbrev=False,
    )
    demo.add_argument("--out", metavar="DIR", default="demo-report", help="where to write (default: demo-report)")
    demo.add_argument("--epochs", type=int, default=40, help="default: 40")
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    demo.set_defaults(run=_demo)
    return parser


def _report(arguments: argparse.Namespace) -> None:
    from torchcalib import terminal  # needs the extra `report`, as does the page

    if arguments.out is not None:
        from torchcalib import html

        _make_folder(arguments.out)
    check_count("n_bins", arguments.n_bins)
    files = open_predictions(
        arguments.files,
        preds=arguments.preds,
        target=arguments.target,
        weights=arguments.weights,
        from_logits=True if arguments.from_logits else False if arguments.from_probs else None,
        task=arguments.task,
    )
    builder = ReportBuilder(
        task=files.task,
        n_bins=arguments.n_bins,
        right=arguments.right,
        with_calibration=not arguments.no_calibration,
        from_logits=files.from_logits,
        ignore_index=arguments.ignore_index,
    )
    save = arguments.save_calibrator
    if save is not None:
        _check_place(Path(save), files.paths)
    with terminal.progress(files.n_rows, f"reading {files.paths[0].name}") as advance:
        first = 1
        for preds, target, weights in files.chunks(_PIECE_BYTES):
            try:
                builder.update(preds, target, weights=weights)
            except ValueError as error:
                raise ValueError(f"in rows {first:,} to {first + len(preds) - 1:,}: {error}") from error
            first += len(preds)
            if save is not None and (why_not := builder.why_no_calibration()):
                raise ValueError(_no_calibrator(why_not))
            advance(len(preds))
    finished = builder.report(source=_source(files))
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


def _demo(arguments: argparse.Namespace) -> None:
    from torchcalib import demo, html, terminal

    check_count("epochs", arguments.epochs)
    _make_folder(arguments.out)
    run = demo.Demo(arguments.seed)
    terminal.show_epochs(run.epochs(arguments.epochs), title="Validation, epoch by epoch")
    finished: Report = run.report()
    paths = (*html.save_report(finished, arguments.out), run.save_predictions(Path(arguments.out)))
    terminal.show(finished)
    terminal.show_paths(paths)


def _make_folder(out: str) -> None:
    """Find out before the work is done whether there is a place for it."""
    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise ValueError(f"`--out` must be a folder, got {out!r}. Name another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)


def _source(files: PredictionFiles) -> dict[str, Any]:
    """What was read, for people."""
    source = {
        "files": [str(path) for path in files.paths],
        "format": files.format,
        "predictions": f"{files.preds_name}, read as {'logits' if files.from_logits else 'probabilities'}",
        "targets": files.target_name,
        "weights": files.weights_name or "none",
        "shape": list(files.shape),
        "dtype": files.dtype,
        "not used": list(files.ignored),
    }
    return {
        name: [_printable(v) for v in value] if isinstance(value, list) else _printable(value)
        for name, value in source.items()
    }


def _printable(value: Any) -> Any:
    """Names come out of files, and what is printed must not steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else value
