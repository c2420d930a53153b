"""Percentile bootstrap: intervals for every metric, from samples weighed by how often they are drawn.

A replicate is a row of integer weights, so that the predictions are read once for all of them. What is drawn follows
from a hash of the seed, the replicate and the place of the sample: the same on every device.
"""

from torchcalib.bootstrap.function import bootstrap
from torchcalib.bootstrap.interval import Interval
from torchcalib.bootstrap.resampling import Resampling
from torchcalib.bootstrap.streaming import Bootstrapped

__all__ = ["Bootstrapped", "Interval", "Resampling", "bootstrap"]
