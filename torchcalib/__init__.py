"""How far a classifier's probabilities can be trusted, on torch.

Scores (`nll`, `brier_score`, `ecd`, `bayes_risk`) and calibration errors, over bins (`ece`, `esce`, `mce`, `rmsce`), of
samples in order (`ace`, `tce`, `gce`, `ks`, `corp`) and by what a calibrator would gain (`calibration_loss`, `rcl`), as
functions; and as metrics that stream, under the same names in capitals (`NLL`, `ECE`, `TCE`, `CalibrationCollection`).
"""

from typing import TYPE_CHECKING, Any

from torchcalib._version import __version__
from torchcalib.binless import (
    ICI,
    Cox,
    CoxCalibration,
    SmECE,
    Spiegelhalter,
    SpiegelhalterTest,
    cox,
    ici,
    smece,
    smece_width,
    spiegelhalter,
)
from torchcalib.binned import (
    ACE,
    ECE,
    ESCE,
    MCE,
    RMSCE,
    ace,
    bin_table,
    ece,
    esce,
    mce,
    rmsce,
)
from torchcalib.binomial import betainc, binomial_test
from torchcalib.bins import BinTable, TCETable
from torchcalib.bootstrap import Bootstrapped, Interval, bootstrap
from torchcalib.calibration_loss import (
    Recommendation,
    ScoreDivergence,
    calibrated,
    calibration_loss,
    rcl,
    recommend,
    score_divergence,
)
from torchcalib.calibrators import (
    DPCalibration,
    HistogramBinning,
    Isotonic,
    Temperature,
    load_calibrator,
    save_calibrator,
)
from torchcalib.canonical import SKCE, CalibrationTest, canonical_error, skce, skce_test
from torchcalib.comparison import Comparison, compare
from torchcalib.consistency import Evidence, evidence
from torchcalib.losses import (
    CanonicalLoss,
    ECELoss,
    MMCELoss,
    SKCELoss,
    SoftBinnedECELoss,
    mmce,
    soft_binned_ece,
)
from torchcalib.monitoring import History, Monitor, OverConfidenceWarning
from torchcalib.predictions import InputOptions
from torchcalib.ranked import (
    CORP,
    GCE,
    KS,
    TCE,
    CORPCurve,
    CORPDecomposition,
    corp,
    corp_curve,
    gce,
    ks,
    tce,
    tce_table,
)
from torchcalib.reductions import TopK
from torchcalib.report import (
    Report,
    ReportBuilder,
    gather_report,
    load_report_state,
    report,
    save_report_state,
)
from torchcalib.scores import (
    ECD,
    NLL,
    Accuracy,
    BayesRisk,
    BayesRiskCurve,
    Brier,
    CostMatrix,
    EntropyDifference,
    KLDivergence,
    TotalVariation,
    VotesDistance,
    accuracy,
    bayes_decisions,
    bayes_risk,
    bayes_risk_area,
    bayes_risk_curve,
    bayes_risk_per_sample,
    brier_per_sample,
    brier_score,
    ecd,
    ecd_per_sample,
    entropy_difference,
    entropy_difference_per_sample,
    expected_cost,
    kl_divergence,
    kl_divergence_per_sample,
    nees,
    nees_per_sample,
    nll,
    nll_per_sample,
    optimal_threshold_cost,
    total_variation,
    total_variation_per_sample,
    votes_distance,
    votes_distance_per_sample,
)
from torchcalib.streaming import CalibrationCollection, distinct_rows
from torchcalib.subgroups import ByGroup, GroupTable, by_group

if TYPE_CHECKING:
    from torchcalib.html import save_comparison as save_comparison
    from torchcalib.html import save_report as save_report
    from torchcalib.integrations.lightning import CalibrationMonitor as CalibrationMonitor
    from torchcalib.plots import bin_comparison as bin_comparison
    from torchcalib.plots import confidence_histogram as confidence_histogram
    from torchcalib.plots import corp_diagram as corp_diagram
    from torchcalib.plots import difference_plot as difference_plot
    from torchcalib.plots import ecd_curve as ecd_curve
    from torchcalib.plots import reliability_diagram as reliability_diagram
    from torchcalib.plots import tce_diagram as tce_diagram
    from torchcalib.plots import training_curve as training_curve

# Public names whose modules need an extra: imported when they are first used, and not by `import *`.
_LAZY = {
    "save_report": "torchcalib.html",
    "save_comparison": "torchcalib.html",
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
    "bayes_risk_per_sample",
    "betainc",
    "bin_table",
    "binomial_test",
    "bootstrap",
    "brier_per_sample",
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
    "ecd_per_sample",
    "ece",
    "entropy_difference",
    "entropy_difference_per_sample",
    "esce",
    "evidence",
    "expected_cost",
    "gather_report",
    "gce",
    "ici",
    "kl_divergence",
    "kl_divergence_per_sample",
    "ks",
    "load_calibrator",
    "load_report_state",
    "mce",
    "mmce",
    "nees",
    "nees_per_sample",
    "nll",
    "nll_per_sample",
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
    "total_variation_per_sample",
    "votes_distance",
    "votes_distance_per_sample",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
