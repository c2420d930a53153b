"""Calibrators, cross-validated calibration, and estimates of its gain in score."""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
