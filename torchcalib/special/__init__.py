"""Special functions that torch lacks: regularised incomplete beta function and exact two-sided binomial test."""

from torchcalib.special.beta import betainc
from torchcalib.special.binomial import binomial_test

__all__ = ["betainc", "binomial_test"]
