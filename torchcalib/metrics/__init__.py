"""Metrics as functions and as streaming classes: one file per family, with common code in `estimator` and `base`."""
