"""Decide about the calibration of a model, and describe the decision: verdict, cause, degree, and what to do."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.display.words import capitalised, count, ends, listed, percent, rounded, significant
from torchcalib.inference.simulation import BinCells
from torchcalib.io.errors import short_name
from torchcalib.reporting.calibration import FittedCalibrators
from torchcalib.reporting.decision import CAUSES_LEVEL, ERROR_LEVEL, LEVEL, CandidateCause, Z, cause_of
from torchcalib.reporting.diagnosis import evidence_of
from torchcalib.reporting.groups import GroupGaps
from torchcalib.reporting.lines import Data
from torchcalib.results.calibration import CalibrationStage
from torchcalib.results.decision import Decision, Kind
from torchcalib.results.lines import Line, LineInterval

SLIGHT, BAD = 0.02, 0.1
"""Thresholds of the debiased RMSCE: "slightly" below `SLIGHT`, "badly" from `BAD` on, "clearly" between."""

RARE = 0.02
"""Frequency and mean probability below which the ratio of both shows the degree: differences are then always small."""

SLIGHT_RATIO, BAD_RATIO = 1.25, 2.0
"""Thresholds of this ratio or its inverse. The expected number of events, and costs in proportion to it, are wrong by
this factor, and so is the threshold of the best decision (a factor of the odds moves it, by the rule of Bayes)."""

USELESS = 0.98
"""Log loss and Brier score in multiples of those of the class frequencies, from which a model is called useless."""

CLIPPED = 0.1
"""Largest probability to which predictions of probability 0 are clipped. Larger ones are not a matter of rounding."""

_CONFIDENT = 0.6  # confidences above it are called high
_ACCURACY_CHANGE = 0.005  # smallest change of accuracy that is mentioned
_NAME_LENGTH = 40  # maximum length of names in characters
_MOST = 2 / 3  # fraction of labels with a bias of the same sign that are called most labels
_SHOWN_LABELS = 5  # maximum number of labels that are named

_TESTED: dict[Kind, str] = {
    "over-confidence": "a temperature",
    "under-confidence": "a temperature",
    "class bias": "class biases",
    "label noise": "label noise",
    "bad class": "a temperature for each predicted class",
    "bad label": "each label",
    "other classes": "a temperature for the classes below the top label",
    "swapped classes": "swapped classes",
    "confusion": "pairs of predicted class and label",
    "bad group": "each group",
}
"""Names of the tested causes in the sentence on a calibrated model."""

_ACTIONS: dict[Kind, str] = {
    "label noise": "Label noise is one explanation: check the labels of the most confident errors.",
    "bad class": "Check the labels and the training data of {name}.",
    "bad label": "Check the data of {name}, or calibrate it separately.",
    "bad group": "Check the labels and the training data of this group, or calibrate it separately.",
    "swapped classes": "Check the order of the classes, and the labels of these two.",
    "confusion": "Check the order of the classes, and the labels of these two.",
    "other classes": "The top label is not affected. Calibrate only if you use the probabilities of other classes.",
}
"""Sentence on what to do about a cause; {name} is the class or label concerned."""


_SEPARATE: tuple[Kind, ...] = ("bad label", "bad group")
"""Causes that need another calibrator than the compared ones, so that a small gain is no reason to change nothing."""


def _sign(z: float) -> int:
    """Return the sign of a gap in standard errors, 0 unless it is significant at level 5%."""
    return 0 if not abs(z) >= Z else 1 if z > 0 else -1


class Findings:
    """Evidence for causes of miscalibration, and the cause with the most evidence.

    `lines` are all lines of a report with their noise floors, p-values and intervals, by key. `class_names` may be
    empty. Statistics are divided by `design_effect`. `n_clusters` is None for independent samples, `fits` (to all
    samples) if calibrators are omitted, and `label_p_values` (of ECE of each label, adjusted) unless the task is
    multi-label.
    """

    def __init__(
        self,
        data: Data,
        lines: Mapping[str, Line],
        class_names: Sequence[str] = (),
        design_effect: float = 1.0,
        n_clusters: int | None = None,
        fits: FittedCalibrators | None = None,
        label_p_values: Tensor | None = None,
    ) -> None:
        self.data, self.class_names, self.n_clusters = data, class_names, n_clusters
        self.task, self.are_confidences = data.task, data.catalogue.are_confidences
        # Whether confidence is that of a predicted class or of an answer.
        self.is_top_label = self.task == "multiclass" or self.are_confidences
        mode, bins = data.main_mode, data.main_bins
        self.table = data.tables[mode]
        self.confidence, self.frequency = (float(self.table.mean(name)) for name in ("confidence", "frequency"))
        self.ece, self.size = lines[f"ece/{mode}"], lines[f"rmsce_debiased/{mode}"]
        self.classwise_size = lines.get("rmsce_debiased/classwise") if self.task == "multiclass" else None
        # NLL and Brier score relative to those of the class frequencies
        scores = lines["nll"], lines["brier"]
        self.nce, self.nbs = (line.value / line.naive if line.naive > 0 else math.nan for line in scores)
        self.n_impossible = sum(k for k, _ in data.impossible)
        is_above = self.ece.value > (self.ece.noise_floor or 0.0)
        self.is_significant = self.ece.p_value is not None and self.ece.p_value < ERROR_LEVEL and is_above
        # All labels are pooled.
        self.bins = BinCells.from_bins(bins).map(lambda x: x.reshape(-1, x.shape[-1]).sum(0).double())
        self.bins = self.bins.with_noise_times(self.bins.n.new_tensor(max(1.0, design_effect)))
        self.residuals = self.bins.outcomes - self.bins.expected
        # -1 for bins of binary predictions in which y = 0 is more probable, otherwise 1.
        ones, confidence = torch.ones_like(self.bins.n), self.bins.confidence
        is_below = (confidence < 0.5) & (self.bins.n > 0)
        self.sides = ones if self.is_top_label else torch.where(is_below, -ones, ones)
        # Confidence in the predicted outcome. High is at least 0.6, or the largest one below.
        self.confidence_of_bins = torch.where(self.sides < 0, 1 - confidence, confidence)
        self.threshold = min(_CONFIDENT, float(self.confidence_of_bins.max()))
        self.is_high = self.confidence_of_bins >= self.threshold
        # 1 for significant under-confidence in the predicted outcome, -1 for over-confidence, otherwise 0.
        self.direction = _sign(self.z(self.sides))
        self.evidence = None
        if data.predictions is not None and fits is not None:
            self.evidence = evidence_of(data.predictions, fits.fits, fits.nll, design_effect)
        self.groups = None
        if data.groups is not None and data.groups[0]:
            self.groups = GroupGaps.from_bins(*data.groups, design_effect)
        self.label_p_values = label_p_values
        self.labels = None
        if label_p_values is not None:
            self.labels = GroupGaps.from_bins(range(len(label_p_values)), bins, design_effect)
        found = [] if self.evidence is None else list(self.evidence.candidates)
        groups = self.groups if self.groups is not None and len(self.groups.names) > 1 else None
        # Without the predictions, faults that all groups share are not tested, such as a temperature.
        if groups is not None and (self.evidence is not None or groups.p_value_of_differences() < LEVEL):
            found.append(groups.worst_group)
        self.candidates = found if self.labels is None else [*found, self.labels.worst_label]
        self.cause = self._cause()
        # With a reversed order of confidences, no positive scale is best.
        self.is_reversed = (
            self.cause is not None and self.cause.kind == "over-confidence" and math.isinf(self.cause.value)
        )
        self.degree = ""
        if self.cause is not None and data.only_class is None:
            self.degree = degree_of(self.size_of(self.cause), self.ratio_of(self.cause))
        # Smallest gain in percent that justifies a calibrator.
        self.worthwhile = 5.0 if self.cause is None or self.degree == "slightly" else 0.0

    def z(self, factor: Tensor | float = 1.0) -> float:
        """Return the sum of the gaps of bins, multiplied by a factor `(B,)`, in standard errors."""
        total = float((factor * self.residuals).sum())
        noise = float((factor * factor * self.bins.noise).sum())
        return total / math.sqrt(noise) if noise else 0.0

    @property
    def is_useless(self) -> bool:
        """Whether neither NLL nor Brier score is lower than for the class frequencies."""
        return not self.are_confidences and self.nce >= USELESS and self.nbs >= USELESS

    @property
    def is_faulty(self) -> bool:
        """Whether the verdict is miscalibration."""
        return self.cause is not None or self.n_impossible > 0

    def _cause(self) -> CandidateCause | None:
        uneven = CandidateCause("uneven", math.inf, 1) if self.is_significant else None
        if self.evidence is not None or uneven is None:
            return cause_of(self.candidates, self.is_significant) or uneven
        # Without the predictions, the bins show a bias or over-confidence, which precede gaps of a group or a label.
        if abs(self.frequency - self.confidence) < self.ece.value / 2 or not _sign(self.z()):
            return cause_of(self.candidates, is_significant=False) or uneven
        if self.task != "multiclass":
            return CandidateCause("class bias", math.inf, 1, which=0)
        return CandidateCause("over-confidence" if self.direction < 0 else "under-confidence", math.inf, 1)

    def size_of(self, cause: CandidateCause | None) -> Line:
        """Return the debiased RMSCE that shows the degree: that of a bad group, or class-wise for faults of classes.

        The class-wise RMSCE is only used if it is the larger one.
        """
        if cause is not None and cause.kind == "bad group" and self.groups is not None:
            value, interval = self.groups.rmsce_of(cause.which)
            return replace(self.size, value=value, interval=LineInterval(*interval))
        of_classes = ("class bias", "other classes", "swapped classes", "confusion")
        classwise = self.classwise_size if cause is not None and cause.kind in of_classes else None
        return classwise if classwise is not None and classwise.value > self.size.value else self.size

    def ratio_of(self, cause: CandidateCause | None) -> "Ratio | None":
        """Return the ratio of the frequency of events and their mean prediction; None unless both are rare.

        Events are outcomes 1, or 0 if these are rare; errors of the top label; or labels of the class of a class bias.
        """
        if cause is not None and cause.kind == "bad group":
            return None
        mean, frequency = self.confidence, self.frequency
        if cause is not None and cause.kind == "class bias" and self.task == "multiclass" and self.evidence is not None:
            mean, frequency = (float(x[cause.which]) for x in (self.evidence.mean, self.evidence.frequency))
            event = f"Labels of {self.name(cause.which)}"
        elif self.is_top_label:
            mean, frequency, event = 1 - mean, 1 - frequency, "Errors"
        else:
            outcome = 0 if max(mean, frequency) >= RARE else 1
            if outcome == 0:
                mean, frequency = 1 - mean, 1 - frequency
            event = f"Events ({self.name(outcome)})" if self.task == "binary" else "Events"
        if not 0 < mean < RARE or frequency >= RARE:
            return None
        # Number of independent rows with the same standard error
        n, noise, confidence = self.bins.n, float(self.bins.noise.sum()), self.bins.confidence
        rows = float(n.sum())
        if noise:
            rows *= float((n * confidence * (1 - confidence)).sum()) / noise
        return Ratio.from_counts(event, frequency * rows, mean * rows)

    def name(self, index: int) -> str:
        """Return the display name of a class or label; for a binary task without names y = 0 or y = 1."""
        if self.class_names:
            return short_name(self.class_names[index], _NAME_LENGTH)
        if self.task == "binary":
            return f"y = {index}"
        return f"{'label' if self.task == 'multilabel' else 'class'} {index}"

    def names(self, indices: Sequence[int]) -> str:
        """Return the display names of at most five classes or labels."""
        return listed([*map(self.name, indices[:_SHOWN_LABELS]), *["others"] * (len(indices) > _SHOWN_LABELS)])

    def pair(self, cause: CandidateCause) -> tuple[str, str]:
        """Return the names of the two classes concerned."""
        assert self.evidence is not None  # the cause is part of the evidence
        first, second = divmod(cause.which, len(self.evidence.mean))
        return self.name(first), self.name(second)


class Ratio(NamedTuple):
    """Frequency of events divided by their mean prediction, with a 95% interval."""

    event: str
    value: float
    low: float
    high: float

    @classmethod
    def from_counts(cls, event: str, observed: float, expected: float) -> Self:
        """Return the ratio of observed to expected numbers of events, with the interval of Byar for a Poisson count.

        Reference:
            Breslow, Day: Statistical methods in cancer research, volume II (IARC, 1987), eq. 2.13.
        """
        more = observed + 1
        low = observed * (1 - 1 / (9 * observed) - Z / (3 * math.sqrt(observed))) ** 3 if observed else 0.0
        high = more * (1 - 1 / (9 * more) + Z / (3 * math.sqrt(more))) ** 3
        return cls(event, observed / expected, max(0.0, low) / expected, high / expected)

    @property
    def sentence(self) -> str:
        """Sentence with the ratio and its interval; empty if the interval contains 1."""
        if self.low <= 1 <= self.high:
            return ""
        interval = f"(95% interval {ends(self.low, self.high)})"
        return f" {self.event} are {self.value:.2g} times as frequent as predicted {interval}."


def degree_of(size: Line, ratio: Ratio | None) -> str:
    """Return the degree of miscalibration by RMSCE, or by the ratio of rare events if it is higher."""
    ends_of_size = (size.value, size.value) if size.interval is None else (size.interval.low, size.interval.high)
    degree = _degree(size.value, *ends_of_size, SLIGHT, BAD)
    if ratio is None or degree in ("clearly", "badly"):
        return degree
    logs = [math.log(max(x, 1e-9)) for x in ratio[1:]]
    value, low, high = logs if logs[0] >= 0 else (-logs[0], -logs[2], -logs[1])
    return _degree(value, low, high, math.log(SLIGHT_RATIO), math.log(BAD_RATIO))


def _degree(value: float, low: float, high: float, slight: float, bad: float) -> str:
    """Return the degree of a size with a 95% interval; empty if the interval does not show it.

    A degree above "slightly" needs an interval above the next lower limit, which is 0 for "clearly". "Slightly" needs
    an interval below the limit of "badly".
    """
    if value >= bad and low >= slight:
        return "badly"
    if value >= slight:
        return "clearly" if low > 0 else ""
    return "slightly" if high < bad or math.isnan(high) else ""


def decide(found: Findings, stage: CalibrationStage | None) -> Decision:
    """Return the decision: the cause with the most evidence, its degree, and what to do.

    The recommendation of `stage` must be for `found.worthwhile`. `stage` is None if calibrators were omitted.
    """
    if (untestable := _untestable(found)) is not None:
        return untestable
    decision = _decided(found, stage)
    if found.n_impossible:
        verdict, rest = "outcomes with predicted probability 0 occurred", decision.verdict
        if decision.is_fault:
            verdict = f"{capitalised(verdict)}; {rest[:1].lower()}{rest[1:]}"
        else:
            verdict = f"Not calibrated: {verdict}"
        occurred = capitalised("; ".join(_impossible_in_words(found)))
        words = f"{occurred}. This has probability 0 if the model is calibrated; errors over bins do not show it."
        decision = replace(
            decision,
            kind="impossible outcomes",
            verdict=verdict,
            cause=_joined(words, decision.cause),
            action=_joined(_remedy(found.data), decision.action),
        )
    if stage is None:
        return decision
    recommended = stage.recommendation
    interval = None if recommended.interval is None else LineInterval(*recommended.interval)
    return replace(
        decision,
        calibrator=recommended.best or "",
        gain=recommended.gain,
        interval=interval,
        score=recommended.score_name,
    )


def _decided(found: Findings, stage: CalibrationStage | None) -> Decision:
    advice = "" if stage is None else stage.recommendation.text
    if found.cause is not None:
        return _with_cause(found, found.cause, stage)
    if found.data.clusters_determine_label:
        return Decision(
            "clusters",
            "",
            "Clusters determine the label",
            f"All samples of a cluster have the same label, so that their errors cannot be separated from those of the "
            f"cluster. No significant miscalibration was found in {found.n_clusters or 0:,} clusters.",
            _joined(advice, "Use clusters that contain several labels, or evaluate one sample of each cluster."),
        )
    if stage is not None and stage.recommendation.best is not None:
        largest = max(filter(None, (found.size, found.classwise_size)), key=lambda line: line.value)
        degree = degree_of(largest, found.ratio_of(None))
        return Decision(
            "uneven",
            degree,
            capitalised(f"{degree} miscalibrated: calibration lowers {stage.recommendation.score_name}".strip()),
            f"{_ece_in_words(found)}. This error and the tested causes are not significant, but the gain by "
            f"{stage.recommendation.best} is.",
            advice,
        )
    floor, relative, other = found.ece.noise_floor or 0.0, _relative(found), "other " * (found.n_impossible > 0)
    high = found.size.interval.high if found.size.interval is not None else floor
    tested = _ece_in_words(found)
    if floor >= BAD or high >= BAD:
        n_units, units = found.data.effective_n, "samples"
        if found.n_clusters is not None:
            n_units, units = float(found.n_clusters), "clusters"
        n = math.ceil(n_units * max((floor / SLIGHT) ** 2, (high / BAD) ** 2))
        unit = 10 ** (len(str(n)) - 1)
        rounded = int(math.ceil(n / unit) * unit)  # up to one significant digit
        upper = f"; an RMSCE of {significant(high)} is not excluded" if high >= BAD else ""
        return Decision(
            "too little data",
            "",
            "Too little data",
            f"This sample is too small to detect {other}miscalibration: {tested}{upper}.{relative}",
            _joined(advice, f"Evaluate the model on about {rounded:,} {units}."),
        )
    causes = list(dict.fromkeys(_TESTED[each.kind] for each in found.candidates))
    also = f" No other cause is significant: {listed(causes)}." if causes else " Other causes were not tested."
    verdict, action = "Calibrated", "" if found.is_faulty else "No action is needed."
    if found.is_useless:
        how = "no" if found.nce >= 0.9995 else "hardly"  # from 99.95% on, which is rounded to 100%
        verdict += f", but {how} better than always predicting the class frequencies"
        action = "Check the inputs of the model."
    cause = f"No {other}significant miscalibration was found. {tested}.{also}{relative}"
    return Decision("calibrated", "", verdict, cause, advice or action)


def _remedy(data: Data) -> str:
    decimals = data.decimals
    if decimals == 0:
        return "All predictions are 0 or 1: evaluate probabilities instead of decisions."
    # Clip predictions to the frequency of these outcomes, with half an event more. Fractional weights have no unit.
    half = 0.5 if data.weights_are_copies else 0.0
    n_excluded = data.num_classes - 1 if data.task == "multiclass" else 1  # classes that share the frequency
    rates = [float(f"{(k + half) / (m + 2 * half) / n_excluded:.2g}") if m else 0.0 for k, m in data.impossible]
    if max(rates) > CLIPPED:
        return "Check the labels and the inputs of these rows: certain predictions are often wrong."
    low, high = rates[0], 1 - sum(rates[1:])  # a multi-class task has one rate
    bounds = f"between {low:g} and {high:g}" if low else f"at most {high:g}"
    bounds = bounds if high < 1 else f"at least {low:g}"
    if decimals is None:
        return f"Clip probabilities to values {bounds}."
    rounded = f"Predictions are rounded to {decimals} decimal{'s' * (decimals > 1)}"
    return f"{rounded}: use more digits, or clip probabilities to values {bounds}."


def _impossible_in_words(found: Findings) -> Iterator[str]:
    for (k, m), outcome in zip(found.data.impossible, (1, 0), strict=False):
        if not k:
            continue
        n = f"{count(k)} of {count(m)}" if found.data.weights_are_copies else f"{percent(k / m)} of the"
        if found.task == "multiclass":
            yield f"{n} labels had predicted probability 0"
        elif found.are_confidences:
            are = "is" if k == 1 and found.data.weights_are_copies else "are"
            yield f"{n} answers with confidence {1 - outcome} {are} {'correct' if outcome else 'wrong'}"
        elif found.task == "binary":
            yield f"in {n} rows with P({found.name(1)}) = {1 - outcome}, {found.name(outcome)} occurred"
        else:
            yield f"in {n} entries with predicted probability {1 - outcome}, outcome {outcome} occurred"


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _untestable(found: Findings) -> Decision | None:
    if (only := found.data.only_class) is not None:
        verdict = f"Only {found.name(only)} in the targets"
        if found.are_confidences:
            verdict = f"All answers are {'correct' if only else 'wrong'}"
        elif found.task == "multilabel":
            verdict = f"Only {only} in the targets of all labels"
        cause = f"Calibration cannot be evaluated with one outcome: {_means(found)}."
        action = "Check that `target` is the right array, and evaluate more data."
        return Decision("one class", "", verdict, cause, action)
    is_empty = found.data.main_bins.n.sum(-1) == 0
    empty = [] if found.labels is None else is_empty.nonzero().squeeze(-1).tolist()
    if found.n_clusters is not None and found.n_clusters < 2:
        cause = "All rows are in one cluster, and tests and intervals need several clusters."
        action = "Evaluate more clusters, or omit `clusters` if rows are independent."
    elif empty:
        cause = f"No entry is known for {found.names(empty)}, so that averages over labels are undefined."
        action = "Leave out the labels without known entries."
    else:
        return None
    return Decision("too little data", "", "Too little data", cause, action)


def _ece_in_words(found: Findings) -> str:
    mode = {"multiclass": " of the top label", "multilabel": " of all labels"}.get(found.task, "")
    value, floor = significant(found.ece.value), significant(found.ece.noise_floor or 0.0)
    return f"ECE{mode} is {value}, and {floor} is expected if the model is calibrated"


def _relative(found: Findings) -> str:
    """Return a sentence on NLL and Brier score relative to the class frequencies, if NLL is not lower; else ""."""
    if found.are_confidences or not found.nce >= USELESS:
        return ""
    of = "of that of the class frequencies"
    if math.isinf(found.nce):
        words = " NLL is infinite."
    else:
        words = f" NLL is {percent(found.nce)} {of}."
        if found.is_useless:
            return words
    return words + (f" Brier score is {percent(found.nbs)} {of}." if found.nbs < math.inf else "")


def _with_cause(found: Findings, cause: CandidateCause, stage: CalibrationStage | None) -> Decision:
    kind, words, badge = _described(found, cause)
    size, ratio = found.size_of(cause), found.ratio_of(cause)
    is_classwise = size is found.classwise_size
    name = "Class-wise RMSCE" if is_classwise else f"RMSCE{' of the group' * (kind == 'bad group')}"
    interval = "" if size.interval is None else f" (95% interval {size.interval})"
    in_words = f"{name}, debiased: {significant(size.value)}{interval}."
    words = f"{_affected_labels(found)}{words}{'' if ratio is None else ratio.sentence}"
    # ECE of the top label does not measure errors of other classes.
    words += f" {in_words}" * is_classwise
    words += " The size of the error is uncertain." * (found.degree == "") + _relative(found)
    action = _action(found, cause, kind, stage)
    return Decision(kind, found.degree, capitalised(f"{found.degree} {badge}".strip()), words, action, in_words)


def _affected_labels(found: Findings) -> str:
    """Return a sentence on the number of miscalibrated labels; empty for other tasks, or if none is significant."""
    p_values = found.label_p_values
    labels = [] if p_values is None else significant_labels(p_values)
    if p_values is None or not labels:
        return ""
    n = len(p_values)
    which = "" if len(labels) == n else f": {found.names(labels)}"
    return f"{len(labels)} of {n} labels {'is' if len(labels) == 1 else 'are'} significantly miscalibrated{which}. "


def significant_labels(p_values: Tensor) -> list[int]:
    """Return the labels with an adjusted p-value below 5%, the smallest first."""
    return [k for k in p_values.argsort(stable=True).tolist() if p_values[k] < LEVEL]


def _action(found: Findings, cause: CandidateCause, kind: Kind, stage: CalibrationStage | None) -> str:
    sentences = ["Fit a calibrator of torchcalib.calibration to held-out data."]
    if stage is not None:
        is_advised = stage.recommendation.best is not None or kind not in _SEPARATE
        sentences = [stage.recommendation.text, _change_of_accuracy(found, stage)] if is_advised else []
    if found.is_reversed:
        sentences.append("Check the order of the classes and the labels.")
    if kind in _ACTIONS:
        name = found.name(cause.which) if kind in ("bad class", "bad label") else ""
        sentences.append(_ACTIONS[kind].format(name=name))
    if kind == "class bias" and found.task == "binary" and found.evidence is not None:
        threshold = float((-found.evidence.bias[0]).sigmoid())
        if math.isfinite(threshold):
            sentences.append(f"Without a calibrator, use the decision threshold {threshold:.3g} instead of 0.5.")
    return _joined(*sentences)


def _change_of_accuracy(found: Findings, stage: CalibrationStage) -> str:
    """Return a sentence on the change of accuracy by the advised calibrator; empty unless it is large.

    Calibrated confidences do not change the answers, and therefore not their accuracy. With a reversed order of
    confidences, the best calibrator makes all predictions equal, and their accuracy is arbitrary.
    """
    best, before = stage.recommendation.best, stage.raw.accuracy
    after = next((line.accuracy for line in stage.lines if line.calibrator == best), before)
    if found.are_confidences or found.is_reversed or abs(after - before) < _ACCURACY_CHANGE:
        return ""
    return f"It {'raises' if after > before else 'lowers'} accuracy from {before:.1%} to {after:.1%}."


def _described(found: Findings, cause: CandidateCause) -> tuple[Kind, str, str]:
    """Return the kind, sentences on the cause, and the badge without its degree.

    A gap with the sign of the words must be significant. Otherwise the words are neutral.
    """
    kind = cause.kind
    if found.are_confidences and kind in ("class bias", "over-confidence", "under-confidence"):
        kind = "under-confidence" if found.direction > 0 else "over-confidence"
        cause = CandidateCause(kind, cause.statistic, 1, value=math.nan if cause.kind == "class bias" else cause.value)
    if kind == "label noise" and not _agrees_with_label_noise(found, cause.value):
        kind = "uneven"
    elif kind == "label noise" and _sign(found.z(found.sides * found.is_high)) >= 0:
        kind = "over-confidence" if found.direction < 0 else "spread"
        cause = CandidateCause(kind, cause.statistic, 1)
    if kind in ("over-confidence", "under-confidence") and found.direction != (-1 if kind == "over-confidence" else 1):
        kind = "spread"
    return kind, *_words(found, cause, kind)


def _agrees_with_label_noise(found: Findings, rate: float) -> bool:
    """Return whether the gaps of bins agree with random labels for a fraction `rate` of the samples.

    The gaps of probability q are then proportional to 1 / C - q. Two other components must not be significant. One is
    under-confidence, proportional to q (1 - q) (logit q + log(C - 1)). It remains if some ranges are over- and others
    under-confident. The other is a difference between probabilities above and below 0.5, for binary predictions.
    """
    bins = found.bins
    used = (bins.n > 0) & (bins.noise > 0)
    q, n, total, noise = (x[used] for x in (bins.confidence, bins.n, found.residuals, bins.noise))
    n_classes = 2 if found.evidence is None or found.task != "multiclass" else len(found.evidence.mean)
    q = q.clamp(1e-6, 1 - 1e-6)
    noisy = (1 - rate) * q + rate / n_classes
    noise = noise * noisy * (1 - noisy) / (q * (1 - q))  # variance with label noise, which is larger near 0 and 1
    components = [1 / n_classes - q, q * (1 - q) * (q.logit() + math.log(n_classes - 1))]
    components += [] if found.is_top_label else [components[0] * found.sides[used]]
    design = torch.stack(components, -1) * (n / noise.sqrt()).unsqueeze(-1)
    covariance = torch.linalg.pinv(design.T @ design, hermitian=True)
    z = (covariance @ design.T @ (total / noise.sqrt()) / covariance.diagonal().sqrt()).nan_to_num(0, 0, 0).tolist()
    return _sign(z[1]) <= 0 and not any(map(_sign, z[2:]))


def _words(found: Findings, cause: CandidateCause, kind: Kind) -> tuple[str, str]:
    temperature = _temperature(cause)
    match kind:
        case "over-confidence" | "under-confidence":
            over = cause.kind == "over-confidence"
            words = f"Probabilities are too {'close to 0 and 1' if over else 'far from 0 and 1'}{temperature}."
            if found.is_top_label:
                words = f"Confidence is too {'high' if over else 'low'}: {_means(found)}{temperature}."
            return words + _also(found), f"{'over' if over else 'under'}-confident"
        case "spread":
            words = f"Probabilities are not spread correctly{temperature}; {_means(found)}.{_also(found)}"
            return words, "miscalibrated in the spread of probabilities"
        case "class bias":
            mean, frequency, z = found.confidence, found.frequency, found.z()
            if found.evidence is not None:
                of_class = (x[cause.which] for x in (found.evidence.mean, found.evidence.frequency, found.evidence.gap))
                mean, frequency, z = map(float, of_class)
            high = "high" if mean > frequency else "low"
            if not _sign(z):
                words, badge = "Class frequencies differ from the mean probabilities of the classes.", "biased"
            elif found.task == "binary":
                words = f"P({found.name(1)}) is too {high}: {_means(found)}."
                badge = f"biased towards {found.name(1 if mean > frequency else 0)}"
            elif found.task == "multilabel" and _most_labels(found) == (mean > frequency) and _sign(found.z()):
                words, badge = f"Probabilities are too {high}: {_means(found)}.", f"too {high} probabilities"
            else:
                words, badge = _bias_of(found.name(cause.which), mean, frequency)
            return words + _also(found), badge
        case "label noise":
            n, is_high = found.bins.n, found.is_high
            total = float(n[is_high].sum())
            mean = float((n * found.confidence_of_bins)[is_high].sum()) / total
            frequency = mean + float((found.sides * found.residuals)[is_high].sum()) / total
            what, outcome = "the probability of an outcome", "the frequency of this outcome"
            if found.is_top_label:
                what, outcome = "confidence", "accuracy"
            words = (
                f"Where {what} is at least {found.threshold:.0%}, its mean is {mean:.1%}, but {outcome} is "
                f"{frequency:.1%}. Label noise is one explanation: random labels for {percent(cause.value)} of the "
                "samples."
            )
            return words, "flatter than predicted at high confidence"
        case "bad class":
            name, over = found.name(cause.which), cause.value > 1
            if _sign(cause.gap) != (-1 if over else 1):
                words = f"Probabilities are not spread correctly where {name} is predicted{temperature}."
                return words, f"miscalibrated for {name}"
            return (
                f"Confidence is too {'high' if over else 'low'} where {name} is predicted{temperature}; the evidence "
                "for other classes is weaker.",
                f"{'over' if over else 'under'}-confident for {name}",
            )
        case "bad label":
            assert found.labels is not None  # the cause is only considered with labels
            name = found.name(cause.which)
            if not _sign(cause.gap):
                return f"Probabilities of {name} are not spread correctly.", f"miscalibrated for {name}"
            return _bias_of(name, *found.labels.gap_of(found.labels.names.index(cause.which))[:2])
        case "bad group":
            assert found.groups is not None  # the cause is only considered with groups
            name = short_name(found.groups.names[cause.which], _NAME_LENGTH)
            is_slope = abs(cause.gap) < abs(cause.value)
            of_outcome = is_slope and not found.is_top_label
            mean, frequency, (lower, upper) = found.groups.gap_of(cause.which, confident=of_outcome)
            if of_outcome:
                means = (
                    f"the mean probability of the more probable outcome is {mean:.1%}, its frequency {frequency:.1%}"
                )
            else:
                means = _means(found, (mean, frequency))
            if is_slope:
                what = f"Probabilities are too {'far from' if cause.value > 0 else 'close to'} 0 and 1"
            else:
                score = "Confidence" if found.is_top_label else "The probability"
                what = f"{score} is too {'low' if cause.gap > 0 else 'high'}"
            n_groups = len(found.groups.names)
            return (
                f"{what} in group {name}: {means}. The gap is {rounded(100 * (frequency - mean))} percentage points "
                f"(95% interval {ends(100 * lower, 100 * upper)}, adjusted for the choice among {n_groups:,} groups).",
                f"miscalibrated in group {name}",
            )
        case "other classes":
            words = "Below the top label, classes with a higher probability are not more frequent."
            if not math.isinf(cause.value):
                change = "unequal" if cause.value > 1 else "similar"
                words = f"Probabilities of the classes below the top label are too {change}{temperature}."
            return words, "miscalibrated below the top label"
        case "swapped classes":
            first, second = found.pair(cause)
            return (
                f"If the label is {first} or {second}, it is usually the one with the smaller probability "
                f"(slope of the log-odds {cause.value:.2g} instead of 1). The two classes may be swapped.",
                f"miscalibrated for {first} and {second}",
            )
        case "confusion":
            predicted, label = found.pair(cause)
            return (
                f"Where {predicted} is predicted, the mean probability of {label} is {cause.expected:.1%}, its "
                f"frequency {cause.value:.1%}.",
                f"miscalibrated for {label} where {predicted} is predicted",
            )
    table = found.table
    in_errors = (found.residuals / found.bins.noise.sqrt()).nan_to_num(0)
    gap = (table.gap * table.share).masked_fill((table.n == 0) | (in_errors.abs() < Z), 0)
    parts = []
    for side, words in ((-1, "too high"), (1, "too low")):
        index = int((side * gap).argmax())
        if side * float(gap[index]) > 0:
            parts.append(f"{words} between {float(table.lower[index]):.0%} and {float(table.upper[index]):.0%}")
    what = "confidence" if found.is_top_label else "the probability"
    largest = f"The largest gaps: {what} is {listed(parts)}." if parts else "Probabilities are not spread correctly."
    return largest, "miscalibrated in some ranges"


def _means(found: Findings, means: tuple[float, float] | None = None) -> str:
    """Return mean confidence and frequency as a clause; those of all rows if `means` is None."""
    confidence, frequency = (f"{x:.1%}" for x in means or (found.confidence, found.frequency))
    if found.is_top_label:
        return f"mean confidence is {confidence}, accuracy {frequency}"
    if found.task == "binary":
        return f"mean P({found.name(1)}) is {confidence}, its frequency {frequency}"
    return f"mean probability of labels is {confidence}, their frequency {frequency}"


def _also(found: Findings) -> str:
    also = None if found.evidence is None else found.evidence.also
    if also is None or found.are_confidences or also.p_value >= CAUSES_LEVEL:
        return ""
    if also.kind == "class bias":
        return " There are also significant class biases."
    return f" After correction of the class biases, the error of the spread remains significant{_temperature(also)}."


def _temperature(cause: CandidateCause) -> str:
    if math.isnan(cause.value):
        return ""
    if math.isinf(cause.value):
        return " (confident predictions are not right more often than others)"
    return f" (fitted temperature {cause.value:.3g})"


def _bias_of(name: str, mean: float, frequency: float) -> tuple[str, str]:
    words = f"The mean probability of {name} is {mean:.1%}, its frequency {frequency:.1%}."
    return words, f"biased {'towards' if mean > frequency else 'against'} {name}"


def _most_labels(found: Findings) -> bool | None:
    """Return whether the probabilities of most labels are too high, False if too low; None if neither."""
    if found.evidence is None:
        return found.confidence > found.frequency
    gap = found.evidence.mean - found.evidence.frequency
    large = gap.abs() > gap.abs().max() / 3  # the signs of small gaps are sampling noise
    too_high, too_low = (float((large & (side * gap > 0)).double().mean()) for side in (1, -1))
    return True if too_high >= _MOST else False if too_low >= _MOST else None
