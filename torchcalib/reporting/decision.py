"""The decision of a report on calibration, and the causes among which it chooses.

A calibrated model gets a verdict that names a cause with a probability of about `LEVEL`: half of it for the test of the
expected calibration error (ECE), and half for all causes together (Bonferroni). The tests of causes are chi-squared
approximations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from torchcalib.reporting.results import LineInterval

Kind = Literal[
    "calibrated",
    "too little data",
    "one class",
    "clusters",
    "over-confidence",
    "under-confidence",
    "spread",
    "class bias",
    "label noise",
    "bad class",
    "bad label",
    "bad group",
    "other classes",
    "swapped classes",
    "confusion",
    "uneven",
]

LEVEL = 0.05
"""Nominal probability of a wrong alarm for a calibrated model, and level of a cause if ECE is significant."""

ERROR_LEVEL = LEVEL / 2
"""Significance level of ECE."""

CAUSES_LEVEL = LEVEL - ERROR_LEVEL
"""Significance level of all causes together, if ECE is not significant."""


@dataclass(frozen=True)
class Decision:
    """Verdict on the calibration of a model, its cause, and what to do.

    All texts of a report on these questions are fields of its decision.

    Attributes:
        kind: cause: `"over-confidence"`, `"under-confidence"`, `"spread"` (a temperature, without a significant mean
            gap of this sign), `"class bias"`, `"label noise"`, `"bad class"`, `"bad label"`, `"bad group"`,
            `"other classes"` (their probabilities if they are not the top label), `"swapped classes"`, `"confusion"`
            (one label where another class is predicted), or `"uneven"` (other errors in some ranges, or only a
            significant gain of a calibrator). Without a
            significant cause: `"calibrated"`, `"too little data"`, `"one class"` (in the targets), or `"clusters"`
            (which determine the label).
        degree: `"slightly"`, `"clearly"` or `"badly"`, by the debiased root mean squared calibration error (RMSCE).
            Empty without a significant cause. The limits are 0.02 and 0.1. It is `"badly"` only if the lower end of the
            interval is at least 0.02.
        verdict: the decision in few words, such as `"Clearly over-confident"`.
        cause: sentences on the cause, with the values that show it.
        action: sentences on what to do. They contain `Recommendation.text`, if calibrators were evaluated.
        calibrator: name of the calibrator to add; empty for none.
        gain: gain of the calibrator to add, or of the preferred one if none is worthwhile, in percent of `score`.
            None if calibrators were not evaluated.
        interval: 95% interval of `gain`; None if undefined.
        score: name of the score, `"NLL"` or `"Brier score"`.
    """

    kind: Kind
    degree: str
    verdict: str
    cause: str
    action: str
    calibrator: str = ""
    gain: float | None = None
    interval: LineInterval | None = None
    score: str = "NLL"

    @property
    def sentence(self) -> str:
        """Verdict and cause."""
        return f"{self.verdict}. {self.cause}"


class Candidate(NamedTuple):
    """Possible cause with its evidence.

    Attributes:
        kind: the cause.
        statistic: likelihood-ratio or score statistic.
        n_parameters: number of fitted parameters.
        n_choices: number of classes or groups from which one was selected.
        which: index of the selected class, label or group, or row and column of classes; -1 for none.
        value: fitted temperature, slope or rate of label noise; frequency of the label for `"confusion"`; slope of the
            gaps in standard errors for `"bad group"`.
        gap: mean gap of the samples concerned in standard errors; NaN if it was not computed.
        expected: mean probability of the label for `"confusion"`.
    """

    kind: Kind
    statistic: float
    n_parameters: int
    n_choices: int = 1
    which: int = -1
    value: float = math.nan
    gap: float = math.nan
    expected: float = math.nan

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large for a calibrated model (chi-squared, Bonferroni)."""
        half = torch.tensor((self.n_parameters / 2, max(self.statistic, 0) / 2), dtype=torch.float64)
        return min(1.0, self.n_choices * float(torch.special.gammaincc(half[0], half[1])))

    @property
    def penalised(self) -> float:
        """Statistic minus twice the number of parameters, where a selection counts as log(n_choices) parameters."""
        penalty = self.n_parameters + math.log(self.n_choices)
        # Label noise is rarer than over-confidence, from which it is hard to distinguish in small samples.
        return self.statistic - 2 * penalty - (self.kind == "label noise")


def cause_of(candidates: Sequence[Candidate], is_significant: bool) -> Candidate | None:
    """Return the cause with the most evidence; None without a significant one.

    Args:
        candidates: possible causes.
        is_significant: whether the expected calibration error is significant. Otherwise the level of all causes
            together is `CAUSES_LEVEL` (Bonferroni).
    """
    level = LEVEL if is_significant else CAUSES_LEVEL / max(1, len(candidates))
    found = [each for each in candidates if each.p_value < level]
    return max(found, key=lambda each: each.penalised, default=None)
