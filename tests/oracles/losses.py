"""Reference implementations of penalties: float64 loops over events (confidence, outcome, weight)."""

import math


def soft_binned_ece(events, n_bins, temperature, norm):
    """Karandikar et al., sec. 4: u_ib = softmax_b(-(c_i - centre_b)^2 / T), then the error over bins of weight u."""
    centres = [(b + 0.5) / n_bins for b in range(n_bins)]
    bins = [[0.0, 0.0, 0.0] for _ in centres]
    for c, y, w in events:
        near = [math.exp(-((c - x) ** 2 - min((c - z) ** 2 for z in centres)) / temperature) for x in centres]
        for held, u in zip(bins, near, strict=True):
            for k, value in enumerate((1, c, y)):
                held[k] += w * u / sum(near) * value
    total = sum(n for n, _, _ in bins)
    power = {"l1": 1, "l2": 2}[norm]
    return sum(n / total * abs(y / n - c / n) ** power for n, c, y in bins if n) ** (1 / power)


def mmce(events, bandwidth, weighted):
    """Kumar et al.: mean over pairs of d_i d_j k(c_i, c_j). With `weighted`, each outcome is normalised separately."""
    positives, negatives = sum(w * y for _, y, w in events), sum(w * (1 - y) for _, y, w in events)
    if weighted:
        residuals = [
            (w * y * (1 - c) / positives if positives else 0) - (w * (1 - y) * c / negatives if negatives else 0)
            for c, y, w in events
        ]
    else:
        residuals = [w * (y - c) / (positives + negatives) for c, y, w in events]
    square = sum(
        a * b * math.exp(-abs(c - z) / bandwidth)
        for a, (c, _, _) in zip(residuals, events, strict=True)
        for b, (z, _, _) in zip(residuals, events, strict=True)
    )
    return math.sqrt(max(square, 0.0))
