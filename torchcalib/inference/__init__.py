"""Inference: null distribution of calibration errors, intervals, and the bootstrap."""
