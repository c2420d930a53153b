"""Check, write and print the results of the commands `report` and `merge`."""

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.saving import save_calibrator
from torchcalib.cli.errors import warn
from torchcalib.cli.progress import working
from torchcalib.io.errors import printable
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.render import terminal
from torchcalib.results.report import Report


def check_places(arguments: argparse.Namespace, inputs: Sequence[Path]) -> None:
    """Check that the results can be written and that the required packages are installed."""
    if arguments.out is not None:
        from torchcalib.reporting.render import html  # noqa: F401 - fails early if the extra `report` is not installed

        make_folder(arguments.out)
    places = {"--save-calibrator": arguments.save_calibrator, "--save-state": arguments.save_state}
    paths = {option: Path(place) for option, place in places.items() if place is not None}
    for option, path in paths.items():
        _check_place(option, path, inputs)
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise ValueError(
            f"`--save-state` must not be the file of `--save-calibrator`, got {arguments.save_state!r} for both. "
            "Name two files."
        )


def make_folder(out: str) -> None:
    """Create the folder for results, unless it exists."""
    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise ValueError(f"`--out` must be a folder, got {out!r}. Name another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)


def finish(builder: ReportBuilder, arguments: argparse.Namespace, remarks: Sequence[str] = ()) -> None:
    """Write all results, then print them. `remarks` become notes in the report, and warnings on stderr."""
    save, state = arguments.save_calibrator, arguments.save_state
    if state is not None:
        builder.save(state)
    if state is None or arguments.out is not None or save is not None:
        with working("computing values, intervals and calibrators"):
            finished = builder.report()
        finished = replace(finished, notes=(*finished.notes, *remarks))
        is_advised = finished.calibration is not None and finished.calibration.recommendation.best is not None
        if save is not None:
            fit = _fitted(builder, finished)
            if is_advised:
                save_calibrator(fit, save)
        paths: tuple[Path, ...] = ()
        if arguments.out is not None:
            with working("writing the files"):
                paths = finished.save(arguments.out)
        terminal.show(finished, arguments.all)
        terminal.show_paths(paths)
        if is_advised and save is not None and finished.calibration is not None:
            terminal.show_calibrator(Path(save), finished.calibration, finished.settings["from_logits"])
    if state is not None:
        terminal.show_state(Path(state), builder.source)
    for remark in remarks:
        warn(remark)
    if save is not None and not is_advised:
        warn(f"no calibrator is saved to `{printable(save)}`, because none is recommended for this data.")


def no_calibrator(reason: str) -> ValueError:
    """Return the error for data that do not allow the fit of a calibrator."""
    return ValueError(
        f"`--save-calibrator` must be used with data to which calibrators can be fitted, got unsuitable data: {reason}."
    )


def _fitted(builder: ReportBuilder, report: Report) -> Calibrator:
    if report.calibration is None:
        raise no_calibrator(builder.why_no_calibration() or report.notes[-1].removesuffix("."))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the report contains these warnings as notes
        return builder.fit(report.calibration.calibrator)


def _check_place(option: str, path: Path, inputs: Sequence[Path]) -> None:
    folder = path.parent
    if path.is_dir() or not path.name:
        raise ValueError(f"`{option}` must be a file, got the folder {str(path)!r}. Name a file in it.")
    if not folder.is_dir():
        raise ValueError(f"`{option}` must be in a folder that exists, got {str(path)!r}. Create the folder.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`{option}` must be in a folder that can be written to, got {str(path)!r}. Name another one.")
    if any(path.exists() and path.samefile(other) for other in inputs):
        raise ValueError(f"`{option}` must not be an input file, got {str(path)!r}. Name another one.")
