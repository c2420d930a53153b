"""
Which of several models is better, and is the difference significant?
=====================================================================

Models that predicted the same targets are compared with paired intervals. The first model is the baseline.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
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
    "temperature": cross_val_calibrate(
        images.preds, images.target, calibrator=TemperatureScaling(), **options
    ),
    "noisy": images.preds + 2 * noise,
    "half precision": images.preds.bfloat16(),
}
compared = torchcalib.compare(systems, images.target, n_replicates=99, **options)
torchcalib.plots.difference_plot(compared).figure

# %%
# Each panel shows the differences of one metric from the baseline, with 95% intervals. The better side is shaded. Blue
# marks are significantly better, orange marks worse, and hollow marks are not significant. Significance in the diagram
# is that of a single metric (p at most 0.05). The :doc:`glossary </glossary>` explains the abbreviations.
#
# The intervals are paired: all models share the bootstrap replicates of the test images. The part of the noise that the
# models have in common cancels out. The interval of a difference is therefore usually narrower than those of the two
# values.
#
# The sentences use p-values that are adjusted for all differences of the comparison.

for sentence in compared.sentences.values():
    print(sentence)

# %%
# Temperature scaling improves the calibration and keeps the accuracy. Noise in the logits makes the probabilities and
# the accuracy worse. Rounding to half precision has almost no effect.
#
# The result contains all values, intervals, p-values and verdicts. This figure shows the negative log-likelihood (NLL)
# and its differences. `compared.save("folder")` writes a page and all values.

line = compared["nll"]
fig, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3))
for row, (name, value) in enumerate(line.values.items()):
    interval = line.intervals[name]
    left.plot([interval.low, interval.high], [row, row], color="0.5")
    left.plot(value, row, "o", color="0.3")
colors = {"better": "#2f6db5", "worse": "#d1661a", "not significant": "0.5"}
for row, difference in enumerate(line.differences.values(), 1):
    interval, color = difference.interval, colors[difference.verdict]
    right.plot([interval.low, interval.high], [row, row], color=color)
    right.plot(difference.value, row, "o", color=color)
right.axvline(0, color="0.3", linewidth=1)
left.set_yticks(range(len(line.values)), line.values)
right.set_yticks([])
for ax, title in ((left, "NLL (nats)"), (right, "difference from the baseline")):
    ax.set_title(title, fontsize="medium")
    ax.set_ylim(len(line.values) - 0.5, -0.5)
plt.show()
