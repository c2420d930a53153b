"""Metrics as functions of predictions and targets, and the types of the tables and curves that they return."""

from typing import Any

from torchcalib._lazy import unknown_name
from torchcalib.core.arguments import InputOptions
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.metrics.all_classes import full_ece
from torchcalib.metrics.binned import ace, calibration_curve, ece, esce, mce, rmsce
from torchcalib.metrics.canonical import canonical_error
from torchcalib.metrics.decision import bayes_decisions, bayes_risk, expected_cost
from torchcalib.metrics.estimation_error import estimation_error, near_optimal_bins, optimal_bins
from torchcalib.metrics.gaussian import Density, nees, nees_interval
from torchcalib.metrics.groups.function import GroupValues, by_group
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.metrics.hidden import from_hidden
from torchcalib.metrics.integrated_index import ici
from torchcalib.metrics.kernel import skce
from torchcalib.metrics.label_distribution import (
    entropy_gap,
    kl_divergence,
    ranking_score,
    squared_distance,
    total_variation,
)
from torchcalib.metrics.logistic import cox, spiegelhalter
from torchcalib.metrics.proper_scores import accuracy, brier_score, ecd, nll, stratified_brier_score
from torchcalib.metrics.ranked import CORPCurve, CORPDecomposition, cllr, corp, corp_curve, ks
from torchcalib.metrics.risk_area import bayes_risk_area
from torchcalib.metrics.risk_coverage import RiskCoverageCurve, risk_coverage_curve
from torchcalib.metrics.risk_curve import BayesRiskCurve, bayes_risk_curve, optimal_threshold_cost
from torchcalib.metrics.selective import (
    accuracy_at_coverage,
    augrc,
    aurc,
    correctness_auroc,
    coverage_at_risk,
    eaurc,
    risk_at_coverage,
)
from torchcalib.metrics.smooth import smece, smece_width
from torchcalib.metrics.test_based import gce, tce, tce_table
from torchcalib.metrics.truthful import atb

__all__ = [
    "BayesRiskCurve",
    "BinTable",
    "CORPCurve",
    "CORPDecomposition",
    "Density",
    "GroupTable",
    "GroupValues",
    "InputOptions",
    "RiskCoverageCurve",
    "TCETable",
    "accuracy",
    "accuracy_at_coverage",
    "ace",
    "atb",
    "augrc",
    "aurc",
    "bayes_decisions",
    "bayes_risk",
    "bayes_risk_area",
    "bayes_risk_curve",
    "brier_score",
    "by_group",
    "calibration_curve",
    "canonical_error",
    "cllr",
    "corp",
    "corp_curve",
    "correctness_auroc",
    "coverage_at_risk",
    "cox",
    "eaurc",
    "ecd",
    "ece",
    "entropy_gap",
    "esce",
    "estimation_error",
    "expected_cost",
    "from_hidden",
    "full_ece",
    "gce",
    "ici",
    "kl_divergence",
    "ks",
    "mce",
    "near_optimal_bins",
    "nees",
    "nees_interval",
    "nll",
    "optimal_bins",
    "optimal_threshold_cost",
    "ranking_score",
    "risk_at_coverage",
    "risk_coverage_curve",
    "rmsce",
    "skce",
    "smece",
    "smece_width",
    "spiegelhalter",
    "squared_distance",
    "stratified_brier_score",
    "tce",
    "tce_table",
    "total_variation",
]


def __getattr__(name: str) -> Any:
    raise unknown_name(__name__, name, __all__)
