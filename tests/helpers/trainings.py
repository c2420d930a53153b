"""Trainings that a `Monitor` watches: predictions whose calibration is known in every epoch."""

import warnings

import torch

import torchcalib as tc


def epochs_of(scales, threshold=0.1, metrics=None, right=30):
    """A monitor of a model that is right in 3 of 4 samples and becomes surer by these scales of its logits."""
    monitor = tc.Monitor(task="binary", from_logits=True, threshold=threshold, metrics=metrics)
    target = (torch.arange(40) < right).long()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for scale in scales:
            monitor.update(torch.full((40,), float(scale)), target)
            monitor.end_epoch()
    return monitor, [str(warning.message) for warning in told]
