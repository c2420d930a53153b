"""Comparison of systems on the same targets: `compare({"a": preds_a, "b": preds_b}, target, task=...)`.

It has the lines of a report for each system, their differences to the first system, and paired bootstrap intervals.
"""
