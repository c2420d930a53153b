"""Diagnose the cause of miscalibration, and recommend an action.

A cause is a change of the predicted probabilities with few parameters. Its evidence is the likelihood-ratio statistic,
twice the increase of the log-likelihood when the change is fitted to all samples. The bias of one class and the gap of
one group have score statistics instead: the squared gap in standard errors.

- over- or under-confidence: a temperature,
- class bias: one bias for each class,
- label noise: the mixture (1 - e) q + e / C of the probabilities q of C classes with uniform probabilities,
- a bad class: a temperature for the predictions of one class,
- a bad group: a gap between frequency and confidence in one group (squared number of standard errors).

The cause with the largest statistic after a penalty for its parameters is reported (Akaike information criterion).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.core.words import capitalised

Kind = Literal[
    "calibrated",
    "too little data",
    "over-confidence",
    "under-confidence",
    "class bias",
    "label noise",
    "bad class",
    "bad group",
    "uneven",
]

LEVEL = 0.05
"""Significance level of the expected calibration error (ECE), and of a cause if ECE is significant."""

CAUSE_LEVEL = 0.01
"""Significance level of a cause if ECE is not significant: a fifth of `LEVEL`, because there are five causes."""

_MIN_CLASS_WEIGHT = 5.0  # smallest effective number of predictions of a class that is examined


@dataclass(frozen=True)
class Diagnosis:
    """Cause of miscalibration, and the action with the largest gain.

    Attributes:
        kind: cause: `"calibrated"`, `"too little data"`, `"over-confidence"`, `"under-confidence"`, `"class bias"`,
            `"label noise"`, `"bad class"`, `"bad group"`, or `"uneven"` (different errors in different ranges).
        degree: `"slightly"`, `"clearly"` or `"badly"`, by the excess of ECE over its noise floor; empty for
            `"calibrated"` and `"too little data"`. The limits are 0.02 and 0.1.
        badge: verdict in few words, such as `"clearly over-confident"`.
        cause: sentences on the cause, with the values that show it.
        action: sentences on what to do, with the cross-validated gain.
        calibrator: name of the calibrator to add; empty for none.
    """

    kind: Kind
    degree: str
    badge: str
    cause: str
    action: str
    calibrator: str = ""

    @property
    def verdict(self) -> str:
        """The badge, which begins with a capital letter."""
        return capitalised(self.badge)

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
        which: index of the selected class or group; -1 for none.
        value: fitted temperature, rate of label noise, or gap of the group in standard errors.
    """

    kind: Kind
    statistic: float
    n_parameters: int
    n_choices: int = 1
    which: int = -1
    value: float = math.nan

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


class Evidence(NamedTuple):
    """Candidates, and mean probability and frequency of each class or label `(C,)`."""

    candidates: list[Candidate]
    also: Candidate | None  # a temperature in addition to class biases, or class biases in addition to a temperature
    mean: Tensor
    frequency: Tensor
    bias: Tensor


def evidence_of(
    p: Predictions, fits: Mapping[type[Calibrator], Calibrator], nll: Mapping[type[Calibrator], Tensor], effect: float
) -> Evidence:
    """Return the evidence for each cause.

    Args:
        p: predictions with labels as targets.
        fits: calibrators fitted to all samples, by class.
        nll: negative log-likelihood of each sample after calibration, by class.
        effect: design effect of clusters, by which statistics are divided; 1 for independent samples.
    """
    w = sample_weights(p)
    raw = p.cross_entropy
    w_finite = w.masked_fill(raw.isinf() | (w == 0), 0)
    # Weights that are not counts have an effective number of samples.
    scale = 1.0 if p.copies else float(w.sum() / w.square().sum())
    scale /= max(1.0, effect)

    def statistic(after: Tensor, weights: Tensor = w_finite) -> float:
        return 2 * scale * float((weights * (raw - after)).masked_fill(weights == 0, 0).sum())

    mean, frequency, variance, varentropy, top = _class_statistics(p, w)
    n_fits = p.samples[:-1].numel()
    n_biases = n_fits if p.task != "multiclass" else max(1, int((frequency > 0).sum()) - 1)
    candidates: list[Candidate] = []
    bias = torch.zeros_like(mean)
    also = None
    temperature = nll.get(TemperatureScaling)
    if temperature is not None:
        value = float(fits[TemperatureScaling].temperature.mean())
        kind: Kind = "over-confidence" if value > 1 else "under-confidence"
        candidates.append(Candidate(kind, statistic(temperature), n_fits, value=value))
    if BiasCorrection in nll:
        beta = fits[BiasCorrection].beta
        bias = beta if p.task == "multiclass" else (beta[..., 1] - beta[..., 0]).reshape(-1)
        index = int((mean - frequency).argmax()) if p.task == "multiclass" else int((mean - frequency).abs().argmax())
        candidates.append(Candidate("class bias", statistic(nll[BiasCorrection]), n_biases, which=index))
        if p.task == "multiclass":
            candidates.append(_bias_of_one_class(mean, frequency, variance, w, scale))
    if AffineScaling in nll and len(candidates) > 1:
        largest = max(candidates[:2], key=lambda each: each.statistic)
        rest = statistic(nll[AffineScaling]) - largest.statistic
        both = fits[AffineScaling]
        if largest.kind == "class bias":
            value = float(both.temperature.mean())
            kind = "over-confidence" if value > 1 else "under-confidence"
            also = Candidate(kind, rest, n_fits, value=value)
        else:
            also = Candidate("class bias", rest, n_biases, which=candidates[1].which)
    candidates.append(_label_noise(raw, w_finite, p.num_classes, scale))
    if p.task == "multiclass":
        candidates += _bad_class(p, w_finite, scale, varentropy, top)
    return Evidence(candidates, also, mean, frequency, bias)


def _bias_of_one_class(mean: Tensor, frequency: Tensor, variance: Tensor, w: Tensor, scale: float) -> Candidate:
    """Return the class with the largest score statistic of a bias: the squared gap in standard errors."""
    statistics = (scale * (w.sum() * (mean - frequency)).square() / variance).nan_to_num(0, 0, 0)
    index = int(statistics.argmax())
    return Candidate("class bias", float(statistics[index]), 1, len(statistics), index)


def _class_statistics(p: Predictions, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return sums over the samples, and statistics of each sample.

    Returns:
        Mean probability and frequency of each class or label `(C,)`; weighted sum of q (1 - q) `(C,)`; variance of log
        q and top class of each sample `(N,)`. The last three are empty unless the task is "multiclass".
    """
    if p.task != "multiclass":
        total = w.sum(-1)
        mean, frequency = ((w * x).masked_fill(w == 0, 0).sum(-1) / total for x in (p.probs, p.target))
        empty = w.new_empty(0)
        return mean.reshape(-1), frequency.reshape(-1), empty, empty, empty.long()
    mean, square = w.new_zeros(p.num_classes), w.new_zeros(p.num_classes)
    pieces = []
    rows = max(1, 2**20 // p.num_classes)
    for start in range(0, w.shape[-1], rows):
        piece = p.part(slice(start, start + rows))
        log_q = piece.log_probs
        q = log_q.exp()
        finite = log_q.masked_fill(q == 0, 0)
        weights = w[start : start + rows]
        used = q.to(w.dtype).masked_fill((weights == 0).unsqueeze(-1), 0)
        mean, square = mean + weights @ used, square + weights @ used.square()
        pieces.append((q * finite.square()).sum(-1).to(w.dtype))
    frequency = torch.zeros_like(mean).index_add(-1, p.target, w)
    total = w.sum()
    varentropy = torch.cat(pieces) - p.rows.neg_entropy.square()
    return mean / total, frequency / total, mean - square, varentropy, p.rows.top


def _label_noise(nll: Tensor, w: Tensor, num_classes: int, scale: float) -> Candidate:
    """Fit the rate e of the mixture (1 - e) q + e / C by bisection of the derivative of the log-likelihood."""
    q = (-nll).exp().flatten()
    w = w.expand(nll.shape).flatten()
    q, w = q[w > 0], w[w > 0]

    def slope(e: float) -> float:
        return float((w * (1 / num_classes - q) / ((1 - e) * q + e / num_classes)).sum())

    low, high = 0.0, 1.0
    if slope(0.0) <= 0:
        return Candidate("label noise", 0.0, 1, value=0.0)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    gain = (w * (((1 - low) * q + low / num_classes).log() - q.log())).sum()
    return Candidate("label noise", 2 * scale * float(gain), 1, value=low)


def _bad_class(p: Predictions, w: Tensor, scale: float, varentropy: Tensor, top: Tensor) -> list[Candidate]:
    """Return a temperature for the predictions of one class, which has the largest score statistic.

    The derivative of the log-likelihood in the logarithm of 1 / T is the log-probability of the label plus the entropy.
    """
    score = (w * -p.ecd).masked_fill(w == 0, 0)
    variance = w.square() * varentropy if not p.copies else w * varentropy
    sums = torch.zeros(3, p.num_classes, dtype=w.dtype, device=w.device)
    total, scores, variances = sums.index_add(-1, top, torch.stack((w, score, variance)))
    statistics = scores.square() / variances.clamp(min=1e-30)
    is_rare = total * scale < _MIN_CLASS_WEIGHT
    statistics = statistics.masked_fill(is_rare | (variances <= 0), 0)
    index = int(statistics.argmax())
    rows = (top == index).nonzero().squeeze(-1)
    if float(statistics[index]) == 0 or int((w[rows] > 0).sum()) == int((w > 0).sum()):
        return []
    piece = p.part(rows)
    fit = TemperatureScaling().fit_to(piece)
    after = piece.with_values(fit.calibrated(piece.values, piece.from_logits).to(p.dtype)).cross_entropy
    gain = (w[rows] * (piece.cross_entropy - after)).masked_fill(w[rows] == 0, 0).sum()
    n_classes = int((~is_rare).sum())
    return [Candidate("bad class", 2 * scale * float(gain), 1, n_classes, index, float(fit.temperature))]


def cause_of(candidates: Sequence[Candidate], is_significant: bool) -> Candidate | None:
    """Return the cause with the most evidence; None without a significant one.

    Args:
        candidates: possible causes.
        is_significant: whether the expected calibration error is significant.
    """
    level = LEVEL if is_significant else CAUSE_LEVEL
    found = [each for each in candidates if each.p_value < level]
    return max(found, key=lambda each: each.penalised, default=None)
