"""
How do I write a metric of my own?
==================================

A calibration error over bins needs only a loss for each bin. The library adds validation, tasks, streaming, groups,
weights and the test.
"""

import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
logits = 2 * torch.randn(5_000, generator=generator)
target = (torch.rand(5_000, generator=generator) < logits.sigmoid()).long()
preds = (1.4 * logits).sigmoid()


def over_prediction(b):
    """Return the amount by which the confidence in each bin exceeds the frequency."""
    return (-b.gap).clamp(min=0)


print(torchcalib.functional.gce(preds, target, task="binary", loss=over_prediction))

# %%
# The generalised calibration error (GCE) passes bins to the loss. Their attributes are `n`, `share`, `confidence`,
# `frequency` and `gap`, tensors of the shape `(..., n_bins)`. The result is the mean of the losses, weighted by the
# share of samples in each bin. Other norms and types of bins are arguments.
#
# The class `torchcalib.GCE` accumulates batches, and `test` adds the noise floor and the p-value.

metric = torchcalib.GCE(task="binary", loss=over_prediction, bins="equal_mass", n_bins=10)
for rows in torch.arange(5_000).split(1_000):
    metric.update(preds[rows], target[rows])
print(metric.test(n_replicates=199))
torchcalib.plots.reliability_diagram(metric).figure

# %%
# A metric that depends on all bins together is a formula and a function. The formula returns a value from the sums over
# bins. The function has the options of the metric and returns an estimator, which `metric_function` applies to data.
# This metric is the difference between the largest and the smallest gap.

from torchcalib.core.ranked_bins import Binning
from torchcalib.functional.binned import binned, error_over_bins
from torchcalib.functional.estimator import metric_function
from torchcalib.metrics.errors import BinnedMetric


def gap_range_from_bins(b):
    """Return the largest minus the smallest gap of the bins with samples."""
    return b.gap.amax(-1) - b.gap.amin(-1)  # the gap of an empty bin is 0


@metric_function(
    error_over_bins(
        name="GapRange",
        question="largest minus smallest gap over equal-width bins",
        source="this example",
    )
)
def gap_range(task=None, *, n_bins=15, mode=None, average="macro", **options):
    """Range of the gaps over bins."""
    return binned(
        gap_range_from_bins,
        Binning("equal_width", n_bins, False),
        task,
        mode,
        average,
        options,
    )


class GapRange(BinnedMetric, function=gap_range):
    """Streaming range of the gaps over bins."""


print(gap_range(preds, target, task="binary", n_bins=10))
metric = GapRange(task="binary", n_bins=10)
metric.update(preds, target)
print(metric.test(n_replicates=199))

# %%
# The new class works with all wrappers, for example with groups.

by_group = torchcalib.ByGroup(GapRange(task="binary", n_bins=10), num_groups=3)
by_group.update(preds, target, groups=torch.arange(5_000) % 3)
by_group.worst()

# %%
# A function of predictions and targets needs no class. The bootstrap accepts any function with the arguments `weights`
# and `task`. Replicate weights have an additional leading axis.


def mean_gap(preds, target, weights=None, task="binary"):
    """Return the weighted mean outcome minus the weighted mean probability."""
    weights = torch.ones_like(preds) if weights is None else weights
    return (weights * (target - preds)).sum(-1) / weights.sum(-1)


found = torchcalib.inference.bootstrap(mean_gap, preds, target, task="binary")
print(f"{found.value:.4f} (95% interval {found.low:.4f} to {found.high:.4f})")
