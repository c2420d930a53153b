"""Calibrators, and what they would gain: cross-validated calibration loss and a recommendation."""

from torchcalib.calibration.affine import DPCalibration, Temperature
from torchcalib.calibration.cross_validation import calibrated
from torchcalib.calibration.divergence import ScoreDivergence, score_divergence
from torchcalib.calibration.gain import calibration_loss, rcl
from torchcalib.calibration.histogram import HistogramBinning
from torchcalib.calibration.isotonic import Isotonic
from torchcalib.calibration.recommendation import Recommendation, recommend
from torchcalib.calibration.saving import load_calibrator, save_calibrator

__all__ = [
    "DPCalibration",
    "HistogramBinning",
    "Isotonic",
    "Recommendation",
    "ScoreDivergence",
    "Temperature",
    "calibrated",
    "calibration_loss",
    "load_calibrator",
    "rcl",
    "recommend",
    "save_calibrator",
    "score_divergence",
]
