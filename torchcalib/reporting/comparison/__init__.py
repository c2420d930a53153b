"""Comparison of systems on the same targets: `compare({"a": preds_a, "b": preds_b}, target, task=...)`.

It computes scores and calibration errors for each system. Differences from the first system have paired bootstrap
intervals.
"""
