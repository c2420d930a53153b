"""How far a classifier's probabilities can be trusted, on torch.

Scores (`nll`, `brier_score`, `ecd`, `bayes_risk`) and calibration errors, over bins (`ece`, `esce`, `mce`, `rmsce`), of
samples in order (`ace`, `tce`, `gce`, `ks`, `corp`), without bins (`smece`, `ici`, `cox`, `spiegelhalter`) and by what
a calibrator would gain (`calibration_loss`, `rcl`), as functions; and as metrics that stream, under the same names in
capitals (`NLL`, `ECE`, `TCE`, `CalibrationCollection`).
"""

from typing import TYPE_CHECKING, Any

from torchcalib._version import __version__
from torchcalib.calibration.affine import DPCalibration, Temperature
from torchcalib.calibration.cross_validation import calibrated
from torchcalib.calibration.gain import ScoreDivergence, calibration_loss, rcl, score_divergence
from torchcalib.calibration.histogram import HistogramBinning
from torchcalib.calibration.isotonic import Isotonic
from torchcalib.calibration.recommendation import Recommendation, recommend
from torchcalib.calibration.saving import load_calibrator, save_calibrator
from torchcalib.core.arguments import InputOptions
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import TopK
from torchcalib.core.kernel_blocks import CalibrationTest
from torchcalib.inference.bootstrap import Interval, bootstrap
from torchcalib.inference.evidence import Evidence
from torchcalib.losses.binned import ECELoss, SoftBinnedECELoss, soft_binned_ece
from torchcalib.losses.kernel import CanonicalLoss, MMCELoss, SKCELoss, mmce
from torchcalib.metrics.binned import ACE, ECE, ESCE, MCE, RMSCE, ace, bin_table, ece, esce, mce, rmsce
from torchcalib.metrics.bootstrapped import Bootstrapped
from torchcalib.metrics.canonical import canonical_error
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.cost_matrix import CostMatrix
from torchcalib.metrics.decision import BayesRisk, bayes_decisions, bayes_risk, expected_cost
from torchcalib.metrics.distributed_sampler import distinct_rows
from torchcalib.metrics.evidence import evidence
from torchcalib.metrics.gaussian import nees
from torchcalib.metrics.groups.function import by_group
from torchcalib.metrics.groups.streaming import ByGroup
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.metrics.kernel import SKCE, skce, skce_test
from torchcalib.metrics.label_distribution import (
    EntropyDifference,
    KLDivergence,
    TotalVariation,
    VotesDistance,
    entropy_difference,
    kl_divergence,
    total_variation,
    votes_distance,
)
from torchcalib.metrics.logistic import Cox, CoxCalibration, Spiegelhalter, SpiegelhalterTest, cox, spiegelhalter
from torchcalib.metrics.proper_scores import (
    ECD,
    NLL,
    Accuracy,
    Brier,
    accuracy,
    brier_score,
    ecd,
    nll,
)
from torchcalib.metrics.ranked import CORP, KS, CORPCurve, CORPDecomposition, corp, corp_curve, ks
from torchcalib.metrics.risk_curve import BayesRiskCurve, bayes_risk_area, bayes_risk_curve, optimal_threshold_cost
from torchcalib.metrics.smooth import ICI, SmECE, ici, smece, smece_width
from torchcalib.metrics.test_based import GCE, TCE, gce, tce, tce_table
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.comparison.building import compare
from torchcalib.reporting.data import Comparison, Report
from torchcalib.reporting.function import report
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.monitoring.monitor import Monitor
from torchcalib.reporting.monitoring.over_confidence import OverConfidenceWarning
from torchcalib.reporting.saving import gather_report, load_report_state, save_report_state
from torchcalib.special.beta import betainc
from torchcalib.special.binomial import binomial_test

if TYPE_CHECKING:
    from torchcalib.integrations.lightning import CalibrationMonitor as CalibrationMonitor
    from torchcalib.plots.comparison import bin_comparison as bin_comparison
    from torchcalib.plots.differences import difference_plot as difference_plot
    from torchcalib.plots.ecd import ecd_curve as ecd_curve
    from torchcalib.plots.reliability import confidence_histogram as confidence_histogram
    from torchcalib.plots.reliability import corp_diagram as corp_diagram
    from torchcalib.plots.reliability import reliability_diagram as reliability_diagram
    from torchcalib.plots.tce import tce_diagram as tce_diagram
    from torchcalib.plots.training import training_curve as training_curve
    from torchcalib.reporting.html.comparison import save_comparison as save_comparison
    from torchcalib.reporting.html.report import save_report as save_report

# Public names whose modules need an extra: imported when they are first used, and not by `import *`.
_LAZY = {
    "save_report": "torchcalib.reporting.html",
    "save_comparison": "torchcalib.reporting.html",
    "CalibrationMonitor": "torchcalib.integrations.lightning",
    "bin_comparison": "torchcalib.plots",
    "confidence_histogram": "torchcalib.plots",
    "corp_diagram": "torchcalib.plots",
    "difference_plot": "torchcalib.plots",
    "ecd_curve": "torchcalib.plots",
    "reliability_diagram": "torchcalib.plots",
    "tce_diagram": "torchcalib.plots",
    "training_curve": "torchcalib.plots",
}

__all__ = [
    "ACE",
    "CORP",
    "ECD",
    "ECE",
    "ESCE",
    "GCE",
    "ICI",
    "KS",
    "MCE",
    "NLL",
    "RMSCE",
    "SKCE",
    "TCE",
    "Accuracy",
    "BayesRisk",
    "BayesRiskCurve",
    "BinTable",
    "Bootstrapped",
    "Brier",
    "ByGroup",
    "CORPCurve",
    "CORPDecomposition",
    "CalibrationCollection",
    "CalibrationTest",
    "CanonicalLoss",
    "Comparison",
    "CostMatrix",
    "Cox",
    "CoxCalibration",
    "DPCalibration",
    "ECELoss",
    "EntropyDifference",
    "Evidence",
    "GroupTable",
    "HistogramBinning",
    "History",
    "InputOptions",
    "Interval",
    "Isotonic",
    "KLDivergence",
    "MMCELoss",
    "Monitor",
    "OverConfidenceWarning",
    "Recommendation",
    "Report",
    "ReportBuilder",
    "SKCELoss",
    "ScoreDivergence",
    "SmECE",
    "SoftBinnedECELoss",
    "Spiegelhalter",
    "SpiegelhalterTest",
    "TCETable",
    "Temperature",
    "TopK",
    "TotalVariation",
    "VotesDistance",
    "__version__",
    "accuracy",
    "ace",
    "bayes_decisions",
    "bayes_risk",
    "bayes_risk_area",
    "bayes_risk_curve",
    "betainc",
    "bin_table",
    "binomial_test",
    "bootstrap",
    "brier_score",
    "by_group",
    "calibrated",
    "calibration_loss",
    "canonical_error",
    "compare",
    "corp",
    "corp_curve",
    "cox",
    "distinct_rows",
    "ecd",
    "ece",
    "entropy_difference",
    "esce",
    "evidence",
    "expected_cost",
    "gather_report",
    "gce",
    "ici",
    "kl_divergence",
    "ks",
    "load_calibrator",
    "load_report_state",
    "mce",
    "mmce",
    "nees",
    "nll",
    "optimal_threshold_cost",
    "rcl",
    "recommend",
    "report",
    "rmsce",
    "save_calibrator",
    "save_report_state",
    "score_divergence",
    "skce",
    "skce_test",
    "smece",
    "smece_width",
    "soft_binned_ece",
    "spiegelhalter",
    "tce",
    "tce_table",
    "total_variation",
    "votes_distance",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
