"""The metrics of a report, in its order. Values, tests, intervals, comparisons and notes are loops over them.

A new metric gets its line in reports by one entry of `CATALOGUE`, and its description by the metadata of its class.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import Mode, NamedMode, modes_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample, RankedSample, by_pieces
from torchcalib.core.sums import ScoreAccumulator
from torchcalib.display.words import listed
from torchcalib.inference.testing import ErrorTest
from torchcalib.metrics.base import Better, CalibrationMetric
from torchcalib.metrics.binned import ACE, ECE, ESCE, MCE, RMSCE, BinnedMetric
from torchcalib.metrics.proper_scores import ECD, NLL, Accuracy, BrierScore
from torchcalib.metrics.ranked import CORP, KS, RankedMetric
from torchcalib.metrics.scores import ScoreMetric
from torchcalib.metrics.selective import (
    AUGRC,
    AURC,
    EAURC,
    AccuracyAtCoverage,
    CorrectnessAUROC,
    CoverageAtRisk,
    SelectiveMetric,
)
from torchcalib.metrics.test_based import TCE
from torchcalib.metrics.truthful import ATB
from torchcalib.ops.logs import wide_dtype
from torchcalib.results.lines import SELECTIVE_GROUP, Line

GROUPS: dict[NamedMode, str] = {"positive": "positive class", "top_label": "top label", "classwise": "class-wise"}
"""Groups of lines in a report, by the mode of their errors."""


class Entry(NamedTuple):
    """A metric of a report, with its options."""

    metric: type[CalibrationMetric[Any]]
    options: Mapping[str, Any] = {}
    described: Mapping[str, Any] = {}  # key, name and other metadata, if they differ from those of the class


def _relative(metric: type[ScoreMetric], key: str) -> Entry:
    question = f"{metric.name} divided by its value for the class frequencies"
    described = {"key": key, "name": key.upper(), "unit": "ratio to naive", "question": question}
    return Entry(metric, {"normalize": "prior"}, described)


def _debiased(metric: type[BinnedMetric]) -> Entry:
    question = f"{metric.name} without the sampling noise of bins"
    described = {"key": f"{metric.key}_debiased", "name": f"{metric.name} debiased", "question": question}
    return Entry(metric, {"debiased": True}, described)


def _component(name: str, question: str, better: Better) -> Entry:
    described = {"key": name, "name": name.upper(), "unit": BrierScore.unit, "question": question, "better": better}
    return Entry(CORP, {"component": name}, described)


_MAX_SUMS = 2**27  # maximum number of float64 sums of a report (1 GiB)
_COVERAGE, _RISK = 0.8, 0.05

CATALOGUE: tuple[Entry, ...] = (
    Entry(Accuracy),
    Entry(NLL),
    _relative(NLL, "nce"),
    Entry(BrierScore),
    _relative(BrierScore, "nbs"),
    Entry(ECD),
    Entry(ECE),
    Entry(ESCE),
    Entry(MCE),
    Entry(RMSCE),
    _debiased(ECE),
    _debiased(RMSCE),
    Entry(ACE),
    Entry(TCE),
    Entry(KS),
    Entry(ATB),
    _component("mcb", "decrease of the Brier score by the best monotone recalibration", "lower"),
    _component("dsc", "decrease of the Brier score by discrimination, after recalibration", "higher"),
    _component("unc", "Brier score of always predicting the outcome frequency", "lower"),
    Entry(AURC),
    Entry(EAURC),
    Entry(AUGRC),
    Entry(CorrectnessAUROC),
    Entry(
        AccuracyAtCoverage,
        {"coverage": _COVERAGE},
        {
            "name": f"Accuracy at {_COVERAGE:.0%} coverage",
            "question": f"accuracy of the most confident {_COVERAGE:.0%} of the samples",
        },
    ),
    Entry(
        CoverageAtRisk,
        {"risk": _RISK},
        {
            "name": f"Coverage at {_RISK:.0%} risk",
            "question": f"largest fraction of samples that a threshold accepts at an error rate of {_RISK:.0%} or less",
        },
    ),
)


@dataclass(frozen=True, eq=False)
class Member:
    """A metric of a report for a task and a mode. Its line has the key of the metric, followed by the mode."""

    key: str
    metric: CalibrationMetric[Any]  # only its definition is used, not its state
    mode: NamedMode | None  # None for scores, and for metrics of selective prediction
    statistic: str  # name of the statistic from which the value is computed
    described: Mapping[str, Any]  # metadata of the line
    better: Better  # direction of better values

    @property
    def group(self) -> str:
        """Group of the line in a report."""
        if self.mode is not None:
            return GROUPS[self.mode]
        return SELECTIVE_GROUP if isinstance(self.metric, SelectiveMetric) else "scores"

    @property
    def is_error(self) -> bool:
        """Whether the metric is a calibration error, which has a noise floor and a p-value."""
        if isinstance(self.metric, CORP):
            return self.metric.component == "mcb"
        return isinstance(self.metric, BinnedMetric | RankedMetric)

    @cached_property
    def error_test(self) -> ErrorTest:
        """Definition of the calibration test of an error."""
        metric: Any = self.metric
        test: ErrorTest = metric.error_test()
        return test

    @property
    def has_fixed_bins(self) -> bool:
        """Whether the metric is an error over bins that do not depend on the outcomes, which are tested as such."""
        metric = self.metric
        return isinstance(metric, BinnedMetric) and not (
            metric.estimator.binning.is_isotonic or metric.depends_on_samples
        )

    def of_piece(self, sample: RankedSample) -> Tensor:
        """Return the value `(...)` for a ranked sample that fits into memory, without an average over classes."""
        metric = self.metric
        if isinstance(metric, BinnedMetric):
            return metric.estimator.formula(metric.estimator.binning.from_sample(sample))
        return metric.from_sample(sample) if isinstance(metric, RankedMetric) else metric.estimator.formula(sample)

    def line(self, value: float, naive: float, perfect: float | None) -> Line:
        """Return the line of a report; `perfect` replaces that of the metric."""
        described = self.described if perfect is None else {**self.described, "perfect": perfect}
        return Line(key=self.key, group=self.group, value=value, naive=naive, **described)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The metrics of a report, and the statistics that they share."""

    task: Task
    n_bins: int
    right: bool
    are_confidences: bool  # whether binary predictions are confidences, and targets are 1 if they are correct
    members: tuple[Member, ...]
    accumulators: dict[str, Any] = field(repr=False)  # of each statistic: `ScoreAccumulator`, bins or `ExactSample`

    @property
    def ranked(self) -> list[Member]:
        """The metrics that are computed from ranked samples."""
        return [member for member in self.members if isinstance(self.accumulators[member.statistic], ExactSample)]

    def in_words(self, statistic: str) -> str:
        """Return the name of a sum in notes."""
        member = next(member for member in self.members if member.statistic == statistic)
        if isinstance(member.metric, ScoreMetric):
            return type(member.metric).__name__
        return f"errors over equal-width bins, {member.group}"

    def named(self, key: str) -> Member:
        """Return the member with a key, such as `"ece/top_label"`."""
        return next(member for member in self.members if member.key == key)


def names_of(members: Iterable[Member]) -> str:
    """Return the names of rank-based metrics in a note; those of selective prediction are named together."""
    names = [each.described["name"] if each.mode else f"metrics of {SELECTIVE_GROUP}" for each in members]
    return listed(list(dict.fromkeys(names)))


def bins_of(mode: Mode) -> str:
    """Return the name of the sums over equal-width bins for a mode."""
    return f"bins of {mode}"


def sample_of(mode: Mode) -> str:
    """Return the name of the ranked sample for a mode."""
    return f"sample of {mode}"


BY_CLASS = "nll"
"""Name of the sums of the negative log-likelihood, which also contain the frequencies of all classes."""


def _is_impossible(p: Predictions) -> Tensor:
    """Return 1 for samples with an outcome of predicted probability 0, `(..., N)`. Logits are not rounded to it."""
    return p.cross_entropy.isinf().to(wide_dtype(p.input_preds.device))


def _excludes(p: Predictions, outcome: int, occurred: bool) -> Tensor:
    """Return 1 for binary predictions that give an outcome probability 0, with `occurred` only if it occurred."""
    log_q = p.binary_log_probs[1 - outcome]
    excludes = log_q.isinf()
    if occurred:
        excludes &= p.target != 1 - outcome
    return excludes.to(log_q.dtype)


def counts_of(task: Task) -> dict[str, ScoreAccumulator]:
    """Return the accumulators of the weight of outcomes with predicted probability 0, by name.

    Binary and multi-label: of outcome 1 with predictions 0, and of outcome 0 with predictions 1, each followed by that
    of all predictions that exclude this outcome.
    """
    if task == "multiclass":  # an additional pass over the probabilities of all classes would take too long
        return {"impossible": ScoreAccumulator(_is_impossible, (), by_class=False)}
    return {
        f"{'impossible' if occurred else 'excluded'} {outcome}": ScoreAccumulator(
            _excludes, (outcome, occurred), by_class=False
        )
        for outcome in (1, 0)
        for occurred in (True, False)
    }


def has_table(task: Task, mode: Mode) -> bool:
    """Return False for class-wise errors of a multi-class task: exclusive classes are not pooled in one bin table."""
    return mode != "classwise" or task == "multilabel"


@lru_cache(maxsize=64)
def catalogue_of(
    task: Task,
    n_bins: int = 15,
    right: bool = False,
    *,
    are_confidences: bool = False,
    with_noise: bool = True,
    with_classes: bool = True,
) -> Catalogue:
    """Return the metrics of a report.

    With `are_confidences`, binary predictions are confidences, and targets are 1 for correct predictions. With
    `with_noise`, bins include sums of their noise and, if they have a table, of their entropic calibration difference.
    Without `with_classes`, class-wise errors of a multi-class task are omitted.
    """
    given: dict[str, Any] = {"task": task, "n_bins": n_bins, "right": right}
    # Values and tests do not depend on the number of classes, which only determines the size of the state.
    given |= {"num_classes": 2} if task == "multiclass" else {"num_labels": 1} if task == "multilabel" else {}
    scores, errors, selective = [], [], []
    modes = modes_of(task)
    if task == "multiclass" and not with_classes:
        modes = ("top_label",)
    for entry in CATALOGUE:
        if issubclass(entry.metric, SelectiveMetric):
            selective.append(_member(entry, {**given, "mode": "positive" if are_confidences else None}, None))
        elif issubclass(entry.metric, ScoreMetric):
            scores.append(_member(entry, given, None))
        else:
            # The mean signed error of exclusive classes is always 0.
            exclusive = {"classwise"} if entry.metric is ESCE and task == "multiclass" else set()
            errors += [_member(entry, {**given, "mode": mode}, mode) for mode in modes if mode not in exclusive]
    by_mode = [member for mode in modes for member in errors if member.mode == mode]
    members: list[Member] = []
    accumulators: dict[str, Any] = {}
    for member in (*scores, *by_mode, *selective):
        accumulator: Any = member.metric.accumulator
        if isinstance(accumulator, ScoreAccumulator):
            accumulator = replace(accumulator, by_class=True)
        elif isinstance(accumulator, EqualWidthBins):
            with_ecd = with_noise and has_table(task, accumulator.mode)
            accumulator = replace(accumulator, with_ecd=with_ecd, with_noise=with_noise)
        elif not has_table(task, accumulator.mode):
            continue
        # Metrics with equal accumulators share a statistic.
        name = next((name for name, each in accumulators.items() if each == accumulator), None) or member.statistic
        accumulators[name] = accumulator
        members.append(replace(member, statistic=name))
    return Catalogue(task, n_bins, right, are_confidences, tuple(members), accumulators)


_METADATA = ("key", "better", "name", "unit", "perfect", "question", "source")


def _member(entry: Entry, given: Mapping[str, Any], mode: NamedMode | None) -> Member:
    options = {**given, **entry.options}
    accepted = signature(entry.metric).parameters
    for name in ("n_bins", "right"):
        if name not in accepted or entry.metric is TCE:  # the number of isotonic blocks follows from the data
            del options[name]
    metric = entry.metric(**options)
    described = {**{name: getattr(metric, name) for name in _METADATA}, **entry.described}
    key, better = described.pop("key"), described.pop("better")
    accumulator = metric.accumulator
    statistic = metric.key
    if isinstance(accumulator, EqualWidthBins):
        statistic = bins_of(accumulator.mode)
    elif isinstance(accumulator, ExactSample):
        statistic = sample_of(accumulator.mode)
    return Member(key if mode is None else f"{key}/{mode}", metric, mode, statistic, described, better)


def values(members: Sequence[Member], statistics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the value `(...)` of each member whose statistic is given, by key. Class-wise values are averaged."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys([member.statistic for member in members]):
        sharing = [member for member in members if member.statistic == name]
        statistic = statistics.get(name)
        if isinstance(statistic, RankedSample):
            found |= _values_of_sample(sharing, statistic)
        elif statistic is not None:
            found |= {member.key: member.metric.estimator.value(statistic) for member in sharing}
    return found


def _values_of_sample(members: list[Member], sample: RankedSample) -> dict[str, Tensor]:
    def of_piece(piece: RankedSample) -> Tensor:
        shared = piece.sharing()
        return torch.stack([member.of_piece(shared) for member in members], -1)

    columns = by_pieces(of_piece, sample)
    if members[0].metric.estimator.averages:
        columns = columns.mean(sample.score.dim() - 2)
    return dict(zip([member.key for member in members], columns.unbind(-1), strict=True))


def check_size(task: Task, num_outputs: int, n_bins: int) -> None:
    """Raise a ValueError if the sums for `num_outputs` classes or labels need more than 1 GiB."""
    n_scores = sum(isinstance(each, ScoreAccumulator) for each in catalogue_of(task).accumulators.values())
    per_output = 3 * n_scores * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MAX_SUMS:
        outputs = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MAX_SUMS // per_output:,} {outputs} with {n_bins} bins, "
            f"got {num_outputs:,}. Check the class axis, or compute single metrics, which need less memory."
        )
