"""Everything that is known about a set of predictions, as data: `report(preds, target, task=...)` gives a `Report`.

A report is built from sums and from samples in order, so `ReportBuilder` takes predictions piece by piece, of any
number, in bounded memory. Builders add: what one of them holds is saved to a file, or sent to another rank, and merged.
Drawing, pages and files are made further up, from the finished `Report`.
"""

from torchcalib.report.building import ReportBuilder
from torchcalib.report.data import (
    EVIDENCE_WORDS,
    INTERVAL_WORDS,
    CalibrationGain,
    CalibrationStage,
    Line,
    LineInterval,
    Report,
)
from torchcalib.report.function import report
from torchcalib.report.groups import GROUP_WORDS
from torchcalib.report.metrics import check_size
from torchcalib.report.ranks import gather_report
from torchcalib.report.saving import load_report_state, save_report_state

__all__ = [
    "EVIDENCE_WORDS",
    "GROUP_WORDS",
    "INTERVAL_WORDS",
    "CalibrationGain",
    "CalibrationStage",
    "Line",
    "LineInterval",
    "Report",
    "ReportBuilder",
    "check_size",
    "gather_report",
    "load_report_state",
    "report",
    "save_report_state",
]
