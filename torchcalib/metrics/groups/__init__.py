"""Metrics per group of rows: the streaming class `ByGroup` and the function `by_group`."""
