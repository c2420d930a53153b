"""How far a classifier's probabilities can be trusted, in PyTorch.

Metric classes that stream stand here: proper scores (`NLL`, `BrierScore`, `ECD`, `BayesRisk`) and calibration errors
(`ECE`, `TCE`, `KS`, `SmECE` ...). `functional` has every metric as a function, `calibration` the calibrators, `losses`
penalties for training, `inference` tests and intervals, `plots` the diagrams.
"""

from torchcalib._lazy import names_of_stub
from torchcalib._version import __version__ as __version__

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
