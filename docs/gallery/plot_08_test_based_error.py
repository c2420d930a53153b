"""
Which predictions are rejected by a test?
=========================================

The test-based calibration error (TCE) is the percentage of predictions that a binomial test rejects. Its bins are
isotonic: the empirical probability never decreases from one bin to the next.
"""

import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
true = torch.rand(20_000, generator=generator) ** 4
target = (torch.rand(20_000, generator=generator) < true).long()
preds = true**1.15  # too small, in particular near 0
torchcalib.plots.tce_diagram(preds, target, logit=True).figure

# %%
# This is the test-based reliability diagram. Each violin shows the predictions in a bin, and the diamond shows their
# empirical probability. For a calibrated model the diamond is usually inside the violin or near it. Here the diamonds
# are above the violins at small probabilities.
#
# The bars below show the bin sizes. The coloured part of a bar is rejected. Each prediction is tested against the
# outcomes in its bin with the exact two-sided binomial test, at the level 0.05.
#
# The TCE of the true probabilities is not 0. A bin contains different predictions but has one frequency, so some are
# rejected by chance. Use the noise floor of `torchcalib.TCE.test` for comparison.

table = torchcalib.functional.tce_table(preds, target, task="binary")
print(f"TCE {torchcalib.functional.tce(preds, target, task='binary'):.1f}%")
tce = torchcalib.functional.tce(true, target, task="binary")
print(f"TCE of the true probabilities {tce:.1f}%")
table

# %%
# The choice of bins matters. Equal-width bins put most of these predictions into one bin. Isotonic bins of bounded
# size, PAVA-BC (pool-adjacent-violators algorithm with block constraints), follow the data.

tables = {
    "equal width": torchcalib.functional.calibration_curve(preds, target, task="binary"),
    "PAVA-BC": table,
}
torchcalib.plots.bin_comparison(tables, logit=True).figure

# %%
# The estimation error is the distance of the outcomes in the bins to their frequency. Bins with a small error separate
# likely from unlikely outcomes. Table 1 of the paper has the error over all samples, and the
# mean of the errors of bins.

for name, each in tables.items():
    total, within = each.estimation_error(norm="l1"), each.estimation_error(norm="mean")
    print(f"{name}: total {total:.4f}, mean within bins {within:.4f}")

# %%
# Edges of optimal bins, or of near-optimal bins with bounded sizes, can be found on some data and used on other data.

edges = torchcalib.functional.near_optimal_bins(
    preds[:10_000], target[:10_000], task="binary"
)
torchcalib.functional.mce(preds[10_000:], target[10_000:], task="binary", bins=edges)

# %%
# `test` accepts any two-sided test: a function from the number of events and of samples in the bin of each prediction,
# and the prediction, to p-values. This z-test is a normal approximation, which is poor for rare events.


def z_test(successes, n, probability):
    z = (successes - n * probability) / (n * probability * (1 - probability)).sqrt()
    return torch.erfc(z.abs() / 2**0.5)


torchcalib.functional.tce(preds, target, task="binary", test=z_test)

# %%
# The method is from Matsubara, Tax, Mudd and Guy, `TCE: A Test-Based Approach to Measuring Calibration Error
# <https://proceedings.mlr.press/v216/matsubara23a.html>`_.
