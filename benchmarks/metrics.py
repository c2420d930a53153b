"""Jobs for metrics that need orders, pairs or fits, and for reports, which compute all of them."""

from functools import partial

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import Job, gradient
from benchmarks.samples import binary, logits, softmax_outputs
from torchcalib.calibration import AffineScaling, TemperatureScaling, relative_calibration_loss
from torchcalib.inference import bootstrap

BINARY = {"task": "binary"}
GIVEN = {"task": "multiclass", "from_logits": True}
doubles = partial(binary, dtype=torch.float64)
million = partial(doubles, n=1_000_000)
EVERY = 50
"""The peer of TCE tests every 50th sorted prediction against the same blocks."""


def rows_and_blocks(n: int) -> tuple[object, ...]:
    """Return predictions, labels, and arrays for the peer: every 50th prediction, and the sums of its block."""
    p, y = doubles(n)
    table = F.tce_table(p, y, **BINARY)
    sizes, every = table.n.long(), torch.arange(0, n, EVERY)
    block = torch.searchsorted(sizes.cumsum(-1), every, right=True)
    positives = (table.n * table.frequency).round().long()
    return p, y, tuple(x.numpy() for x in (positives[block], sizes[block], p.sort().values[every]))


def tce(p: Tensor, y: Tensor, _: object) -> Tensor:
    return F.tce(p, y, **BINARY)


def with_log_probs(**sizes: int) -> tuple[Tensor, ...]:
    """Return logits, labels, and float64 log-probabilities, which psrcal gets."""
    z, y = logits(**sizes)
    return z, y, z.log_softmax(-1).double()


def with_costs(n: int, num_classes: int) -> tuple[object, ...]:
    """Return logits, labels, and costs as our object and as a matrix."""
    cost = tc.CostMatrix.zero_one(num_classes).with_reject(0.1)
    return *logits(n, num_classes), cost, torch.tensor(cost.costs)


def temperature(z: Tensor, y: Tensor) -> TemperatureScaling:
    """Only this side validates the logits."""
    return TemperatureScaling().fit(z, y, **GIVEN)


def affine(z: Tensor, y: Tensor, _: Tensor) -> AffineScaling:
    return AffineScaling().fit(z, y, **GIVEN)


def bayes_risk(z: Tensor, y: Tensor, cost: tc.CostMatrix, _: Tensor) -> Tensor:
    return F.bayes_risk(z, y, cost=cost, **GIVEN)


rows_of_10 = partial(logits, num_classes=10)
many_rows, rows_for_pairs, few_rows = (partial(rows_of_10, n=n) for n in (1_000_000, 10_000, 5_000))
rows_of_100 = {"n": 10_000, "num_classes": 100}
rows_of_1000 = partial(logits, n=50_000, num_classes=1_000, separation=4.0)
linear, in_blocks, all_pairs = (partial(F.skce, estimator=name, **GIVEN) for name in ("linear", "block", "unbiased"))
skce, canonical_error = partial(F.skce, **GIVEN), partial(F.canonical_error, bandwidth=0.05, **GIVEN)
canonical_peer = partial(peers.dirichlet_error_at_once, bandwidth=0.05)
top_5 = partial(F.ece, mode=tc.TopK(5), n_bins=15, **GIVEN)
top_5_peer = partial(peers.top_k_ece, k=5, n_bins=15)
# Each replicate cross-validates affine scaling in 5 folds.
replicates_of_rcl = partial(bootstrap, relative_calibration_loss, n_replicates=100, **GIVEN)
of_binary = {f.__name__: partial(f, **BINARY) for f in (F.ks, F.corp, F.smece, F.ici)}
ace, cox = partial(F.ace, n_bins=15, **BINARY), partial(F.cox, eps=1e-12, **BINARY)
report, binary_report = partial(tc.report, **GIVEN), partial(tc.report, from_logits=False, **BINARY)
MANY, SMALL = {"extra_bytes": 100_000_000}, {"extra_bytes": 50_000_000, "rounds": 3}

TCE = Job(
    "TCE, 50,000",
    partial(rows_and_blocks, n=50_000),
    tce,
    {peers.one_test_per_prediction: 1 / 1000},
    shares={peers.ONE_TEST_EACH: 1 / EVERY},
    seconds=0.006,
)
classwise_tce = partial(F.tce, task="multiclass")
outputs = partial(softmax_outputs, n=50_000, num_classes=1_000)
JOBS = [
    TCE,
    TCE.without_numba({peers.ONE_TEST_EACH: 1 / 300}),
    Job("ACE, 1 million, float32", partial(binary, n=1_000_000), ace, {peers.quantile_calibration_curve: 1 / 15}),
    Job("ACE, 1 million, float64", million, ace, {peers.quantile_calibration_curve: None}),
    Job("class-wise TCE, 50,000 x 1,000", outputs, classwise_tce, seconds=15, rounds=3),
    Job("KS, 1 million", million, of_binary["ks"], {peers.plain_ks: 1.0}),
    Job("CORP, 1 million", million, of_binary["corp"], {peers.isotonic_fit: 1.0}),
    Job("smECE, 1 million", million, of_binary["smece"], {peers.relplot_smece: 1 / 10}),
    Job("ICI, 1 million", million, of_binary["ici"], seconds=1),
    Job("Cox slope and intercept, 1 million", million, cox, {peers.logistic_fit: 1.0}, seconds=1),
    Job("SKCE, linear, 1 million x 10", many_rows, linear, seconds=1.0, **MANY),
    Job("SKCE in blocks of 32, 1 million x 10", many_rows, in_blocks, rounds=3, **MANY),
    Job("SKCE, all pairs, 10,000 x 10", rows_for_pairs, all_pairs, {peers.skce_at_once: 1.0}, **SMALL),
    Job(
        "SKCE, all pairs, 10,000 x 10, forward + backward",
        partial(rows_for_pairs, gradient=True),
        partial(gradient, skce),
        **SMALL,
    ),
    Job("canonical error, 5,000 x 10", few_rows, canonical_error, {canonical_peer: 1.0}, **SMALL),
    Job(
        "canonical error, 5,000 x 10, forward + backward",
        partial(few_rows, gradient=True),
        partial(gradient, canonical_error),
        **SMALL,
    ),
    Job("top-5 ECE, 50,000 x 1,000", rows_of_1000, top_5, {top_5_peer: 0.8}),
    *(
        Job(f"temperature, 10,000 x 100{how}", partial(logits, **rows_of_100), temperature, {peer: 0.4})
        for how, peer in (("", peers.temperature_by_bisection), (", L-BFGS", peers.temperature_by_lbfgs))
    ),
    Job("DP, 10,000 x 100", partial(with_log_probs, **rows_of_100), affine, {peers.affine_fit: 1 / 12}),
    Job("RCL, 10,000 x 10, 100 replicates, 5 folds", rows_for_pairs, replicates_of_rcl, seconds=10, rounds=3),
    Job(
        "Bayes risk, 10,000 x 1,000, reject",
        partial(with_costs, n=10_000, num_classes=1_000),
        bayes_risk,
        {peers.plain_bayes_risk: 1.0},
    ),
    Job("report, 10,000 x 10", rows_for_pairs, report, seconds=1.5, rounds=5),
    Job("report, binary, 50,000", partial(doubles, n=50_000), binary_report, seconds=4, rounds=5),
    Job(
        "report, 50,000 x 1,000",
        partial(logits, n=50_000, num_classes=1_000),
        report,
        seconds=10,
        extra_bytes=700_000_000,
        rounds=3,
    ),
]
