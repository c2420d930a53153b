"""Calibration metrics for PyTorch classifiers: measure and improve the reliability of predicted probabilities.

This namespace contains reports and streaming metric classes, such as the negative log-likelihood (`NLL`) and the
expected calibration error (`ECE`). Other namespaces are `functional` (metrics as functions), `calibration`
(calibrators), `losses` (training penalties), `inference` (tests and intervals) and `plots` (diagrams).
"""

from torchcalib._lazy import names_of_stub
from torchcalib._version import __version__ as __version__

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
