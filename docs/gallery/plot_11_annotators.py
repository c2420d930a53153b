"""
Do predictions agree with the labels of several annotators?
===========================================================

Several annotators label each item, and they do not always agree. The target is then a distribution of labels. With
few annotators, the counts are a noisy estimate of it.
"""

import matplotlib.pyplot as plt
import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
logits = torch.randn(5_000, 4, generator=generator)
population = logits.softmax(-1)  # fraction of all people who choose each class
options = {"task": "multiclass", "from_logits": True}
numbers = [2, 3, 5, 10, 20, 50]


def annotate(n):
    """Return counts of the labels of `n` annotators for each item."""
    choices = torch.multinomial(population, n, replacement=True, generator=generator)
    return torch.nn.functional.one_hot(choices, 4).sum(-2)


fig, axes = plt.subplots(1, 2, sharey=True, figsize=(7.4, 3.6))
counts = {n: annotate(n) for n in numbers}
for ax, scale, name in zip(
    axes, (1, 2), ("Exact model", "Over-confident model"), strict=True
):
    for component, style in (("value", "o-"), ("noise_floor", "--"), ("corrected", "s-")):
        distances = [
            torchcalib.functional.squared_distance(
                scale * logits, c, component=component, **options
            )
            for c in counts.values()
        ]
        ax.plot(numbers, distances, style, label=component.replace("_", " "))
    ax.set(xscale="log", xlabel="annotators per item", xticks=numbers, xticklabels=numbers)
    ax.minorticks_off()
    ax.set_title(name, fontsize="medium")
axes[0].set_ylabel("squared distance")
axes[1].legend()
plt.show()

# %%
# The left model predicts the population exactly. Its distance to the counts is nevertheless large if there are few
# annotators. The noise floor is the expected distance of such a model.
#
# The right model multiplies the logits by two. Its predictions are too extreme, and the distance is larger.
#
# The corrected value estimates the distance to the whole population. It does not depend on the number of annotators:
# two annotators per item are sufficient. It is close to 0 for the left model and positive for the right one.

few = counts[5]
for scale, name in ((1, "exact"), (2, "over-confident")):
    gap = torchcalib.functional.entropy_gap(
        scale * logits, few, component="corrected", **options
    )
    distance = torchcalib.functional.total_variation(scale * logits, few, **options)
    floor = torchcalib.functional.total_variation(
        scale * logits, few, component="noise_floor", **options
    )
    print(
        f"{name:15} entropy gap {gap:+.3f} nats, "
        f"total variation {distance:.3f} (noise floor {floor:.3f})"
    )

# %%
# The entropy gap is the entropy of the predictions minus the entropy of the label distributions. It is negative if the
# predictions are more certain than the label distributions.
#
# All calibration errors accept annotator counts too. The frequency in a bin is then the mean fraction of annotators.

torchcalib.plots.reliability_diagram(
    {"exact": logits, "over-confident": 2 * logits}, few, **options
).figure

# %%
# The guide explains :doc:`label distributions </guide/label_distributions>`.
