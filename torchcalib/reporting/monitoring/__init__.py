"""Calibration during training: `Monitor` takes validation batches and keeps a `History` of all epochs.

It is independent of training frameworks; `torchcalib.integrations` connects it to them.
"""
