"""From sums and samples to the lines of a report, whose names, units and sources are metric metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable, equal_width_edges
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.ranked import RankedSample, by_pieces
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats, ScoreSum
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ACE, ECE, ESCE, MCE, RMSCE, BinnedMetric, ece_from_bins, rmsce_from_bins
from torchcalib.metrics.proper_scores import ECD, NLL, Accuracy, BrierScore
from torchcalib.metrics.ranked import CORP, KS, CORPDecomposition, corp_from_sample, ks_from_sample
from torchcalib.metrics.scores import ScoreMetric, scored
from torchcalib.metrics.test_based import TCE, tce_from_bins
from torchcalib.reporting.data import Line

SCORES: tuple[type[ScoreMetric], ...] = (Accuracy, NLL, BrierScore, ECD)
ERRORS: tuple[type[BinnedMetric], ...] = (ECE, ESCE, MCE, RMSCE)

GROUPS: dict[NamedMode, str] = {
    "positive": "positive class",
    "top_label": "top label",
    "classwise": "class-wise",
}


def key_of(metric: type) -> str:
    """Return the first part of the keys of a metric's lines: "brier" for `BrierScore`."""
    return metric.__name__.lower().removesuffix("score")


_TESTED, _ALPHA = Binning("pava_bc"), 0.05
"""Default bins and level of the TCE."""

_RELATIVE: dict[type[CalibrationMetric[Any]], str] = {NLL: "nce", BrierScore: "nbs"}
"""Scores that are divided by the score of the class frequencies."""


_NAMES: dict[type[CalibrationMetric[Any]], str] = {BrierScore: "Brier score"}
"""Names of lines that are not those of their metrics."""


def _metadata(metric: type[CalibrationMetric[Any]], **changes: Any) -> dict[str, Any]:
    """Return what a line has of its metric."""
    names = ("unit", "perfect", "question", "source")
    return {"name": _NAMES.get(metric, metric.__name__), **{name: getattr(metric, name) for name in names}, **changes}


_METRICS: tuple[type[CalibrationMetric[Any]], ...] = (*SCORES, *ERRORS, ACE, TCE, KS)
_METADATA: dict[str, dict[str, Any]] = {
    **{key_of(m): _metadata(m) for m in _METRICS},
    **{
        name: _metadata(
            m,
            name=name.upper(),
            unit="share of naive",
            question=f"{_NAMES.get(m, m.__name__)} divided by that of always predicting the class frequencies",
        )
        for m, name in _RELATIVE.items()
    },
    "rmsce_debiased": _metadata(RMSCE, name="RMSCE debiased", question="RMSCE without the bias of noisy bins"),
    **{
        name: _metadata(CORP, name=name.upper(), unit=BrierScore.unit, question=question)
        for name, question in (
            ("mcb", "how much would the best monotone recalibration decrease the Brier score"),
            ("dsc", "how much does discrimination decrease the Brier score, after recalibration"),
            ("unc", "what is the Brier score of the constant prediction of the outcome frequency"),
        )
    },
}
"""Metadata of lines, by the first part of their keys. MCB - DSC + UNC is the Brier score of an event."""


def score_values(metric: type[ScoreMetric], s: ScoreSum, task: Task) -> dict[str, Tensor]:
    """Return a score `(...)`, and its ratio to the score of the class frequencies where that is defined."""
    values = {key_of(metric): scored(metric.score, task=task).value(s)}
    if metric in _RELATIVE:
        values[_RELATIVE[metric]] = scored(metric.score, task=task, normalize="prior").value(s)
    return values


def error_values(b: BinStats, mode: NamedMode) -> dict[str, Tensor]:
    """Return every error over equal-width bins `(...)`; class-wise the mean over classes."""
    values = {key_of(m): m.from_bins(b) for m in ERRORS}
    values["rmsce_debiased"] = rmsce_from_bins(b, debiased=True)
    classwise = mode == "classwise"
    return {f"{name}/{mode}": value.mean(-1) if classwise else value for name, value in values.items()}


def order_values(sample: RankedSample, has_labels: bool, mode: NamedMode, n_bins: int) -> dict[str, Tensor]:
    """Return every rank-based value, the mean over labels if there are any.

    Args:
        sample: `(..., N)`, or `(..., L, N)` for labels.
        has_labels: whether outcomes are labels. If not, TCE, MCB, DSC and UNC are left out.
        mode: the kind of confidence.
        n_bins: of the ACE.
    """
    values = {f"ace/{mode}": _mean(lambda s: ece_from_bins(Binning("equal_mass", n_bins).of(s)), sample, mode)}
    if has_labels:
        tce = partial(tce_from_bins, alpha=_ALPHA, test="binomial", norm="l1")
        values[f"tce/{mode}"] = _mean(lambda s: tce(_TESTED.of(s)), sample, mode)
    values[f"ks/{mode}"] = _mean(ks_from_sample, sample, mode)
    return values | (corp_values(sample, mode) if has_labels else {})


def corp_values(sample: RankedSample, mode: NamedMode) -> dict[str, Tensor]:
    """Return MCB, DSC and UNC of the Brier score of the event; arguments as of `order_values`."""
    parts = CORPDecomposition(*_mean(partial(corp_from_sample, score="brier"), sample, mode).unbind(-1))
    return {f"{name}/{mode}": getattr(parts, name) for name in ("mcb", "dsc", "unc")}


def _mean(value: Callable[[RankedSample], Tensor], sample: RankedSample, mode: NamedMode) -> Tensor:
    values = by_pieces(value, sample)
    return values.mean(sample.score.dim() - 2) if mode == "classwise" else values


def has_table(task: Task, mode: NamedMode) -> bool:
    """Return whether a mode has one bin table and one sample, rather than one for each of C classes."""
    return mode != "classwise" or task == "multilabel"


class LineEstimator(NamedTuple):
    """Lines that are functions of one statistic.

    Attributes:
        key: of the statistic: a score, or the mode of bins.
        accumulator: of the statistic: `ScoreAccumulator`, `EqualWidthBins` or `ExactSample`.
        values: function from statistics `(...)` to the values of lines `(...)`, by their keys.
        name: of the lines, for people.
    """

    key: str
    accumulator: Any
    values: Callable[[Any], Mapping[str, Tensor]]
    name: str


def score_estimators(task: Task) -> list[LineEstimator]:
    """Return the estimators of the scores, by class."""
    return [
        LineEstimator(m.__name__, m.score.accumulator(by_class=True), partial(score_values, m, task=task), m.__name__)
        for m in SCORES
    ]


def bin_estimators(task: Task, n_bins: int, right: bool, *, with_noise: bool = False) -> list[LineEstimator]:
    """Return the estimators of the errors over equal-width bins, with what noise floors and tables need if asked."""
    return [
        LineEstimator(
            mode,
            EqualWidthBins(mode, n_bins, right, with_noise and has_table(task, mode), with_noise),
            partial(error_values, mode=mode),
            f"the errors over equal-width bins, {GROUPS[mode]}",
        )
        for mode in modes_of(task)
    ]


@dataclass(frozen=True)
class Statistics:
    """Sums and samples of a set of predictions, which determine every line and table.

    Attributes:
        task: of the predictions.
        n_bins: of the ACE.
        sums: of `score_estimators` and `bin_estimators`, by their keys.
        samples: for each mode with rank-based values, `(N,)`, or `(L, N)` for labels.
        has_labels: whether all outcomes are labels. If not, TCE, MCB, DSC and UNC are left out.
    """

    task: Task
    n_bins: int
    sums: Mapping[str, Any]
    samples: Mapping[NamedMode, RankedSample]
    has_labels: bool

    @property
    def bins(self) -> dict[NamedMode, BinStats]:
        """Bins of equal width, for each mode."""
        return {mode: self.sums[mode] for mode in modes_of(self.task)}

    @property
    def _by_class(self) -> ScoreSum:
        """Sums by class of a score."""
        found: ScoreSum = self.sums[NLL.__name__]
        return found

    @property
    def n(self) -> float:
        """Sum of all weights."""
        return float(self._by_class.total.sum())

    @property
    def priors(self) -> tuple[float, ...]:
        """Share of every class, or of 1s for every label."""
        share = self._by_class.share
        return tuple((share[..., 1] if self.task == "multilabel" else share).tolist())

    @property
    def num_classes(self) -> int:
        """Number of classes or labels."""
        return 2 if self.task == "binary" else len(self.priors)

    @property
    def per_class(self) -> tuple[float, ...]:
        """Class-wise ECE of every class or label."""
        return tuple(ece_from_bins(self.bins["classwise"]).tolist()) if "classwise" in self.bins else ()

    def tables(self) -> dict[NamedMode, BinTable]:
        """Return the bin tables, all labels pooled."""
        tables = {}
        for mode, bins in self.bins.items():
            if has_table(self.task, mode):
                pooled = replace(bins, sums=bins.sums.sum(0)) if self.task == "multilabel" else bins
                tables[mode] = BinTable.of(pooled, equal_width_edges(pooled.n.shape[-1], pooled.n))
        return tables

    def tests(self) -> dict[NamedMode, TCETable]:
        """Return the bins of the TCE with the decisions of its test, all labels pooled; none without labels."""
        samples = self.samples if self.has_labels else {}
        return {r: _TESTED.of(s.pooled()).test_table(alpha=_ALPHA, test="binomial") for r, s in samples.items()}

    def lines(self) -> list[Line]:
        """Return every line, without evidence."""
        values: dict[str, Tensor] = {}
        naive = dict.fromkeys(_RELATIVE.values(), 1.0)
        perfect: dict[str, float] = {}
        for metric in SCORES:
            s = self.sums[metric.__name__]
            values |= score_values(metric, s, self.task)
            naive[key_of(metric)] = float(scored(metric.score, task=self.task).of_prior(s))
        for mode, bins in self.bins.items():
            values |= error_values(bins, mode)
            if mode in self.samples:
                values |= order_values(self.samples[mode], self.has_labels, mode, self.n_bins)
        for mode in self.samples if self.has_labels else ():
            # A perfect predictor has DSC = UNC. A top label that is always right has no uncertainty: both are 0 then.
            # The top label of the class frequencies is right as often as the most frequent class occurs.
            unc, is_top, likeliest = float(values[f"unc/{mode}"]), mode == "top_label", max(self.priors)
            perfect |= dict.fromkeys((f"dsc/{mode}", f"unc/{mode}"), 0.0 if is_top else unc)
            naive[f"unc/{mode}"] = likeliest * (1 - likeliest) if is_top else unc
        lines = []
        for key, value in values.items():
            name, _, of = key.partition("/")
            line = Line(
                key=key,
                group=GROUPS[of] if of else "scores",  # type: ignore[index]  # a mode
                value=float(value),
                naive=naive.get(key, 0.0),
                **_METADATA[name],
            )
            lines.append(replace(line, perfect=perfect.get(key, line.perfect)))
        return lines
