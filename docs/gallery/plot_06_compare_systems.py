"""
Which of several models is better, and is the difference significant?
=====================================================================

Models that predicted the same targets are compared with paired intervals. The first model is the baseline.
"""

import torch
from example_data import predictions

import torchcalib
from torchcalib.calibration import TemperatureScaling, cross_val_calibrate

images = predictions("cifar10_resnet20")
print(images)
options = {"task": "multiclass", "from_logits": True}
noise = torch.randn(images.preds.shape, generator=torch.Generator().manual_seed(0))
systems = {
    "baseline": images.preds,
    "temperature": cross_val_calibrate(images.preds, images.target, calibrator=TemperatureScaling(), **options),
    "noisy": images.preds + 2 * noise,
    "half precision": images.preds.bfloat16(),
}
compared = torchcalib.compare(systems, images.target, n_replicates=99, **options)
torchcalib.plots.difference_plot(compared).figure

# %%
# Each panel shows the differences of one metric from the baseline, with 95% intervals. The better side is shaded.
# Blue marks are significantly better, orange marks worse, and hollow marks are not significant.
#
# The intervals are paired: all models share the bootstrap replicates of the test images. The part of the noise that
# the models have in common cancels out. Small differences are therefore significant although the separate intervals
# of the models overlap.

for sentence in compared.sentences.values():
    print(sentence)

# %%
# Temperature scaling improves the calibration and keeps the accuracy. Noise in the logits makes the probabilities and
# the accuracy worse. Rounding to half precision has almost no effect.
#
# A line contains the values, their intervals and the verdicts. `compared.save("folder")` writes a page, a table and
# the diagram.

line = compared["nll"]
for name, difference in line.differences.items():
    low, high = difference.interval.low, difference.interval.high
    print(f"{name}: {difference.value:+.4f} ({low:+.4f} to {high:+.4f}), {difference.verdict}")
