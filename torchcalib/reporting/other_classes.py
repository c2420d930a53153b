"""Evidence for faults of the classes below the top label, which errors of the top label do not show.

- Other classes: a temperature for the probabilities of the other classes, given that the label is not the top class.
- Swapped classes: the log-odds of two classes predict which of both is the label, with a negative slope. The test is
  conditional on one of both being the label. It uses all samples, or only samples in which neither is the top class.
- Confusion: the number of samples with predicted class k and label j, compared with the sum of their probabilities of
  class j, for one pair of classes.

The cost is O(N C) operations for N samples and C classes.
"""

import math

import torch
from torch import Tensor

from torchcalib.core.predictions import Predictions
from torchcalib.ops.bisection import bisect
from torchcalib.reporting.decision import Candidate

_MAX_CLASSES, _MAX_ELEMENTS = 1024, 2**25  # larger problems are not tested: they need too much time and memory
_MIN_ROWS = 10.0  # smallest effective number of labels that are not the top class
_MIN_INFORMATION = 5.0  # smallest expected Fisher information of the slope of two classes
_MAX_SLOPE = 20.0


def faults_of_other_classes(p: Predictions, w: Tensor, scale: float) -> list[Candidate]:
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


def _tail(p: Predictions, w: Tensor, scale: float) -> list[Candidate]:
    """Return a temperature for the other classes, from samples whose label is not the top class.

    Newton's method finds the maximum of the log-likelihood, which is concave in 1 / T. A bracket bounds its steps.
    """
    rows = ((p.target != p.rows.top) & (w > 0)).nonzero().squeeze(-1)
    weights = w[rows]
    if float(weights.sum()) * scale < _MIN_ROWS:
        return []
    piece = p.part(rows)
    label = piece.target.unsqueeze(-1)
    log_q = piece.log_probs.double().scatter(-1, piece.rows.top.unsqueeze(-1), -math.inf).log_softmax(-1)
    is_possible = log_q.isfinite()
    finite = log_q.masked_fill(~is_possible, 0)

    def evaluate(slope: float) -> tuple[float, float, float]:
        """Return the log-likelihood and its first two derivatives."""
        log_p = (slope * finite).masked_fill(~is_possible, -math.inf).log_softmax(-1)
        q = log_p.exp()
        mean = (q * finite).sum(-1)
        variance = (q * finite.square()).sum(-1) - mean.square()
        values = log_p.gather(-1, label)[:, 0], finite.gather(-1, label)[:, 0] - mean, -variance
        total, first, second = torch.stack([(weights * each).sum() for each in values]).tolist()
        return total, first, second

    before, first, second = evaluate(1.0)
    low, high, slope, after = 0.0, _MAX_SLOPE, 1.0, before
    for _ in range(50):
        low, high = (slope, high) if first > 0 else (low, slope)
        step = slope - first / second if second < 0 else math.nan
        following = step if low < step < high else (low + high) / 2
        is_last = abs(following - slope) < 1e-9
        slope = following
        after, first, second = evaluate(slope)
        if is_last:
            break
    value = 1 / slope if slope > 1e-6 else math.inf
    return [Candidate("other classes", 2 * scale * (after - before), 1, value=value)]


def _swapped(
    p: Predictions, w: Tensor, scale: float, all_score: Tensor, all_information: Tensor, *of_others: Tensor
) -> list[Candidate]:
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
    best = max(reversed_, key=lambda each: each.statistic, default=Candidate("swapped classes", 0.0, 1))
    return [best._replace(n_choices=max(1, n_choices))] if n_choices else []


def _slope(p: Predictions, w: Tensor, scale: float, first: int, second: int, only_other: bool) -> Candidate:
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
    return Candidate("swapped classes", 2 * scale * float(gain), 1, which=place, value=slope)


def poisson_deviance(observed: Tensor, expected: Tensor) -> Tensor:
    """Return the deviance of a Poisson distribution, the likelihood-ratio statistic of one number of events.

    Its tail bounds that of a sum of independent indicators (Hoeffding 1956).
    """
    return 2 * (torch.xlogy(observed, observed / expected) - (observed - expected))


def _confusion(expected: Tensor, observed: Tensor) -> list[Candidate]:
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
    return [Candidate("confusion", statistic, 1, n_choices, index, of_label / total, gap, of_sum / total)]
