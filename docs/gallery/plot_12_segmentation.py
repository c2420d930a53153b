"""
How do I evaluate segmentation maps?
====================================

Predictions have the shape `(N, C, H, W)`: images, classes, height and width. Neighbouring pixels are dependent, so
tests and intervals must treat whole images as independent units.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import avg_pool2d

import torchcalib

generator = torch.Generator().manual_seed(0)


def smooth_noise(n_images):
    """Return smooth Gaussian noise `(N, 3, 48, 48)` with variance 1."""
    noise = torch.randn(n_images, 3, 72, 72, generator=generator)
    for _ in range(3):
        noise = avg_pool2d(noise, 9, stride=1)
    return noise / noise.std()


logits = 1.5 * smooth_noise(60)
gumbel = -torch.special.ndtr(smooth_noise(60)).clamp(1e-7, 1 - 1e-7).log().neg().log()
# Each pixel has the class probabilities softmax(logits).
target = (logits + gumbel).argmax(1)

fig, axes = plt.subplots(1, 3, figsize=(7.4, 2.8))
confidence, predicted = logits.softmax(1).max(1)
panels = {
    "true class": target[0],
    "predicted class": predicted[0],
    "confidence": confidence[0],
}
for ax, (name, image) in zip(axes, panels.items(), strict=True):
    ax.imshow(image, cmap="cividis" if name == "confidence" else "Set2")
    ax.set_title(name)
    ax.set_axis_off()
plt.show()

# %%
# The model in this simulation is calibrated: each class is as frequent as predicted. But errors come in regions, not in
# single pixels. A test that treats pixels as independent is therefore wrong.

ece = torchcalib.ECE(task="multiclass", num_classes=3, from_logits=True)
images = torch.arange(60)
for name, clusters in {
    "pixels are independent": None,
    "images are independent": images,
}.items():
    found = torchcalib.inference.calibration_test(
        ece, logits, target, clusters=clusters, n_replicates=199
    )
    print(
        f"{name}: ECE {found.statistic:.4f}, "
        f"noise floor {found.noise_floor:.4f}, p = {found.p_value:.3f}"
    )

# %%
# If pixels are treated as independent, the noise floor of the expected calibration error (ECE) is far too small. The
# p-value then wrongly rejects calibration. With `clusters`, the noise floor accounts for the dependence. The design
# effect is the factor by which the dependence increases the variance of the mean gap.

print(f"{found.n_clusters} images, design effect {found.design_effect:.0f}")

# %%
# `torchcalib.Clustered` does the same for batches, in constant memory. It rejects calibration for this over-confident
# model.

metric = torchcalib.Clustered(ece)
for batch in images.split(20):
    metric.update(3 * logits[batch], target[batch], clusters=batch)
print(metric.test(n_replicates=199))
torchcalib.plots.reliability_diagram(
    {"calibrated": logits, "over-confident": 3 * logits}, target, from_logits=True
).figure

# %%
# The guide explains :doc:`clusters of dependent samples </guide/clusters_and_groups>`.
