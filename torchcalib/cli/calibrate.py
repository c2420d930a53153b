"""The commands `torchcalib calibrate FILE ... --out PATH` and `torchcalib apply CALIBRATOR FILE ... --out PATH`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import torchcalib
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.saving import load_calibrator, save_calibrator
from torchcalib.cli.files import print_json, read_builder
from torchcalib.cli.inputs import opened_to_convert
from torchcalib.cli.messages import computing, output, warn, working
from torchcalib.display.words import count, printable
from torchcalib.io.copying import copy_of
from torchcalib.io.errors import quoted, shown
from torchcalib.io.names import are_logits
from torchcalib.io.writing import write_whole
from torchcalib.reporting.building import ReportBuilder


def calibrate(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Fit a calibrator, by default the recommended one, to the predictions in files, and save it."""
    place = Path(arguments.out)
    calibrator = None if arguments.calibrator is None else getattr(torchcalib, arguments.calibrator)()
    builder = read_builder(arguments, paths, with_intervals=False)
    if why_not := builder.why_no_calibration():
        raise _unsuitable(why_not)
    reason = ""
    if calibrator is None:
        calibrator, reason = _recommended(builder)
    with working(f"fitting {calibrator.name}"):
        fit = builder.fit(calibrator)
    save_calibrator(fit, place)
    kind, n = type(fit).__name__, 0 if builder.source is None else builder.source.shape[0]
    if arguments.json:
        print_json({"path": str(place), "calibrator": kind, "rows": n, "task": fit.task, "reason": reason})
    else:
        lines = (f"wrote {place}: {fit.name} ({kind}), fitted to {count(n)} rows", reason)
        output("\n".join(map(printable, filter(None, lines))))


def _recommended(builder: ReportBuilder) -> tuple[Calibrator, str]:
    """Return the recommended calibrator and the reason, or raise ValueError if none is worthwhile."""
    with computing("computing"):
        report = builder.report()
    stage = report.calibration
    if stage is None:
        raise _unsuitable(report.notes[-1].removesuffix("."))
    if stage.recommendation.best is None:
        raise ValueError(
            f"`--calibrator` must be named if none is recommended for the data. {report.decision.action} "
            "Pass --calibrator TemperatureScaling to fit one in spite of this."
        )
    return stage.calibrator, report.decision.action


def _unsuitable(reason: str) -> ValueError:
    return ValueError(f"The data must be such that calibrators can be fitted, got unsuitable data: {reason}.")


def apply(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Copy prediction files with calibrated predictions."""
    place = Path(arguments.out)
    calibrator = load_calibrator(arguments.calibrator)
    if calibrator.positive_classes is not None:
        raise ValueError(
            "`CALIBRATOR` must calibrate all classes, got one for "
            f"positive_classes={shown(list(calibrator.positive_classes))}. Apply it in Python."
        )

    def convert(name: str, preds: Tensor) -> Tensor:
        named = True if arguments.from_logits else False if arguments.from_probs else are_logits(name)
        if named not in (None, calibrator.from_logits):
            kinds = [("logits" if each else "probabilities") for each in (calibrator.from_logits, named)]
            raise ValueError(
                f"`{name}` must be {kinds[0]}, as in the fit of the calibrator, got {kinds[1]}. Fit a calibrator to "
                f"{kinds[1]}, or choose other predictions with --preds."
            )
        with torch.no_grad():
            calibrated: Tensor = calibrator(preds)
        return calibrated

    with working("calibrating"):
        copied = copy_of(opened_to_convert(arguments, paths), convert)
        content, not_stored = copied.content(place)
        write_whole(place, content)
    n = len(copied.arrays[copied.preds])
    if arguments.json:
        left_out = [*copied.left_out, *not_stored]
        print_json({"path": str(place), "rows": n, "predictions": copied.preds, "left_out": left_out})
    else:
        output(printable(f"wrote {place}: {count(n)} rows, `{copied.preds}` calibrated by {calibrator.name}"))
    if copied.left_out or not_stored:
        warn(f"{quoted((*copied.left_out, *not_stored))} cannot be copied to `{place}`, and are left out.")
