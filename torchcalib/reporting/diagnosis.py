"""Evidence for causes of miscalibration.

A cause is a change of the predicted probabilities with few parameters, fitted to all samples. Its evidence is the
likelihood-ratio statistic, twice the increase of the log-likelihood. A gap of one class has a score statistic instead:
the squared gap in standard errors. Groups and labels have the score statistic of a bias and a slope, and are tested by
deviances; see `torchcalib.inference.roots`.

- over- or under-confidence: a temperature,
- class bias: one bias for each class,
- label noise: the mixture (1 - e) q + e / C of the probabilities q of C classes with uniform probabilities,
- bad class: a temperature for the predictions of one class,
- bad group, bad label: the mean gap of one group or label, and the regression of its gaps on the log-odds,
- other classes, swapped classes, confusion: faults of classes below the top label.

For soft targets, temperatures, class biases, groups and labels are tested: cross entropy defines their likelihood, with
a scale from the residuals; see `likelihood_ratio`.

The cause with the largest statistic after a penalty for its parameters is reported (Akaike information criterion).

Faults of the classes below the top label have evidence that errors of the top label do not show:

- other classes: a temperature for the probabilities of the other classes, given that the label is not the top class,
- swapped classes: the log-odds of two classes predict which of both is the label, with a negative slope. The test is
  conditional on one of both being the label. It uses all samples, or only samples in which neither is the top class.
- confusion: the number of samples with predicted class k and label j, compared with the sum of their probabilities of
  class j, for one pair of classes.

The cost of these is O(N C) operations for N samples and C classes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.selection import likelihood_ratio
from torchcalib.core.predictions import Predictions
from torchcalib.ops.bisection import bisect
from torchcalib.ops.newton import SEPARABLE
from torchcalib.ops.newton.fits import fit_temperature
from torchcalib.reporting.decision import CandidateCause
from torchcalib.results.decision import Kind

_MIN_CLASS_WEIGHT = 5.0  # smallest effective number of predictions of a class that is examined
_MIN_PER_CLASS = 5.0  # labels per class on average, for the chi-squared law of all biases (Cochran 1954)


class CauseEvidence(NamedTuple):
    """Candidates, and statistics of each class or label `(C,)`."""

    candidates: list[CandidateCause]
    # A temperature in addition to class biases, or class biases in addition to a temperature
    also: CandidateCause | None
    mean: Tensor  # mean probability
    frequency: Tensor
    gap: Tensor  # frequency minus mean probability in standard errors
    bias: Tensor  # fitted bias


def evidence_of(
    p: Predictions, fits: Mapping[type[Calibrator], Any], nll: Mapping[type[Calibrator], Tensor], effect: float
) -> CauseEvidence:
    """Return the evidence for each cause, from fits to all samples and the NLL of each sample after calibration.

    `effect` is the design effect of clusters, by which statistics are divided; 1 for independent samples.
    """
    w = sample_weights(p)
    raw = p.cross_entropy
    w_finite = w.masked_fill(raw.isinf() | (w == 0), 0)
    # Weights that are not counts have an effective number of samples.
    scale = 1.0 if p.copies else float(w.sum() / w.square().sum())
    scale /= max(1.0, effect)

    def statistic(after: Tensor) -> float:
        return likelihood_ratio(p, raw, after, effect)

    mean, frequency, variance, varentropy, top = _class_statistics(p, w)
    n_fits = p.samples[:-1].numel()
    n_biases = n_fits if p.task != "multiclass" else max(1, int((mean > 0).sum()) - 1)
    has_classes = p.task == "multiclass" and p.has_labels
    has_biases = p.task != "multiclass" or scale * float(w.sum()) >= _MIN_PER_CLASS * (n_biases + 1)
    candidates: list[CandidateCause] = []
    bias = torch.zeros_like(mean)
    gap = (w.sum() * (frequency - mean) * math.sqrt(scale) / variance.sqrt()).nan_to_num(0, 0, 0)
    also = None
    temperature = nll.get(TemperatureScaling)
    if temperature is not None:
        value = float(fits[TemperatureScaling].temperature.mean())
        kind: Kind = "over-confidence" if value > 1 else "under-confidence"
        candidates.append(CandidateCause(kind, statistic(temperature), n_fits, value=value))
    if BiasCorrection in nll:
        beta = fits[BiasCorrection].beta
        bias = beta if p.task == "multiclass" else (beta[..., 1] - beta[..., 0]).reshape(-1)
        of_class = (mean - frequency).abs()
        if has_classes:
            of_class = _biases_of_classes(mean, frequency, variance, float(w.sum()), scale)
        index = int(of_class.argmax())
        if has_biases:
            candidates.append(CandidateCause("class bias", statistic(nll[BiasCorrection]), n_biases, which=index))
        if has_classes:
            candidates.append(CandidateCause("class bias", float(of_class[index]), 1, len(of_class), index))
    if AffineScaling in nll and has_biases and len(candidates) > 1:
        largest = max(candidates[:2], key=lambda each: each.statistic)
        rest = statistic(nll[AffineScaling]) - largest.statistic
        both = fits[AffineScaling]
        if largest.kind == "class bias":
            value = float(both.temperature.mean())
            kind = "over-confidence" if value > 1 else "under-confidence"
            also = CandidateCause(kind, rest, n_fits, value=value)
        else:
            also = CandidateCause("class bias", rest, n_biases, which=candidates[1].which)
    if p.has_labels:  # other causes are defined by labels
        candidates.append(_label_noise(raw, w_finite, p.num_classes, scale))
    if has_classes:
        candidates += _bad_class(p, w_finite, scale, varentropy, top)
        candidates += faults_of_other_classes(p, w_finite, scale)
    return CauseEvidence(candidates, also, mean, frequency, gap, bias)


def _class_statistics(p: Predictions, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return mean probability, frequency and weighted sum of q (1 - q) of each class or label `(C,)`.

    For soft targets t the sum is that of (t - q)^2, which estimates the same variance. For multi-class labels, also
    return the variance of log q and the top class of each sample `(N,)`, otherwise empty.
    """
    empty = w.new_empty(0)
    if p.soft:
        of_rows = (p.probs.to(w.dtype), p.target, (p.target - p.probs).square())
        sums = [(w.unsqueeze(-1) * x).masked_fill((w == 0).unsqueeze(-1), 0).sum(-2) for x in of_rows]
        return sums[0] / w.sum(), sums[1] / w.sum(), sums[2], empty, empty.long()
    if p.task != "multiclass":
        total = w.sum(-1)
        noise = p.probs * p.not_probs if p.has_labels else (p.target - p.probs).square()
        mean, frequency = ((w * x).masked_fill(w == 0, 0).sum(-1) / total for x in (p.probs, p.target))
        variance = (w * noise).masked_fill(w == 0, 0).sum(-1)
        return mean.reshape(-1), frequency.reshape(-1), variance.reshape(-1), empty, empty.long()
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
    varentropy = torch.cat(pieces) - p.neg_entropy.square()
    return mean / total, frequency / total, mean - square, varentropy, p.rows.top


def _biases_of_classes(mean: Tensor, frequency: Tensor, variance: Tensor, n: float, scale: float) -> Tensor:
    """Return the statistic of a bias of each class alone `(C,)`: a deviance, divided by its dispersion.

    The deviance is that of the less frequent outcome. For many samples, it is the squared gap in standard errors. For
    few samples, it is closer to its chi-squared law.
    """
    is_rare = mean <= 0.5
    expected, observed = (scale * n * torch.where(is_rare, x, 1 - x) for x in (mean, frequency))
    dispersion = scale * variance / expected
    return (poisson_deviance(observed, expected) / dispersion).nan_to_num(0, 0, 0)


def _label_noise(nll: Tensor, w: Tensor, num_classes: int, scale: float) -> CandidateCause:
    """Fit the rate e of the mixture (1 - e) q + e / C by bisection of the derivative of the log-likelihood."""
    q = (-nll).exp().flatten()
    w = w.expand(nll.shape).flatten()
    q, w = q[w > 0], w[w > 0]

    def rises(e: float) -> bool:
        return float((w * (1 / num_classes - q) / ((1 - e) * q + e / num_classes)).sum()) > 0

    if not rises(0.0):
        return CandidateCause("label noise", 0.0, 1, value=0.0)
    rate, _ = bisect(rises, 0.0, 1.0, 40)
    gain = (w * (((1 - rate) * q + rate / num_classes).log() - q.log())).sum()
    return CandidateCause("label noise", 2 * scale * float(gain), 1, value=rate)


def _bad_class(p: Predictions, w: Tensor, scale: float, varentropy: Tensor, top: Tensor) -> list[CandidateCause]:
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
    confidence, is_right = piece.rows.confidence.to(w.dtype), (piece.target == index).to(w.dtype)
    noise = (w[rows] * confidence * (1 - confidence)).sum()
    gap = math.sqrt(scale) * float((w[rows] * (is_right - confidence)).sum() / noise.sqrt())
    value = float(fit.temperature)
    return [CandidateCause("bad class", 2 * scale * float(gain), 1, n_classes, index, value, gap)]


_MAX_CLASSES, _MAX_ELEMENTS = 1024, 2**25  # larger problems are not tested: they need too much time and memory
_MIN_ROWS = 10.0  # smallest effective number of labels that are not the top class
_MIN_INFORMATION = 5.0  # smallest expected Fisher information of the slope of two classes
_MAX_SLOPE = 20.0


def faults_of_other_classes(p: Predictions, w: Tensor, scale: float) -> list[CandidateCause]:
    """Return the evidence for each fault of a multi-class task; none with two or with very many classes.

    Weights `w` are 0 for labels of probability 0. `scale` is the effective number of samples divided by their sum.
    """
    if p.num_classes < 3 or p.num_classes > _MAX_CLASSES or p.input_preds.numel() > _MAX_ELEMENTS:
        return []
    *slopes, expected, observed = _pairs(p, w)
    return [*_tail(p, w, scale), *_swapped(p, w, scale, *slopes), *_confusion(scale * expected, scale * observed)]


def _pairs(p: Predictions, w: Tensor) -> Tensor:
    """Return six sums for pairs of classes, `(6, C, C)`.

    In rows of the label: the derivative of the log-likelihood in the slope of two classes, its variance, and both
    without samples in which one of the classes is the top class. The sum of an element and its transpose refers to both
    classes. In rows of the predicted class: the sum of probabilities, and the number of labels.
    """
    n_classes = p.num_classes
    sums = w.new_zeros(6, n_classes * n_classes)
    rows = max(1, 2**20 // n_classes)
    columns = torch.arange(n_classes, device=w.device)
    for start in range(0, w.shape[-1], rows):
        piece, weights = p.part(slice(start, start + rows)), w[start : start + rows]
        used = weights > 0
        log_q, label, top = piece.log_probs.double()[used], piece.target[used], piece.rows.top[used]
        weights = weights[used].unsqueeze(-1)
        log_odds = log_q.gather(-1, label.unsqueeze(-1)) - log_q  # of the label against each class
        wrong = (-log_odds).sigmoid()
        finite = log_odds.masked_fill(log_odds.isinf(), 0)
        score = weights * wrong * finite
        information = score * (1 - wrong) * finite
        is_other = ((label != top).unsqueeze(-1) & (columns != top.unsqueeze(-1))).to(w.dtype)
        of_label, of_top = (k.unsqueeze(-1) * n_classes + columns for k in (label, top))
        parts = [
            (of_label, score),
            (of_label, information),
            (of_label, score * is_other),
            (of_label, information * is_other),
            (of_top, weights * log_q.exp()),
            (top * n_classes + label, weights),
        ]
        for total, (place, values) in zip(sums, parts, strict=True):
            total += torch.bincount(place.flatten(), values.flatten(), minlength=len(total))
    return sums.reshape(6, n_classes, n_classes)


def _tail(p: Predictions, w: Tensor, scale: float) -> list[CandidateCause]:
    """Return a temperature for the other classes, from samples whose label is not the top class."""
    rows = ((p.target != p.rows.top) & (w > 0)).nonzero().squeeze(-1)
    weights = w[rows]
    if float(weights.sum()) * scale < _MIN_ROWS:
        return []
    piece = p.part(rows)
    scores = piece.log_probs.double().scatter(-1, piece.rows.top.unsqueeze(-1), -math.inf)
    fit = fit_temperature(scores.unsqueeze(0), piece.target.unsqueeze(0), weights.expand(1, 1, -1))
    slope = _MAX_SLOPE if int(fit.outcome) == SEPARABLE else min(float(fit.alpha), _MAX_SLOPE)

    def log_likelihood(slope: float) -> float:
        log_p = (slope * scores).masked_fill(scores.isinf(), -math.inf).log_softmax(-1)
        return float((weights * log_p.gather(-1, piece.target.unsqueeze(-1))[:, 0]).sum())

    statistic = 2 * scale * (log_likelihood(slope) - log_likelihood(1.0))
    return [CandidateCause("other classes", statistic, 1, value=1 / slope if slope > 1e-6 else math.inf)]


def _swapped(
    p: Predictions, w: Tensor, scale: float, all_score: Tensor, all_information: Tensor, *of_others: Tensor
) -> list[CandidateCause]:
    """Return the pair of classes with the most evidence for a negative slope, with its likelihood-ratio statistic."""
    found, n_choices = [], 0
    for only_other, sums in ((False, (all_score, all_information)), (True, of_others)):
        score, information = ((x + x.T).triu(1) for x in sums)
        large = information * scale >= _MIN_INFORMATION
        n_choices += int(large.sum())
        statistics = (score.clamp(max=0).square() / information).masked_fill(~large, 0)
        index = int(statistics.argmax())
        if float(statistics.flatten()[index]) > 0:
            found.append(_slope(p, w, scale, *divmod(index, p.num_classes), only_other))
    reversed_ = [each for each in found if each.value < 0]
    best = max(reversed_, key=lambda each: each.statistic, default=CandidateCause("swapped classes", 0.0, 1))
    return [best._replace(n_choices=max(1, n_choices))] if n_choices else []


def _slope(p: Predictions, w: Tensor, scale: float, first: int, second: int, only_other: bool) -> CandidateCause:
    """Fit the slope of the log-odds of two classes by bisection of the derivative of the log-likelihood."""
    is_pair = ((p.target == first) | (p.target == second)) & (w > 0)
    if only_other:
        is_pair &= (p.rows.top != first) & (p.rows.top != second)
    rows = is_pair.nonzero().squeeze(-1)
    piece = p.part(rows)
    log_q = piece.log_probs.double()[:, (first, second)]
    log_odds = torch.where(piece.target == first, log_q[:, 0] - log_q[:, 1], log_q[:, 1] - log_q[:, 0])
    log_odds, weights = log_odds[log_odds.isfinite()], w[rows][log_odds.isfinite()]

    def rises(slope: float) -> bool:
        return float((weights * log_odds * (-slope * log_odds).sigmoid()).sum()) > 0

    slope, _ = bisect(rises, -_MAX_SLOPE, _MAX_SLOPE, 50)
    log_sigmoid = torch.nn.functional.logsigmoid
    gain = (weights * (log_sigmoid(slope * log_odds) - log_sigmoid(log_odds))).sum()
    place = first * p.num_classes + second
    return CandidateCause("swapped classes", 2 * scale * float(gain), 1, which=place, value=slope)


def poisson_deviance(observed: Tensor, expected: Tensor) -> Tensor:
    """Return the deviance of a Poisson distribution, the likelihood-ratio statistic of one number of events.

    Its tail bounds that of a sum of independent indicators (Hoeffding 1956).
    """
    return 2 * (torch.xlogy(observed, observed / expected) - (observed - expected))


def _confusion(expected: Tensor, observed: Tensor) -> list[CandidateCause]:
    """Return the pair of predicted class and label with the largest deviance of the number of labels."""
    deviance = poisson_deviance(observed, expected)
    is_tested = (expected > 0) & ~torch.eye(len(expected), dtype=torch.bool, device=expected.device)
    deviance = deviance.masked_fill(~is_tested, 0)
    index = int(deviance.argmax())
    predicted, label = divmod(index, len(expected))
    total = float(observed[predicted].sum())
    if not total or not is_tested.any():
        return []
    of_label, of_sum = float(observed[predicted, label]), float(expected[predicted, label])
    statistic, n_choices = float(deviance[predicted, label]), int(is_tested.sum())
    gap = (of_label - of_sum) / math.sqrt(of_sum) if of_sum else 0.0
    return [CandidateCause("confusion", statistic, 1, n_choices, index, of_label / total, gap, of_sum / total)]
