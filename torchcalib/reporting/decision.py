"""The decision of a report on calibration, and the causes among which it chooses.

A calibrated model gets a verdict that names a cause with a probability of about `LEVEL`: half of it for the test of the
expected calibration error (ECE), and half for all causes together (Bonferroni). The tests of causes are chi-squared
approximations.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torchcalib.calibration.selection import chi_squared_tail
from torchcalib.display.words import significant
from torchcalib.results.decision import Decision, Kind, Safety
from torchcalib.results.lines import Line

LEVEL = 0.05
"""Nominal probability of a wrong alarm for a calibrated model, and level of a cause if ECE is significant."""

ERROR_LEVEL = LEVEL / 2
"""Significance level of ECE."""

CAUSES_LEVEL = LEVEL - ERROR_LEVEL
"""Significance level of all causes together, if ECE is not significant."""

Z = 1.959963984540054
"""97.5% quantile of the normal distribution, for 95% intervals."""


class CandidateCause(NamedTuple):
    """Possible cause with its evidence."""

    kind: Kind
    statistic: float  # likelihood-ratio or score statistic
    n_parameters: int  # number of fitted parameters
    n_choices: int = 1  # number of classes or groups from which one was selected
    which: int = -1  # index of the selected class, label or group, or row and column of classes; -1 for none
    # Fitted temperature, slope or rate of label noise. For `"confusion"`, the frequency of the label. For
    # `"bad group"`, the slope of the gaps in standard errors.
    value: float = math.nan
    gap: float = math.nan  # mean gap of the samples concerned in standard errors; NaN if it was not computed
    expected: float = math.nan  # mean probability of the label for `"confusion"`
    tail: float = math.nan  # p-value that replaces the chi-squared approximation; NaN if there is none

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large for a calibrated model (chi-squared, Bonferroni), or `tail`."""
        if not math.isnan(self.tail):
            return self.tail
        return min(1.0, self.n_choices * chi_squared_tail(self.statistic, self.n_parameters))

    @property
    def penalised(self) -> float:
        """Statistic minus twice the number of parameters, where a selection counts as log(n_choices) parameters."""
        penalty = self.n_parameters + math.log(self.n_choices)
        # Label noise is rarer than over-confidence, from which it is hard to distinguish in small samples.
        return self.statistic - 2 * penalty - (self.kind == "label noise")


def cause_of(candidates: Sequence[CandidateCause], is_significant: bool) -> CandidateCause | None:
    """Return the cause with the most evidence; None without a significant one.

    `is_significant` refers to the expected calibration error. Otherwise all causes share `CAUSES_LEVEL` (Bonferroni).
    """
    level = LEVEL if is_significant else CAUSES_LEVEL / max(1, len(candidates))
    found = [each for each in candidates if each.p_value < level]
    return max(found, key=lambda each: each.penalised, default=None)


def with_safety(decision: Decision, ecd: Line, threshold: float) -> Decision:
    """Return the decision with its safety: whether over-confidence, measured by ECD, is at most a threshold in nats.

    The 95% interval of ECD decides: a model beyond the threshold gets the wrong answer in about 2.5% of data sets.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, sec. III.B.
    """
    safety: Safety
    found = ecd.interval
    value, limit = f"ECD is {significant(ecd.value)} nats", f"the threshold {threshold:.3g}"
    interval = "" if found is None else f" (95% interval {found})"
    if ecd.value == math.inf or (found is not None and found.low > threshold):
        safety, words = "unsafe", f"Unsafe: {value}{interval}, above {limit}."
    elif found is not None and found.high <= threshold:
        safety, words = "safe", f"Safe: {value}{interval}, at most {limit}."
    else:
        why = "which contains" if found is not None else "without an interval, for"
        safety, words = "cannot be told", f"Whether it is safe cannot be told: {value}{interval}, {why} {limit}."
    return replace(decision, cause=f"{decision.cause} {words}", safety=safety)
