"""Systems side by side on the same targets: `compare({"a": preds_a, "b": preds_b}, target, task=...)`.

Every number of a report that says how good a system is, its difference to the first system, and a paired bootstrap
interval of that. Built from pieces of any number, in constant memory, as a report is.
"""
