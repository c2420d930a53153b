"""Reference implementations of canonical calibration: loops over Python floats, with the equation.

A sample is a list of rows q of class probabilities with targets t, and whole weights, which count copies of rows.
No code is shared with the package.
"""

import math
from statistics import median_low

import oracles


def repeated_rows(rows, weights):
    """Repeat every row as often as its weight."""
    return [row for row, w in zip(rows, weights, strict=True) for _ in range(int(w))]


def distance(p, q, kernel):
    if kernel == "laplacian":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(p, q, strict=True)))


def h(p, t, q, u, kernel, bandwidth):
    """Widmann et al., NeurIPS 2019, eq. 4 with the kernel k I: (t - p)^T (u - q) k(p, q)."""
    d = distance(p, q, kernel)
    k = math.exp(-d / bandwidth) if kernel == "laplacian" else math.exp(-(d**2) / (2 * bandwidth**2))
    return k * sum((a - b) * (c - d) for a, b, c, d in zip(t, p, u, q, strict=True))


def median_bandwidth(qs, kernel):
    """Median distance over pairs of samples, or 1 if it is 0."""
    found = [distance(qs[i], qs[j], kernel) for j in range(len(qs)) for i in range(j)]
    return median_low(found) or 1.0


def block_means(qs, ts, weights, kernel, bandwidth, size):
    """Table 1: unbiased estimate for each whole block."""
    sample = repeated_rows(list(zip(qs, ts, strict=True)), weights)
    found = []
    for start in range(0, len(sample) // size * size, size):
        block = sample[start : start + size]
        terms = [h(*block[i], *block[j], kernel, bandwidth) for j in range(size) for i in range(j)]
        found.append(sum(terms) / len(terms))
    return found


def skce(qs, ts, weights, estimator="unbiased", kernel="laplacian", bandwidth=1.0, block_size=32):
    """Table 1: mean over all pairs i < j, over all i and j, or over the pairs of blocks."""
    if bandwidth == "median":
        bandwidth = median_bandwidth(repeated_rows(qs, weights), kernel)
    if estimator in ("block", "linear"):
        means = block_means(qs, ts, weights, kernel, bandwidth, 2 if estimator == "linear" else block_size)
        return sum(means) / len(means) if means else math.nan
    if estimator == "biased":
        pairs = [(i, j, weights[i] * weights[j]) for i in range(len(qs)) for j in range(len(qs))]
    else:
        copies = repeated_rows(range(len(qs)), weights)
        pairs = [(i, j, 1) for b, j in enumerate(copies) for i in copies[:b]]
    total = sum(w for *_, w in pairs)
    terms = [w * h(qs[i], ts[i], qs[j], ts[j], kernel, bandwidth) for i, j, w in pairs if w]
    return sum(terms) / total if total else math.nan


def p_value(means):
    """Lemma 3: the block mean over its standard error is asymptotically normal; one-sided."""
    n, mean = len(means), sum(means) / len(means)
    variance = sum((x - mean) ** 2 for x in means) / (n - 1)
    return math.erfc(mean / math.sqrt(variance / n) / math.sqrt(2)) / 2


def log_dirichlet(q, alpha):
    """Log density of a Dirichlet distribution at q, with 0 log 0 = 0."""
    constant = math.lgamma(sum(alpha)) - sum(math.lgamma(a) for a in alpha)
    return constant + sum(oracles.xlogy(a - 1, x) for a, x in zip(alpha, q, strict=True))


def canonical_error(qs, ts, weights, p, bandwidth):
    """Popordanoska et al., NeurIPS 2022, eq. 9-10: leave-one-out ratio estimate, and its mean distance from q."""
    sample = repeated_rows(list(zip(qs, ts, strict=True)), weights)
    found = []
    for i, (q, _) in enumerate(sample):
        others = [row for j, row in enumerate(sample) if j != i]
        logs = [log_dirichlet(q, [x / bandwidth + 1 for x in other]) for other, _ in others]
        kernels = [math.exp(x - max(logs)) for x in logs]
        weighted_targets = [[k * x for x in t] for k, (_, t) in zip(kernels, others, strict=True)]
        expected = [sum(column) / sum(kernels) for column in zip(*weighted_targets, strict=True)]
        found.append(sum(abs(e - x) ** p for e, x in zip(expected, q, strict=True)))
    return sum(found) / len(found)


def leave_one_out_likelihood(qs, weights, bandwidth):
    """Mean log density of every sample under the mean of the kernels at the other samples."""
    sample, total = repeated_rows(qs, weights), 0.0
    for i, q in enumerate(sample):
        logs = [log_dirichlet(q, [x / bandwidth + 1 for x in other]) for j, other in enumerate(sample) if j != i]
        total += max(logs) + math.log(sum(math.exp(x - max(logs)) for x in logs) / len(logs))
    return total / len(sample)
