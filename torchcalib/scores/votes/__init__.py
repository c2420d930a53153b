"""Human-uncertainty calibration: how far predictions are from how people voted, and what of that few votes explain.

The distances are of two distributions over classes, predicted and voted, sample by sample. Few votes are a noisy
picture of what many would be: `component` tells the distance that is found, what chance alone would make of it, and
where it can be known the distance without that noise.
"""

from torchcalib.scores.votes.entropy_difference import (
    EntropyDifference,
    entropy_difference,
    entropy_difference_per_sample,
)
from torchcalib.scores.votes.kl_divergence import KLDivergence, kl_divergence, kl_divergence_per_sample
from torchcalib.scores.votes.total_variation import TotalVariation, total_variation, total_variation_per_sample
from torchcalib.scores.votes.votes_distance import VotesDistance, votes_distance, votes_distance_per_sample

__all__ = [
    "EntropyDifference",
    "KLDivergence",
    "TotalVariation",
    "VotesDistance",
    "entropy_difference",
    "entropy_difference_per_sample",
    "kl_divergence",
    "kl_divergence_per_sample",
    "total_variation",
    "total_variation_per_sample",
    "votes_distance",
    "votes_distance_per_sample",
]
