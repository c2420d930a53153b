"""What a calibration stage would gain: a score of the predictions as they are, less that of the calibrated ones."""

from torchcalib.calibration_loss.divergence import ScoreDivergence, score_divergence
from torchcalib.calibration_loss.folds import FoldOptions
from torchcalib.calibration_loss.losses import calibration_loss, rcl
from torchcalib.calibration_loss.recommendation import Recommendation, recommend
from torchcalib.calibration_loss.training import CalibrationOptions, calibrated

__all__ = [
    "CalibrationOptions",
    "FoldOptions",
    "Recommendation",
    "ScoreDivergence",
    "calibrated",
    "calibration_loss",
    "rcl",
    "recommend",
    "score_divergence",
]
