"""
Is the whole probability vector calibrated?
===========================================

A model can be calibrated for the predicted class and for each class separately, and still be wrong. Canonical
calibration compares the whole vector of probabilities with the frequencies of all classes.
"""

from itertools import permutations

import matplotlib.pyplot as plt
import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
values = torch.tensor([0.1, 0.3, 0.6])
orders = torch.tensor(list(permutations(range(3))))
sign = torch.tensor([1, -1, -1, 1, 1, -1])  # 1 for even permutations
vectors = values[orders]
error = torch.tensor([0.1, -0.1, 0.0])  # of the probabilities 0.1, 0.3 and 0.6
true = vectors + sign[:, None] * error[orders]

kind = torch.randint(6, (12_000,), generator=generator)
preds = vectors[kind]
target = torch.multinomial(true[kind], 1, generator=generator).squeeze(-1)

corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])
fig, ax = plt.subplots(figsize=(5, 4.4))
ax.fill(*corners.T, facecolor="none", edgecolor="0.5")
for k in range(6):
    observed = torch.bincount(target[kind == k], minlength=3) / (kind == k).sum()
    start, end = vectors[k] @ corners, observed @ corners
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": "#d1661a", "lw": 3}
    )
    ax.plot(*start, "o", color="#2f6db5", markersize=9)
for name, corner, align in zip("123", corners, ("right", "left", "center"), strict=True):
    ax.text(
        *corner, f" class {name} ", ha=align, va="top" if align != "center" else "bottom"
    )
ax.set(aspect="equal", xlim=(-0.2, 1.2), ylim=(-0.1, 1.0))
ax.set_title("Predictions (dots) and class frequencies (arrows)")
ax.set_axis_off()
plt.show()

# %%
# Each dot is one of six predictions, and each corner is a class. The arrow points to the actual class frequencies. All
# six predictions are wrong.
#
# The errors cancel in the usual metrics. The probability 0.6 of the predicted class is always correct. A class with
# probability 0.1 has the frequency 0.2 or 0, and 0.1 on average.

for mode in ("top_label", "classwise"):
    ece = torchcalib.ECE(num_classes=3, mode=mode)
    found = torchcalib.inference.calibration_test(ece, preds, target, n_replicates=199)
    print(
        f"{mode}: expected calibration error {found.statistic:.4f}, p = {found.p_value:.3f}"
    )

# %%
# The squared kernel calibration error (SKCE) compares the residuals of pairs of samples with similar predictions. It
# uses all classes jointly, and its expected value is 0 if the model is calibrated. The test rejects
# calibration for this model.

options = {"task": "multiclass", "estimator": "block", "block_size": 50, "bandwidth": 0.1}
print("this model:      ", torchcalib.inference.skce_test(preds, target, **options))
calibrated = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
print("calibrated model:", torchcalib.inference.skce_test(preds, calibrated, **options))

# %%
# The canonical calibration error estimates the mean distance between predictions and frequencies. Unlike SKCE it is
# positive for a calibrated model of a finite sample, so compare it with such a model.

for name, labels in {"this model": target, "calibrated model": calibrated}.items():
    error = torchcalib.functional.canonical_error(
        preds[:2000], labels[:2000], task="multiclass", bandwidth=0.01
    )
    print(f"{name}: canonical calibration error {error:.3f}")

# %%
# The tests are from Widmann, Lindsten and Zachariah, `Calibration tests in multi-class classification
# <https://arxiv.org/abs/1910.11385>`_.
#
# The guide explains the :doc:`five notions of calibration </guide/notions>`.
