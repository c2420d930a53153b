"""Reference implementations of metrics without bins, and of penalties: float64 loops, with the equation.

No code is shared with the package.
"""

import math

import numpy as np

# Smooth ECE


def smooth(values, places, width):
    """Smooth values at places in [0, 1] at the nodes of a grid, like relplot 1.0.3.

    Values are split linearly between the nodes of a grid with max(2000, 20 / width) // 2 steps, and reflected at both
    ends. The kernel reaches half of the range. On a grid with an odd number of steps it is shifted by half a step.
    """
    steps = max(2000, round(20 / width)) // 2
    nodes = {}
    for value, place in zip(values, places, strict=True):
        below = min(int(place * steps), steps - 1)
        above = place * steps - below
        nodes[below] = nodes.get(below, 0) + (1 - above) * value
        nodes[below + 1] = nodes.get(below + 1, 0) + above * value
    at = np.arange(steps + 1)
    smoothed = np.zeros(steps + 1)
    shift = (steps + 1) // 2 - steps / 2
    for node, value in nodes.items():
        for image in {node, -node, 2 * steps - node}:
            offset = at - image
            density = np.exp(-(((offset + shift) / steps / width) ** 2) / 2) / (math.sqrt(2 * math.pi) * width)
            smoothed += value * density * (offset >= -((steps + 1) // 2)) * (offset <= steps - (steps + 1) // 2)
    return smoothed


def smece_at(width, confidence, outcome, weights):
    """Blasiok, Nakkiran (ICLR 2024): mean |smoothed residual| at max(200, 10 / width) points, over the mean density."""
    held = [(c, y, w) for c, y, w in zip(confidence, outcome, weights, strict=True) if w]
    places = [c for c, _, _ in held]
    points = np.linspace(0, 1, max(200, round(10 / width)))
    residual = smooth([w * (c - y) for c, y, w in held], places, width)
    density = smooth([w for _, _, w in held], places, width)
    grid = np.linspace(0, 1, len(density))
    residual, density = np.interp(points, grid, residual), np.interp(points, grid, density) + 1e-4
    return np.abs(residual).sum() / density.sum()


def smece_width(confidence, outcome, weights):
    """Bisect in ten steps for the width that equals the smooth ECE at that width, but is at least 0.001."""
    width, low = 1.0, 0.0
    for _ in range(10):
        middle = (width + low) / 2
        if middle < 0.001 or middle < smece_at(middle, confidence, outcome, weights):
            low = middle
        else:
            width = middle
    return width


def smece(confidence, outcome, weights, bandwidth=None):
    width = smece_width(confidence, outcome, weights) if bandwidth is None else bandwidth
    return smece_at(width, confidence, outcome, weights)


# Spiegelhalter's z


def spiegelhalter(confidence, outcome, weights, component="z"):
    """Spiegelhalter (1986): Brier score minus its expectation, over its standard deviation. Each row counts w times."""
    rows = list(zip(confidence, outcome, weights, strict=True))
    excess = math.fsum(w * (y - p) * (1 - 2 * p) for p, y, w in rows)
    variance = math.fsum(w * (1 - 2 * p) ** 2 * p * (1 - p) for p, y, w in rows)
    z = excess / math.sqrt(variance)
    return z if component == "z" else math.erfc(abs(z) / math.sqrt(2))


# Cox's regression


def logistic(x, y, w, free_slope=True):
    """Maximum likelihood of P(y=1) = 1 / (1 + exp(-a - b x)) by Newton's method, and the variances of a and b."""
    a, b = 0.0, 0.0 if free_slope else 1.0
    for _ in range(60):
        q = [1 / (1 + math.exp(-a - b * value)) for value in x]
        by_a = sum(wi * (yi - qi) for yi, qi, wi in zip(y, q, w, strict=True))
        by_b = sum(wi * (yi - qi) * xi for xi, yi, qi, wi in zip(x, y, q, w, strict=True))
        v = [wi * qi * (1 - qi) for qi, wi in zip(q, w, strict=True)]
        aa, ab = sum(v), sum(vi * xi for xi, vi in zip(x, v, strict=True))
        bb = sum(vi * xi * xi for xi, vi in zip(x, v, strict=True))
        if not free_slope:
            a += by_a / aa
            continue
        determinant = aa * bb - ab * ab
        a, b = a + (bb * by_a - ab * by_b) / determinant, b + (aa * by_b - ab * by_a) / determinant
    return a, b, (bb / (aa * bb - ab * ab), aa / (aa * bb - ab * ab))


def cox(confidence, outcome, weights, component="slope", eps=0):
    """Cox (1958): logistic regression on the log-odds. The likelihood-ratio test has two degrees of freedom."""
    x = [math.log(p / (1 - p)) for p in (min(max(p, eps), 1 - eps) for p in confidence)]
    a, b, variances = logistic(x, outcome, weights)

    def log_likelihood(a, b):
        q = [1 / (1 + math.exp(-a - b * value)) for value in x]
        rows = zip(q, outcome, weights, strict=True)
        return math.fsum(w * math.log(qi if y else 1 - qi) for qi, y, w in rows)

    return {
        "slope": b,
        "intercept": a,
        "in_the_large": logistic(x, outcome, weights, free_slope=False)[0],
        "slope_se": math.sqrt(variances[1]),
        "intercept_se": math.sqrt(variances[0]),
        "p_value": math.exp(log_likelihood(0, 1) - log_likelihood(a, b)),
    }[component]


# Integrated calibration index (ICI)


def loess(x, y, span=0.75, degree=2):
    """Cleveland, Devlin (1988): for each point a polynomial fit to its nearest neighbours with tricube weights."""
    x, y = np.array(x), np.array(y, dtype=float)
    fitted = []
    for at in x:
        reach = np.sort(np.abs(x - at))[int(span * len(x) + 1e-5) - 1]
        if reach == 0:  # more samples than the span are equal
            fitted.append(y[x == at].mean())
            continue
        weight = np.clip(1 - (np.abs(x - at) / reach) ** 3, 0, None) ** 3
        design = np.stack([((x - at) / reach) ** power for power in range(degree + 1)], -1)
        root = np.sqrt(weight)
        fitted.append(np.linalg.lstsq(design * root[:, None], y * root, rcond=None)[0][0])
    return np.array(fitted)


def ici(confidence, outcome, weights, component="ici", **how):
    """Austin, Steyerberg (2019): mean, median, 90th percentile or maximum of |p - loess(p)|."""
    p = [c for c, w in zip(confidence, weights, strict=True) for _ in range(int(w))]
    y = [o for o, w in zip(outcome, weights, strict=True) for _ in range(int(w))]
    distance = np.abs(loess(p, y, **how) - np.array(p))
    shares = {"e50": 0.5, "e90": 0.9, "emax": 1}
    return distance.mean() if component == "ici" else np.quantile(distance, shares[component])


SIZES = [sign * size for size in (0.1, 0.2, 0.4, 0.8) for sign in (1, -1)]
SHIFTS_AND_SLOPES = [(a, 1.0) for a in SIZES] + [(0.0, math.exp(log_b)) for log_b in SIZES]


def log_mean(logs):
    """Logarithm of the mean of exp."""
    top = max(logs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(x - top) for x in logs) / len(logs))


def log_ratio(p, y, a, b):
    """Log of q^y (1 - q)^(1 - y) / (p^y (1 - p)^(1 - y)) for q = sigmoid(a + b logit p) (module `sequential`)."""
    if p in (0, 1):
        return 0.0 if y == p else math.inf
    z = math.log(p) - math.log1p(-p)
    w = a + b * z

    def log_sigmoid(x):
        return min(x, 0) - math.log1p(math.exp(-abs(x)))

    return y * (log_sigmoid(w) - log_sigmoid(z)) + (1 - y) * (log_sigmoid(-w) - log_sigmoid(-z))


def log_ratios(confidence, outcome, weights):
    """Sums of log ratios for each component, and the sum of their magnitudes."""
    rows = list(zip(confidence, outcome, weights, strict=True))
    of_rows = [[w * log_ratio(p, y, a, b) for p, y, w in rows if w] for a, b in SHIFTS_AND_SLOPES]
    sums = [math.inf if math.inf in of else math.fsum(of) for of in of_rows]
    return sums, max(math.fsum(abs(x) for x in of if x < math.inf) for of in of_rows)


# Penalties, of events (confidence, outcome, weight)


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
