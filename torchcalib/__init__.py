"""How far a classifier's probabilities can be trusted, on torch.

Scores (`nll`, `brier_score`, `ecd`) and calibration errors (`ece`, `esce`, `mce`, `rmsce`) as functions, and as metrics
that stream (`NLL`, `Brier`, `ECD`, `ECE`, `ESCE`, `MCE`, `RMSCE`, `CalibrationCollection`).
"""

from torchcalib._version import __version__
from torchcalib.binned import (
    ECE,
    ESCE,
    MCE,
    RMSCE,
    BinOptions,
    BinTable,
    bin_table,
    ece,
    esce,
    mce,
    rmsce,
)
from torchcalib.distributions import nees, nees_per_sample
from torchcalib.predictions import InputOptions
from torchcalib.report import Report, report
from torchcalib.scores import (
    ECD,
    NLL,
    Brier,
    brier_per_sample,
    brier_score,
    ecd,
    ecd_per_sample,
    nll,
    nll_per_sample,
)
from torchcalib.streaming import CalibrationCollection

__all__ = [
    "ECD",
    "ECE",
    "ESCE",
    "MCE",
    "NLL",
    "RMSCE",
    "BinOptions",
    "BinTable",
    "Brier",
    "CalibrationCollection",
    "InputOptions",
    "Report",
    "__version__",
    "bin_table",
    "brier_per_sample",
    "brier_score",
    "ecd",
    "ecd_per_sample",
    "ece",
    "esce",
    "mce",
    "nees",
    "nees_per_sample",
    "nll",
    "nll_per_sample",
    "report",
    "rmsce",
]
