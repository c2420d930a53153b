"""Raw tensors in, `Predictions` out: the only place that checks or converts input.

`InputFormat` says how tensors are to be read; it is a frozen value, so two metrics with equal formats can share one
reading. `Predictions` holds what every score and every bin is computed from, each row quantity computed once.

Axes: `...` batch, `N` samples, `C` classes (or labels).
"""
