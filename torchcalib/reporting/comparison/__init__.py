"""Comparison of systems on the same targets: `compare({"a": preds_a, "b": preds_b}, target, task=...)`.

It computes the lines of a report for each system, and differences from the first one with paired bootstrap intervals.
"""
