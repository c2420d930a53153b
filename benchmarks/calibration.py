"""Jobs for calibrators, the relative calibration loss (RCL) with its interval, and the Bayes risk."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import Job, Peer, Sides
from benchmarks.samples import overconfident_logits
from torchcalib.calibration import AffineScaling, TemperatureScaling, relative_calibration_loss
from torchcalib.inference import bootstrap

GIVEN = {"task": "multiclass", "from_logits": True}

BISECTION = "probmetrics TemperatureScalingCalibrator"
LBFGS = "torch.optim.LBFGS(lr=0.01, max_iter=50), as Guo et al. run it"
PSRCAL = "psrcal AffineCalLogLoss, float64 (scipy L-BFGS-B, 100 iterations)"
PLAIN = "torch: softmax @ cost, argmin, gather"


def temperature(name: str, peer: Callable[[Tensor, Tensor], object], n: int = 10_000, num_classes: int = 100) -> Sides:
    """Both sides get logits. Only ours validates them."""
    logits, target = overconfident_logits(n, num_classes)
    return Sides(lambda: TemperatureScaling().fit(logits, target, **GIVEN), {name: lambda: peer(logits, target)})


def affine_scaling(n: int = 10_000, num_classes: int = 100) -> Sides:
    """The peer gets float64 log-probabilities."""
    logits, target = overconfident_logits(n, num_classes)
    log_q = logits.log_softmax(-1).double()
    peer = {PSRCAL: lambda: peers.affine_fit(log_q, target)}
    return Sides(lambda: AffineScaling().fit(logits, target, **GIVEN), peer)


def bootstrapped_rcl(n_replicates: int = 100, n: int = 10_000, num_classes: int = 10) -> Sides:
    """Interval of the relative calibration loss. Each replicate cross-validates affine scaling in 5 folds."""
    logits, target = overconfident_logits(n, num_classes)
    return Sides(lambda: bootstrap(relative_calibration_loss, logits, target, n_replicates=n_replicates, **GIVEN))


def bayes_risk_with_reject(n: int = 10_000, num_classes: int = 1_000) -> Sides:
    logits, target = overconfident_logits(n, num_classes)
    cost = tc.CostMatrix.zero_one(num_classes).with_reject(0.1)
    matrix = torch.tensor(cost.costs)
    return Sides(
        lambda: F.bayes_risk(logits, target, cost=cost, **GIVEN),
        {PLAIN: lambda: peers.plain_bayes_risk(logits, target, matrix)},
    )


JOBS = [
    Job(
        "temperature, 10,000 x 100",
        partial(temperature, BISECTION, peers.temperature_by_bisection),
        (Peer(BISECTION, 0.4, needs=("probmetrics",)),),
    ),
    Job(
        "temperature, 10,000 x 100, L-BFGS",
        partial(temperature, LBFGS, peers.temperature_by_lbfgs),
        (Peer(LBFGS, 0.4),),
    ),
    Job("DP, 10,000 x 100", affine_scaling, (Peer(PSRCAL, 1 / 12, needs=("psrcal",)),)),
    Job("RCL, 10,000 x 10, 100 replicates, 5 folds", bootstrapped_rcl, seconds=10, rounds=3),
    Job("Bayes risk, 10,000 x 1,000, reject", bayes_risk_with_reject, (Peer(PLAIN, 1.0),)),
]
