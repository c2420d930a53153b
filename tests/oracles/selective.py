"""Reference implementations of selective prediction: loops over the number k of accepted samples.

Input is a column of confidences (or any sort key of the same order), whether each prediction is correct, and whole
weights. No code is shared with the package.
"""

import math
from fractions import Fraction
from itertools import pairwise

from oracles.ranked import groups


def expected_errors(order, correct, weights=None):
    """Return E_1, ..., E_N: the expected number of errors among the k most confident samples, over orders of ties.

    In a random order, each of several tied samples is an error with the same probability.
    """
    weights = weights or [1] * len(order)
    errors, found = Fraction(0), []
    for group in reversed(groups(order, correct, weights)):
        n = sum(weights[i] for i in group)
        rate = Fraction(sum(weights[i] * (1 - correct[i]) for i in group), n)
        for _ in range(n):
            errors += rate
            found.append(errors)
    return found


def area(errors):
    """Geifman, Uziel, El-Yaniv, arXiv 1805.08206: (1/N) sum_k E_k / k."""
    return math.fsum(e / k for k, e in enumerate(errors, 1)) / len(errors) if errors else math.nan


def aurc(order, correct, weights=None):
    return area(expected_errors(order, correct, weights))


def eaurc(order, correct, weights=None):
    """AURC minus the AURC of the same predictions with the correctness as their confidence."""
    return aurc(order, correct, weights) - aurc(correct, correct, weights)


def augrc(order, correct, weights=None):
    """Traub et al., arXiv 2407.01032: trapezoidal area under E_k / N over k / N, from (0, 0)."""
    errors = [0, *expected_errors(order, correct, weights)]
    n = len(errors) - 1
    return float(sum((a + b) / 2 for a, b in pairwise(errors)) / n**2) if n else math.nan


def correctness_auroc(order, correct, weights=None):
    """Fraction of pairs of a correct sample and an error in which the correct one is more confident; ties are 1/2."""
    weights = weights or [1] * len(order)
    rows = list(zip(order, correct, weights, strict=True))
    wins = pairs = 0
    for a, y, v in rows:
        for b, z, w in rows:
            if y == 1 and z == 0:
                wins += v * w * ((a > b) + Fraction(1, 2) * (a == b))
                pairs += v * w
    return float(wins / pairs) if pairs else math.nan


def risk_at_coverage(order, correct, weights=None, coverage=0.8):
    """E_k / k for the smallest k >= coverage N, with the coverage as the decimal number that was written."""
    errors = expected_errors(order, correct, weights)
    if not errors:
        return math.nan
    k = math.ceil(Fraction(str(coverage)) * len(errors))
    return float(errors[k - 1] / k)


def accuracy_at_coverage(order, correct, weights=None, coverage=0.8):
    return 1 - risk_at_coverage(order, correct, weights, coverage)


def points(order, correct, weights=None):
    """Return (confidence, k, E_k) for every threshold that accepts all samples with at least this confidence."""
    weights = weights or [1] * len(order)
    found = []
    for threshold in sorted({o for o, w in zip(order, weights, strict=True) if w}, reverse=True):
        accepted = [(y, w) for o, y, w in zip(order, correct, weights, strict=True) if o >= threshold]
        found.append((threshold, sum(w for _, w in accepted), sum(w * (1 - y) for y, w in accepted)))
    return found


def coverage_at_risk(order, correct, weights=None, risk=0.05):
    """Largest k / N over thresholds with E_k / k <= risk, with the risk as the decimal number that was written."""
    found = points(order, correct, weights)
    if not found:
        return math.nan
    return max([k for _, k, e in found if Fraction(e, k) <= Fraction(str(risk))], default=0) / found[-1][1]
