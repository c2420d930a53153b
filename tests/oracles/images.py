"""Float64 loops over images and classes: values per image, their means, and the voxels near an edge.

The input of an image is a list of voxels. A voxel is (q, t, w): probabilities and targets of the classes (labels of a
multi-label task), and a weight. No code is shared with the package.
"""

import math
from itertools import product

from oracles import brier_of, esce, mce, meanbinerror, nll_of, rmsce
from oracles import ece as ece_of_bins

ERRORS = {"ece": ece_of_bins, "esce": esce, "mce": mce, "rmsce": rmsce, "mean_bin_error": meanbinerror}
SCORES = {"nll": nll_of, "brier_score": brier_of}


def bins_of(events, n_bins, right):
    """Rows (b, n, mean confidence, frequency, unused) of the non-empty bins of events (confidence, outcome, weight)."""
    sums = {}
    for p, y, w in events:
        if not w:
            continue
        edges = [k / n_bins for k in range(n_bins + 1)]
        inside = [k for k in range(n_bins) if (edges[k] < p <= edges[k + 1] if right else edges[k] <= p < edges[k + 1])]
        b = inside[0] if inside else (0 if p == 0 else n_bins - 1)
        n, c, f = sums.get(b, (0, 0, 0))
        sums[b] = n + w, c + w * p, f + w * y
    return [(b, n, c / n, f / n, 0) for b, (n, c, f) in sorted(sums.items())]


def top_label(q, t):
    k = max(range(len(q)), key=lambda j: (q[j], -j))
    return q[k], t[k]


def value_of(name, image, k=None, n_bins=15, right=False):
    """Value of one image, for class k against the rest, or for the top label (k is None)."""
    if name in SCORES:
        rows = [(SCORES[name](q, t), w) for q, t, w in image if w]
        return sum(w * s for s, w in rows) / sum(w for _, w in rows) if rows else math.nan
    events = [(*(top_label(q, t) if k is None else (q[k], t[k])), w) for q, t, w in image]
    return ERRORS[name](bins_of(events, n_bins, right))


def mean(values):
    """Mean of the values that are not NaN; NaN without one."""
    found = [x for x in values if not math.isnan(x)]
    return math.fsum(found) / len(found) if found else math.nan


def values_of(name, images, classes, ignore_empty=False, **options):
    """Values of all images and classes. An empty class is NaN with `ignore_empty`."""

    def value(image, k):
        is_empty = ignore_empty and not any(t[k] and w for _, t, w in image)
        return math.nan if is_empty else value_of(name, image, k, **options)

    return [[value(image, k) for k in classes] for image in images]


def near_edge(labels, shape, width, spacing, ignored=None):
    """Whether a voxel with another label is at most `width` away, for a dict of labels by position."""
    places = list(product(*map(range, shape)))

    def distance(one, other):
        return math.sqrt(sum(((i - j) * step) ** 2 for i, j, step in zip(one, other, spacing, strict=True)))

    known = [place for place in places if labels[place] != ignored]
    return {
        place: place in known
        and any(labels[other] != labels[place] and distance(place, other) <= width for other in known)
        for place in places
    }
