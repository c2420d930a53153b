"""Reports on confidences: the predicted probabilities that predictions or answers are correct.

Confidences are evaluated as a binary task: the confidence c is the probability of the outcome "correct". Errors of the
positive class are then errors of the top label. `torchcalib.reporting.catalogue.catalogue_of` omits errors of the
confidence max(c, 1 - c), and computes metrics of selective prediction from c. The binary accuracy, which depends on the
threshold 0.5, is replaced. Comparisons omit it.
"""

from dataclasses import replace
from typing import TypeVar

from torchcalib.reporting.catalogue import GROUPS
from torchcalib.results.lines import LineInterval, Quantity
from torchcalib.results.report import Report

Q = TypeVar("Q", bound=Quantity)

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution


def report_of_confidences(report: Report, n: float) -> Report:
    """Convert a binary report to a report on confidences, with the mean outcome as accuracy.

    Its interval is that of Wilson for `n` samples, the effective number for floating weights: Franco, Little, Louis,
    Slud: Comparative study of confidence intervals for proportions in complex sample surveys (Journal of Survey
    Statistics and Methodology, 2019).
    """
    accuracy = report.priors[1]
    interval = None
    if any(line.interval is not None for line in report.lines):  # Wilson 1927, for a proportion of n samples
        centre = (accuracy + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * (accuracy * (1 - accuracy) / n + _Z**2 / (4 * n**2)) ** 0.5
        interval = LineInterval(max(0.0, centre - half), min(1.0, centre + half))
    lines = [
        replace(line, value=accuracy, naive=accuracy, interval=interval) if line.key == "accuracy" else line
        for line in as_top_label(report.lines)
    ]
    stage = report.calibration
    if stage is not None:  # calibration changes the confidences, not the answers
        stage = replace(stage, lines=tuple(replace(line, accuracy=accuracy) for line in stage.lines))
    return replace(
        report,
        calibration=stage,
        lines=tuple(lines),
        tables={"top_label": report.tables["positive"]},
        tests={"top_label": report.tests["positive"]} if report.tests else {},
        settings={**report.settings, "kind": "confidence"},
    )


def as_top_label(lines: tuple[Q, ...]) -> tuple[Q, ...]:
    """Rename errors of the positive class to errors of the top label."""
    suffix = "/positive"
    return tuple(
        replace(line, key=line.key.replace(suffix, "/top_label"), group=GROUPS["top_label"])
        if line.key.endswith(suffix)
        else line
        for line in lines
    )
