"""Readings of a sample in order: TCE and its general form GCE, KS, and the CORP decomposition of scores.

TCE and GCE are readings of bins of the sample, and built of `binned`; KS and CORP read the sample itself.
"""

from torchcalib.ranked.corp import CORP, CORPDecomposition, corp, corp_from_sample
from torchcalib.ranked.corp_curve import CORPCurve, corp_curve, curve_of
from torchcalib.ranked.gce import GCE, gce
from torchcalib.ranked.ks import KS, ks, ks_from_sample
from torchcalib.ranked.reading import RankedMetric, RankedReading, TestedRankedMetric
from torchcalib.ranked.tce import TCE, tce, tce_from_bins, tce_table

__all__ = [
    "CORP",
    "GCE",
    "KS",
    "TCE",
    "CORPCurve",
    "CORPDecomposition",
    "RankedMetric",
    "RankedReading",
    "TestedRankedMetric",
    "corp",
    "corp_curve",
    "corp_from_sample",
    "curve_of",
    "gce",
    "ks",
    "ks_from_sample",
    "tce",
    "tce_from_bins",
    "tce_table",
]
