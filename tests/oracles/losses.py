"""Slow, obvious penalties: float64 loops over claims (confidence, outcome, weight), the equation beside each."""

import math


def soft_binned_ece(claims, n_bins, temperature, norm):
    """Karandikar et al., sec. 4: u_ib = softmax_b(-(c_i - centre_b)^2 / T), then the error of bins of weight sum u."""
    centres = [(b + 0.5) / n_bins for b in range(n_bins)]
    bins = [[0.0, 0.0, 0.0] for _ in centres]
    for c, y, w in claims:
        near = [math.exp(-((c - x) ** 2 - min((c - z) ** 2 for z in centres)) / temperature) for x in centres]
        for held, u in zip(bins, near, strict=True):
            for k, value in enumerate((1, c, y)):
                held[k] += w * u / sum(near) * value
    total = sum(n for n, _, _ in bins)
    power = {"l1": 1, "l2": 2}[norm]
    return sum(n / total * abs(y / n - c / n) ** power for n, c, y in bins if n) ** (1 / power)


def mmce(claims, bandwidth, weighted):
    """Kumar et al.: the mean over all pairs of d_i d_j k(c_i, c_j); weighted, of residuals of each outcome apart."""
    came, not_came = sum(w * y for _, y, w in claims), sum(w * (1 - y) for _, y, w in claims)
    if weighted:
        residuals = [
            (w * y * (1 - c) / came if came else 0) - (w * (1 - y) * c / not_came if not_came else 0)
            for c, y, w in claims
        ]
    else:
        residuals = [w * (y - c) / (came + not_came) for c, y, w in claims]
    square = sum(
        a * b * math.exp(-abs(c - z) / bandwidth)
        for a, (c, _, _) in zip(residuals, claims, strict=True)
        for b, (z, _, _) in zip(residuals, claims, strict=True)
    )
    return math.sqrt(max(square, 0.0))
