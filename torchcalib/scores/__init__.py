"""Proper scores: means over samples of what one sample gets.

A score is data (`Score`), one engine reads every score, and the function and the streaming class of a score stand
together in its file.
"""

from torchcalib.scores.accuracy import Accuracy, accuracy
from torchcalib.scores.bayes_risk import (
    BayesRisk,
    bayes_decisions,
    bayes_risk,
    bayes_risk_per_sample,
    expected_cost,
)
from torchcalib.scores.brier import Brier, brier_per_sample, brier_score
from torchcalib.scores.costs import CostMatrix
from torchcalib.scores.ecd import ECD, ecd, ecd_per_sample
from torchcalib.scores.engine import Score, ScoreMetric, ScoreReading
from torchcalib.scores.gaussian import nees, nees_per_sample
from torchcalib.scores.nll import NLL, nll, nll_per_sample
from torchcalib.scores.risk_curve import BayesRiskCurve, bayes_risk_area, bayes_risk_curve, optimal_threshold_cost
from torchcalib.scores.votes import (
    EntropyDifference,
    KLDivergence,
    TotalVariation,
    VotesDistance,
    entropy_difference,
    entropy_difference_per_sample,
    kl_divergence,
    kl_divergence_per_sample,
    total_variation,
    total_variation_per_sample,
    votes_distance,
    votes_distance_per_sample,
)

__all__ = [
    "ECD",
    "NLL",
    "Accuracy",
    "BayesRisk",
    "BayesRiskCurve",
    "Brier",
    "CostMatrix",
    "EntropyDifference",
    "KLDivergence",
    "Score",
    "ScoreMetric",
    "ScoreReading",
    "TotalVariation",
    "VotesDistance",
    "accuracy",
    "bayes_decisions",
    "bayes_risk",
    "bayes_risk_area",
    "bayes_risk_curve",
    "bayes_risk_per_sample",
    "brier_per_sample",
    "brier_score",
    "ecd",
    "ecd_per_sample",
    "entropy_difference",
    "entropy_difference_per_sample",
    "expected_cost",
    "kl_divergence",
    "kl_divergence_per_sample",
    "nees",
    "nees_per_sample",
    "nll",
    "nll_per_sample",
    "optimal_threshold_cost",
    "total_variation",
    "total_variation_per_sample",
    "votes_distance",
    "votes_distance_per_sample",
]
