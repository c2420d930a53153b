"""Sums over equal-mass bins by partitioning the samples at the bin edges."""

from torchcalib.ops.sorting import equal_mass_sums

__all__ = ["equal_mass_sums"]
