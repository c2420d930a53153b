"""Recommend whether to calibrate, and with which calibrator."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import CalibrationOptions, with_calibration_options
from torchcalib.calibration.gain import Score, both_scores
from torchcalib.core.arguments import Task


@dataclass(frozen=True)
class Recommendation:
    """Recommendation whether to add a calibration stage.

    Attributes:
        text: the recommendation in one sentence.
        score: name of the score.
        raw: score of the uncalibrated predictions.
        rcl: relative calibration loss (RCL) of each calibrator in percent, by name.
        best: name of the recommended calibrator; None if none is worthwhile.
    """

    text: str
    score: str
    raw: float
    rcl: Mapping[str, float]
    best: str | None


_SCORE_NAMES = {"nll": "NLL", "brier": "Brier score", "bayes_risk": "Bayes risk"}


@with_calibration_options
def recommend(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    score: Score = "nll",
    calibrators: Sequence[Calibrator] = (TemperatureScaling(), AffineScaling()),
    worthwhile: float = 5.0,
    **options: Unpack[CalibrationOptions],
) -> Recommendation:
    """Recommend whether to add a calibration stage, and which calibrator to use.

    Args:
        preds: binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`.
        calibrators: candidates, the simplest first. A later candidate is preferred if its gain is larger by more than a
            tenth.
        worthwhile: smallest gain in percent of the score that justifies a calibration stage.

    Returns:
        A `Recommendation`.

    Raises:
        TypeError, ValueError: for invalid input.

    Warns:
        UserWarning: see `calibration_loss`.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 4.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits = torch.randn(1000, generator=generator)
        >>> target = (torch.rand(1000, generator=generator) < logits.sigmoid()).long()
        >>> recommend(3 * logits, target, task="binary", from_logits=True).text
        'Calibration would cut NLL by 21.4%: add temperature scaling; affine scaling gains 21.3%.'
    """
    if not calibrators:
        raise ValueError("`calibrators` must contain at least one calibrator, got none. Omit it to use the default.")
    gains: dict[str, float] = {}
    raw = torch.tensor(torch.nan)
    names = [calibrator.name for calibrator in calibrators]
    for name, calibrator in zip(names, calibrators, strict=True):
        raw, after = both_scores(preds, target, task, score, calibrator, options)
        if raw.dim():
            raise ValueError(f"`preds` must have no batch axes, got {tuple(raw.shape)}. Pass one data set.")
        gains[name if names.count(name) == 1 else repr(calibrator)] = float(100 * (1 - after / raw))
    return recommendation_of(_name_of_score(score), float(raw), gains, worthwhile)


def recommendation_of(score: str, raw: float, gains: Mapping[str, float], worthwhile: float = 5.0) -> Recommendation:
    """Return the recommendation for gains in percent of the raw score, in the order of preference."""
    best, *others = gains
    for name in others:
        # A gain is NaN if the score stays infinite, or is undefined.
        if math.isnan(gains[best]) or gains[name] > max(gains[best], 1.1 * gains[best]):
            best = name if not math.isnan(gains[name]) else best
    text = _in_words(_SCORE_NAMES.get(score, score), raw, gains, best, worthwhile)
    return Recommendation(text, score, raw, gains, best if gains[best] >= worthwhile else None)


def _name_of_score(score: Score) -> str:
    if isinstance(score, str):
        return score
    return getattr(getattr(score, "func", score), "__name__", "score")  # `func` is the function in a functools.partial


def _in_words(score: str, raw: float, gains: Mapping[str, float], best: str, worthwhile: float) -> str:
    gain = gains[best]
    rest = "".join(f"; {name} {_gains(value)}" for name, value in gains.items() if name != best)
    if gain >= worthwhile:
        return f"Calibration would cut {score} by {gain:.1f}%: add {best}{rest}."
    if gain > 0:
        return f"Calibration would cut {score} by {gain:.1f}% only ({best}): leave the predictions as they are."
    if math.isnan(raw):
        return f"{score} is undefined, and so is the gain of calibration."
    if raw == 0:
        return f"{score} is 0: there is nothing to gain by calibration."
    return f"No calibrator lowers {score} ({best} {_gains(gain)}): leave the predictions as they are."


def _gains(value: float) -> str:
    if math.isfinite(value):
        return f"gains {round(value, 1) + 0:.1f}%"  # + 0 turns -0 into 0
    return "leaves it infinite" if math.isnan(value) else "makes it infinite"
