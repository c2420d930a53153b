"""Calibrators in a report: cross-validated scores with and without each of them."""

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.bins import BinTable
from torchcalib.display.tables import Cell, Column, Table, Tabular, attribute_column, number
from torchcalib.display.words import gain, percent
from torchcalib.results.base import plain
from torchcalib.results.lines import LineInterval, interval_column


@dataclass(frozen=True)
class CalibratorLine:
    """Cross-validated scores after calibration with one calibrator.

    Attributes:
        calibrator: display name of the calibrator, such as `"temperature scaling"`; `"none"` without calibration.
        accuracy: accuracy of the calibrated predictions.
        nll: negative log-likelihood (NLL) in nats.
        brier_score: Brier score.
        ece: expected calibration error (ECE) of the main mode.
        gain: decrease of the NLL, or of the score of the recommendation, in percent of its value without calibration
            (relative calibration loss). Negative for an increase. None without calibration. For the preferred
            calibrator it is corrected for the choice.
        interval: 95% interval of `gain`; see `torchcalib.calibration.Recommendation`. None if undefined.
        parameters: parameters of the fit to all samples, in words.
    """

    calibrator: str
    accuracy: float
    nll: float
    brier_score: float
    ece: float
    gain: float | None = None
    interval: LineInterval | None = None
    parameters: str = ""


@dataclass(frozen=True)
class CalibrationStage(Tabular):
    """Cross-validated scores with and without calibrators.

    Attributes:
        recommendation: whether to calibrate and with which calibrator, based on the negative log-likelihood (NLL), or
            on the Brier score if NLL is infinite.
        lines: scores without calibration, then after each calibrator.
        calibrator: the recommended calibrator, not fitted; the preferred one if none is recommended.
            `calibrator.fit(preds, target)` fits it to all samples.
        table: bins of the main mode after calibration with `calibrator`.
        n_folds: number of random folds.
        n_repeats: number of random splits into folds over which scores are averaged.
        seed: seed of the splits.
        notes: sentences on problems of the fits and on omitted calibrators.
        label_parameters: parameters of the fit of `calibrator` to all samples of each label, in words. Empty for tasks
            without labels.
    """

    recommendation: Recommendation
    lines: tuple[CalibratorLine, ...]
    calibrator: Calibrator = field(compare=False)
    table: BinTable = field(compare=False, repr=False)
    n_folds: int
    n_repeats: int
    seed: int
    notes: tuple[str, ...] = ()
    label_parameters: tuple[str, ...] = ()

    def advised(self, worthwhile: float, *, is_faulty: bool = False) -> "CalibrationStage":
        """Return the stage with another recommendation; see `Recommendation.advised`."""
        return replace(self, recommendation=self.recommendation.advised(worthwhile, is_faulty=is_faulty))

    @property
    def name(self) -> str:
        """Display name of `calibrator`."""
        return self.calibrator.name

    @property
    def raw(self) -> CalibratorLine:
        """Scores without calibration."""
        return self.lines[0]

    @property
    def best(self) -> CalibratorLine:
        """Scores after calibration with `calibrator`."""
        return next(line for line in self.lines if line.calibrator == self.name)

    def layout(self) -> Table:
        """Return the table of scores without calibration and after each calibrator."""
        return calibrator_table(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain Python values; see `Results.to_dict`."""
        attributes: dict[str, Any] = plain(self)
        return attributes


def calibrator_table(stage: CalibrationStage, most: int | None = None) -> Table:
    """Return the table of scores without calibration and after each calibrator, or after the `most` best ones."""
    # Scores that are equal up to rounding keep the order of the calibrators.
    ranked = sorted(stage.lines[1:], key=lambda line: float(f"{line.nll:.6g}"))[:most]
    best = [line for line in stage.lines[1:] if line is stage.best or line in ranked]

    def name(line: Any) -> Cell:
        is_advised = line.calibrator == stage.recommendation.best
        return Cell(f"{line.calibrator} (advised)", style="better") if is_advised else Cell(line.calibrator)

    columns = [
        Column("calibrator", name, is_number=False, data={"calibrator": attrgetter("calibrator")}),
        attribute_column("accuracy", "accuracy", lambda accuracy: Cell(percent(accuracy), accuracy)),
        attribute_column("NLL", "nll", number),
        Column("gain", lambda line: Cell() if line.gain is None else Cell(gain(line.gain), line.gain, style="main")),
        interval_column(attrgetter("interval")),
        Column("Brier score", lambda line: number(line.brier_score), shown="wide"),
        attribute_column("ECE", "ece", number),
        Column("fitted parameters", lambda line: Cell(line.parameters), is_number=False, shown="page", wraps=True),
    ]
    repeats = f", mean of {stage.n_repeats} random splits" if stage.n_repeats > 1 else ""
    title = "" if most else f"Scores after calibration, {stage.n_folds}-fold cross-validation{repeats}"
    return Table.from_items(columns, {"": [stage.raw, *best]}, title, index=["calibrator"])
