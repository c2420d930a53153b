"""Multi-class (canonical) calibration: of the whole vector of probabilities, not of one number made of it."""

from torchcalib.canonical.blocks import CalibrationTest
from torchcalib.canonical.error import canonical_error
from torchcalib.canonical.skce import SKCE, skce
from torchcalib.canonical.testing import skce_test

__all__ = ["SKCE", "CalibrationTest", "canonical_error", "skce", "skce_test"]
