"""The metrics of a report, in its order. Values, tests, intervals, comparisons and notes are loops over them.

A new metric gets its line in reports by one entry of `SCORES`, `ERRORS` or `SELECTIVE`, and its description by the
declaration of its function.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
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
from torchcalib.functional.binned import BinnedEstimator, ace, ece, esce, mce, rmsce
from torchcalib.functional.estimator import (
    Better,
    Declaration,
    Estimator,
    declaration_of,
    options_of,
    stream_factory_of,
)
from torchcalib.functional.proper_scores import accuracy, brier_score, ecd, nll
from torchcalib.functional.ranked import RankedEstimator, atb, corp, ks
from torchcalib.functional.scores import ScoreEstimator
from torchcalib.functional.selective import (
    SelectiveEstimator,
    accuracy_at_coverage,
    augrc,
    aurc,
    correctness_auroc,
    coverage_at_risk,
    eaurc,
)
from torchcalib.functional.test_based import tce
from torchcalib.inference.testing import ErrorTest
from torchcalib.ops.logs import wide_dtype
from torchcalib.results.lines import SELECTIVE_GROUP, Line

GROUPS: dict[NamedMode, str] = {"positive": "positive class", "top_label": "top label", "classwise": "class-wise"}
"""Groups of lines in a report, by the mode of their errors."""


class Entry(NamedTuple):
    """A metric of a report, with its options."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = {}
    described: Mapping[str, Any] = {}  # fields that differ from those of its declaration

    @property
    def declaration(self) -> Declaration:
        """Declaration of the metric with these options."""
        return replace(declaration_of(self.function), **self.described)


def _relative(function: Callable[..., Any], key: str) -> Entry:
    question = f"{declaration_of(function).name} divided by its value for the class frequencies"
    described = {"key": key, "name": key.upper(), "unit": "ratio to naive", "question": question}
    return Entry(function, {"normalize": "prior"}, described)


def _debiased(function: Callable[..., Any]) -> Entry:
    metric = declaration_of(function)
    question = f"{metric.name} without the sampling noise of bins"
    described = {"key": f"{metric.key}_debiased", "name": f"{metric.name} debiased", "question": question}
    return Entry(function, {"debiased": True}, described)


def _component(name: str, question: str, better: Better) -> Entry:
    described: dict[str, Any] = {
        "key": name,
        "name": name.upper(),
        "unit": declaration_of(brier_score).unit,
        "question": question,
    }
    described |= {"better": better, "has_test": name == "mcb"}
    return Entry(corp, {"component": name}, described)


_MAX_SUMS = 2**27  # maximum number of float64 sums of a report (1 GiB)
_COVERAGE, _RISK = 0.8, 0.05

SCORES = (
    Entry(accuracy),
    Entry(nll),
    _relative(nll, "nce"),
    Entry(brier_score),
    _relative(brier_score, "nbs"),
    Entry(ecd),
)
ERRORS = (
    Entry(ece),
    Entry(esce),
    Entry(mce),
    Entry(rmsce),
    _debiased(ece),
    _debiased(rmsce),
    Entry(ace),
    Entry(tce),
    Entry(ks),
    Entry(atb),
    _component("mcb", "decrease of the Brier score by the best monotone recalibration", "lower"),
    _component("dsc", "decrease of the Brier score by discrimination, after recalibration", "higher"),
    _component("unc", "Brier score of always predicting the outcome frequency", "lower"),
)
"""Metrics with a value for each mode."""
SELECTIVE = (
    Entry(aurc),
    Entry(eaurc),
    Entry(augrc),
    Entry(correctness_auroc),
    Entry(
        accuracy_at_coverage,
        {"coverage": _COVERAGE},
        {
            "name": f"Accuracy at {_COVERAGE:.0%} coverage",
            "question": f"accuracy of the most confident {_COVERAGE:.0%} of the samples",
        },
    ),
    Entry(
        coverage_at_risk,
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
    declaration: Declaration
    estimator: Estimator[Any]
    settings: Mapping[str, Any]  # all options of the estimator
    mode: NamedMode | None  # "top_label" for confidences; None for scores, and for metrics of selective prediction
    statistic: str  # name of the statistic from which the value is computed

    @property
    def group(self) -> str:
        """Group of the line in a report."""
        if self.mode is not None:
            return GROUPS[self.mode]
        return SELECTIVE_GROUP if self.is_selective else "scores"

    @property
    def is_selective(self) -> bool:
        """Whether this is a metric of selective prediction."""
        return isinstance(self.estimator, SelectiveEstimator)

    @property
    def is_error(self) -> bool:
        """Whether the metric is a calibration error, which has a noise floor and a p-value."""
        return self.declaration.has_test

    @cached_property
    def error_test(self) -> ErrorTest:
        """Definition of the calibration test of an error."""
        estimator: Any = self.estimator
        test: ErrorTest = estimator.error_test()
        return test

    @property
    def has_fixed_bins(self) -> bool:
        """Whether the metric is an error over bins that do not depend on the outcomes, which are tested as such."""
        estimator = self.estimator
        return isinstance(estimator, BinnedEstimator) and not (
            estimator.binning.is_isotonic or estimator.depends_on_samples
        )

    def of_piece(self, sample: RankedSample) -> Tensor:
        """Return the value `(...)` for a ranked sample that fits into memory, without an average over classes."""
        estimator = self.estimator
        if isinstance(estimator, BinnedEstimator):
            return estimator.formula(estimator.binning.from_sample(sample))
        return estimator.of_piece(sample) if isinstance(estimator, RankedEstimator) else estimator.formula(sample)

    def line(self, value: float, naive: float, perfect: float | None) -> Line:
        """Return the line of a report; `perfect` replaces that of the metric."""
        described = {name: getattr(self.declaration, name) for name in ("name", "unit", "question", "source")}
        described["perfect"] = self.declaration.perfect if perfect is None else perfect
        return Line(key=self.key, group=self.group, value=value, naive=naive, **described)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The metrics of a report, and the statistics that they share."""

    task: Task
    n_bins: int
    right: bool
    are_confidences: bool  # whether binary predictions are confidences, and targets are 1 if they are correct
    modes: tuple[NamedMode, ...]  # the main mode first
    members: tuple[Member, ...]
    accumulators: dict[str, Any] = field(repr=False)  # of each statistic: `ScoreAccumulator`, bins or `ExactSample`

    @property
    def kind(self) -> dict[str, str]:
        """Kind of the predictions in the settings of results; empty unless they are confidences."""
        return {"kind": "confidence"} if self.are_confidences else {}

    @property
    def ranked(self) -> list[Member]:
        """The metrics that are computed from ranked samples."""
        return [member for member in self.members if isinstance(self.accumulators[member.statistic], ExactSample)]

    def in_words(self, statistic: str) -> str:
        """Return the name of a sum in notes."""
        member = next(member for member in self.members if member.statistic == statistic)
        if isinstance(member.estimator, ScoreEstimator):
            return member.declaration.name
        return f"errors over equal-width bins, {member.group}"


def names_of(members: Iterable[Member]) -> str:
    """Return the names of rank-based metrics in a note; those of selective prediction are named together."""
    names = [each.declaration.name if each.mode else f"metrics of {SELECTIVE_GROUP}" for each in members]
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
        return {"impossible": ScoreAccumulator(_is_impossible, (), by_class=False, score_range=(0, 1))}
    return {
        f"{'impossible' if occurred else 'excluded'} {outcome}": ScoreAccumulator(
            _excludes, (outcome, occurred), by_class=False, score_range=(0, 1)
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
    with_classes: bool = True,
) -> Catalogue:
    """Return the metrics of a report.

    With `are_confidences`, binary predictions are confidences, and targets are 1 for correct predictions. The events of
    their only mode, the top label, are those of the positive class. Bins include sums of their noise and, if they have
    a table, of their entropic calibration difference. Without `with_classes`, class-wise errors of a multi-class task
    are omitted.
    """
    given: dict[str, Any] = {"task": task, "n_bins": n_bins, "right": right}
    modes = modes_of(task)
    if are_confidences or (task == "multiclass" and not with_classes):
        modes = ("top_label",)
    events: dict[NamedMode, Mode] = {"top_label": "positive"} if are_confidences else {}
    scores = [_member(entry, given, None) for entry in SCORES]
    selective = [_member(entry, {**given, "mode": events.get("top_label")}, None) for entry in SELECTIVE]
    errors = [
        _member(entry, {**given, "mode": events.get(mode, mode)}, mode)
        for entry in ERRORS
        for mode in modes
        # The mean signed error of exclusive classes is always 0.
        if not (entry.function is esce and task == "multiclass" and mode == "classwise")
    ]
    by_mode = [member for mode in modes for member in errors if member.mode == mode]
    members: list[Member] = []
    accumulators: dict[str, Any] = {}
    for member in (*scores, *by_mode, *selective):
        accumulator: Any = member.estimator.accumulator
        if isinstance(accumulator, ScoreAccumulator):
            accumulator = replace(accumulator, by_class=True)
        elif isinstance(accumulator, EqualWidthBins):
            accumulator = replace(accumulator, with_ecd=has_table(task, accumulator.mode), with_noise=True)
        elif not has_table(task, accumulator.mode):
            continue
        # Metrics with equal accumulators share a statistic.
        name = next((name for name, each in accumulators.items() if each == accumulator), None) or member.statistic
        accumulators[name] = accumulator
        members.append(replace(member, statistic=name))
    return Catalogue(task, n_bins, right, are_confidences, modes, tuple(members), accumulators)


def _member(entry: Entry, given: Mapping[str, Any], mode: NamedMode | None) -> Member:
    factory = stream_factory_of(entry.function)
    options = {**given, **entry.options}
    defaults = {option.name: option.default for option in options_of(factory)}
    for name in ("n_bins", "right"):
        if name not in defaults or entry.function is tce:  # the number of isotonic blocks follows from the data
            del options[name]
    # Values and tests do not depend on the number of classes, which only determines the size of a state.
    estimator = factory(**options).streamed({"binary": None, "multiclass": 2, "multilabel": 1}[given["task"]])
    declaration, accumulator = entry.declaration, estimator.accumulator
    statistic = declaration.key
    if isinstance(accumulator, EqualWidthBins):
        statistic = bins_of(mode or accumulator.mode)
    elif isinstance(accumulator, ExactSample):
        statistic = sample_of(mode or accumulator.mode)
    key = declaration.key if mode is None else f"{declaration.key}/{mode}"
    return Member(key, declaration, estimator, {**defaults, **options}, mode, statistic)


def values(members: Sequence[Member], statistics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the value `(...)` of each member whose statistic is given, by key. Class-wise values are averaged."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys([member.statistic for member in members]):
        sharing = [member for member in members if member.statistic == name]
        statistic = statistics.get(name)
        if isinstance(statistic, RankedSample):
            found |= _values_of_sample(sharing, statistic)
        elif statistic is not None:
            found |= {member.key: member.estimator.value(statistic) for member in sharing}
    return found


def values_of_replicates(members: Sequence[Member], replicates: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return each member in R replicates `(R,)` on the CPU, by key, from their statistics in chunks; see `values`."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for statistics in replicates:
        for key, column in values(members, statistics).items():
            found[key].append(column.cpu())
    return {key: torch.cat(columns) for key, columns in found.items()}


def _values_of_sample(members: list[Member], sample: RankedSample) -> dict[str, Tensor]:
    def of_piece(piece: RankedSample) -> Tensor:
        shared = piece.sharing()
        return torch.stack([member.of_piece(shared) for member in members], -1)

    columns = by_pieces(of_piece, sample)
    if members[0].estimator.averages:
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
