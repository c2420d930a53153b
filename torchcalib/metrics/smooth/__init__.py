"""Readings that need no bins: smECE, the calibration index of a loess curve, a logistic regression, and a z-test."""
