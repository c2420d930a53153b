"""Metrics per group of rows: streaming (`ByGroup`) and as a function (`by_group`)."""
