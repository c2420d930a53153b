"""Calibration metrics as streaming classes, which are subclasses of `torchmetrics.Metric`; collection and wrappers."""
