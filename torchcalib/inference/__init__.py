"""Inference: null distribution of calibration errors, confidence intervals, and the bootstrap."""
