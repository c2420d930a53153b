"""
Which groups of the data are miscalibrated?
===========================================

A model can be calibrated on average, and not calibrated for some hospitals, languages or customers. This example has
60 groups of different size. The probabilities of three of them are wrong.
"""

import matplotlib.pyplot as plt
import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
n, n_groups = 30_000, 60
# A few groups are large, and many are small.
groups = (n_groups * torch.rand(n, generator=generator) ** 2.5).long()
true = torch.rand(n, generator=generator)
target = (torch.rand(n, generator=generator) < true).long()
shift = torch.zeros(n_groups)  # errors of the log-odds
shift[[3, 20, 45]] = torch.tensor([0.5, -0.8, 1.2])
preds = (true.logit() + shift[groups]).sigmoid()

metric = torchcalib.ByGroup(torchcalib.ECE(task="binary"), num_groups=n_groups)
metric.update(preds, target, groups=groups)
table = metric.worst(None)  # all groups

fig, ax = plt.subplots()
significant = torch.tensor(table.p_value) < 0.05
size, value = torch.tensor(table.n), torch.tensor(table.value)
ax.plot(size, table.noise_floor, "_", color="0.5", label="noise floor of each group")
ax.plot(
    size[~significant], value[~significant], "o", color="#9aa5b1", label="not significant"
)
ax.plot(size[significant], value[significant], "o", color="#d1661a", label="significant")
for group, x, y, p in zip(table.group, table.n, table.value, table.p_value, strict=True):
    if p < 0.05:
        ax.annotate(f"group {group}", (x, y), xytext=(5, 5), textcoords="offset points")
ax.set(
    xscale="log", xlabel="samples in the group", ylabel="ECE (probability)", ylim=(0, None)
)
ax.set_xticks([200, 500, 1000, 2000, 5000], ["200", "500", "1,000", "2,000", "5,000"])
ax.minorticks_off()
ax.set_title("Calibration error of each group")
ax.legend()
plt.show()

# %%
# Each point is a group. The expected calibration error (ECE) of small groups is large. But their noise floor, the
# expected error of a calibrated model, is large too. A large error of a small group is often only sampling noise.
#
# `ByGroup.worst` sorts the groups by their error minus the noise floor. The p-values are adjusted for the number of
# groups by the method of Benjamini and Hochberg. Without this correction, about one of twenty calibrated groups has a
# p-value below 0.05.

metric.worst(6)

# %%
# The error over all rows does not show the problem. It is much smaller than the errors of the three groups, because
# most rows belong to other groups.

print(torchcalib.inference.calibration_test(torchcalib.ECE(task="binary"), preds, target))

# %%
# `torchcalib.functional.by_group` accepts any function of the library. Reports accept `groups` too.

nll = torchcalib.functional.by_group(
    torchcalib.functional.nll, preds, target, groups, task="binary"
)
print(f"negative log-likelihood of groups 0 to 4: {[round(float(v), 3) for v in nll[:5]]}")

# %%
# The guide explains :doc:`groups and clusters </guide/clusters_and_groups>`.
