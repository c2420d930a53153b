"""Samples and calibrators for tests of calibrators and calibration losses."""

import copy

import torch

from torchcalib.calibration import (
    AffineScaling,
    BayesianBinning,
    BetaCalibration,
    BiasCorrection,
    CentredIsotonicCalibration,
    DirichletCalibration,
    EnsembleTemperatureScaling,
    HistogramBinning,
    IsotonicCalibration,
    PlattScaling,
    QuadraticScaling,
    SplineCalibration,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
    VennAbersCalibration,
)

T, D, B = TemperatureScaling(), AffineScaling(), BiasCorrection()
H, ISO = HistogramBinning(n_bins=5), IsotonicCalibration()
CIR, VA = CentredIsotonicCalibration(), VennAbersCalibration()
BBQ, SPLINE, PLATT = BayesianBinning(), SplineCalibration(), PlattScaling()
BETA, QUADRATIC, ENSEMBLE = BetaCalibration(), QuadraticScaling(), EnsembleTemperatureScaling()
SCALED = [T, D]  # with a fitted temperature
AFFINE = [*SCALED, B]
ALL = [*AFFINE, PLATT, H, ISO, CIR, VA, BBQ, SPLINE, BETA, QUADRATIC, ENSEMBLE]
OF_CLASSES = [VectorScaling(), StructuredVectorScaling(), StructuredMatrixScaling(), DirichletCalibration()]
"""Calibrators that support multi-class predictions only."""
binary = {"task": "binary", "from_logits": True}
multi = {"task": "multiclass", "from_logits": True}


def fresh(calibrator):
    """Return a copy to fit, because `fit` changes the calibrator itself."""
    return copy.deepcopy(calibrator)


def name(calibrator):
    return type(calibrator).__name__


def gumbel(*shape, generator, dtype=torch.float64):
    """Return Gumbel noise: the argmax of logits plus this noise is a sample from their softmax."""
    return -(-torch.rand(*shape, generator=generator, dtype=dtype).log()).log()


def data(n=60, n_classes=4, lead=(), seed=0, dtype=torch.float64):
    """Return logits with a wrong scale and a missing bias, and their labels."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*lead, n, n_classes, generator=g, dtype=torch.float64)
    noise = gumbel(*lead, n, n_classes, generator=g)
    return logits.to(dtype), (0.6 * logits + 0.7 * torch.arange(n_classes) + noise).argmax(-1)


def single(n=60, lead=(), seed=0):
    """Return log-odds and labels of a binary task."""
    logits, target = data(n, 2, lead, seed)
    return logits[..., 1], target


def turns(n, n_folds=5):
    """Return fold numbers 0, 1, ..., n_folds - 1, 0, 1, ..."""
    return torch.arange(n) % n_folds
