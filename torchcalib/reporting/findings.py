"""Describe the diagnosis of a report in sentences: the cause of miscalibration, its degree, and what to do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.core.words import ends, listed, percent, significant
from torchcalib.io.errors import short_name
from torchcalib.reporting.diagnosis import CAUSE_LEVEL, LEVEL, Candidate, Diagnosis, Evidence, Kind, cause_of
from torchcalib.reporting.results import CalibrationStage, Line

SLIGHT, BAD = 0.02, 0.1
"""Thresholds for ECE minus its noise floor: "slightly" below `SLIGHT`, "badly" from `BAD` on, "clearly" between."""

_ACCURACY_CHANGE = 0.005  # smallest change of accuracy that is mentioned
_NAME_LENGTH = 40  # maximum length of names in characters
_MOST = 2 / 3  # fraction of labels with a bias of the same sign that are called most labels


def _bad_group(gaps: Tensor) -> Candidate:
    index = int(gaps.abs().argmax())
    return Candidate("bad group", float(gaps[index].square()), 1, len(gaps), index, float(gaps[index]))


@dataclass(frozen=True)
class Findings:
    """Input of a diagnosis.

    Attributes:
        task: task of the predictions; `"binary"` for confidences.
        n: sum of weights.
        ece: line of the expected calibration error of the main mode.
        table: bins of the main mode.
        class_names: names of classes or labels; empty if unknown.
        evidence: evidence for causes; None if the predictions are not available.
        stage: cross-validated calibrators; None if omitted.
        groups: names of all groups, and the gap of each group in standard errors `(G,)`; None without groups.
        are_confidences: whether predictions are confidences in answers.
        n_clusters: number of clusters of dependent samples; None if samples are independent.
    """

    task: Task
    n: float
    ece: Line
    table: BinTable
    class_names: Sequence[str] = ()
    evidence: Evidence | None = None
    stage: CalibrationStage | None = None
    groups: tuple[Sequence[str], Tensor] | None = None
    are_confidences: bool = False
    n_clusters: int | None = None

    @property
    def is_top_label(self) -> bool:
        """Whether confidence is that of a predicted class or of an answer."""
        return self.task == "multiclass" or self.are_confidences

    @property
    def is_reversed(self) -> bool:
        """Whether samples with higher confidence are not right more often, so that no positive scale is best."""
        cause = self.cause
        return cause is not None and cause.kind == "over-confidence" and math.isinf(cause.value)

    @property
    def confidence(self) -> float:
        """Mean confidence."""
        return float(self.table.mean("confidence"))

    @property
    def frequency(self) -> float:
        """Mean outcome."""
        return float(self.table.mean("frequency"))

    @property
    def is_significant(self) -> bool:
        """Whether the expected calibration error exceeds its noise floor significantly."""
        return self.ece.p_value is not None and self.ece.p_value < LEVEL and self.excess > 0

    @property
    def excess(self) -> float:
        """Expected calibration error minus its noise floor; the error itself without a noise floor."""
        return self.ece.value - (self.ece.noise_floor or 0.0)

    @property
    def cause(self) -> Candidate | None:
        """Cause with the most evidence; None without a significant one."""
        of_groups = [] if self.groups is None or len(self.groups[0]) < 2 else [_bad_group(self.groups[1])]
        uneven = Candidate("uneven", math.inf, 1) if self.is_significant else None
        if self.evidence is not None:
            return cause_of([*self.evidence.candidates, *of_groups], self.is_significant) or uneven
        difference = self.frequency - self.confidence
        if uneven is None or abs(difference) < self.ece.value / 2:
            return cause_of(of_groups, False) or uneven
        if self.task != "multiclass":
            return Candidate("class bias", math.inf, 1, which=0)
        return Candidate("over-confidence" if difference < 0 else "under-confidence", math.inf, 1)

    def name(self, index: int) -> str:
        """Return the display name of a class or label; for a binary task without names y = 0 or y = 1."""
        if self.class_names:
            return short_name(self.class_names[index], _NAME_LENGTH)
        if self.task == "binary":
            return f"y = {index}"
        return f"{'label' if self.task == 'multilabel' else 'class'} {index}"


def diagnose(found: Findings) -> Diagnosis:
    """Return the diagnosis: the cause with the most evidence, its degree, and what to do."""
    cause = found.cause
    if cause is None:
        return _without_cause(found)
    if found.are_confidences and cause.kind in ("class bias", "over-confidence", "under-confidence", "label noise"):
        kind: Kind = "over-confidence" if found.confidence > found.frequency else "under-confidence"
        cause = Candidate(kind, cause.statistic, 1)
    words, badge = _WORDS[cause.kind](found, cause)
    if found.stage is not None and math.isinf(found.stage.raw.nll):
        words += " NLL is infinite, because an outcome with predicted probability 0 occurred."
    return _diagnosis(found, cause, badge, words)


def _without_cause(found: Findings) -> Diagnosis:
    ece = found.ece
    floor = ece.noise_floor or 0.0
    high = ece.interval.high if ece.interval is not None else floor
    tested = f"ECE is {significant(ece.value)}, and {significant(floor)} is expected if the model is calibrated"
    if floor >= BAD or high >= BAD:
        n_units = found.n if found.n_clusters is None else found.n_clusters
        n = math.ceil(n_units * max((floor / SLIGHT) ** 2, (high / BAD) ** 2))
        upper = f"; an expected ECE of {significant(high)} is not excluded" if high >= BAD else ""
        return Diagnosis(
            "too little data",
            "",
            "too little data to tell",
            f"This sample is too small to detect miscalibration: {tested}{upper}.",
            f"Evaluate the model on about {_rounded(n):,} {'samples' if found.n_clusters is None else 'clusters'}.",
        )
    calibrator = _calibrator_to_add(found.stage)
    return Diagnosis(
        "calibrated",
        "",
        "calibrated",
        f"This sample shows no significant miscalibration: {tested}.",
        "No action is needed." if found.stage is None else _advice(found, found.stage, calibrator),
        calibrator,
    )


def _rounded(n: int) -> int:
    """Round a number of samples up to one significant digit."""
    unit = 10 ** (len(str(n)) - 1)
    return int(math.ceil(n / unit) * unit)


def _diagnosis(found: Findings, cause: Candidate, badge: str, words: str) -> Diagnosis:
    degree = "slightly" if found.excess < SLIGHT else "clearly" if found.excess < BAD else "badly"
    calibrator = _calibrator_to_add(found.stage, degree)
    action = _action(found, cause, calibrator)
    return Diagnosis(cause.kind, degree, f"{degree} {badge}", words, action, calibrator)


def _calibrator_to_add(stage: CalibrationStage | None, degree: str = "") -> str:
    """Return the name of a worthwhile calibrator, or of one with a significant gain if miscalibration is not slight."""
    if stage is None:
        return ""
    is_significant = stage.best.interval is not None and stage.best.interval.low > 0
    is_needed = is_significant and degree in ("clearly", "badly")
    return stage.name if stage.recommendation.best is not None or is_needed else ""


def _action(found: Findings, cause: Candidate, calibrator: str) -> str:
    if found.stage is None:
        sentences = ["Fit a calibrator of torchcalib.calibration to held-out data."]
    else:
        sentences = [_advice(found, found.stage, calibrator)]
    if found.is_reversed:
        sentences.append("Check the order of the classes and the labels.")
    if cause.kind == "label noise":
        sentences.append("Check the labels of the most confident errors.")
    if cause.kind == "bad class":
        sentences.append(f"Check the labels and the training data of {found.name(cause.which)}.")
    if cause.kind == "bad group":
        sentences.append("Check the labels and the training data of this group, or calibrate it separately.")
    if cause.kind == "class bias" and found.task == "binary" and found.evidence is not None:
        threshold = float((-found.evidence.bias[0]).sigmoid())
        if math.isfinite(threshold):
            sentences.append(f"Without a calibrator, use the decision threshold {threshold:.3g} instead of 0.5.")
    return " ".join(sentences)


def _advice(found: Findings, stage: CalibrationStage, calibrator: str) -> str:
    """Return the calibrator to add with its gain in NLL and its change of accuracy, or the advice to add none.

    Calibrated confidences do not change the answers, and therefore not their accuracy.
    """
    raw, best = stage.raw, stage.best
    if not calibrator:
        if best.gain is None or not best.gain > 0:
            return "No calibrator lowers NLL: use the predictions as they are."
        return f"Use the predictions as they are: the best calibrator, {best.calibrator}, cuts NLL by {best.gain:.1f}%."
    interval = "" if best.interval is None else f" (95% interval {ends(best.interval.low, best.interval.high, 3)})"
    gain = f"Add {best.calibrator}: it cuts NLL by {best.gain:.1f}%{interval}"
    change = best.accuracy - raw.accuracy
    if abs(change) < _ACCURACY_CHANGE or found.are_confidences:
        return f"{gain}."
    direction = "raises" if change > 0 else "lowers"
    return f"{gain} and {direction} accuracy from {raw.accuracy:.1%} to {best.accuracy:.1%}."


def _means(found: Findings) -> str:
    """Return mean confidence and frequency as a clause."""
    confidence, frequency = f"{found.confidence:.1%}", f"{found.frequency:.1%}"
    if found.is_top_label:
        return f"mean confidence is {confidence}, accuracy {frequency}"
    if found.task == "binary":
        return f"mean P({found.name(1)}) is {confidence}, its frequency {frequency}"
    return f"mean probability of labels is {confidence}, their frequency {frequency}"


def _over_confident(found: Findings, cause: Candidate) -> tuple[str, str]:
    over = cause.kind == "over-confidence"
    badge = "over-confident" if over else "under-confident"
    temperature = _temperature(cause)
    means = _means(found)
    if found.is_top_label:
        words = f"Confidence is too {'high' if over else 'low'}: {means}{temperature}."
    else:
        words = f"Probabilities are too {'close to 0 and 1' if over else 'far from 0 and 1'}{temperature}."
    return words + _also(found), badge


def _class_bias(found: Findings, cause: Candidate) -> tuple[str, str]:
    mean, frequency = found.confidence, found.frequency
    if found.evidence is not None:
        mean, frequency = (float(x[cause.which]) for x in (found.evidence.mean, found.evidence.frequency))
    if found.task == "binary":
        name = found.name(1 if mean > frequency else 0)
        high = "high" if mean > frequency else "low"
        return f"P({found.name(1)}) is too {high}: {_means(found)}.{_also(found)}", f"biased towards {name}"
    high = "high" if mean > frequency else "low"
    if found.task == "multilabel" and _most_labels(found) == (mean > frequency):
        return f"Probabilities are too {high}: {_means(found)}.{_also(found)}", f"too {high} probabilities"
    name = found.name(cause.which)
    words = f"The mean probability of {name} is {mean:.1%}, its frequency {frequency:.1%}.{_also(found)}"
    return words, f"biased {'towards' if mean > frequency else 'against'} {name}"


def _most_labels(found: Findings) -> bool | None:
    """Return whether the probabilities of most labels are too high, False if too low; None if neither."""
    if found.evidence is None:
        return found.confidence > found.frequency
    gap = found.evidence.mean - found.evidence.frequency
    large = gap.abs() > gap.abs().max() / 3  # the signs of small gaps are sampling noise
    too_high, too_low = (float((large & (sign * gap > 0)).double().mean()) for sign in (1, -1))
    return True if too_high >= _MOST else False if too_low >= _MOST else None


def _also(found: Findings) -> str:
    """Return a sentence on a second cause, if it is significant; otherwise an empty string."""
    also = None if found.evidence is None else found.evidence.also
    if also is None or found.are_confidences or also.p_value >= CAUSE_LEVEL:
        return ""
    if also.kind == "class bias":
        return " There are also significant class biases."
    change = "high" if also.kind == "over-confidence" else "low"
    return f" After a correction of the bias, confidence is too {change}{_temperature(also)}."


def _temperature(cause: Candidate) -> str:
    """Return the fitted temperature in parentheses; empty without a value."""
    if math.isnan(cause.value):
        return ""
    if math.isinf(cause.value):
        return " (confident predictions are not right more often than others)"
    return f" (fitted temperature {cause.value:.3g})"


def _label_noise_words(found: Findings, cause: Candidate) -> tuple[str, str]:
    table = found.table
    last = int((table.n > 0).nonzero().flatten()[-1])
    confidence, frequency = float(table.confidence[last]), float(table.frequency[last])
    outcome = "accuracy" if found.is_top_label else "observed frequency"
    words = (
        f"Where confidence is above {float(table.lower[last]):.0%}, its mean is {confidence:.1%}, but {outcome} is "
        f"{frequency:.1%}. This is consistent with random labels for {percent(cause.value)} of the samples."
    )
    return words, "over-confident at the top"


def _bad_class_words(found: Findings, cause: Candidate) -> tuple[str, str]:
    name = found.name(cause.which)
    change = "high" if cause.value > 1 else "low"
    return (
        f"Confidence is too {change} where {name} is predicted{_temperature(cause)}; the evidence for other classes is "
        "weaker.",
        f"{'over' if cause.value > 1 else 'under'}-confident for {name}",
    )


def _bad_group_words(found: Findings, cause: Candidate) -> tuple[str, str]:
    assert found.groups is not None  # the cause is only considered with groups
    name = short_name(found.groups[0][cause.which], _NAME_LENGTH)
    what = "Confidence" if found.is_top_label else "The probability"
    change = "low" if cause.value > 0 else "high"
    words = f"{what} is too {change} in group {name}: the gap is {abs(cause.value):.2g} standard errors."
    return words, f"off in group {name}"


def _uneven(found: Findings, cause: Candidate) -> tuple[str, str]:  # noqa: ARG001
    table = found.table
    gap = (table.gap * table.share).masked_fill(table.n == 0, 0)
    parts = []
    for sign, words in ((-1, "too high"), (1, "too low")):
        index = int((sign * gap).argmax())
        if sign * float(gap[index]) > 0:
            where = f"{float(table.lower[index]):.0%} and {float(table.upper[index]):.0%}"
            parts.append(f"{words} between {where}")
    what = "confidence" if found.is_top_label else "the probability"
    return f"The largest gaps: {what} is {listed(parts)}." if parts else f"{what} is off.", "off in some ranges"


_WORDS = {
    "over-confidence": _over_confident,
    "under-confidence": _over_confident,
    "class bias": _class_bias,
    "label noise": _label_noise_words,
    "bad class": _bad_class_words,
    "bad group": _bad_group_words,
    "uneven": _uneven,
}
"""Functions from findings and cause to the sentences on the cause and the badge without its degree."""
