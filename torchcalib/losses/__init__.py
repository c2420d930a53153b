"""Differentiable calibration errors of a batch, as functions and as modules, for use as training penalties.

Add a penalty to the training loss. Do not minimise it alone: a model that always predicts the class frequencies is
calibrated.
"""

from typing import Any

from torchcalib._lazy import unknown_name
from torchcalib.losses.base import PenaltyLoss
from torchcalib.losses.binned import ECELoss, SoftBinnedECELoss, soft_binned_ece
from torchcalib.losses.kernel import CanonicalLoss, MMCELoss, SKCELoss, mmce

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


def __getattr__(name: str) -> Any:
    raise unknown_name(__name__, name, __all__)
