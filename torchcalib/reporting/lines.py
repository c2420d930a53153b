"""Compute the lines of a report, such as scores and calibration errors, from accumulated sums and ranked samples.

Scores: negative log-likelihood (NLL) and entropic calibration difference (ECD). Calibration errors: expected (ECE),
expected signed (ESCE), maximum (MCE), root mean squared (RMSCE), adaptive (ACE), test-based (TCE),
Kolmogorov-Smirnov (KS) and averaged two-bin (ATB). Brier score decomposition: miscalibration (MCB) - discrimination
(DSC) + uncertainty (UNC). Selective prediction: area under the risk-coverage curve (AURC), its excess over the ideal
order (E-AURC), area under the generalised risk-coverage curve (AUGRC), and area under the receiver operating
characteristic curve (AUROC) of correctness.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable, equal_width_edges
from torchcalib.core.clusters import Clusters
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.ranked import RankedSample, by_pieces
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats, ScoreSum
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ACE, ECE, ESCE, MCE, RMSCE, BinnedMetric, ece_from_bins, rmsce_from_bins
from torchcalib.metrics.proper_scores import ECD, NLL, Accuracy, BrierScore
from torchcalib.metrics.ranked import CORP, KS, CORPDecomposition, corp_from_sample, ks_from_sorted
from torchcalib.metrics.risk_coverage import Accepted, of_predicted_class
from torchcalib.metrics.scores import ScoreMetric, scored
from torchcalib.metrics.selective import (
    AUGRC,
    AURC,
    EAURC,
    AccuracyAtCoverage,
    CorrectnessAUROC,
    CoverageAtRisk,
    SelectiveMetric,
    accuracy_at_coverage_of,
    augrc_of,
    aurc_of,
    correctness_auroc_of,
    coverage_at_risk_of,
    excess_of,
)
from torchcalib.metrics.test_based import TCE, tce_from_bins
from torchcalib.metrics.truthful import ATB, atb_from_sorted
from torchcalib.reporting.contents import SELECTIVE_GROUP
from torchcalib.reporting.results import Line

SCORES: tuple[type[ScoreMetric], ...] = (Accuracy, NLL, BrierScore, ECD)
ERRORS: tuple[type[BinnedMetric], ...] = (ECE, ESCE, MCE, RMSCE)

GROUPS: dict[NamedMode, str] = {
    "positive": "positive class",
    "top_label": "top label",
    "classwise": "class-wise",
}


def key_of(metric: type) -> str:
    """Return the key of a metric, without its mode: "brier" for `BrierScore`."""
    return metric.__name__.lower().removesuffix("score")


_TCE_BINNING, _ALPHA = Binning("pava_bc"), 0.05
"""Default bins and significance level of `torchcalib.functional.tce`."""

_RELATIVE: dict[type[CalibrationMetric[Any]], str] = {NLL: "nce", BrierScore: "nbs"}
"""Keys of relative scores, which are divided by the score of a model that always predicts the class frequencies."""


_NAMES: dict[type[CalibrationMetric[Any]], str] = {BrierScore: "Brier score"}
"""Display names that differ from the class names of the metrics."""


def _metadata(metric: type[CalibrationMetric[Any]], **changes: Any) -> dict[str, Any]:
    """Return the fields of a `Line` by name: those that a metric class defines, updated with `changes`."""
    names = ("unit", "perfect", "question", "source")
    return {"name": _NAMES.get(metric, metric.__name__), **{name: getattr(metric, name) for name in names}, **changes}


_COVERAGE, _RISK = 0.8, 0.05
"""Default arguments of `torchcalib.functional.accuracy_at_coverage` and `coverage_at_risk`."""

SELECTIVE: dict[str, tuple[type[SelectiveMetric], str]] = {
    "aurc": (AURC, "AURC"),
    "eaurc": (EAURC, "E-AURC"),
    "augrc": (AUGRC, "AUGRC"),
    "correctness_auroc": (CorrectnessAUROC, "AUROC of correctness"),
    "accuracy_at_coverage": (AccuracyAtCoverage, f"Accuracy at {_COVERAGE:.0%} coverage"),
    "coverage_at_risk": (CoverageAtRisk, f"Coverage at {_RISK:.0%} risk"),
}
"""Metrics of selective prediction with their display names, by `Line.key`."""

_SELECTIVE_QUESTIONS = {
    "accuracy_at_coverage": f"accuracy of the most confident {_COVERAGE:.0%} of the samples",
    "coverage_at_risk": f"largest fraction of samples that a threshold accepts at an error rate of {_RISK:.0%} or less",
}
"""Descriptions that contain the arguments of the metrics, by `Line.key`."""


_METRICS: tuple[type[CalibrationMetric[Any]], ...] = (*SCORES, *ERRORS, ACE, TCE, KS, ATB)
_METADATA: dict[str, dict[str, Any]] = {
    **{key_of(m): _metadata(m) for m in _METRICS},
    **{
        name: _metadata(
            m,
            name=name.upper(),
            unit="ratio to naive",
            question=f"{_NAMES.get(m, m.__name__)} divided by its value for the class frequencies",
        )
        for m, name in _RELATIVE.items()
    },
    "ece_debiased": _metadata(ECE, name="ECE debiased", question="ECE without the sampling noise of bins"),
    "rmsce_debiased": _metadata(RMSCE, name="RMSCE debiased", question="RMSCE without the sampling noise of bins"),
    **{
        name: _metadata(CORP, name=name.upper(), unit=BrierScore.unit, question=question)
        for name, question in (
            ("mcb", "decrease of the Brier score by the best monotone recalibration"),
            ("dsc", "decrease of the Brier score by discrimination, after recalibration"),
            ("unc", "Brier score of always predicting the outcome frequency"),
        )
    },
    **{
        key: _metadata(metric, name=name, question=_SELECTIVE_QUESTIONS.get(key, metric.question))
        for key, (metric, name) in SELECTIVE.items()
    },
}
"""Metadata of lines, by the key without the mode."""


def score_values(metric: type[ScoreMetric], s: ScoreSum, task: Task) -> dict[str, Tensor]:
    """Return a score `(...)` and, for NLL and Brier score, its ratio to predicting class frequencies, by key."""
    values = {key_of(metric): scored(metric.score, task, {}).value(s)}
    if metric in _RELATIVE:
        values[_RELATIVE[metric]] = scored(metric.score, task, {}, normalize="prior").value(s)
    return values


def error_values(b: BinStats, mode: NamedMode) -> dict[str, Tensor]:
    """Return all errors over equal-width bins `(...)`, by key. Class-wise errors are means over classes or labels."""
    values = {key_of(m): m.from_bins(b) for m in ERRORS}
    values["ece_debiased"] = ece_from_bins(b, debiased=True)
    values["rmsce_debiased"] = rmsce_from_bins(b, debiased=True)
    classwise = mode == "classwise"
    return {f"{name}/{mode}": value.mean(-1) if classwise else value for name, value in values.items()}


def order_values(sample: RankedSample, has_labels: bool, mode: NamedMode, n_bins: int) -> dict[str, Tensor]:
    """Return all rank-based errors `(...)`, by key. Class-wise errors are means over labels.

    Args:
        sample: ranked sample `(..., N)`; for mode "classwise" `(..., L, N)`.
        has_labels: whether all outcomes are 0 or 1. If not, test-based error and Brier score decomposition are omitted.
        mode: event whose probability is the confidence.
        n_bins: number of equal-mass bins of the adaptive calibration error (ACE).
    """
    values = {f"ace/{mode}": _mean(lambda s: ece_from_bins(Binning("equal_mass", n_bins).from_sample(s)), sample, mode)}
    if has_labels:
        tce = partial(tce_from_bins, alpha=_ALPHA, test="binomial", norm="l1")
        values[f"tce/{mode}"] = _mean(lambda s: tce(_TCE_BINNING.from_sample(s)), sample, mode)
    values[f"ks/{mode}"], values[f"atb/{mode}"] = _mean(_ks_and_atb, sample, mode).unbind(-1)
    return values | (corp_values(sample, mode) if has_labels else {})


def _ks_and_atb(sample: RankedSample) -> Tensor:
    """Compute KS and ATB `(..., 2)` with one sort."""
    s = sample.sorted()
    return torch.stack((ks_from_sorted(s), atb_from_sorted(s)), -1)


def corp_values(sample: RankedSample, mode: NamedMode) -> dict[str, Tensor]:
    """Return miscalibration, discrimination and uncertainty `(...)` in the Brier score of a ranked sample, by key."""
    parts = CORPDecomposition(*_mean(partial(corp_from_sample, score="brier"), sample, mode).unbind(-1))
    return {f"{name}/{mode}": getattr(parts, name) for name in ("mcb", "dsc", "unc")}


def selective_mode(task: Task, are_confidences: bool) -> NamedMode:
    """Return the mode of the ranked sample for selective prediction, where an event is a correct prediction.

    The samples of a multi-label task are converted by `of_predicted_class`. `are_confidences` is True if the
    predictions of a binary task are confidences, and its targets are 1 for correct predictions.
    """
    if are_confidences:
        return "positive"
    return "classwise" if task == "multilabel" else "top_label"


def selective_values(sample: RankedSample, mode: NamedMode) -> dict[str, Tensor]:
    """Return all metrics of selective prediction `(...)`, by key. Multi-label values are means over labels.

    Args:
        sample: ranked sample of `selective_mode`, with outcomes 0 and 1.
        mode: result of `selective_mode`.
    """
    return dict(zip(SELECTIVE, _mean(partial(_selective, mode=mode), sample, mode).unbind(-1), strict=True))


def _selective(sample: RankedSample, mode: NamedMode) -> Tensor:
    """Compute all metrics of selective prediction `(..., 6)` with one sort, in the order of `SELECTIVE`."""
    a = Accepted.from_sample(of_predicted_class(sample) if mode == "classwise" else sample)
    aurc = aurc_of(a)
    at_levels = accuracy_at_coverage_of(a, _COVERAGE), coverage_at_risk_of(a, _RISK)
    return torch.stack((aurc, excess_of(aurc, a), augrc_of(a), correctness_auroc_of(a), *at_levels), -1)


def _mean(value: Callable[[RankedSample], Tensor], sample: RankedSample, mode: NamedMode) -> Tensor:
    values = by_pieces(value, sample)
    return values.mean(sample.score.dim() - 2) if mode == "classwise" else values


def has_table(task: Task, mode: NamedMode) -> bool:
    """Return False for class-wise errors of a multi-class task: exclusive classes are not pooled in one bin table."""
    return mode != "classwise" or task == "multilabel"


def bin_table(task: Task, bins: BinStats) -> BinTable:
    """Return the table of equal-width bins, with all labels pooled."""
    pooled = replace(bins, sums=bins.sums.sum(0)) if task == "multilabel" else bins
    return BinTable.from_bins(pooled, equal_width_edges(pooled.n.shape[-1], pooled.n))


class LineEstimator(NamedTuple):
    """Functions to compute several lines of a report from one statistic, such as the sums over bins.

    Attributes:
        key: key of the statistic: the class name of a score, or the mode of bins.
        accumulator: `ScoreAccumulator`, `EqualWidthBins` or `ExactSample`, which computes the statistic.
        values: function that converts the statistic to the values of the lines `(...)`, by key.
        name: description of the lines in the notes of a report.
    """

    key: str
    accumulator: Any
    values: Callable[[Any], Mapping[str, Tensor]]
    name: str


def score_estimators(task: Task) -> list[LineEstimator]:
    """Return one estimator for each score. Its statistic is the sum of the score for each class."""
    return [
        LineEstimator(m.__name__, m.score.accumulator(by_class=True), partial(score_values, m, task=task), m.__name__)
        for m in SCORES
    ]


def bin_estimators(task: Task, n_bins: int, right: bool, *, with_noise: bool = False) -> list[LineEstimator]:
    """Return one estimator of errors over equal-width bins for each mode.

    `with_noise` adds sums for noise floors and, if `has_table`, for the entropic calibration difference of bins.
    """
    return [
        LineEstimator(
            mode,
            EqualWidthBins(mode, n_bins, right, with_noise and has_table(task, mode), with_noise),
            partial(error_values, mode=mode),
            f"errors over equal-width bins, {GROUPS[mode]}",
        )
        for mode in modes_of(task)
    ]


@dataclass(frozen=True)
class Statistics:
    """Accumulated statistics of one set of predictions, from which all lines and tables are computed.

    Attributes:
        task: task of the predictions.
        n_bins: number of equal-mass bins of the adaptive calibration error (ACE).
        sums: statistics of `score_estimators` and `bin_estimators`, by key.
        samples: ranked sample for each mode with rank-based errors, `(N,)`; for mode "classwise" `(L, N)`.
        has_labels: whether all outcomes are 0 or 1. If not, test-based error, Brier score decomposition and metrics of
            selective prediction are omitted.
        are_confidences: whether binary predictions are confidences, and targets are 1 for correct predictions.
        right: whether equal-width bins are `(a, b]` instead of `[a, b)`.
        clusters: sums over bins and ranked samples by cluster, by the names of their accumulators in a report; None if
            rows are independent.
        clusters_determine_label: whether all rows of each cluster have the same label; see `determine_label`. False if
            it is unknown, because predictions are not stored.
    """

    task: Task
    n_bins: int
    sums: Mapping[str, Any]
    samples: Mapping[NamedMode, RankedSample]
    has_labels: bool
    are_confidences: bool = False
    right: bool = False
    clusters: Mapping[str, Clusters] | None = None
    clusters_determine_label: bool = False

    @property
    def bins(self) -> dict[NamedMode, BinStats]:
        """Sums over equal-width bins, by mode."""
        return {mode: self.sums[mode] for mode in modes_of(self.task)}

    @property
    def _by_class(self) -> ScoreSum:
        """Sums of the negative log-likelihood for each class. Only the total weights of the classes are used."""
        sums: ScoreSum = self.sums[NLL.__name__]
        return sums

    @property
    def n(self) -> float:
        """Sum of all weights."""
        return float(self._by_class.total.sum())

    @property
    def priors(self) -> tuple[float, ...]:
        """Frequency of each class; multi-label: frequency of each label."""
        share = self._by_class.share
        return tuple((share[..., 1] if self.task == "multilabel" else share).tolist())

    @property
    def only_class(self) -> int | None:
        """Class of all targets, for a multi-label task 0 or 1; None if there are several."""
        if self.task != "multilabel":
            return self.priors.index(1) if max(self.priors) == 1 else None
        frequencies = set(self.priors)
        return int(frequencies.pop()) if frequencies in ({0.0}, {1.0}) else None

    @property
    def only_class_in_words(self) -> str:
        """Class of all targets, such as `"class 2"`; an empty string if there are several."""
        if self.only_class is None:
            return ""
        return f"{self.only_class}" if self.task == "multilabel" else f"class {self.only_class}"

    @property
    def num_classes(self) -> int:
        """Number of classes or labels."""
        return 2 if self.task == "binary" else len(self.priors)

    def tables(self) -> dict[NamedMode, BinTable]:
        """Return the table of equal-width bins for each mode, with all labels pooled."""
        return {mode: bin_table(self.task, bins) for mode, bins in self.bins.items() if has_table(self.task, mode)}

    def tests(self) -> dict[NamedMode, TCETable]:
        """Return the bins of the test-based error (TCE) for each mode, all labels pooled; empty for soft targets."""
        samples = self.samples if self.has_labels else {}
        return {
            mode: _TCE_BINNING.from_sample(sample.pooled()).test_table(alpha=_ALPHA, test="binomial")
            for mode, sample in samples.items()
        }

    @property
    def selective_mode(self) -> NamedMode | None:
        """Mode of the sample for metrics of selective prediction; None if they are omitted."""
        mode = selective_mode(self.task, self.are_confidences)
        return mode if self.has_labels and mode in self.samples else None

    def _naive_selective_values(self) -> dict[str, Tensor]:
        """Return the metrics of selective prediction for always predicting the class frequencies, by key.

        All confidences are then equal. Predictions are correct for the most frequent class, of each label for
        multi-label.
        """
        n = self._by_class.n
        total = n.sum(-1, keepdim=True)
        correct = n[..., 1:] if self.are_confidences else n.amax(-1, keepdim=True)
        # As a probability of the positive class above 1/2, the score is not changed by `of_predicted_class`.
        constant = RankedSample(torch.full_like(total, 0.75), correct, total, False)
        return selective_values(constant, selective_mode(self.task, self.are_confidences))

    def lines(self) -> list[Line]:
        """Return all lines, without noise floors, p-values and intervals."""
        values: dict[str, Tensor] = {}
        naive = dict.fromkeys(_RELATIVE.values(), 1.0)
        perfect: dict[str, float] = {}
        for metric in SCORES:
            s = self.sums[metric.__name__]
            values |= score_values(metric, s, self.task)
            naive[key_of(metric)] = float(scored(metric.score, self.task, {}).of_prior(s))
        for mode, bins in self.bins.items():
            values |= error_values(bins, mode)
            if mode in self.samples:
                values |= order_values(self.samples[mode], self.has_labels, mode, self.n_bins)
        if self.selective_mode is not None:
            values |= selective_values(self.samples[self.selective_mode], self.selective_mode)
            naive |= _numbers(self._naive_selective_values())
        numbers = _numbers(values)
        for mode in self.samples if self.has_labels else ():
            # A perfect predictor has discrimination (DSC) = uncertainty (UNC). For the top label both are 0.
            # The naive top label is the most frequent class. If its frequency is f, the uncertainty is f (1 - f).
            unc, is_top, largest = numbers[f"unc/{mode}"], mode == "top_label", max(self.priors)
            perfect |= dict.fromkeys((f"dsc/{mode}", f"unc/{mode}"), 0.0 if is_top else unc)
            naive[f"unc/{mode}"] = largest * (1 - largest) if is_top else unc
        lines = []
        for key, value in numbers.items():
            name, _, line_mode = key.partition("/")
            group = SELECTIVE_GROUP if key in SELECTIVE else "scores"
            line = Line(
                key=key,
                group=GROUPS[line_mode] if line_mode else group,  # type: ignore[index]  # str, but always a mode
                value=value,
                naive=naive.get(key, 0.0),
                **_METADATA[name],
            )
            lines.append(replace(line, perfect=perfect.get(key, line.perfect)))
        return lines


def _numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers. They are read at once, because each read waits for the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def sample_name(mode: NamedMode) -> str:
    """Return the name of the accumulator of ranked samples for a mode."""
    return f"sample of {mode}"


def cluster_sums_name(mode: str) -> str:
    """Return the name of the accumulator of sums over bins by cluster for a mode."""
    return f"clusters of {mode}"
