"""Calibrators: fitted to predictions and labels, they give a frozen transform of predictions.

A calibrator is a small frozen value that says what to fit (`Temperature()`, `HistogramBinning(n_bins=10)`); its `fit`
returns a `Transform`, a module without parameters that stands at the end of a model.
"""

from torchcalib.calibrators.affine import AffineTransform, DPCalibration, Temperature
from torchcalib.calibrators.histogram import HistogramBinning, HistogramTransform
from torchcalib.calibrators.isotonic import Isotonic, IsotonicTransform
from torchcalib.calibrators.saving import CHECKPOINT_KEY, load_calibrator, save_calibrator, transform_of
from torchcalib.calibrators.transform import Calibrator, Transform

__all__ = [
    "CHECKPOINT_KEY",
    "AffineTransform",
    "Calibrator",
    "DPCalibration",
    "HistogramBinning",
    "HistogramTransform",
    "Isotonic",
    "IsotonicTransform",
    "Temperature",
    "Transform",
    "load_calibrator",
    "save_calibrator",
    "transform_of",
]
