"""Jobs of calibrators, the calibration loss with its interval, and the Bayes risk."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import peers
from benchmarks.job import Job, Sides

GIVEN = {"task": "multiclass", "from_logits": True}


def overconfident_logits(n: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Float32 logits of a network on a hard task, and labels: seven in ten are right, and all are too sure.

    Classes are Gaussians whose means lie in fewer dimensions than there are classes, so that some are near each other,
    and the logits are the true log-likelihoods, with an error in every class and half again as large.
    """
    generator = torch.Generator().manual_seed(0)
    dims, separation = min(64, 2 * num_classes), 3.1
    target = torch.randint(0, num_classes, (n,), generator=generator)
    means = separation * torch.randn(num_classes, dims, generator=generator) / dims**0.5
    features = means[target] + torch.randn(n, dims, generator=generator)
    log_likelihood = features @ means.T - means.square().sum(-1) / 2
    return 1.5 * (log_likelihood + 0.3 * torch.randn(num_classes, generator=generator)), target


def temperature(peer: Callable[[Tensor, Tensor], object], n: int = 10_000, num_classes: int = 100) -> Sides:
    """Both sides take logits; ours checks them."""
    logits, target = overconfident_logits(n, num_classes)
    return Sides(lambda: tc.Temperature().fit(logits, target, **GIVEN), lambda: peer(logits, target))


def dp(n: int = 10_000, num_classes: int = 100) -> Sides:
    """The peer takes log-probabilities in float64."""
    logits, target = overconfident_logits(n, num_classes)
    log_q = logits.log_softmax(-1).double()
    return Sides(lambda: tc.DPCalibration().fit(logits, target, **GIVEN), lambda: peers.affine_fit(log_q, target))


def bootstrapped_rcl(n_replicates: int = 100, n: int = 10_000, num_classes: int = 10) -> Sides:
    """The interval of the RCL: DP calibration is fitted to 5 parts in every replicate."""
    logits, target = overconfident_logits(n, num_classes)
    return Sides(lambda: tc.bootstrap(tc.rcl, logits, target, n_replicates=n_replicates, **GIVEN))


def bayes_risk_with_reject(n: int = 10_000, num_classes: int = 1_000) -> Sides:
    logits, target = overconfident_logits(n, num_classes)
    cost = tc.CostMatrix.zero_one(num_classes).with_reject(0.1)
    matrix = torch.tensor(cost.costs)
    return Sides(
        lambda: tc.bayes_risk(logits, target, cost=cost, **GIVEN),
        lambda: peers.plain_bayes_risk(logits, target, matrix),
    )


_GUO = "torch.optim.LBFGS(lr=0.01, max_iter=50), as Guo et al. run it"
_PSRCAL = "psrcal AffineCalLogLoss, float64 (scipy L-BFGS-B, 100 iterations)"

JOBS = [
    Job(
        "temperature, 10,000 x 100",
        partial(temperature, peers.temperature_by_bisection),
        "probmetrics TemperatureScalingCalibrator",
        of_peer=0.4,
        needs=("probmetrics",),
    ),
    Job("temperature, 10,000 x 100, L-BFGS", partial(temperature, peers.temperature_by_lbfgs), _GUO, of_peer=0.4),
    Job("DP, 10,000 x 100", dp, _PSRCAL, of_peer=1 / 12, needs=("psrcal",)),
    Job("RCL, 10,000 x 10, 100 replicates, 5 folds", bootstrapped_rcl, within=10, rounds=3),
    Job("Bayes risk, 10,000 x 1,000, reject", bayes_risk_with_reject, "torch: softmax @ cost, argmin, gather"),
]
