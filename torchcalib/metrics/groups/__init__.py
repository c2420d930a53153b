"""Metrics per group of rows (`ByGroup`, `by_group`), and for clusters of dependent rows (`Clustered`)."""
