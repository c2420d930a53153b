"""Cross-validated gain of a calibration stage."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import torch

from torchcalib.calibration.affine import AffineScaling, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import FoldOptions, folds_of, out_of_fold
from torchcalib.calibration.histogram import HistogramBinning
from torchcalib.calibration.isotonic import IsotonicCalibration
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

MOST_PRODUCTS = 2**31
"""Samples times squared classes up to which affine scaling is tried: a Newton step takes as many multiplications."""

CALIBRATORS: tuple[type[Calibrator], ...] = (TemperatureScaling, AffineScaling, HistogramBinning, IsotonicCalibration)
"""Calibrators to try, the simplest first."""

SCORES: dict[type[ScoreMetric], str] = {NLL: "NLL", BrierScore: "Brier score"}

FOLDS = FoldOptions(n_folds=5, seed=0)


def calibration_stage(
    p: Predictions | None, why_not: str, class_names: Sequence[str] = ()
) -> tuple[CalibrationStage | None, tuple[str, ...]]:
    """Try every applicable calibrator.

    Args:
        p: predictions with labels as targets; None if there are none.
        why_not: why there are none, a clause.
        class_names: of the classes or labels, if they are known.

    Returns:
        The stage, and no notes; or None and a note of the reason.
    """
    if p is not None:
        why_not = _why_no_folds(p, class_names)
        try:
            if not why_not:
                return _stage(p), ()
        except RuntimeError as error:  # memory, above all: the rest of the report is still useful
            why_not = f"trying calibrators failed with {failure(error)}"
    return None, (f"The gain of a calibration stage is left out: {why_not}.",)


def fitted(calibrator: T, p: Predictions) -> T:
    """Return a copy of a calibrator, fitted to predictions with labels as targets.

    Raises:
        ValueError: if the calibrator is not for their task, or needs weights that are counts.
    """
    if p.task not in calibrator.tasks or (calibrator.whole_weights and not are_counts(p.weights)):
        tasks, counts = ", ".join(calibrator.tasks), " with weights that are counts" * calibrator.whole_weights
        raise ValueError(f"`calibrator` must be for the data, got {calibrator!r}. It is for task {tasks}{counts}.")
    with torch.inference_mode(False):  # tensors made in inference mode could not be used in a backward pass later
        return calibrator.fit_to(p)


def _stage(p: Predictions) -> CalibrationStage:
    """Cross-validate all calibrators on the same folds."""
    tried, notes = _applicable(p)
    at, n_folds = folds_of(p, FOLDS)
    raw = _scores(p)
    after: dict[str, dict[str, float]] = {}
    remarked: dict[str, list[str]] = defaultdict(list)
    for calibrator in tried:
        name = calibrator.name
        values, _ = out_of_fold(p, calibrator, at, n_folds)
        after[name] = _scores(p.with_values(values.to(p.dtype)))
        for remark in calibrator.fit_to(p).remarks():
            remarked[remark].append(name)
    gains = {score: {name: _rcl(raw[score], of[score]) for name, of in after.items()} for score in raw}
    found = tuple(
        CalibrationGain(score, name, after[name][score], gain) for score in raw for name, gain in gains[score].items()
    )
    recommendation = recommendation_of("nll", raw["NLL"], gains["NLL"])
    by_name = {calibrator.name: calibrator for calibrator in tried}
    affine = [calibrator for calibrator in tried if isinstance(calibrator, TemperatureScaling | AffineScaling)]
    best = affine[-1] if recommendation.best is None else by_name[recommendation.best]
    notes += tuple(f"{_sentence_case(listed(names))}: {remark.replace('`', '')}" for remark, names in remarked.items())
    return CalibrationStage(recommendation, raw, found, best, n_folds, FOLDS["seed"], notes)


def _rcl(raw: float, after: float) -> float:
    """Return the relative calibration loss; NaN for a score of 0."""
    return float(100 * (1 - torch.tensor(after, dtype=torch.float64) / raw))


def _scores(p: Predictions) -> dict[str, float]:
    return {name: float(scored(metric.score, task=p.task).of(p)) for metric, name in SCORES.items()}


def _applicable(p: Predictions) -> tuple[list[Calibrator], tuple[str, ...]]:
    """Return the calibrators to try, and notes on those that fit the task but not the data."""
    tried: list[Calibrator] = []
    notes: tuple[str, ...] = ()
    counts = are_counts(p.weights)
    for calibrator in (method() for method in CALIBRATORS):
        if p.task not in calibrator.tasks:
            continue
        if calibrator.whole_weights and not counts:
            notes += (f"{_sentence_case(calibrator.name)} is not tried: it needs weights that are counts of samples.",)
        elif isinstance(calibrator, AffineScaling) and p.target.numel() * p.num_classes**2 > MOST_PRODUCTS:
            notes += (
                f"Affine scaling is not tried: with {p.num_classes:,} classes it takes long. "
                "torchcalib.calibration.relative_calibration_loss computes its gain.",
            )
        else:
            tried.append(calibrator)
    return tried, notes


def _why_no_folds(p: Predictions, class_names: Sequence[str]) -> str:
    """Return why calibrators cannot be cross-validated, a clause: a class has no sample or one. Empty if they can."""
    target = p.target.long().reshape(-1, p.target.shape[-1])
    present = torch.ones_like(target, dtype=torch.bool)
    if p.weights is not None:
        present = (p.weights != 0).expand(p.target.shape).reshape(target.shape)
    counts = target.new_zeros(len(target), p.num_classes).scatter_add(-1, target, present.long())
    if p.task == "multilabel":
        short = (counts < 2).any(-1).nonzero().flatten().tolist()
        needed = "cross-validation takes two samples with a label and two without"
        return f"{needed}, and label {_some(short, class_names)} has fewer" if short else ""
    alone = (counts[0] == 1).nonzero().flatten().tolist()
    if alone:
        return f"cross-validation takes two samples of a class, and there is one of class {_some(alone, class_names)}"
    return "all samples are of one class" if int((counts > 0).sum()) < 2 else ""


def _some(numbers: Sequence[int], class_names: Sequence[str]) -> str:
    shown = (printable(class_names[k]) if class_names else str(k) for k in numbers[:8])
    return ", ".join(shown) + (", ..." if len(numbers) > 8 else "")


def _sentence_case(words: str) -> str:
    return words[:1].upper() + words[1:]
