"""Input conversion, and the statistics that metrics are computed from.

`InputFormat` checks the input and converts it to `Predictions`, which caches per-row quantities. Metrics with equal
formats can share one conversion. Accumulators compute sums or samples from the predictions.

Axes in shapes: `...` batch, `N` samples, `C` classes, `L` labels.
"""
