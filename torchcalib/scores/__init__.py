"""Proper scores: means over samples of what one sample gets.

A score is data (`Score`), one engine reads every score, and the function and the streaming class of a score stand
together in its file.
"""

from torchcalib.scores.accuracy import Accuracy
from torchcalib.scores.brier import Brier, brier_per_sample, brier_score
from torchcalib.scores.ecd import ECD, ecd, ecd_per_sample
from torchcalib.scores.engine import Score, ScoreMetric, ScoreReading
from torchcalib.scores.gaussian import nees, nees_per_sample
from torchcalib.scores.nll import NLL, nll, nll_per_sample

__all__ = [
    "ECD",
    "NLL",
    "Accuracy",
    "Brier",
    "Score",
    "ScoreMetric",
    "ScoreReading",
    "brier_per_sample",
    "brier_score",
    "ecd",
    "ecd_per_sample",
    "nees",
    "nees_per_sample",
    "nll",
    "nll_per_sample",
]
