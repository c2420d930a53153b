"""Calibration during training: a `Monitor` evaluates each validation and appends the values to a `History`.

This package does not depend on a training framework; `integrations.lightning` is an adapter.
"""
