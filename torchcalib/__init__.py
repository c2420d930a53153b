"""Calibration metrics for PyTorch classifiers: measure and improve the reliability of predicted probabilities.

This namespace contains reports, streaming metric classes such as the expected calibration error (`ECE`), metrics as
functions (`ece`), calibrators, tests and diagrams. The namespaces `functional`, `calibration`, `inference` and `plots`
contain the same objects in the order of the documentation, and their types. `losses` contains training penalties.
"""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
