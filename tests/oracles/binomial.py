"""Reference implementations: tails of the beta distribution to 50 digits, and the rule of scipy's binomial test.

No code is shared with the package.
"""

import mpmath as mp
import numpy as np
from scipy.stats import binom


def log_beta_density(a, b, x):
    """Log of x^a (1-x)^b / B(a, b), in the current mpmath precision."""
    return a * mp.log(x) + b * mp.log(1 - x) + mp.loggamma(a + b) - mp.loggamma(a) - mp.loggamma(b)


def beta_tail_by_series(a, b, x):
    """I_x(a, b) to 50 digits by DLMF 8.17.7, for x <= 1/2 and b x <= 40, where 80 digits allow for cancellation."""
    with mp.workdps(80):
        a, b, x = mp.mpf(a), mp.mpf(b), mp.mpf(x)
        term = total = 1 / a
        pochhammer, k = mp.mpf(1), 0
        while abs(term) > abs(total) * mp.mpf(10) ** -55:
            k += 1
            pochhammer *= (k - b) / k * x
            term = pochhammer / (a + k)
            total += term
        return total * mp.exp(log_beta_density(a, b, x) - b * mp.log(1 - x))


def beta_tails_50_digits(a, b, x):
    """I_x(a, b) and 1 - I_x(a, b) by the continued fraction of DiDonato and Morris (1992, eq. 9), to convergence."""
    with mp.workdps(50):
        a, b, x = mp.mpf(a), mp.mpf(b), mp.mpf(x)
        mirrored = x > a / (a + b)
        if mirrored:
            a, b, x = b, a, 1 - x

        def partial_denominator(m):
            head = m + m * (b - m) * x / (a + 2 * m - 1) if m else 0
            return head + (a + m) * (a * (1 - x) - b * x + 1 + m * (2 - x)) / (a + 2 * m + 1)

        c = f = partial_denominator(0)
        d, m, change = mp.mpf(0), 0, mp.mpf(0)
        while abs(change - 1) > mp.mpf(10) ** -25:
            m += 1
            numerator = (a + m - 1) * (a + b + m - 1) * m * (b - m) * x * x / (a + 2 * m - 1) ** 2
            if numerator == 0:
                break
            d = 1 / (partial_denominator(m) + numerator * d)
            c = partial_denominator(m) + numerator / c
            change = c * d
            f *= change
        tail = mp.exp(log_beta_density(a, b, x)) / f
        return (1 - tail, tail) if mirrored else (tail, 1 - tail)


def scipy_p_value(k, n, p):
    """p-values by the rule of scipy.stats.binomtest for arrays, from scipy's distribution."""
    k, n, p = np.broadcast_arrays(np.asarray(k, float), np.asarray(n, float), np.asarray(p, float))
    d, mean = binom.pmf(k, n, p) * (1 + 1e-7), p * n
    below = k < mean
    # `inner` is more probable than d or before the search range, `outer` is not or beyond all outcomes
    inner = np.where(below, np.ceil(mean) - 1, np.floor(mean) + 1)
    outer = np.where(below, n + 1, -1.0)
    for _ in range(40):
        middle = np.trunc((inner + outer) / 2)
        common, open_ = binom.pmf(middle, n, p) > d, abs(inner - outer) > 1
        inner, outer = np.where(common & open_, middle, inner), np.where(~common & open_, middle, outer)
    low = np.where(below, k, outer)
    high = np.where(below, outer, k)
    return np.where(k == mean, 1.0, np.minimum(1, binom.cdf(low, n, p) + binom.sf(high - 1, n, p)))
