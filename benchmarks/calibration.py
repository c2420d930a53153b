"""Jobs for calibrators, the relative calibration loss (RCL) with its interval, and the Bayes risk."""

from functools import partial

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import job
from benchmarks.samples import logits
from torchcalib.calibration import AffineScaling, TemperatureScaling, relative_calibration_loss
from torchcalib.inference import bootstrap

GIVEN = {"task": "multiclass", "from_logits": True}
rows_of_100 = partial(logits, n=10_000, num_classes=100)


def with_log_probs(**sizes: int) -> tuple[Tensor, ...]:
    """Return logits, labels, and float64 log-probabilities, which psrcal gets."""
    z, y = rows_of_100(**sizes)
    return z, y, z.log_softmax(-1).double()


def with_costs(n: int, num_classes: int) -> tuple[object, ...]:
    """Return logits, labels, and costs as our object and as a matrix."""
    cost = tc.CostMatrix.zero_one(num_classes).with_reject(0.1)
    return *logits(n, num_classes), cost, torch.tensor(cost.costs)


def temperature(z: Tensor, y: Tensor) -> TemperatureScaling:
    """Only this side validates the logits."""
    return TemperatureScaling().fit(z, y, **GIVEN)


JOBS = [
    job("temperature, 10,000 x 100", rows_of_100, temperature, {peers.temperature_by_bisection: 0.4}),
    job("temperature, 10,000 x 100, L-BFGS", rows_of_100, temperature, {peers.temperature_by_lbfgs: 0.4}),
    job(
        "DP, 10,000 x 100",
        with_log_probs,
        lambda z, y, _: AffineScaling().fit(z, y, **GIVEN),
        {peers.affine_fit: 1 / 12},
    ),
    # Each replicate cross-validates affine scaling in 5 folds.
    job(
        "RCL, 10,000 x 10, 100 replicates, 5 folds",
        partial(logits, n=10_000, num_classes=10),
        partial(bootstrap, relative_calibration_loss, n_replicates=100, **GIVEN),
        seconds=10,
        rounds=3,
    ),
    job(
        "Bayes risk, 10,000 x 1,000, reject",
        partial(with_costs, n=10_000, num_classes=1_000),
        lambda z, y, cost, _: F.bayes_risk(z, y, cost=cost, **GIVEN),
        {peers.plain_bayes_risk: 1.0},
    ),
]
