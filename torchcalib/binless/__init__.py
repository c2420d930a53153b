"""Readings that need no bins: smECE, the calibration index of a loess curve, a logistic regression, and a z-test."""

from torchcalib.binless.cox import Cox, CoxCalibration, cox, cox_from_sample
from torchcalib.binless.ici import ICI, ici, ici_from_sample
from torchcalib.binless.reading import EventMetric, EventReading, EventSums
from torchcalib.binless.smece import SmECE, SmoothingCells, smece, smece_from_cells, smece_width
from torchcalib.binless.spiegelhalter import Spiegelhalter, SpiegelhalterTest, spiegelhalter, spiegelhalter_from_sums

__all__ = [
    "ICI",
    "Cox",
    "CoxCalibration",
    "EventMetric",
    "EventReading",
    "EventSums",
    "SmECE",
    "SmoothingCells",
    "Spiegelhalter",
    "SpiegelhalterTest",
    "cox",
    "cox_from_sample",
    "ici",
    "ici_from_sample",
    "smece",
    "smece_from_cells",
    "smece_width",
    "spiegelhalter",
    "spiegelhalter_from_sums",
]
