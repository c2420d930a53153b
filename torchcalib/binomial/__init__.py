"""Regularised incomplete beta function, exact two-sided binomial test, and its decisions for whole bins of samples; and
what is expected of shares of votes.
"""

from torchcalib.binomial.beta import betainc
from torchcalib.binomial.bins import rejected_in_bins
from torchcalib.binomial.critical import CriticalValues, critical_values
from torchcalib.binomial.shares import entropy_of_counts, mean_distance_of_share, mean_log_share
from torchcalib.binomial.student import t_interval
from torchcalib.binomial.two_sided import binomial_test

__all__ = [
    "CriticalValues",
    "betainc",
    "binomial_test",
    "critical_values",
    "entropy_of_counts",
    "mean_distance_of_share",
    "mean_log_share",
    "rejected_in_bins",
    "t_interval",
]
