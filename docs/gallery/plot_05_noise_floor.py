"""
How large is the calibration error of a calibrated model?
=========================================================

It is not 0. The outcomes are random, so the frequency in a bin differs from the confidence. The noise floor is the
expected value of the error under perfect calibration.
"""

import matplotlib.pyplot as plt
import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
sizes = [100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000]


def simulate(n, sharpness):
    """Test a model whose log-odds are multiplied by `sharpness`."""
    logits = 2 * torch.randn(n, generator=generator)
    target = (torch.rand(n, generator=generator) < logits.sigmoid()).long()
    ece = torchcalib.ECE(task="binary")
    return torchcalib.inference.calibration_test(
        ece, (sharpness * logits).sigmoid(), target, n_replicates=199
    )


calibrated = [simulate(n, 1.0) for n in sizes]
over_confident = [simulate(n, 1.3) for n in sizes]

fig, ax = plt.subplots()
for tests, color, name in (
    (calibrated, "#2f6db5", "calibrated"),
    (over_confident, "#d1661a", "over-confident"),
):
    ax.plot(
        sizes, [float(t.statistic) for t in tests], "o-", color=color, label=f"{name} model"
    )
floors = [float(t.noise_floor) for t in calibrated]
ax.fill_between(sizes, 0, floors, color="0.85", label="below the noise floor")
ax.set(xscale="log", xlabel="number of samples", ylabel="ECE (probability)", ylim=(0, None))
ax.set_title("Expected calibration error and sample size")
ax.legend()
plt.show()

# %%
# The expected calibration error (ECE) of the calibrated model follows the noise floor. It decreases as
# :math:`1/\sqrt{n}` with the number of samples. The ECE of the over-confident model tends to a positive value. With few
# samples, the two models cannot be distinguished by their ECE.
#
# So report the noise floor beside the ECE. Do not compare the ECE of two data sets of different size.

for n, good, bad in zip(sizes, calibrated, over_confident, strict=True):
    print(
        f"{n:6,} samples: floor {good.noise_floor:.3f}, "
        f"p = {good.p_value:.3f} and p = {bad.p_value:.3f}"
    )

# %%
# The p-value is the probability of an error at least as large under perfect calibration. The last column tends to
# decrease with the number of samples: with more data, the test has more power against the same miscalibration.
#
# `torchcalib.inference.calibration_test` simulates the outcomes from the predicted probabilities and recomputes the
# metric. Metric classes have the method `test`, and reports contain the noise floor of every calibration error. See
# `Broecker and Smith (2007) <https://doi.org/10.1175/WAF993.1>`_ for the method.

print(over_confident[-1])

# %%
# The guide explains the :doc:`noise floor and p-values </guide/noise_floor>`.
