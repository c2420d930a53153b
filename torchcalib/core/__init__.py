"""Conversion of input to predictions, and statistics from which metrics are computed.

`InputFormat` checks the input and converts it to `Predictions`, which caches per-row quantities. Metrics with equal
formats can share one conversion. Accumulators compute sums or samples from the predictions.

Axes in shapes: `...` batch, `N` samples, `C` classes, `L` labels.
"""
