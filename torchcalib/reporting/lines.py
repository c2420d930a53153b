"""The numbers of a report, each made of a metric's identity card."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.bins import TCETable, ece_from_bins, rmsce_from_bins
from torchcalib.core.events import NamedReduction
from torchcalib.core.ranked import RankedSample, by_pieces
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats, ScoreSum
from torchcalib.metrics.binned.ace import ACE
from torchcalib.metrics.binned.ece import ECE
from torchcalib.metrics.binned.esce import ESCE
from torchcalib.metrics.binned.mce import MCE
from torchcalib.metrics.binned.reading import BinnedMetric
from torchcalib.metrics.binned.rmsce import RMSCE
from torchcalib.metrics.ranked.corp import CORP, CORPDecomposition, corp_from_sample
from torchcalib.metrics.ranked.ks import KS, ks_from_sample
from torchcalib.metrics.ranked.reading import RankedMetric
from torchcalib.metrics.ranked.tce import TCE, tce_from_bins
from torchcalib.metrics.scores.accuracy import Accuracy
from torchcalib.metrics.scores.brier import Brier
from torchcalib.metrics.scores.ecd import ECD
from torchcalib.metrics.scores.engine import ScoreMetric, ScoreReading
from torchcalib.metrics.scores.nll import NLL
from torchcalib.reporting.data import Line

SCORES: tuple[type[ScoreMetric], ...] = (Accuracy, NLL, Brier, ECD)
ERRORS: tuple[type[BinnedMetric], ...] = (ECE, ESCE, MCE, RMSCE)
"""What is read from sums, in its order."""

GROUPS: dict[NamedReduction, str] = {
    "positive_class": "positive class",
    "top_label": "top label",
    "classwise": "class-wise",
}

_SHARES = {"NLL": "NCE", "Brier": "NBS"}
"""Scores as a share of what always predicting the class shares gets."""

_TESTED, _ALPHA = Binning("pava_bc"), 0.05
"""TCE as it is by default."""

_PARTS = {
    "mcb": "how much of the Brier score would the best rising recalibration take away",
    "dsc": "how much has telling samples apart taken away, once recalibrated",
    "unc": "what Brier score does always predicting the share of outcomes get",
}
"""Parts of the Brier score of an event, MCB - DSC + UNC, and what each answers."""


def score_values(metric: type[ScoreMetric], s: ScoreSum, task: Task) -> dict[str, Tensor]:
    """A score, and its share of what the class shares alone would get where this means something; `(...)` each."""
    values = {metric.__name__.lower(): ScoreReading(metric.score, task).read(s)}
    if metric.score.normalizable:
        values[_SHARES[metric.__name__].lower()] = ScoreReading(metric.score, task, normalize="prior").read(s)
    return values


def score_lines(metric: type[ScoreMetric], s: ScoreSum, task: Task) -> list[Line]:
    """Lines of `score_values`, with what the class shares alone would get."""
    (key, value), *share = score_values(metric, s, task).items()
    lines = [_line(metric, "scores", key, value, float(ScoreReading(metric.score, task).of_prior(s)))]
    for key, value in share:
        question = f"{metric.__name__} as a share of what always predicting the class shares gets"
        line = _line(metric, "scores", key, value, 1.0)
        lines.append(replace(line, name=_SHARES[metric.__name__], unit="share of naive", question=question))
    return lines


def error_values(b: BinStats, reduction: NamedReduction) -> dict[str, Tensor]:
    """Every error over equal-width bins `(...)`; class-wise the mean over classes."""
    values = {m.__name__.lower(): m.from_bins(b) for m in ERRORS}
    values["rmsce_debiased"] = rmsce_from_bins(b, debiased=True)
    classwise = reduction == "classwise"
    return {f"{name}/{reduction}": value.mean(-1) if classwise else value for name, value in values.items()}


def error_lines(b: BinStats, reduction: NamedReduction) -> list[Line]:
    """Lines of `error_values`. Predicting the class shares gets 0."""
    *usual, debiased = error_values(b, reduction).items()
    lines = [_line(m, GROUPS[reduction], *item) for m, item in zip(ERRORS, usual, strict=True)]
    last = _line(RMSCE, GROUPS[reduction], *debiased)
    return [*lines, replace(last, name="RMSCE debiased", question="the same, less what the noise of the bins adds")]


def order_values(sample: RankedSample, has_labels: bool, reduction: NamedReduction, n_bins: int) -> dict[str, Tensor]:
    """Every number of a sample in order, the mean over labels if it has any.

    Args:
        sample: `(..., N)`, or `(..., L, N)` for labels.
        has_labels: whether outcomes are labels. If not, what counts labels is left out.
        reduction: what the scores are of.
        n_bins: of the ACE.
    """
    values = {
        f"ace/{reduction}": _read(lambda s: ece_from_bins(Binning("equal_mass", n_bins).of(s)), sample, reduction),
        f"ks/{reduction}": _read(ks_from_sample, sample, reduction),
    }
    return values | (label_values(sample, reduction) if has_labels else {})


def label_values(sample: RankedSample, reduction: NamedReduction) -> dict[str, Tensor]:
    """What counts labels: TCE, MCB, DSC and UNC; arguments as of `order_values`."""
    tce = _read(lambda s: tce_from_bins(_TESTED.of(s), alpha=_ALPHA, test="binomial", norm="l1"), sample, reduction)
    parts = CORPDecomposition(*_read(partial(corp_from_sample, score="brier"), sample, reduction).unbind(-1))
    return {f"tce/{reduction}": tce} | {f"{name}/{reduction}": getattr(parts, name) for name in _PARTS}


def _read(read: Callable[[RankedSample], Tensor], sample: RankedSample, reduction: NamedReduction) -> Tensor:
    value = by_pieces(read, sample)
    return value.mean(sample.score.dim() - 2) if reduction == "classwise" else value


def order_lines(
    sample: RankedSample, has_labels: bool, reduction: NamedReduction, n_bins: int, likeliest: float
) -> tuple[list[Line], TCETable | None]:
    """Lines of `order_values`, and the table of the tested bins, all labels pooled; none if there are no labels.

    Arguments are those of `order_values`; `likeliest` is the share of the most frequent class.
    """
    group, values = GROUPS[reduction], order_values(sample, has_labels, reduction, n_bins)
    metrics: tuple[type[BinnedMetric | RankedMetric], ...] = (ACE, TCE, KS) if has_labels else (ACE, KS)
    keys = [f"{m.__name__.lower()}/{reduction}" for m in metrics]
    lines = [_line(m, group, key, values[key]) for m, key in zip(metrics, keys, strict=True)]
    if not has_labels:
        return lines, None
    return [*lines, *_corp_lines(values, reduction, likeliest)], _tested(sample.pooled())


def _tested(sample: RankedSample) -> TCETable:
    """What the TCE, as it is by default, says of every bin."""
    return _TESTED.of(sample).test_table(alpha=_ALPHA, test="binomial")


def _corp_lines(values: Mapping[str, Tensor], reduction: NamedReduction, likeliest: float) -> list[Line]:
    """MCB, DSC and UNC of the Brier score of the event.

    One who is right and sure every time has DSC = UNC. A top label that is always right is no uncertain event: both
    are 0 then. Who always predicts the class shares is right at the top as often as the most frequent class comes up.
    """
    unc = float(values[f"unc/{reduction}"])
    always_right = 0.0 if reduction == "top_label" else unc
    never_told_apart = likeliest * (1 - likeliest) if reduction == "top_label" else unc
    perfect = {"mcb": 0.0, "dsc": always_right, "unc": always_right}
    naive = {"mcb": 0.0, "dsc": 0.0, "unc": never_told_apart}
    lines = []
    for name, question in _PARTS.items():
        line = _line(CORP, GROUPS[reduction], key := f"{name}/{reduction}", values[key], naive[name])
        lines.append(replace(line, name=name.upper(), unit=Brier.unit, perfect=perfect[name], question=question))
    return lines


def _line(
    metric: type[ScoreMetric | BinnedMetric | RankedMetric], group: str, key: str, value: Tensor, naive: float = 0.0
) -> Line:
    """One line, from a metric's identity card."""
    return Line(
        key=key,
        name=metric.__name__,
        group=group,
        unit=metric.unit,
        perfect=metric.perfect,
        question=metric.question,
        source=metric.source,
        value=float(value),
        naive=naive,
    )
