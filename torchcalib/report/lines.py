"""The numbers of a report, each made of a metric's identity card."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from torchcalib.binned import ACE, ECE, ESCE, MCE, RMSCE, BinnedMetric
from torchcalib.binnings import Binning
from torchcalib.bins import TCETable, ece_from_bins, rmsce_from_bins
from torchcalib.predictions import Task
from torchcalib.ranked import CORP, KS, TCE, CORPDecomposition, RankedMetric, corp_from_sample, ks_from_sample
from torchcalib.reductions import Reduction
from torchcalib.report.data import Line
from torchcalib.samples import RankedSample, by_pieces
from torchcalib.scores import ECD, NLL, Accuracy, Brier, ScoreMetric, ScoreReading
from torchcalib.statistics import BinStats, ScoreSum

SCORES: tuple[type[ScoreMetric], ...] = (Accuracy, NLL, Brier, ECD)
ERRORS: tuple[type[BinnedMetric], ...] = (ECE, ESCE, MCE, RMSCE)
"""What is read from sums, in its order."""

GROUPS: dict[Reduction, str] = {
    "positive_class": "positive class",
    "top_label": "top label",
    "classwise": "class-wise",
}

_PARTS = {
    "mcb": "how much of the Brier score would the best rising recalibration take away",
    "dsc": "how much has telling samples apart taken away, once recalibrated",
    "unc": "what Brier score does always predicting the share of outcomes get",
}
"""Parts of the Brier score of an event, MCB - DSC + UNC, and what each answers."""


def score_lines(metric: type[ScoreMetric], s: ScoreSum, task: Task) -> list[Line]:
    """A score, with what the class shares alone would get, and as a share of that where this means something."""
    reading = ScoreReading(metric.score, task)
    lines = [_line(metric, "scores", metric.__name__.lower(), reading.read(s), float(reading.of_prior(s)))]
    if metric.score.normalizable:
        name = {"NLL": "NCE", "Brier": "NBS"}[metric.__name__]
        value = ScoreReading(metric.score, task, normalize="prior").read(s)
        question = f"{metric.__name__} as a share of what always predicting the class shares gets"
        line = _line(metric, "scores", name.lower(), value, 1.0)
        lines.append(replace(line, name=name, unit="share of naive", question=question))
    return lines


def error_lines(b: BinStats, reduction: Reduction) -> list[Line]:
    """Every error over equal-width bins; class-wise the mean over classes. Predicting the class shares gets 0."""
    group = GROUPS[reduction]
    lines = [_line(m, group, f"{m.__name__.lower()}/{reduction}", m.from_bins(b).mean()) for m in ERRORS]
    debiased = _line(RMSCE, group, f"rmsce_debiased/{reduction}", rmsce_from_bins(b, debiased=True).mean())
    return [*lines, replace(debiased, name="RMSCE debiased", question="the same, less what the noise of the bins adds")]


def order_lines(
    sample: RankedSample, has_labels: bool, reduction: Reduction, n_bins: int, likeliest: float
) -> tuple[list[Line], TCETable | None]:
    """Every number of a sample in order, the mean over labels if it has any, and the table of the tested bins.

    Args:
        sample: `(N,)`, or `(L, N)` for labels.
        has_labels: whether outcomes are labels. If not, what counts labels is left out, and there is no table.
        reduction: what the scores are of.
        n_bins: of the ACE.
        likeliest: share of the most frequent class.
    """
    group = GROUPS[reduction]
    equal_mass = Binning("equal_mass", n_bins)
    of_mass = by_pieces(lambda part: ece_from_bins(equal_mass.of(part)), sample).mean()
    ace = _line(ACE, group, f"ace/{reduction}", of_mass)
    ks = _line(KS, group, f"ks/{reduction}", by_pieces(ks_from_sample, sample).mean())
    if not has_labels:
        return [ace, ks], None
    table = _tested(sample.pooled())
    rejected = table.tce if sample.score.dim() == 1 else by_pieces(lambda part: _tested(part).tce, sample).mean()
    tce = _line(TCE, group, f"tce/{reduction}", rejected)
    return [ace, tce, ks, *_corp_lines(sample, reduction, likeliest)], table


def _tested(sample: RankedSample) -> TCETable:
    """What the TCE, as it is by default, says of every bin."""
    return Binning("pava_bc").of(sample).test_table(alpha=0.05, test="binomial")


def _corp_lines(sample: RankedSample, reduction: Reduction, likeliest: float) -> list[Line]:
    """MCB, DSC and UNC of the Brier score of the event.

    One who is right and sure every time has DSC = UNC. A top label that is always right is no uncertain event: both
    are 0 then. Who always predicts the class shares is right at the top as often as the most frequent class comes up.
    """
    values = by_pieces(partial(corp_from_sample, score="brier"), sample).reshape(-1, 4).mean(0)
    parts = CORPDecomposition(*values)
    unc = float(parts.unc)
    always_right = 0.0 if reduction == "top_label" else unc
    never_told_apart = likeliest * (1 - likeliest) if reduction == "top_label" else unc
    perfect = {"mcb": 0.0, "dsc": always_right, "unc": always_right}
    naive = {"mcb": 0.0, "dsc": 0.0, "unc": never_told_apart}
    lines = []
    for name, question in _PARTS.items():
        line = _line(CORP, GROUPS[reduction], f"{name}/{reduction}", getattr(parts, name), naive[name])
        lines.append(replace(line, name=name.upper(), unit=Brier.unit, perfect=perfect[name], question=question))
    return lines


def _line(
    metric: type[ScoreMetric | BinnedMetric | RankedMetric], group: str, key: str, value: Tensor, naive: float = 0.0
) -> Line:
    """One line, from a metric's identity card."""
    return Line(
        key, metric.__name__, group, float(value), metric.unit, metric.perfect, naive, metric.question, metric.source
    )
