"""Metrics of confidences in answers, for the tools that evaluate language models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

from torchcalib.functional import brier_score, correctness_auroc
from torchcalib.functional.binned import ece
from torchcalib.functional.estimator import factory_of
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.logs.stated import Scale, Stated, stated_by

Pair = tuple[float | str | None, float]
"""Confidence in an answer, and 1 if it is right, else 0.

A number is a fraction. A text, such as "85%" or "85", has the scale of all texts. None stands for no confidence.
"""


def events_of(pairs: Iterable[Pair]) -> tuple[Tensor, Tensor]:
    """Return confidences as fractions, float64 `(n,)`, and outcomes, int64 `(n,)`, of the answers with a confidence.

    Raises:
        ValueError: if the scale is ambiguous, or if an outcome is neither 0 nor 1.
    """
    read: list[tuple[float | Stated, float]] = []
    for confidence, correct in pairs:
        found = stated_by(confidence, {}) if isinstance(confidence, str) else confidence
        if found is not None:
            read.append((found, float(correct)))
    scale = reduce(Scale.including, (each for each, _ in read if isinstance(each, Stated)), Scale())
    if scale.problem:
        raise ValueError(f"Confidences must have a known scale. {scale.problem} Ask for a percent sign.")
    outcomes = [correct for _, correct in read]
    if other := [correct for correct in outcomes if correct not in (0, 1)]:
        raise ValueError(
            f"Outcomes must be 0 or 1, got {other[0]}. Read a log with several epochs by torchcalib.audit."
        )
    fractions = [scale.fraction(each) if isinstance(each, Stated) else float(each) for each, _ in read]
    return torch.tensor(fractions, dtype=torch.float64, device="cpu"), torch.tensor(
        outcomes, dtype=torch.float64, device="cpu"
    ).long()


def _test(confidence: Tensor, correct: Tensor) -> CalibrationTest:
    estimator = factory_of(ece)(task="binary").streamed(None)
    return estimator.test_from(estimator.statistic(confidence, correct, None))


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ece": lambda confidence, correct: ece(confidence, correct, task="binary"),
    "ece_if_calibrated": lambda confidence, correct: _test(confidence, correct).noise_floor,
    "ece_p_value": lambda confidence, correct: _test(confidence, correct).p_value,
    "correctness_brier": lambda confidence, correct: brier_score(confidence, correct, task="binary"),
    "correctness_auroc": lambda confidence, correct: correctness_auroc(confidence, correct, task="binary"),
}
"""Metrics of the confidences that answers are right, with 15 equal-width bins for the expected calibration error."""


def value_of(metric: str, pairs: Iterable[Pair]) -> float:
    """Return a metric in `METRICS` of the answers with a confidence; NaN without any."""
    confidence, correct = events_of(pairs)
    return float(METRICS[metric](confidence, correct)) if len(confidence) else math.nan
