"""Recommend whether to add a calibration stage, from cross-validated scores with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.binary import BetaCalibration, QuadraticScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.cross_validation import (
    CalibrationOptions,
    fitted,
    flat_options,
    input_options,
    with_calibration_options,
)
from torchcalib.calibration.ensemble import EnsembleTemperatureScaling
from torchcalib.calibration.gain import Score, both_scores
from torchcalib.calibration.histogram import HistogramBinning
from torchcalib.calibration.isotonic import CentredIsotonicCalibration, IsotonicCalibration
from torchcalib.calibration.one_against_rest import OneAgainstRest
from torchcalib.calibration.structured import StructuredMatrixScaling, StructuredVectorScaling, VectorScaling
from torchcalib.calibration.venn_abers import VennAbersCalibration
from torchcalib.core.arguments import Task
from torchcalib.core.checks import are_counts
from torchcalib.core.predictions import Predictions
from torchcalib.core.words import capitalised, ends, listed

CALIBRATORS: tuple[type[Calibrator], ...] = (
    TemperatureScaling,
    BiasCorrection,
    EnsembleTemperatureScaling,
    AffineScaling,
    BetaCalibration,
    QuadraticScaling,
    VectorScaling,
    StructuredVectorScaling,
    StructuredMatrixScaling,
    HistogramBinning,
    IsotonicCalibration,
    CentredIsotonicCalibration,
    VennAbersCalibration,
)
"""All calibrators in the order of preference, simple ones first."""

_LIMITS: tuple[tuple[tuple[type, ...], int, int], ...] = (
    ((AffineScaling, BiasCorrection), 2, 2**31),
    ((StructuredMatrixScaling,), 2, 2**23),
    ((EnsembleTemperatureScaling,), 1, 2**25),
    ((VectorScaling, StructuredVectorScaling, OneAgainstRest), 1, 2**22),
)
"""Calibrators, exponent k, and the largest (number of samples) * (number of classes)^k, which limits their run time."""

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class Recommendation:
    """Recommendation whether to add a calibration stage.

    Attributes:
        text: the recommendation in one or two sentences.
        score: name of the score.
        raw: score of the uncalibrated predictions.
        rcl: relative calibration loss (RCL) of each calibrator in percent, by name.
        best: name of the recommended calibrator; None if none is worthwhile.
        preferred: name of the calibrator with the largest gain, or of an earlier one that is not significantly worse,
            even if it is not worthwhile.
        intervals: 95% interval of the RCL of each calibrator, `(low, high)`, by name; empty for other scores than
            `"nll"` and `"brier"`. Standard errors are those of paired differences between independent samples, or
            between clusters (`groups`). They do not contain the variation of the fits. A weight is the importance of
            one sample, also if it is a whole number.
    """

    text: str
    score: str
    raw: float
    rcl: Mapping[str, float]
    best: str | None
    preferred: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Gain of the preferred calibrator in percent."""
        return self.rcl[self.preferred]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of `gain`; None if undefined."""
        interval = self.intervals.get(self.preferred)
        return interval if interval is not None and math.isfinite(interval[0]) else None


_LEAVE = "leave the predictions as they are"
_SCORE_NAMES = {"nll": "NLL", "brier": "Brier score", "bayes_risk": "Bayes risk"}
_ROW_SCORES = {"nll": "cross_entropy", "brier": "squared_error"}
"""Attribute of `Predictions` with the score of each sample, by score."""


@with_calibration_options
def recommend(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    score: Score = "nll",
    calibrators: Sequence[Calibrator] | None = None,
    worthwhile: float = 5.0,
    **options: Unpack[CalibrationOptions],
) -> Recommendation:
    """Recommend whether to add a calibration stage, and which calibrator to use.

    The calibrator with the largest gain in the cross-validated score is recommended. For `"nll"` and `"brier"`, an
    earlier calibrator is preferred if its score is not significantly worse (paired difference, level 5%).

    Do not choose a calibrator by its calibration error. Histogram binning often has a low expected calibration error
    (ECE), because it makes all predictions of a bin equal. Its proper scores are often the worst of all calibrators.

    Args:
        preds: binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`.
        calibrators: candidates in the order of preference, simple ones first. None for all calibrators of this package
            that support the task and the weights.
        worthwhile: smallest gain in percent of the score that justifies a calibration stage. The lower end of its 95%
            interval must also be positive.

    Returns:
        A `Recommendation`.

    Warns:
        UserWarning: see `calibration_loss`.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 4.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits = torch.randn(1000, generator=generator)
        >>> target = (torch.rand(1000, generator=generator) < logits.sigmoid()).long()
        >>> recommend(3 * logits, target, task="binary", from_logits=True).best
        'temperature scaling'
    """
    if calibrators is not None and not calibrators:
        raise ValueError("`calibrators` must contain at least one calibrator, got none. Omit it to use the default.")
    preds, target, options = flat_options(preds, target, task, options)
    if calibrators is None:
        p = TemperatureScaling().read(preds, target, task=task, options=input_options(options))
        calibrators, _ = applicable(p)
    before, after = torch.tensor(torch.nan), dict[str, Tensor]()
    names = [calibrator.name for calibrator in calibrators]
    for name, calibrator in zip(names, calibrators, strict=True):
        name = name if names.count(name) == 1 else repr(calibrator)
        if score in _ROW_SCORES:
            before, after[name] = _contributions(preds, target, task, score, calibrator, options)
        else:
            before, after[name] = both_scores(preds, target, task, score, calibrator, options)
        if before.dim() > (score in _ROW_SCORES):
            shape = tuple(before.shape)
            raise ValueError(f"`preds` must have no batch axes, got {shape}. Pass one data set.")
    return recommendation_of(_name_of_score(score), before, after, worthwhile)


def _contributions(
    preds: Tensor, target: Tensor, task: Task, score: str, calibrator: Calibrator, options: CalibrationOptions
) -> tuple[Tensor, Tensor]:
    """Return the contributions of independent units to the raw and to the calibrated mean score, `(..., U)` each."""
    fitting = fitted(preds, target, task, calibrator, options)
    p = fitting.p
    after = p.with_values(fitting.calibrate(p).to(p.dtype))
    name = _ROW_SCORES[score]
    groups = options.get("groups")
    raw, calibrated = (contributions(getattr(each, name), p, groups) for each in (p, after))
    return raw, calibrated


def contributions(scores: Tensor, p: Predictions, groups: Tensor | None = None) -> Tensor:
    """Return the contribution of each independent unit to the mean score, `(..., U)`. Their sum is the mean score.

    Args:
        scores: score of each sample `(..., N)`, multi-label `(..., L, N)`.
        p: predictions, which contain the weights.
        groups: group of dependent samples `(N,)`; None if samples are independent.
    """
    w = sample_weights(p)
    parts = (w * scores).masked_fill(w == 0, 0) / w.sum(-1, keepdim=True)
    if p.task == "multilabel":
        parts = parts.mean(-2)
    if groups is None:
        return parts
    _, index = torch.unique(groups.reshape(-1), return_inverse=True)
    return parts.new_zeros(*parts.shape[:-1], int(index.max()) + 1).index_add(-1, index, parts)


def recommendation_of(
    score: str, before: Tensor, after: Mapping[str, Tensor], worthwhile: float = 5.0
) -> Recommendation:
    """Return the recommendation for scores before and after each calibrator, in the order of preference.

    Args:
        score: name of the score.
        before: contributions of independent units to the raw score `(U,)`, or the raw score `()`.
        after: the same after calibration, by name of the calibrator.
        worthwhile: smallest gain in percent of the raw score that justifies a calibration stage.
    """
    raw = float(before.sum())
    gains, intervals = {}, {}
    for name, parts in after.items():
        gains[name] = 100 * (1 - float(parts.sum() / before.sum()))
        if before.dim():
            # Standard error of a ratio of means (delta method).
            residual = parts - parts.sum() / before.sum() * before
            half = 100 * _Z * _standard_error(residual) / abs(raw) if raw else math.nan
            intervals[name] = (gains[name] - half, gains[name] + half)
    largest = max(gains, key=lambda name: -math.inf if math.isnan(gains[name]) else gains[name])
    useful = [name for name in after if gains[name] > 0]
    best = next((name for name in useful if _is_within_noise(after[name], after[largest])), largest)
    is_worthwhile = gains[best] >= worthwhile and not intervals.get(best, (math.inf,))[0] <= 0
    text = _in_words(_SCORE_NAMES.get(score, score), raw, gains, intervals, best, is_worthwhile)
    return Recommendation(text, score, raw, gains, best if is_worthwhile else None, best, intervals)


def _standard_error(parts: Tensor) -> float:
    """Return the standard error of the sum of independent contributions `(U,)`."""
    n = parts.numel()
    centred = parts - parts.mean()
    return float((n / (n - 1) * centred.square().sum()).sqrt()) if n > 1 else math.nan


def _is_within_noise(parts: Tensor, best: Tensor) -> bool:
    """Return whether a score is not significantly worse than the best score. Scores without parts are compared."""
    difference = parts - best
    if not difference.dim():
        return bool(difference == 0)
    return float(difference.sum()) <= _Z * _standard_error(difference)


def applicable(p: Predictions) -> tuple[list[Calibrator], tuple[str, ...]]:
    """Return the calibrators that support the predictions, and notes on calibrators that are omitted."""
    found: list[Calibrator] = []
    slow, fractional = [], []
    counts = are_counts(p.weights)
    for calibrator in (method() for method in CALIBRATORS):
        if p.task not in calibrator.tasks:
            continue
        if calibrator.whole_weights and not counts:
            fractional.append(calibrator.name)
        elif _is_slow(calibrator, p):
            slow.append(calibrator.name)
        else:
            found.append(calibrator)
    notes = []
    if fractional:
        notes.append(f"Omitted, because weights are not whole numbers: {listed(fractional)}.")
    if slow:
        notes.append(
            f"Omitted, because they are slow for {p.num_classes:,} classes: {listed(slow)}. "
            "Call torchcalib.calibration.relative_calibration_loss to compute their gain."
        )
    return found, tuple(notes)


def _is_slow(calibrator: Calibrator, p: Predictions) -> bool:
    if p.task != "multiclass":
        return False
    n, n_classes = p.target.numel(), p.num_classes
    return any(isinstance(calibrator, kinds) and n * n_classes**exponent > most for kinds, exponent, most in _LIMITS)


def _name_of_score(score: Score) -> str:
    if isinstance(score, str):
        return score
    return getattr(getattr(score, "func", score), "__name__", "score")  # `func` is the function in a functools.partial


def _in_words(
    score: str,
    raw: float,
    gains: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
    best: str,
    is_worthwhile: bool,
) -> str:
    gain = gains[best]
    shown = f"{gain:.1f}%"
    if best in intervals and math.isfinite(intervals[best][0]):
        shown += f" (95% interval {ends(*intervals[best], digits=3)})"
    if is_worthwhile:
        return f"Calibration would cut {score} by {shown}: add {best}{_other(gains, best)}."
    if gain > 0:
        if intervals.get(best, (math.inf,))[0] <= 0:
            return f"The gain of the best calibrator, {best}, is not significant, {shown} of {score}: {_LEAVE}."
        return f"Calibration would cut {score} by only {shown}, with {best}: {_LEAVE}."
    if math.isnan(raw):
        return f"{score} is undefined, and so is the gain of calibration."
    if raw == 0:
        return f"{score} is 0: there is nothing to gain by calibration."
    return f"No calibrator lowers {score} ({best} {_gains(gain)}): {_LEAVE}."


def _other(gains: Mapping[str, float], best: str) -> str:
    """Return a clause on the calibrator with the largest gain, or on the second one if `best` has the largest gain."""
    others = {name: value for name, value in gains.items() if name != best and not math.isnan(value)}
    if not others:
        return ""
    next_best = max(others, key=lambda name: others[name])
    if others[next_best] > gains[best]:
        return f". {capitalised(next_best)} {_gains(others[next_best])}: the difference is within noise"
    return f"; {next_best} {_gains(others[next_best])}"


def _gains(value: float) -> str:
    if math.isfinite(value):
        return f"gains {round(value, 1) + 0:.1f}%"  # + 0 turns -0 into 0
    return "leaves it infinite" if math.isnan(value) else "makes it infinite"
