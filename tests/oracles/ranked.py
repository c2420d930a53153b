"""Reference implementations of bins of the sorted sample, and of metrics over them.

A sample is a list of (score, outcome) rows with whole weights. A block is a list of row indices, and its mean a
fraction. No code is shared with the package.
"""

import math
import warnings
from fractions import Fraction
from functools import cache
from itertools import pairwise

from scipy import stats

import oracles


def groups(scores, outcomes, weights=None, ties="pool"):
    """Return the sample in ascending order, as groups of equal score ("pool") or single samples ("split")."""
    weights = weights or [1] * len(scores)
    out = []
    for i in sorted(range(len(scores)), key=lambda i: scores[i]):
        if weights[i] == 0:
            continue
        if ties == "pool" and out and scores[out[-1][0]] == scores[i]:
            out[-1].append(i)
        else:
            out.append([i])
    return out


class Sample:
    """Sizes and means of the blocks of one sample."""

    def __init__(self, outcomes, weights=None):
        self.y = outcomes
        self.w = weights or [1] * len(outcomes)

    def size(self, block):
        return sum(self.w[i] for i in block)

    def positives(self, block):
        return sum(self.w[i] * self.y[i] for i in block)

    def mean(self, block):
        return Fraction(self.positives(block), self.size(block))

    def table(self, blocks):
        return [self.size(b) for b in blocks], [self.positives(b) for b in blocks]


def pava(sample, parts):
    """Isotonic least squares: merge the first two neighbours whose means do not rise, and start again."""
    blocks = [list(part) for part in parts]
    i = 0
    while i + 1 < len(blocks):
        if sample.mean(blocks[i]) >= sample.mean(blocks[i + 1]):
            blocks[i : i + 2] = [blocks[i] + blocks[i + 1]]
            i = 0
        else:
            i += 1
    return blocks


def pava_bc(sample, parts, n_min, n_max, variant):
    """[TCE] Algorithms 2 and 3, line by line, for parts (samples, or groups of equal score)."""
    # the last n_min samples; groups are not split
    tail, rest = [], list(parts)
    while sample.size(tail) < n_min:
        tail = rest.pop() + tail

    def joins(earlier, later):
        size = sample.size(earlier) + sample.size(later)
        return size <= n_min or (size <= n_max and sample.mean(earlier) >= sample.mean(later))

    blocks = []
    for part in rest:
        blocks.append(list(part))
        while len(blocks) > 1 and joins(blocks[-2], blocks[-1]):
            later = blocks.pop()
            blocks[-1] = blocks[-1] + later

    counted = n_min if variant == "code" else sample.size(blocks[-1]) if blocks else 0
    if blocks and counted + sample.size(tail) <= n_max:
        blocks[-1] = blocks[-1] + tail
    else:
        blocks.append(tail)

    if variant == "paper":
        merged = [blocks[0]]
        for block in blocks[1:]:
            if sample.mean(merged[-1]) == sample.mean(block):
                merged[-1] = merged[-1] + block
            else:
                merged.append(block)
        blocks = merged
    return blocks


def equal_mass(sample, parts, n_bins):
    """Cut the sorted samples at i * N // B. A part belongs to the bin that contains its first sample."""
    total = sum(sample.size(part) for part in parts)
    blocks = [[] for _ in range(n_bins)]
    start = 0
    for part in parts:
        last_cut_before = max(i for i in range(n_bins) if i * total // n_bins <= start)
        blocks[last_cut_before] += part
        start += sample.size(part)
    return blocks


# Blocks of any kind, and rows `(index, n, mean confidence, mean outcome, ...)` for `oracles.ece` and other errors


def blocks_of(
    bins,
    scores,
    outcomes,
    weights=None,
    *,
    n_bins=15,
    n_min=None,
    n_max=None,
    variant="code",
    ties="pool",
    right=False,
):
    """Return the non-empty blocks in ascending order. `bins` is the name of a rule, or a list of edges."""
    weights = weights or [1] * len(scores)
    sample, parts = Sample(outcomes, weights), groups(scores, outcomes, weights, ties)
    total = sum(weights)
    if bins == "pava_bc":
        n_min = max(1, total // 20) if n_min is None else n_min
        n_max = max(1, total // 5) if n_max is None else n_max
        return pava_bc(sample, parts, n_min, n_max, variant)
    if bins == "pava":
        return pava(sample, parts)
    if bins == "equal_mass":
        return [block for block in equal_mass(sample, parts, n_bins) if block]
    edges = [i / n_bins for i in range(n_bins + 1)] if bins == "equal_width" else bins
    held = [[] for _ in edges[1:]]
    for i, score in enumerate(scores):
        if weights[i] > 0:
            held[oracles.between(edges, score, right)].append(i)
    return [block for block in held if block]


def rows_of(blocks, scores, outcomes, weights=None, copies=True):
    """Return index, n, mean confidence, mean outcome and variance of the gap for each block; see `gap_variance`."""
    weights = weights or [1] * len(scores)
    rows = []
    for b, block in enumerate(blocks):
        own = [weights[i] for i in block]
        means = [oracles.mean([column[i] for i in block], own) for column in (scores, outcomes)]
        variance = oracles.gap_variance([scores[i] for i in block], [outcomes[i] for i in block], own, copies)
        rows.append((b, sum(own), *means, variance))
    return rows


def norm_of(values, shares, norm):
    """[TCE] Definition 1: norm over bins, weighted by their share of the samples."""
    if not values:
        return math.nan
    if norm == "max":
        return max(values)
    if norm == "mean":
        return sum(values) / len(values)
    power = {"l1": 1, "l2": 2}[norm]
    return sum(s * v**power for s, v in zip(shares, values, strict=True)) ** (1 / power)


def gce(loss, rows, norm="l1"):
    """[TCE] Definition 1: norm over bins of `loss(n, confidence, frequency)`."""
    total = sum(n for _, n, *_ in rows)
    return norm_of([loss(n, c, f) for _, n, c, f, _ in rows], [n / total for _, n, *_ in rows], norm)


def estimation_error(blocks, outcomes, weights=None, *, distance="squared", delta=0.5, norm="l1"):
    """[TCE] eq. 8 and 9: norm over bins of the mean distance d(y, P) of the outcomes to their frequency P.

    A soft target is the frequency of several labels.
    """
    d = {
        "squared": lambda error: error**2,
        "absolute": abs,
        "huber": lambda error: error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2),
    }.get(distance, lambda error: abs(error) ** 3)  # `cases.cubed`
    sample = Sample(outcomes, weights)
    errors, sizes = [], [sample.size(block) for block in blocks]
    for block, n in zip(blocks, sizes, strict=True):
        p = sum(sample.w[i] * sample.y[i] for i in block) / n
        labels = ((sample.w[i], sample.y[i]) for i in block)
        errors.append(math.fsum(w * (y * d(1 - p) + (1 - y) * d(p)) for w, y in labels) / n)
    return norm_of(errors, [n / sum(sizes) for n in sizes], norm)


# Test-based calibration error


@cache
def binomial_p_value(k, n, p):
    """Exact two-sided binomial test by minimum likelihood.

    scipy overflows for p below 1e-300. The p-value at 1e-300 is used: 1 for k = 0, otherwise below n * 1e-300.
    """
    return stats.binomtest(k, n, max(p, 1e-300) if p else p).pvalue


@cache
def t_p_value(positives, n, p):
    """One-sample t-test of n labels with `positives` ones against the mean p; NaN if undefined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal labels, or a single label
        return float(stats.ttest_1samp([1.0] * positives + [0.0] * (n - positives), p).pvalue)


def z_p_value(k, n, p):
    """The test `cases.z_test`, which is a function instead of a name."""
    expected, variance = n * p, n * p * (1 - p)
    if variance == 0:
        return float(k == expected)
    return math.erfc(abs(k - expected) / math.sqrt(2 * variance))


def rejected(blocks, scores, outcomes, weights=None, *, alpha=0.05, test="binomial"):
    """Return the number of samples in each block whose prediction is rejected by its own test: [TCE] Definition 2."""
    sample = Sample(outcomes, weights)
    p_value = {"binomial": binomial_p_value, "t": t_p_value}.get(test, z_p_value)
    counts = []
    for block in blocks:
        n, k = sample.size(block), sample.positives(block)
        counts.append(sum(sample.w[i] for i in block if p_value(k, n, scores[i]) <= alpha))
    return counts


def tce(bins, scores, outcomes, weights=None, *, alpha=0.05, test="binomial", norm="l1", order=None, **binning):
    """[TCE] eq. 7, in percent. For `order` see `ks`."""
    blocks = blocks_of(bins, scores if order is None else order, outcomes, weights, **binning)
    sizes = [Sample(outcomes, weights).size(block) for block in blocks]
    counts = rejected(blocks, scores, outcomes, weights, alpha=alpha, test=test)
    shares = [n / sum(sizes) for n in sizes]
    return 100 * norm_of([r / n for r, n in zip(counts, sizes, strict=True)], shares, norm)


# Metrics of the sorted sample without bins


def ks(scores, outcomes, weights=None, order=None, norm="max"):
    """Largest |sum of w (y - p)| over the samples up to a score, divided by the total weight.

    Gupta et al.: Calibration of Neural Networks using Splines (ICLR 2021), eq. 6-8. With norm="range" (Kuiper) the
    range of these sums and 0. `order` is a finer sort key than the scores: log-odds.
    """
    weights = weights or [1] * len(scores)
    sums = [0.0]
    order = scores if order is None else order
    for end in set(order):
        terms = [w * (y - s) for o, s, y, w in zip(order, scores, outcomes, weights, strict=True) if o <= end and w]
        sums.append(math.fsum(terms))
    value = max(sums) - min(sums) if norm == "range" else max(map(abs, sums))
    return value / sum(weights) if sum(weights) else math.nan


def atb(scores, outcomes, weights=None):
    """Mean of the squared sums of w (p - y) on both sides of a boundary, uniform on [0, 1], over the total weight.

    Hartline, Hu, Wu: A Perfectly Truthful Calibration Measure (COLT 2026), the definition of ATB. The sums are
    constant between adjacent scores, so that any boundary between them represents all.
    """
    weights = weights or [1] * len(scores)
    if not sum(weights):
        return math.nan
    value = 0.0
    for a, b in pairwise(sorted({0.0, 1.0, *scores})):
        sides = [], []
        for p, y, w in zip(scores, outcomes, weights, strict=True):
            sides[p >= (a + b) / 2].append(w * (p - y) if w else 0.0)
        value += (b - a) * sum(math.fsum(side) ** 2 for side in sides)
    return value / sum(weights) ** 2


def cllr(scores, outcomes, weights=None, order=None):
    """Cllr, min-Cllr and their difference: Bruemmer, du Preez (2006). For `order` see `ks`.

    Weights give both outcomes the same total. Isotonic regression uses these weights.
    """
    weights = weights or [1] * len(scores)
    totals = [math.fsum(w for w, t in zip(weights, outcomes, strict=True) if t == y) for y in (0, 1)]
    if 0 in totals:
        return [math.nan] * 3
    balanced = [Fraction(int(w), int(totals[int(t)])) for w, t in zip(weights, outcomes, strict=True)]
    raw, loss, *_ = (value / math.log(2) for value in corp("nll", scores, outcomes, balanced, order))
    return raw, raw - loss, loss


def corp(score, scores, outcomes, weights=None, order=None):
    """Score, miscalibration, discrimination, uncertainty: Dimitriadis, Gneiting, Jordan (PNAS 2021), eq. 4-6.

    For `order` see `ks`.
    """
    weights = weights or [1] * len(scores)
    sample = Sample(outcomes, weights)
    fitted = {}
    for block in pava(sample, groups(scores if order is None else order, outcomes, weights)):
        fitted |= dict.fromkeys(block, float(sample.mean(block)))
    of = {"brier": oracles.binary_brier_of, "nll": oracles.nll_of}[score]

    def mean_score(predicted):
        rows = [([1 - predicted[i], predicted[i]], [1 - outcomes[i], outcomes[i]]) for i in fitted]
        return oracles.mean([of(q, t) for q, t in rows], [weights[i] for i in fitted])

    rate = oracles.mean(outcomes, weights)
    raw, calibrated, constant = mean_score(scores), mean_score(fitted), mean_score([rate] * len(scores))
    return raw, raw - calibrated, constant - calibrated, constant
