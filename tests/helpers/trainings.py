"""Simulated trainings for tests of `Monitor`, with known calibration in every epoch."""

import warnings

import torch

import torchcalib as tc


def epochs_of(scales, threshold=0.1, metrics=None, right=30):
    """Return a monitor and its warnings, for an accuracy of `right` / 40 and logits of one scale per epoch."""
    monitor = tc.Monitor(task="binary", from_logits=True, threshold=threshold, metrics=metrics)
    target = (torch.arange(40) < right).long()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in scales:
            monitor.update(torch.full((40,), float(scale)), target)
            monitor.end_epoch()
    return monitor, [str(warning.message) for warning in caught]
