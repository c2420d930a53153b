"""Metrics: each family in one file, functions and classes side by side, over one engine (`estimator`, `base`)."""
