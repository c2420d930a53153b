"""Penalties for training: miscalibrations of a batch that have gradients, as functions and as modules.

A penalty is added to the loss that a model is trained with, never minimised alone: always predicting the class shares
is calibrated.
"""

from torchcalib.losses.binned_ece import ECELoss
from torchcalib.losses.canonical import CanonicalLoss, SKCELoss
from torchcalib.losses.engine import PenaltyLoss
from torchcalib.losses.mmce import MMCELoss, mmce
from torchcalib.losses.soft_binned_ece import SoftBinnedECELoss, soft_binned_ece

__all__ = [
    "CanonicalLoss",
    "ECELoss",
    "MMCELoss",
    "PenaltyLoss",
    "SKCELoss",
    "SoftBinnedECELoss",
    "mmce",
    "soft_binned_ece",
]
