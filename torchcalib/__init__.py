"""Calibration metrics for PyTorch classifiers: measure and improve the reliability of predicted probabilities.

This namespace contains streaming metric classes: proper scores, such as the negative log-likelihood (`NLL`) and the
Brier score (`BrierScore`), and calibration errors such as the expected calibration error (`ECE`). Other namespaces are
`functional` (every metric as a function), `calibration` (calibrators), `losses` (penalties for training), `inference`
(tests and confidence intervals) and `plots` (diagrams).
"""

from torchcalib._lazy import names_of_stub
from torchcalib._version import __version__ as __version__

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
