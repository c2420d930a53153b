"""Evaluate calibrators by cross-validation for a report."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import torch

from torchcalib.calibration.affine import AffineScaling, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import FoldOptions, folds_of, out_of_fold
from torchcalib.calibration.histogram import HistogramBinning
from torchcalib.calibration.isotonic import IsotonicCalibration
from torchcalib.calibration.one_against_rest import OneAgainstRest
from torchcalib.calibration.recommendation import recommendation_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.words import listed
from torchcalib.io.errors import printable
from torchcalib.metrics.proper_scores import NLL, BrierScore
from torchcalib.metrics.scores import ScoreMetric, scored
from torchcalib.reporting.accumulators import are_counts
from torchcalib.reporting.data import CalibrationGain, CalibrationStage
from torchcalib.reporting.testing import failure

T = TypeVar("T", bound=Calibrator)

MAX_PRODUCTS = 2**31
"""Maximum of (number of samples) * (number of classes)^2 for affine scaling, which determines its run time."""

CALIBRATORS: tuple[type[Calibrator], ...] = (TemperatureScaling, AffineScaling, HistogramBinning, IsotonicCalibration)
"""Calibrators to evaluate, the simplest first."""

SCORES: dict[type[ScoreMetric], str] = {NLL: "NLL", BrierScore: "Brier score"}

FOLDS = FoldOptions(n_folds=5, seed=0)


def calibration_stage(
    p: Predictions | None, why_not: str, class_names: Sequence[str] = ()
) -> tuple[CalibrationStage | None, tuple[str, ...]]:
    """Cross-validate every calibrator that supports the task and the weights.

    Args:
        p: predictions with labels as targets; None if they are not available.
        why_not: reason why the predictions are not available, as a clause.
        class_names: names of the classes or labels; empty if unknown.

    Returns:
        The cross-validated gains and an empty tuple, or None and a note with the reason.
    """
    if p is not None:
        why_not = _why_no_folds(p, class_names)
        try:
            if not why_not:
                return _stage(p), ()
        # Usually out of memory, or all samples of a class are in one cluster. The rest of the report is still possible.
        except (RuntimeError, ValueError) as error:
            why_not = f"cross-validation failed with {failure(error)}"
    return None, (f"Calibration gains are omitted: {why_not}.",)


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


def _stage(p: Predictions) -> CalibrationStage:
    calibrators, notes = _applicable(p)
    groups = None if p.groups is None else p.groups.reshape(-1)  # a cluster of dependent rows is in one fold
    folds, n_folds = folds_of(p, {**FOLDS, "groups": groups})
    raw = _scores(p)
    after: dict[str, dict[str, float]] = {}
    names_by_remark: dict[str, list[str]] = defaultdict(list)
    for calibrator in calibrators:
        name = calibrator.name
        values, _ = out_of_fold(p, calibrator, folds, n_folds)
        after[name] = _scores(p.with_values(values.to(p.dtype)))
        for remark in calibrator.fit_to(p).remarks():
            names_by_remark[remark].append(name)
    rcl = {score: {name: _rcl(raw[score], scores[score]) for name, scores in after.items()} for score in raw}
    gains = tuple(
        CalibrationGain(score, name, after[name][score], gain) for score in raw for name, gain in rcl[score].items()
    )
    recommendation = recommendation_of("nll", raw["NLL"], rcl["NLL"])
    by_name = {calibrator.name: calibrator for calibrator in calibrators}
    affine = [calibrator for calibrator in calibrators if isinstance(calibrator, TemperatureScaling | AffineScaling)]
    best = affine[-1] if recommendation.best is None else by_name[recommendation.best]
    notes += tuple(
        f"{_sentence_case(listed(names))}: {remark.replace('`', '')}" for remark, names in names_by_remark.items()
    )
    return CalibrationStage(recommendation, raw, gains, best, n_folds, FOLDS["seed"], notes)


def _rcl(raw: float, after: float) -> float:
    """Return the relative calibration loss in percent, 100 (1 - after / raw); NaN for 0 / 0 and inf / inf."""
    return float(100 * (1 - torch.tensor(after, dtype=torch.float64) / raw))


def _scores(p: Predictions) -> dict[str, float]:
    return {name: float(scored(metric.score, task=p.task).of(p)) for metric, name in SCORES.items()}


def _applicable(p: Predictions) -> tuple[list[Calibrator], tuple[str, ...]]:
    """Return the calibrators to evaluate, and notes on calibrators omitted due to weights or run time."""
    applicable: list[Calibrator] = []
    notes: tuple[str, ...] = ()
    counts = are_counts(p.weights)
    for calibrator in (method() for method in CALIBRATORS):
        if p.task not in calibrator.tasks or (p.task == "multiclass" and isinstance(calibrator, OneAgainstRest)):
            continue  # a fit per class is slow for many classes
        if calibrator.whole_weights and not counts:
            notes += (f"{_sentence_case(calibrator.name)} is omitted: it needs weights that are whole numbers.",)
        elif isinstance(calibrator, AffineScaling) and p.target.numel() * p.num_classes**2 > MAX_PRODUCTS:
            notes += (
                f"Affine scaling is omitted: it is slow for {p.num_classes:,} classes. "
                "Call torchcalib.calibration.relative_calibration_loss to compute its gain.",
            )
        else:
            applicable.append(calibrator)
    return applicable, notes


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


def _sentence_case(words: str) -> str:
    return words[:1].upper() + words[1:]
