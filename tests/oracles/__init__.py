"""Reference implementations: float64 loops over Python numbers, one per metric, with the equation.

The input is a list of rows q (class probabilities) with labels h or soft targets t, or a list of P(y=1) with y.
No code is shared with the package.
"""

import math
from itertools import pairwise


def xlogy(x, y):
    """X log y with 0 log 0 = 0."""
    if x == 0:
        return 0.0
    return x * math.log(y) if y > 0 else -math.inf


def one_hot(h, n_classes):
    return [1.0 if k == h else 0.0 for k in range(n_classes)]


def as_rows(probs, targets):
    """Convert binary P(y=1) and y in [0, 1] to rows over the classes (0, 1)."""
    return [[1 - p, p] for p in probs], [[1 - y, y] for y in targets]


# Scores per sample for soft targets t; a label is a one-hot t


def nll_of(q, t):
    """[EPSR] eq. 8: -sum_k t_k log q_k."""
    return -sum(xlogy(tk, qk) for tk, qk in zip(t, q, strict=True))


def brier_of(q, t):
    """[EPSR] eq. 9 without the division by C: sum_k (q_k - t_k)^2."""
    return sum((qk - tk) ** 2 for tk, qk in zip(t, q, strict=True))


def binary_brier_of(q, t):
    """[ECD] eq. 2: (p - y)^2."""
    return (q[1] - t[1]) ** 2


def ecd_of(q, t):
    """[ECD] eq. 12: sum_k q_k log q_k - sum_k t_k log q_k."""
    return sum(xlogy(qk, qk) for qk in q) + nll_of(q, t)


# Distances to label distributions: fractions t of annotators, and sampling noise of n annotators drawn from q


def same_ranking(q, t):
    """Whether no pair of classes is ordered strictly in opposite directions by q and t."""
    return not any(q[j] < q[k] and t[j] > t[k] for j in range(len(q)) for k in range(len(q)))


def expected_of_share(of, p, n):
    """Expectation of of(X / n) for binomial X, summed over all counts. Logarithms of coefficients do not overflow."""

    def log_probability(x):
        coefficient = math.lgamma(n + 1) - math.lgamma(x + 1) - math.lgamma(n - x + 1)
        return coefficient + xlogy(x, p) + xlogy(n - x, 1 - p)

    return sum(math.exp(log_probability(x)) * of(x / n) for x in range(n + 1))


def total_variation_floor(q, n):
    return sum(expected_of_share(lambda t, qk=qk: abs(t - qk), qk, n) for qk in q) / 2


def entropy_floor(q, n):
    """Entropy of q minus the expected entropy of fractions of n annotators."""
    return sum(expected_of_share(lambda t: xlogy(t, t), qk, n) - xlogy(qk, qk) for qk in q)


def brier_floor(q, n):
    return sum(expected_of_share(lambda t, qk=qk: (t - qk) ** 2, qk, n) for qk in q)


def known_entropy(counts):
    """Entropy estimate of the counts n_k: sum_k n_k / n (1 / n_k + ... + 1 / (n - 1))."""
    n = sum(counts)
    return sum(k / n * sum(1 / j for j in range(k, n)) for k in counts if k)


def corrected_distance(metric, q, t, n):
    """Distance, corrected for the noise of n annotators.

    The entropy is the jackknife over annotators of differences of digamma functions, which are sums of inverses of
    whole numbers. The squared distance uses the unbiased variance.
    """
    if metric == "squareddistance":
        return brier_of(q, t) - sum(share * (1 - share) for share in t) / (n - 1)
    counts = [round(share * n) for share in t]
    without = [[k - (j == i) for j, k in enumerate(counts)] for i, voted in enumerate(counts) for _ in range(voted)]
    entropy = n * known_entropy(counts) - (n - 1) * sum(map(known_entropy, without)) / n
    other = nll_of(q, t) if metric == "kldivergence" else -sum(xlogy(p, p) for p in q)
    return other - entropy


def bayes_cost_of(q, t, cost):
    """[EPSR] sec. 2.3.1: sum_k t_k c_kj for the first decision j with the least expected cost sum_k q_k c_kj."""
    expected = [math.fsum(qk * row[j] for qk, row in zip(q, cost, strict=True)) for j in range(len(cost[0]))]
    j = expected.index(min(expected))
    return sum(tk * row[j] for tk, row in zip(t, cost, strict=True))


def least_threshold_cost(scores, labels, weights, cost):
    """Least mean cost over all thresholds of deciding 1 for scores above the threshold."""
    decided = [[int(s > threshold) for s in scores] for threshold in [-math.inf, *scores]]
    return min(mean([cost[y][j] for y, j in zip(labels, row, strict=True)], weights) for row in decided)


def mean(values, weights):
    total = sum(weights)
    return sum(w * v for w, v in zip(weights, values, strict=True) if w) / total if total else math.nan


def mean_at_priors(values, labels, weights, priors):
    """[EPSR] eq. 36-37: sum_k P_k (mean score over the samples of class k)."""
    of_class = []
    for k in range(len(priors)):
        rows = [(v, w) for v, h, w in zip(values, labels, weights, strict=True) if h == k]
        of_class.append(mean([v for v, _ in rows], [w for _, w in rows]))
    return sum(p * m for p, m in zip(priors, of_class, strict=True) if p)


def class_shares(targets, weights):
    """Weighted mean of the (soft) targets: the class priors of the data."""
    return [mean([t[k] for t in targets], weights) for k in range(len(targets[0]))]


# Bins


def between(edges, p, right=False):
    """Index of the bin [a, b) of p; the last bin is closed. With `right` bins are (a, b], and the first is closed."""
    last = len(edges) - 2
    for i, (low, high) in enumerate(pairwise(edges)):
        if right and (low < p <= high or (i == 0 and p == low)):
            return i
        if not right and (low <= p < high or (i == last and p == high)):
            return i
    raise ValueError(p)


def bin_of(p, n_bins, right=False):
    """Index of the equal-width bin of p."""
    return between([i / n_bins for i in range(n_bins + 1)], p, right)


def bins(confidence, outcome, weights, n_bins, right=False, extra=None, copies=None):
    """Return (index, n, mean confidence, mean outcome, mean extra) for each bin with positive weight.

    If `copies` is given, the last number is the variance of the gap instead; see `gap_variance`.
    """
    found = []
    where = [bin_of(c, n_bins, right) for c in confidence]
    for b in range(n_bins):
        rows = [i for i, at in enumerate(where) if at == b and weights[i] > 0]
        if rows:
            w = [weights[i] for i in rows]
            columns = [mean([column[i] for i in rows], w) for column in (confidence, outcome, extra or outcome)]
            if copies is not None:
                columns[-1] = gap_variance([confidence[i] for i in rows], [outcome[i] for i in rows], w, copies)
            found.append((b, sum(w), *columns))
    return found


def gap_variance(confidence, outcome, weights, copies):
    """Estimated variance of the gap of a bin: S2 sum w (e - m)^2 / (W (W^2 - S2)), with S2 = W for copies of rows."""
    e = [o - c for c, o in zip(confidence, outcome, strict=True)]
    total, m = sum(weights), mean(e, weights)
    square = total if copies else sum(w**2 for w in weights)
    around = sum(w * (x - m) ** 2 for w, x in zip(weights, e, strict=True))
    difference = total**2 - square
    return square * around / (total * difference) if difference > 1e-12 * total**2 else 0.0  # 0 for a single row


def noise_of_bins(pairs, weights, n_bins, *, copies, soft, right=False):
    """Return spread, noise, sum of squared weights and of squared residuals of bins for (confidence p, outcome t).

    The spread is sum w p (1 - p). The noise is the variance of sum w t in a calibrated model with independent rows:
    w^2 v for a weight w, and w v for w copies of a row. For labels v is the Bernoulli variance p (1 - p). For soft
    labels it is (t - p)^2, whose mean is the variance of t.
    """
    spread, noise, squares, residuals = ([0.0] * n_bins for _ in range(4))
    for (p, t), w in zip(pairs, weights, strict=True):
        b = bin_of(p, n_bins, right)
        spread[b] += w * p * (1 - p)
        noise[b] += (w if copies else w**2) * ((t - p) ** 2 if soft else p * (1 - p))
        squares[b] += w if copies else w**2
        residuals[b] += w * (t - p) ** 2
    return spread, noise, squares, residuals


def poisson_binomial(probabilities):
    """Probabilities of 0, 1, ... successes of independent trials, by convolution."""
    found = [1.0]
    for p in probabilities:
        found = [a * (1 - p) + b * p for a, b in zip([*found, 0.0], [0.0, *found], strict=True)]
    return found


def ece(rows, debiased=False):
    """Sum of share |gap| over bins. With `debiased`, |gap| is sqrt(max(0, gap^2 - v)) for the variance v of the gap."""
    total = sum(n for _, n, *_ in rows)
    found = 0.0
    for _, n, c, f, v in rows:
        square = (f - c) ** 2 - (v if debiased else 0)
        found += n / total * math.sqrt(max(square, 0))
    return found if rows else math.nan


def esce(rows):
    """Sum of share gap over bins."""
    total = sum(n for _, n, *_ in rows)
    return sum(n / total * (f - c) for _, n, c, f, _ in rows) if rows else math.nan


def fullece(rows):
    """Sum of n |gap| over bins of all classes, divided by the number of samples, each of which has one true class."""
    total = sum(n * f for _, n, _, f, _ in rows)
    return sum(n * abs(f - c) for _, n, c, f, _ in rows) / total if rows else math.nan


def meanbinerror(rows):
    """Mean |gap| of the bins with rows, without weights."""
    gaps = [abs(f - c) for _, n, c, f, _ in rows if n]
    return sum(gaps) / len(gaps) if gaps else math.nan


def mce(rows):
    """Maximum |gap|."""
    return max(abs(f - c) for _, _, c, f, _ in rows) if rows else math.nan


def rmsce(rows, debiased=False):
    """Root of the sum of share gap^2. With `debiased`, the variance of the gap is subtracted from each gap^2."""
    total = sum(n for _, n, *_ in rows)
    square = 0.0
    for _, n, c, f, v in rows:
        square += n / total * ((f - c) ** 2 - (v if debiased else 0))
    return math.sqrt(max(square, 0)) if rows else math.nan


# Modes


def top_k(q, t, k, only=False):
    """Sums of the k largest probabilities and of their targets, or those of the k-th; the first classes at ties."""
    return event_of(q, t, classes_of_top_k(q, k, only))


def classes_of_top_k(q, k, only=False):
    """The k classes with the largest entries, or the k-th alone; the first classes at ties."""
    order = sorted(range(len(q)), key=lambda j: (-q[j], j))
    return order[k - 1 : k] if only else order[:k]


def event_of(q, t, classes):
    """Sums of the probabilities and of the target over some classes."""
    return min(1.0, sum(q[j] for j in classes)), sum(t[j] for j in classes)


def events(task, mode, preds, targets):
    """Return (confidence, outcome) of every sample, for each value. Targets are labels or distributions."""
    if task == "binary" and mode == "positive":
        return [list(zip(preds, targets, strict=True))]
    if task == "binary":
        preds, targets = as_rows(preds, targets)
    elif isinstance(targets[0], int):
        targets = [one_hot(h, len(preds[0])) for h in targets]
    rows = list(zip(preds, targets, strict=True))
    if mode == "classwise":
        return [[(q[k], t[k]) for q, t in rows] for k in range(len(preds[0]))]
    k, only = (1, False) if mode == "top_label" else (mode.k, mode.only)
    return [[top_k(q, t, k, only) for q, t in rows]]
