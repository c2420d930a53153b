"""Calibrators, cross-validated calibration, and the score that it gains."""

from torchcalib.calibration.affine import DPCalibration, Temperature
from torchcalib.calibration.cross_validation import calibrated
from torchcalib.calibration.gain import ScoreDivergence, calibration_loss, rcl, score_divergence
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
