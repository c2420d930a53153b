"""Human-uncertainty calibration: how far predictions are from how people voted, and what of that few votes explain.

The distances are of two distributions over classes, predicted and voted, sample by sample. Few votes are a noisy
picture of what many would be: `component` tells the distance that is found, what chance alone would make of it, and
where it can be known the distance without that noise.
"""
