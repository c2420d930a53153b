"""Evaluate calibrators by cross-validation for a report."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.cross_validation import FoldOptions, calibrated_by_fold, folds_of
from torchcalib.calibration.recommendation import Recommendation, applicable, contributions, recommendation_of
from torchcalib.core.bins import BinTable
from torchcalib.core.checks import are_counts
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import SumsKind
from torchcalib.core.words import capitalised, listed
from torchcalib.io.errors import printable
from torchcalib.metrics.proper_scores import NLL, Accuracy, BrierScore
from torchcalib.reporting.accumulators import Accumulated
from torchcalib.reporting.lines import bin_estimators, bin_table
from torchcalib.reporting.results import CalibrationStage, CalibratorLine, LineInterval
from torchcalib.reporting.testing import failure

T = TypeVar("T", bound=Calibrator)

SCORES = {"accuracy": Accuracy, "nll": NLL, "brier_score": BrierScore}
"""Scores of a `CalibratorLine`, by field."""

DIAGNOSED = (TemperatureScaling, BiasCorrection, AffineScaling)
"""Calibrators whose likelihoods the diagnosis compares."""

FOLDS = FoldOptions(n_folds=5, seed=0)

_SHOWN_LABELS = 2  # number of labels whose fitted parameters are described

_AT_ONCE = 2**21
"""Number of predicted values that are calibrated at once."""


@dataclass(frozen=True)
class FittedCalibrators:
    """Calibrators fitted to all samples, for the diagnosis of a report.

    Attributes:
        fits: fitted calibrators, by class.
        nll: negative log-likelihood of each sample after these calibrators, `(..., N)`, by class; only for `DIAGNOSED`.
    """

    fits: dict[type[Calibrator], Calibrator]
    nll: dict[type[Calibrator], Tensor]


def calibration_stage(
    p: Predictions | None, why_not: str, class_names: Sequence[str] = (), *, n_bins: int = 15, right: bool = False
) -> tuple[CalibrationStage | None, FittedCalibrators | None, tuple[str, ...]]:
    """Cross-validate every calibrator that supports the task and the weights.

    Args:
        p: predictions with labels as targets; None if they are not available.
        why_not: reason why the predictions are not available, as a clause.
        class_names: names of the classes or labels; empty if unknown.
        n_bins: number of equal-width bins.
        right: use bins `(a, b]` instead of `[a, b)`.

    Returns:
        The cross-validated scores, the calibrators fitted to all samples, and an empty tuple; or None, None and a note
        with the reason.
    """
    if p is not None:
        why_not = _why_no_folds(p, class_names)
        try:
            if not why_not:
                return *_stage(p, class_names, n_bins, right), ()
        # Usually out of memory, or all samples of a class are in one cluster. The rest of the report is still possible.
        except (RuntimeError, ValueError) as error:
            why_not = f"cross-validation failed with {failure(error)}"
    return None, None, (f"Calibration gains are omitted: {why_not}.",)


def fitted(calibrator: T, p: Predictions, class_axis: int = -1, positive_classes: Sequence[int] | None = None) -> T:
    """Return a copy of a calibrator, fitted to predictions with labels as targets.

    Raises:
        ValueError: if the calibrator does not support the task, or does not support fractional weights.
    """
    if p.task not in calibrator.tasks or (calibrator.whole_weights and not are_counts(p.weights)):
        tasks, counts = ", ".join(calibrator.tasks), " with whole-number weights" * calibrator.whole_weights
        raise ValueError(
            f"`calibrator` must support the data, got {calibrator!r} for task {p.task}. It supports {tasks}{counts}."
        )
    with torch.inference_mode(False):  # autograd does not support tensors that were created in inference mode
        return calibrator.fit_to(p, class_axis=class_axis, positive_classes=positive_classes)


@dataclass(frozen=True)
class _Evaluated:
    """Scores of each sample `(..., N)` by field of `CalibratorLine`, ECE and bins of some predictions."""

    scores: dict[str, Tensor]
    ece: float
    table: BinTable


class _Evaluation:
    """Collect the scores and the bins of predictions, which may be added in pieces."""

    def __init__(self, p: Predictions, n_bins: int, right: bool) -> None:
        self.task = p.task
        self.scores = {name: torch.zeros(p.samples, dtype=torch.float64, device=p.given.device) for name in SCORES}
        self.estimator = bin_estimators(p.task, n_bins, right, with_noise=True)[0]
        num_classes = {"multiclass": p.num_classes, "multilabel": p.samples[0]}.get(p.task)
        accumulator: Any = self.estimator.accumulator
        self.bins: Accumulated[Any] = Accumulated(SumsKind(accumulator, accumulator.shape(p.task, num_classes)))

    def add(self, samples: slice | Tensor, p: Predictions) -> None:
        for name, metric in SCORES.items():
            self.scores[name][..., samples] = metric.score.per_sample(p, *metric.score.arguments).to(torch.float64)
        self.bins = self.bins + self.bins.of(p)

    def result(self) -> _Evaluated:
        bins = self.bins.statistic
        ece = self.estimator.values(bins)[f"ece/{self.estimator.key}"]
        return _Evaluated(self.scores, float(ece), bin_table(self.task, bins))


def _stage(
    p: Predictions, class_names: Sequence[str], n_bins: int, right: bool
) -> tuple[CalibrationStage, FittedCalibrators]:
    calibrators, notes = applicable(p)
    groups = None if p.groups is None else p.groups.reshape(-1)  # a cluster of dependent rows is in one fold
    folds, n_folds = folds_of(p, {**FOLDS, "groups": groups})
    w = sample_weights(p)
    fold_weights = torch.stack([*(w.masked_fill(folds == f, 0) for f in range(n_folds)), w])
    raw = _Evaluation(p, n_bins, right)
    raw.add(slice(None), p)
    evaluated = {"none": raw.result()}
    whole = FittedCalibrators({}, {})
    names_by_remark: dict[str, list[str]] = defaultdict(list)
    for calibrator in calibrators:
        fits = calibrator.fit_to(p, fold_weights)
        last = whole.fits[type(calibrator)] = fits.part(n_folds)
        evaluation = _Evaluation(p, n_bins, right)
        for samples, piece in _calibrated_pieces(p, fits, folds, n_folds):
            evaluation.add(samples, piece)
        evaluated[calibrator.name] = evaluation.result()
        if type(calibrator) in DIAGNOSED:
            whole.nll[type(calibrator)] = _nll(p, last)
        for remark in last.remarks():
            names_by_remark[remark].append(calibrator.name)

    nll = {name: contributions(each.scores["nll"], p, groups) for name, each in evaluated.items()}
    after = {name: parts for name, parts in nll.items() if name != "none"}
    recommendation = recommendation_of("nll", nll["none"], after)
    best = next(calibrator for calibrator in calibrators if calibrator.name == recommendation.preferred)
    notes += tuple(
        f"{capitalised(listed(names))}: {remark.replace('`', '')}" for remark, names in names_by_remark.items()
    )
    names = [printable(name) for name in class_names]
    words = {each.name: _parameters(whole.fits[type(each)], names) for each in calibrators}
    stage = CalibrationStage(
        recommendation=recommendation,
        lines=tuple(_line(name, each, p, recommendation, words) for name, each in evaluated.items()),
        table=evaluated[best.name].table,
        calibrator=best,
        n_folds=n_folds,
        seed=FOLDS["seed"],
        notes=notes,
        losses=nll,
    )
    return stage, whole


def _parameters(fit: Calibrator, class_names: Sequence[str]) -> str:
    """Return the fitted parameters in words; of the first labels if every label has its own fit."""
    if not fit.grad_norm.dim():
        return fit.in_words(class_names)
    labels = range(min(len(fit.grad_norm), _SHOWN_LABELS))
    names = class_names or [f"label {k}" for k in range(len(fit.grad_norm))]
    shown = [f"{names[k]}: {fit.part(k).in_words()}" for k in labels]
    return "; ".join([*shown, *["..."] * (len(fit.grad_norm) > _SHOWN_LABELS)])


def _line(
    name: str, found: _Evaluated, p: Predictions, recommendation: Recommendation, words: dict[str, str]
) -> CalibratorLine:
    scores = {field: float(contributions(values, p).sum()) for field, values in found.scores.items()}
    low, high = recommendation.intervals.get(name, (math.nan, math.nan))
    return CalibratorLine(
        calibrator=name,
        **scores,
        ece=found.ece,
        gain=recommendation.rcl.get(name),
        interval=LineInterval(low, high) if math.isfinite(low) else None,
        parameters=words.get(name, ""),
    )


def _calibrated_pieces(
    p: Predictions, fits: Calibrator, folds: Tensor, n_folds: int
) -> Iterator[tuple[slice | Tensor, Predictions]]:
    """Yield positions of samples and their calibrated predictions, in pieces that bound the memory."""
    if p.task != "multiclass":  # folds can differ between labels
        yield slice(None), p.with_values(calibrated_by_fold(p, fits, folds, n_folds).to(p.dtype))
        return
    for f in range(n_folds):
        fit = fits.part(f)
        for samples in torch.split((folds == f).nonzero().squeeze(-1), max(1, _AT_ONCE // p.num_classes)):
            yield samples, _calibrated(p.part(samples), fit)


def _calibrated(p: Predictions, fit: Calibrator) -> Predictions:
    return p.with_values(fit.calibrated(p.values, p.from_logits).to(p.dtype))


def _nll(p: Predictions, fit: Calibrator) -> Tensor:
    """Return the negative log-likelihood of each sample after calibration, `(..., N)`."""
    rows = max(1, _AT_ONCE // p.num_classes)
    starts = range(0, p.samples[-1], rows)
    return torch.cat([_calibrated(p.part(slice(i, i + rows)), fit).cross_entropy for i in starts], -1)


def _why_no_folds(p: Predictions, class_names: Sequence[str]) -> str:
    """Return the reason why stratified folds are impossible, as a clause; an empty string if they are possible."""
    target = p.target.long().reshape(-1, p.target.shape[-1])
    present = torch.ones_like(target, dtype=torch.bool)
    if p.weights is not None:
        present = (p.weights != 0).expand(p.target.shape).reshape(target.shape)
    counts = target.new_zeros(len(target), p.num_classes).scatter_add(-1, target, present.long())
    if p.task == "multilabel":
        rare = (counts < 2).any(-1).nonzero().flatten().tolist()
        needed = "cross-validation needs two samples with each label and two without"
        return f"{needed}, but label {_first_names(rare, class_names)} has fewer" if rare else ""
    rare = (counts[0] == 1).nonzero().flatten().tolist()
    if rare:
        needed = "cross-validation needs two samples of each class"
        return f"{needed}, but there is only one of class {_first_names(rare, class_names)}"
    return "all samples have the same class" if int((counts > 0).sum()) < 2 else ""


def _first_names(numbers: Sequence[int], class_names: Sequence[str]) -> str:
    shown = (printable(class_names[k]) if class_names else str(k) for k in numbers[:8])
    return ", ".join(shown) + (", ..." if len(numbers) > 8 else "")
