"""Decide about the calibration of a model, and describe the decision: verdict, cause, degree, and what to do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.core.events import NamedMode
from torchcalib.core.sums import BinStats
from torchcalib.display.words import capitalised, ends, listed, percent, significant
from torchcalib.io.errors import short_name
from torchcalib.reporting.calibration import FittedCalibrators
from torchcalib.reporting.decision import CAUSES_LEVEL, ERROR_LEVEL, LEVEL, Candidate, cause_of
from torchcalib.reporting.diagnosis import Evidence, evidence_of
from torchcalib.reporting.groups import gaps_of_groups
from torchcalib.reporting.lines import Data
from torchcalib.results.calibration import CalibrationStage
from torchcalib.results.decision import Decision, Kind
from torchcalib.results.lines import Line, LineInterval

SLIGHT, BAD = 0.02, 0.1
"""Thresholds of the debiased RMSCE: "slightly" below `SLIGHT`, "badly" from `BAD` on, "clearly" between."""

USELESS = 0.98
"""Log loss in multiples of that of the class frequencies, from which a model is called useless."""


_Z = 1.959963984540054  # 97.5% quantile of the normal distribution
_CONFIDENT = 0.6  # confidences above it are called high
_ACCURACY_CHANGE = 0.005  # smallest change of accuracy that is mentioned
_NAME_LENGTH = 40  # maximum length of names in characters
_MOST = 2 / 3  # fraction of labels with a bias of the same sign that are called most labels
_SHOWN_LABELS = 5  # maximum number of miscalibrated labels that are named

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


class Gaps(NamedTuple):
    """Gaps of B bins, with all labels pooled."""

    confidence: Tensor  # mean confidence of each bin `(B,)`; NaN in an empty bin
    n: Tensor  # sum of weights `(B,)`
    total: Tensor  # sum of outcomes minus confidences `(B,)`
    noise: Tensor  # variance of `total` if the model is calibrated `(B,)`

    @classmethod
    def from_bins(cls, bins: BinStats, effect: float = 1.0) -> Self:
        """Return the gaps of bins `(B,)`, or `(L, B)` with labels; `effect` is the design effect of clusters."""
        n, confidence, outcomes = (
            bins.sums[..., row, :].reshape(-1, bins.n.shape[-1]).sum(0).double() for row in range(3)
        )
        noise = bins.noise.reshape(-1, bins.n.shape[-1]).sum(0).double() * max(1.0, effect)
        return cls(confidence / n, n, outcomes - confidence, noise)

    def z(self, factor: Tensor | float = 1.0) -> float:
        """Return the sum of gaps, multiplied by a factor `(B,)`, in standard errors."""
        factor = (
            torch.as_tensor(factor, dtype=torch.float64, device=self.n.device)
            .expand(self.n.shape)
            .masked_fill(self.n == 0, 0)
        )
        total = float((factor * self.total).sum())
        return total / math.sqrt(noise) if (noise := float((factor.square() * self.noise).sum())) else 0.0


def sign(z: float) -> int:
    """Return the sign of a gap in standard errors, 0 unless it is significant at level 5%."""
    return 0 if not abs(z) >= _Z else 1 if z > 0 else -1


def _worst_group(statistics: Tensor) -> Candidate:
    """Return the group with the largest of the statistics `(G, 2)` of `gaps_of_groups`."""
    index, which = divmod(int(statistics.abs().argmax()), 2)
    gap, slope = statistics[index].tolist()
    return Candidate("bad group", float(statistics[index, which]) ** 2, 1, statistics.numel(), index, slope, gap)


class Labels(NamedTuple):
    """Tests of each label of a multi-label task."""

    p_values: Tensor  # p-value of ECE of each label `(L,)`
    gaps: Sequence[Gaps]

    @property
    def miscalibrated(self) -> list[int]:
        """Labels with a p-value below 5% after adjustment for the number of labels (Holm 1979), the smallest first."""
        order = self.p_values.argsort(stable=True).tolist()
        found = []
        for rank, label in enumerate(order):
            if not float(self.p_values[label]) * (len(order) - rank) < LEVEL:
                break
            found.append(label)
        return found

    @property
    def worst(self) -> Candidate:
        """Largest score statistic of a bias and a slope together, and the significant label with the largest ECE."""
        statistics = [_score_of(gaps) for gaps in self.gaps]
        best = Candidate("bad label", max(statistics), 2, len(statistics))
        found = [k for k, each in enumerate(statistics) if best._replace(statistic=each).p_value < LEVEL]
        sizes = [float(gaps.total.abs().sum() / gaps.n.sum()) for gaps in self.gaps]
        which = max(found, key=sizes.__getitem__) if found else statistics.index(max(statistics))
        return best._replace(which=which, gap=self.gaps[which].z())


def _score_of(gaps: Gaps) -> float:
    """Return the score statistic of an intercept and a slope of the log-odds, from binned gaps."""
    used = (gaps.n > 0) & (gaps.noise > 0)
    if float(gaps.noise.sum()) < 3:  # too few outcomes for a normal approximation
        return 0.0
    x = gaps.confidence[used].clamp(1e-4, 1 - 1e-4).logit()
    design = torch.stack((torch.ones_like(x), x), -1)
    score = design.T @ gaps.total[used]
    information = design.T @ (gaps.noise[used].unsqueeze(-1) * design)
    return float(score @ torch.linalg.pinv(information, hermitian=True) @ score)


@dataclass(frozen=True, eq=False)
class Findings:
    """Input of a decision: the data and lines of a report, and the evidence for causes of miscalibration."""

    data: Data
    lines: Mapping[str, Line]  # all lines with their noise floors, p-values and intervals, by key
    class_names: Sequence[str] = ()  # names of classes or labels; empty if unknown
    design_effect: float = 1.0  # of clusters, by which statistics are divided
    n_clusters: int | None = None  # number of clusters of dependent samples; None if samples are independent
    fits: FittedCalibrators | None = None  # calibrators fitted to all samples; None if omitted
    label_p_values: Tensor | None = None  # p-value of ECE of each label `(L,)`; None unless the task is multi-label

    @property
    def task(self) -> Task:
        """Task of the predictions; `"binary"` for confidences."""
        return self.data.task

    @property
    def are_confidences(self) -> bool:
        """Whether predictions are confidences in answers."""
        return self.data.catalogue.are_confidences

    @cached_property
    def mode(self) -> NamedMode:
        """Main mode."""
        return next(iter(self.data.bins))

    @property
    def ece(self) -> Line:
        """Line of the expected calibration error (ECE) of the main mode."""
        return self.lines[f"ece/{self.mode}"]

    @property
    def size(self) -> Line:
        """Line of the debiased root mean squared calibration error (RMSCE) of the main mode."""
        return self.lines[f"rmsce_debiased/{self.mode}"]

    @property
    def classwise_size(self) -> Line | None:
        """Line of the debiased class-wise RMSCE; None unless the task is `"multiclass"`."""
        return self.lines["rmsce_debiased/classwise"] if self.task == "multiclass" else None

    @property
    def table(self) -> BinTable:
        """Bins of the main mode."""
        return self.data.tables[self.mode]

    @cached_property
    def gaps(self) -> Gaps:
        """Gaps of the bins of the main mode."""
        return Gaps.from_bins(self.data.bins[self.mode], self.design_effect)

    @cached_property
    def evidence(self) -> Evidence | None:
        """Evidence for causes; None if the predictions are not available, or calibrators were not fitted."""
        if self.data.predictions is None or self.fits is None:
            return None
        return evidence_of(self.data.predictions, self.fits.fits, self.fits.nll, self.design_effect)

    @cached_property
    def groups(self) -> tuple[Sequence[str], Tensor] | None:
        """Names of large groups, and statistics of each group `(G, 2)`; see `gaps_of_groups`. None without groups."""
        return gaps_of_groups(*self.data.groups) if self.data.groups is not None and self.data.groups[0] else None

    @cached_property
    def labels(self) -> Labels | None:
        """Tests of each label; None unless the task is `"multilabel"`."""
        if self.label_p_values is None:
            return None
        bins = self.data.bins[self.mode]
        flags = [None] * len(bins.sums) if bins.noise_flag is None else bins.noise_flag
        of_labels = (replace(bins, sums=x, noise_flag=flag) for x, flag in zip(bins.sums, flags, strict=True))
        return Labels(self.label_p_values, [Gaps.from_bins(each, self.design_effect) for each in of_labels])

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
    def nce(self) -> float:
        """NLL divided by that of a model that always predicts the class frequencies; NaN if undefined."""
        nll = self.lines["nll"]
        return nll.value / nll.naive if nll.naive > 0 else math.nan

    @property
    def is_significant(self) -> bool:
        """Whether the expected calibration error exceeds its noise floor significantly."""
        is_above = self.ece.value > (self.ece.noise_floor or 0.0)
        return self.ece.p_value is not None and self.ece.p_value < ERROR_LEVEL and is_above

    @property
    def direction(self) -> int:
        """1 for significant under-confidence, -1 for significant over-confidence, 0 if the gap is not significant.

        The gap is that of the top label, for binary and multi-label predictions that of the more probable outcome.
        """
        return sign(self.gaps.z(self.sides))

    @cached_property
    def sides(self) -> Tensor:
        """-1 for bins of binary predictions in which y = 0 is more probable, otherwise 1, `(B,)`."""
        ones = torch.ones_like(self.gaps.n)
        return ones if self.is_top_label else torch.where(self.gaps.confidence < 0.5, -ones, ones)

    @property
    def confidence_of_bins(self) -> Tensor:
        """Mean probability of the predicted outcome in each bin `(B,)`; NaN in an empty bin."""
        return torch.where(self.sides < 0, 1 - self.gaps.confidence, self.gaps.confidence)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All tested causes."""
        found = [] if self.evidence is None else list(self.evidence.candidates)
        found += [] if self.groups is None or len(self.groups[0]) < 2 else [_worst_group(self.groups[1])]
        return found + ([] if self.labels is None else [self.labels.worst])

    @cached_property
    def cause(self) -> Candidate | None:
        """Cause with the most evidence; None without a significant one."""
        uneven = Candidate("uneven", math.inf, 1) if self.is_significant else None
        found = cause_of(self.candidates, self.is_significant)
        if self.evidence is not None or uneven is None:
            return found or uneven
        # Without the predictions, the bins show a bias or over-confidence, which precede gaps of a group or a label.
        if abs(self.frequency - self.confidence) < self.ece.value / 2 or not sign(self.gaps.z()):
            return cause_of(self.candidates, is_significant=False) or uneven
        if self.task != "multiclass":
            return Candidate("class bias", math.inf, 1, which=0)
        return Candidate("over-confidence" if self.direction < 0 else "under-confidence", math.inf, 1)

    @property
    def degree(self) -> str:
        """Degree of miscalibration, by debiased RMSCE; empty without a significant cause.

        It is "badly" only if the lower end of the interval is not below `SLIGHT`.
        """
        cause = self.cause
        if cause is None or self.data.only_class is not None:
            return ""
        return _degree(self.size_of(cause))

    def size_of(self, cause: Candidate) -> Line:
        """Return the debiased RMSCE that shows the degree: class-wise for faults of single classes, if larger."""
        is_of_classes = cause.kind in ("class bias", "other classes", "swapped classes", "confusion")
        if is_of_classes and self.classwise_size is not None and self.classwise_size.value > self.size.value:
            return self.classwise_size
        return self.size

    @property
    def worthwhile(self) -> float:
        """Smallest gain in percent that justifies a calibrator: 0 if miscalibration is clear, and 5 otherwise."""
        return 0.0 if self.degree in ("clearly", "badly") else 5.0

    def name(self, index: int) -> str:
        """Return the display name of a class or label; for a binary task without names y = 0 or y = 1."""
        if self.class_names:
            return short_name(self.class_names[index], _NAME_LENGTH)
        if self.task == "binary":
            return f"y = {index}"
        return f"{'label' if self.task == 'multilabel' else 'class'} {index}"


def decide(found: Findings, stage: CalibrationStage | None) -> Decision:
    """Return the decision: the cause with the most evidence, its degree, and what to do.

    The recommendation of `stage` must be for `found.worthwhile`. `stage` is None if calibrators were omitted.
    """
    if found.data.only_class is not None:
        return _one_class(found)
    if (missing := _missing_data(found)) is not None:
        return missing
    cause = found.cause
    if cause is None and found.data.clusters_determine_label:
        decision = _clusters(found, stage)
    elif cause is None and stage is not None and stage.recommendation.best is not None:
        decision = _only_gain(found, stage)
    else:
        decision = _without_cause(found, stage) if cause is None else _with_cause(found, cause, stage)
    if stage is None:
        return decision
    advice = stage.recommendation
    interval = None if advice.interval is None else LineInterval(*advice.interval)
    return replace(
        decision,
        calibrator=advice.best or "",
        gain=advice.gain,
        interval=interval,
        score=advice.score_name,
    )


def _one_class(found: Findings) -> Decision:
    assert found.data.only_class is not None
    if found.are_confidences:
        which = "All answers are correct" if found.data.only_class else "All answers are wrong"
        verdict = which
    elif found.task == "multilabel":
        verdict = f"Only {found.data.only_class} in the targets of all labels"
    else:
        verdict = f"Only {found.name(found.data.only_class)} in the targets"
    cause = f"Calibration cannot be evaluated with one outcome: {_means(found)}."
    return Decision("one class", "", verdict, cause, "Check that `target` is the right array, and evaluate more data.")


def _degree(size: Line) -> str:
    """Return the degree of miscalibration by the line of a debiased RMSCE."""
    if not size.value >= SLIGHT:
        return "slightly"
    # The value alone is uncertain for few samples.
    is_certain = size.interval is None or size.interval.low >= SLIGHT
    return "badly" if size.value >= BAD and is_certain else "clearly"


def _missing_data(found: Findings) -> Decision | None:
    """Return the decision without data of a label, or with a single cluster, for which nothing can be tested."""
    kind: Kind = "too little data"
    verdict = "Too little data"
    if found.n_clusters is not None and found.n_clusters < 2:
        cause = "All rows are in one cluster, and tests and intervals need several clusters."
        return Decision(kind, "", verdict, cause, "Evaluate more clusters, or omit `clusters` if rows are independent.")
    empty = [] if found.labels is None else [k for k, gaps in enumerate(found.labels.gaps) if not float(gaps.n.sum())]
    if empty:
        names = listed([found.name(k) for k in empty[:_SHOWN_LABELS]] + ["others"] * (len(empty) > _SHOWN_LABELS))
        cause = f"No entry is known for {names}, so that averages over labels are undefined."
        return Decision(kind, "", verdict, cause, "Leave out the labels without known entries.")
    return None


def _only_gain(found: Findings, stage: CalibrationStage) -> Decision:
    """Return the decision if no error is significant, but the gain of a calibrator is."""
    advice = stage.recommendation
    degree = _degree(max(filter(None, (found.size, found.classwise_size)), key=lambda line: line.value))
    return Decision(
        "uneven",
        degree,
        f"{capitalised(degree)} miscalibrated: calibration lowers {advice.score_name}",
        f"{_ece_in_words(found)}. This error and the tested causes are not significant, but the gain by "
        f"{advice.best} is.",
        advice.text,
    )


def _ece_in_words(found: Findings) -> str:
    mode = {"multiclass": " of the top label", "multilabel": " of all labels"}.get(found.task, "")
    value, floor = significant(found.ece.value), significant(found.ece.noise_floor or 0.0)
    return f"ECE{mode} is {value}, and {floor} is expected if the model is calibrated"


def _clusters(found: Findings, stage: CalibrationStage | None) -> Decision:
    advice = "" if stage is None else f"{stage.recommendation.text} "
    return Decision(
        "clusters",
        "",
        "Clusters determine the label",
        f"All samples of a cluster have the same label, so that their errors cannot be separated from those of the "
        f"cluster. No significant miscalibration was found in {found.n_clusters or 0:,} clusters.",
        f"{advice}Use clusters that contain several labels, or evaluate one sample of each cluster.",
    )


def _without_cause(found: Findings, stage: CalibrationStage | None) -> Decision:
    floor = found.ece.noise_floor or 0.0
    high = found.size.interval.high if found.size.interval is not None else floor
    tested = _ece_in_words(found)
    advice = "" if stage is None else stage.recommendation.text
    if floor >= BAD or high >= BAD:
        n_units = found.data.n if found.n_clusters is None else found.n_clusters
        n = math.ceil(n_units * max((floor / SLIGHT) ** 2, (high / BAD) ** 2))
        upper = f"; an RMSCE of {significant(high)} is not excluded" if high >= BAD else ""
        more = f"Evaluate the model on about {_rounded(n):,} {'samples' if found.n_clusters is None else 'clusters'}."
        return Decision(
            "too little data",
            "",
            "Too little data",
            f"This sample is too small to detect miscalibration: {tested}{upper}.{_useless(found)}",
            " ".join(filter(None, [advice, more])),
        )
    causes = list(dict.fromkeys(_TESTED[each.kind] for each in found.candidates))
    also = f" No other cause is significant: {listed(causes)}." if causes else " Other causes were not tested."
    useless = _useless(found)
    verdict = "Calibrated" + (f", but {_how_useless(found)}" if useless else "")
    return Decision(
        "calibrated",
        "",
        verdict,
        f"No significant miscalibration was found. {tested}.{also}{useless}",
        advice or ("Check the inputs of the model." if useless else "No action is needed."),
    )


def _how_useless(found: Findings) -> str:
    # From 99.95% on, which is rounded to 100%.
    return f"{'no' if found.nce >= 0.9995 else 'hardly'} better than always predicting the class frequencies"


def _useless(found: Findings) -> str:
    """Return a sentence on a model that is not better than the class frequencies; otherwise an empty string."""
    if found.are_confidences or not found.nce >= USELESS:
        return ""
    if math.isinf(found.nce):
        return (
            " NLL is infinite, because an outcome with predicted probability 0 occurred. That of the class frequencies "
            "is finite."
        )
    return f" NLL is {percent(found.nce)} of that of the class frequencies."


def _rounded(n: int) -> int:
    """Round up to one significant digit."""
    unit = 10 ** (len(str(n)) - 1)
    return int(math.ceil(n / unit) * unit)


def _with_cause(found: Findings, cause: Candidate, stage: CalibrationStage | None) -> Decision:
    kind, words, badge = _described(found, cause)
    words = f"{_affected_labels(found)}{words} {_how_large(found, cause)}"
    if math.isinf(found.lines["nll"].value) and not _useless(found):
        words += " NLL is infinite, because an outcome with predicted probability 0 occurred."
    action = _action(found, cause, kind, stage)
    return Decision(kind, found.degree, capitalised(f"{found.degree} {badge}"), words + _useless(found), action)


def _how_large(found: Findings, cause: Candidate) -> str:
    size = found.size_of(cause)
    name = "RMSCE" if size is found.size else "Class-wise RMSCE"
    interval = "" if size.interval is None else f" (95% interval {ends(size.interval.low, size.interval.high, 3)})"
    return f"{name}, debiased: {significant(size.value)}{interval}."


def _affected_labels(found: Findings) -> str:
    """Return a sentence on the number of miscalibrated labels; empty for other tasks, or if none is significant."""
    if found.labels is None or not (labels := found.labels.miscalibrated):
        return ""
    names = [found.name(label) for label in labels[:_SHOWN_LABELS]] + ["others"] * (len(labels) > _SHOWN_LABELS)
    are = "is" if len(labels) == 1 else "are"
    which = "" if len(labels) == len(found.labels.gaps) else f": {listed(names)}"
    return f"{len(labels)} of {len(found.labels.gaps)} labels {are} significantly miscalibrated{which}. "


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

_OF_NAMED = ("bad class", "bad label")


def _action(found: Findings, cause: Candidate, kind: Kind, stage: CalibrationStage | None) -> str:
    if stage is None:
        sentences = ["Fit a calibrator of torchcalib.calibration to held-out data."]
    else:
        sentences = [stage.recommendation.text, *_change_of_accuracy(found, stage)]
    if found.is_reversed:
        sentences.append("Check the order of the classes and the labels.")
    if kind in _ACTIONS:
        sentences.append(_ACTIONS[kind].format(name=found.name(cause.which) if kind in _OF_NAMED else ""))
    if kind == "class bias" and found.task == "binary" and found.evidence is not None:
        threshold = float((-found.evidence.bias[0]).sigmoid())
        if math.isfinite(threshold):
            sentences.append(f"Without a calibrator, use the decision threshold {threshold:.3g} instead of 0.5.")
    return " ".join(sentences)


def _change_of_accuracy(found: Findings, stage: CalibrationStage) -> list[str]:
    """Return a sentence on the change of accuracy by the advised calibrator, if it is large.

    Calibrated confidences do not change the answers, and therefore not their accuracy. With a reversed order of
    confidences, the best calibrator makes all predictions equal, and their accuracy is arbitrary.
    """
    best = next((line for line in stage.lines if line.calibrator == stage.recommendation.best), None)
    if (
        best is None
        or found.are_confidences
        or found.is_reversed
        or abs(best.accuracy - stage.raw.accuracy) < _ACCURACY_CHANGE
    ):
        return []
    direction = "raises" if best.accuracy > stage.raw.accuracy else "lowers"
    return [f"It {direction} accuracy from {stage.raw.accuracy:.1%} to {best.accuracy:.1%}."]


def _described(found: Findings, cause: Candidate) -> tuple[Kind, str, str]:
    """Return the kind, sentences on the cause, and the badge without its degree.

    A gap with the sign of the words must be significant. Otherwise the words are neutral.
    """
    kind = cause.kind
    if found.are_confidences and kind in ("class bias", "over-confidence", "under-confidence"):
        kind = "under-confidence" if found.direction > 0 else "over-confidence"
        cause = Candidate(kind, cause.statistic, 1, value=math.nan if cause.kind == "class bias" else cause.value)
    if kind == "label noise" and not _agrees_with_label_noise(found, cause.value):
        kind = "uneven"
    elif kind == "label noise" and sign(found.gaps.z(found.sides * _is_high(found))) >= 0:
        kind = "over-confidence" if found.direction < 0 else "spread"
        cause = Candidate(kind, cause.statistic, 1)
    if kind in ("over-confidence", "under-confidence") and found.direction != (-1 if kind == "over-confidence" else 1):
        kind = "spread"
    return kind, *_WORDS[kind](found, cause)


def _spread(found: Findings, cause: Candidate) -> tuple[str, str]:
    return (
        f"Probabilities are not spread correctly{_temperature(cause)}; {_means(found)}.{_also(found)}",
        "miscalibrated in the spread of probabilities",
    )


def _agrees_with_label_noise(found: Findings, rate: float) -> bool:
    """Return whether the gaps of bins agree with random labels for a fraction `rate` of the samples.

    The gaps of probability q are then proportional to 1 / C - q. Two other components must not be significant. One is
    under-confidence, proportional to q (1 - q) (logit q + log(C - 1)). It remains if some ranges are over- and others
    under-confident. The other is a difference between probabilities above and below 0.5, for binary predictions.
    """
    gaps = found.gaps
    used = (gaps.n > 0) & (gaps.noise > 0)
    q, n, total, noise = gaps.confidence[used], gaps.n[used], gaps.total[used], gaps.noise[used]
    n_classes = 2 if found.evidence is None or found.task != "multiclass" else len(found.evidence.mean)
    q = q.clamp(1e-6, 1 - 1e-6)
    noisy = (1 - rate) * q + rate / n_classes
    noise = noise * noisy * (1 - noisy) / (q * (1 - q))  # variance with label noise, which is larger near 0 and 1
    components = [1 / n_classes - q, q * (1 - q) * (q.logit() + math.log(n_classes - 1))]
    components += [] if found.is_top_label else [components[0] * found.sides[used]]
    design = torch.stack(components, -1) * (n / noise.sqrt()).unsqueeze(-1)
    covariance = torch.linalg.pinv(design.T @ design, hermitian=True)
    z = (covariance @ design.T @ (total / noise.sqrt()) / covariance.diagonal().sqrt()).nan_to_num(0, 0, 0).tolist()
    return sign(z[1]) <= 0 and not any(map(sign, z[2:]))


def _is_high(found: Findings) -> Tensor:
    """Return a mask `(B,)` of the bins with high confidence in the predicted outcome."""
    return found.confidence_of_bins.nan_to_num(0) >= _threshold(found)


def _threshold(found: Findings) -> float:
    """Return the smallest confidence that is called high: 0.6, or the largest one below."""
    return min(_CONFIDENT, float(found.confidence_of_bins.nan_to_num(0).max()))


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
    if found.is_top_label:
        words = f"Confidence is too {'high' if over else 'low'}: {_means(found)}{temperature}."
    else:
        words = f"Probabilities are too {'close to 0 and 1' if over else 'far from 0 and 1'}{temperature}."
    return words + _also(found), badge


def _class_bias(found: Findings, cause: Candidate) -> tuple[str, str]:
    mean, frequency, z = found.confidence, found.frequency, found.gaps.z()
    if found.evidence is not None:
        of_class = (x[cause.which] for x in (found.evidence.mean, found.evidence.frequency, found.evidence.gap))
        mean, frequency, z = map(float, of_class)
    neutral = "Class frequencies differ from the mean probabilities of the classes."
    if not sign(z):
        return neutral + _also(found), "biased"
    high = "high" if mean > frequency else "low"
    if found.task == "binary":
        name = found.name(1 if mean > frequency else 0)
        return f"P({found.name(1)}) is too {high}: {_means(found)}.{_also(found)}", f"biased towards {name}"
    if found.task == "multilabel" and _most_labels(found) == (mean > frequency) and sign(found.gaps.z()):
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
    if also is None or found.are_confidences or also.p_value >= CAUSES_LEVEL:
        return ""
    if also.kind == "class bias":
        return " There are also significant class biases."
    return f" After correction of the class biases, the error of the spread remains significant{_temperature(also)}."


def _temperature(cause: Candidate) -> str:
    """Return the fitted temperature in parentheses; empty without a value."""
    if math.isnan(cause.value):
        return ""
    if math.isinf(cause.value):
        return " (confident predictions are not right more often than others)"
    return f" (fitted temperature {cause.value:.3g})"


def _label_noise(found: Findings, cause: Candidate) -> tuple[str, str]:
    gaps, high = found.gaps, _is_high(found)
    n = float(gaps.n[high].sum())
    mean = float((gaps.n * found.confidence_of_bins)[high].sum()) / n
    frequency = mean + float((found.sides * gaps.total)[high].sum()) / n
    outcome = "accuracy" if found.is_top_label else "the frequency of this outcome"
    what = "confidence" if found.is_top_label else "the probability of an outcome"
    words = (
        f"Where {what} is at least {_threshold(found):.0%}, its mean is {mean:.1%}, but {outcome} is {frequency:.1%}. "
        f"Label noise is one explanation: random labels for {percent(cause.value)} of the samples."
    )
    return words, "flatter than predicted at high confidence"


def _bad_class(found: Findings, cause: Candidate) -> tuple[str, str]:
    name = found.name(cause.which)
    if sign(cause.gap) != (-1 if cause.value > 1 else 1):
        return (
            f"Probabilities are not spread correctly where {name} is predicted{_temperature(cause)}.",
            f"miscalibrated for {name}",
        )
    change = "high" if cause.value > 1 else "low"
    return (
        f"Confidence is too {change} where {name} is predicted{_temperature(cause)}; the evidence for other classes is "
        "weaker.",
        f"{'over' if cause.value > 1 else 'under'}-confident for {name}",
    )


def _bad_label(found: Findings, cause: Candidate) -> tuple[str, str]:
    assert found.labels is not None  # the cause is only considered with labels
    name, gaps = found.name(cause.which), found.labels.gaps[cause.which]
    if not sign(cause.gap):
        return f"Probabilities of {name} are not spread correctly.", f"miscalibrated for {name}"
    used = gaps.n > 0
    mean = float((gaps.n * gaps.confidence)[used].sum() / gaps.n.sum())
    frequency = mean + float(gaps.total.sum() / gaps.n.sum())
    words = f"The mean probability of {name} is {mean:.1%}, its frequency {frequency:.1%}."
    return words, f"biased {'towards' if mean > frequency else 'against'} {name}"


def _bad_group(found: Findings, cause: Candidate) -> tuple[str, str]:
    assert found.groups is not None  # the cause is only considered with groups
    name = short_name(found.groups[0][cause.which], _NAME_LENGTH)
    what = "Confidence" if found.is_top_label else "The probability"
    if abs(cause.gap) >= abs(cause.value):
        change = "low" if cause.gap > 0 else "high"
        words = f"{what} is too {change} in group {name}: the gap is {abs(cause.gap):.2g} standard errors."
    else:
        change = "far from" if cause.value > 0 else "close to"
        words = (
            f"Probabilities are too {change} 0 and 1 in group {name}: the slope of its gaps is "
            f"{abs(cause.value):.2g} standard errors."
        )
    return words, f"miscalibrated in group {name}"


def _other_classes(found: Findings, cause: Candidate) -> tuple[str, str]:  # noqa: ARG001
    if math.isinf(cause.value):
        words = "Below the top label, classes with a higher probability are not more frequent."
    else:
        change = "unequal" if cause.value > 1 else "similar"
        words = f"Probabilities of the classes below the top label are too {change}{_temperature(cause)}."
    return words, "miscalibrated below the top label"


def _swapped_classes(found: Findings, cause: Candidate) -> tuple[str, str]:
    first, second = (found.name(k) for k in divmod(cause.which, _n_classes(found)))
    return (
        f"If the label is {first} or {second}, it is usually the one with the smaller probability "
        f"(slope of the log-odds {cause.value:.2g} instead of 1). The two classes may be swapped.",
        f"miscalibrated for {first} and {second}",
    )


def _confusion(found: Findings, cause: Candidate) -> tuple[str, str]:
    predicted, label = (found.name(k) for k in divmod(cause.which, _n_classes(found)))
    return (
        f"Where {predicted} is predicted, the mean probability of {label} is {cause.expected:.1%}, its frequency "
        f"{cause.value:.1%}.",
        f"miscalibrated for {label} where {predicted} is predicted",
    )


def _n_classes(found: Findings) -> int:
    assert found.evidence is not None  # the cause is part of the evidence
    return len(found.evidence.mean)


def _uneven(found: Findings, cause: Candidate) -> tuple[str, str]:  # noqa: ARG001
    table, gaps = found.table, found.gaps
    z = (gaps.total / gaps.noise.sqrt()).nan_to_num(0)
    gap = (table.gap * table.share).masked_fill((table.n == 0) | (z.abs() < _Z), 0)
    parts = []
    for side, words in ((-1, "too high"), (1, "too low")):
        index = int((side * gap).argmax())
        if side * float(gap[index]) > 0:
            where = f"{float(table.lower[index]):.0%} and {float(table.upper[index]):.0%}"
            parts.append(f"{words} between {where}")
    what = "confidence" if found.is_top_label else "the probability"
    words = f"The largest gaps: {what} is {listed(parts)}." if parts else "Probabilities are not spread correctly."
    return words, "miscalibrated in some ranges"


_WORDS = {
    "over-confidence": _over_confident,
    "under-confidence": _over_confident,
    "spread": _spread,
    "class bias": _class_bias,
    "label noise": _label_noise,
    "bad class": _bad_class,
    "bad label": _bad_label,
    "bad group": _bad_group,
    "other classes": _other_classes,
    "swapped classes": _swapped_classes,
    "confusion": _confusion,
    "uneven": _uneven,
}
"""Functions from findings and cause to the sentences on the cause and the badge without its degree."""
