"""Statistics as torchmetrics states: metrics that stream and sync across ranks.

What a state is, and how it adds, is its `StateKind`'s to say. `CalibrationCollection` reads the input once for all of
its members and syncs them together: sums in one collective, whole samples in one more.
"""
