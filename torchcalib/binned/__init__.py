"""Errors over bins of equal width or mass, ECE, ACE, ESCE, MCE, RMSCE, as functions and as streaming classes.

Each has a room for its function and its class; `reading` is what takes them from predictions to bins and to a value.
"""

from torchcalib.binned.ace import ACE, ace
from torchcalib.binned.ece import ECE, ece
from torchcalib.binned.esce import ESCE, esce
from torchcalib.binned.mce import MCE, mce
from torchcalib.binned.reading import BinnedMetric, BinReading, evaluate, statistic_of
from torchcalib.binned.rmsce import RMSCE, rmsce
from torchcalib.binned.table import bin_table

__all__ = [
    "ACE",
    "ECE",
    "ESCE",
    "MCE",
    "RMSCE",
    "BinReading",
    "BinnedMetric",
    "ace",
    "bin_table",
    "ece",
    "esce",
    "evaluate",
    "mce",
    "rmsce",
    "statistic_of",
]
