"""Calibrators, cross-validated calibration, and estimates of its gain in score."""

from typing import Any

from torchcalib._lazy import unknown_name
from torchcalib.calibration.affine import (
    AffineScaling,
    BiasCorrection,
    EnsembleTemperatureScaling,
    TemperatureScaling,
)
from torchcalib.calibration.binary import BetaCalibration, QuadraticScaling
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import cross_val_calibrate
from torchcalib.calibration.gain import (
    ScoreDivergence,
    calibration_loss,
    expected_score,
    relative_calibration_loss,
    score_divergence,
)
from torchcalib.calibration.isotonic import CentredIsotonicCalibration, IsotonicCalibration, VennAbersCalibration
from torchcalib.calibration.one_against_rest import HistogramBinning, PlattScaling
from torchcalib.calibration.quantiles import BayesianBinning, SplineCalibration
from torchcalib.calibration.recommendation import Recommendation, recommend
from torchcalib.calibration.saving import load_calibrator, save_calibrator
from torchcalib.calibration.structured import (
    DirichletCalibration,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)

__all__ = [
    "AffineScaling",
    "BayesianBinning",
    "BetaCalibration",
    "BiasCorrection",
    "Calibrator",
    "CentredIsotonicCalibration",
    "DirichletCalibration",
    "EnsembleTemperatureScaling",
    "HistogramBinning",
    "IsotonicCalibration",
    "PlattScaling",
    "QuadraticScaling",
    "Recommendation",
    "ScoreDivergence",
    "SplineCalibration",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "TemperatureScaling",
    "VectorScaling",
    "VennAbersCalibration",
    "calibration_loss",
    "cross_val_calibrate",
    "expected_score",
    "load_calibrator",
    "recommend",
    "relative_calibration_loss",
    "save_calibrator",
    "score_divergence",
]


def __getattr__(name: str) -> Any:
    raise unknown_name(__name__, name, __all__)
