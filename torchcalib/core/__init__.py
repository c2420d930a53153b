"""Input conversion, and the statistics that metrics are computed from.

`InputFormat` checks and converts the input; no other package does. It is a frozen value: metrics with equal formats can
share one conversion. It returns `Predictions`, which caches per-row quantities. Accumulators compute sums or samples
from them.

Axes in shapes: `...` batch, `N` samples, `C` classes, `L` labels.
"""
