"""Calibration metrics as functions and as streaming classes, one module per family."""
