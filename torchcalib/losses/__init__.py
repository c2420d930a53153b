"""Differentiable calibration errors of a batch, as functions and as modules, for use as training penalties.

Add a penalty to the training loss. Do not minimise it alone: a model that always predicts the class frequencies is
calibrated.
"""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
