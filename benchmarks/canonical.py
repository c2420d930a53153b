"""Jobs for multi-class calibration errors: canonical, and of the k most probable classes."""

from functools import partial

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import gradient, job
from benchmarks.samples import logits

GIVEN = {"task": "multiclass", "from_logits": True}
rows_of_10 = partial(logits, num_classes=10)
skce = partial(F.skce, **GIVEN)
canonical_error = partial(F.canonical_error, bandwidth=0.05, **GIVEN)
top_5 = partial(F.ece, mode=tc.TopK(5), n_bins=15, **GIVEN)
SMALL = {"extra_bytes": 50_000_000, "rounds": 3}

JOBS = [
    job(
        "SKCE, linear, 1 million x 10",
        partial(rows_of_10, n=1_000_000),
        partial(skce, estimator="linear"),
        seconds=1.0,
        extra_bytes=100_000_000,
    ),
    job(
        "SKCE in blocks of 32, 1 million x 10",
        partial(rows_of_10, n=1_000_000),
        partial(skce, estimator="block"),
        extra_bytes=100_000_000,
        rounds=3,
    ),
    job(
        "SKCE, all pairs, 10,000 x 10",
        partial(rows_of_10, n=10_000),
        partial(skce, estimator="unbiased"),
        {peers.skce_at_once: 1.0},
        **SMALL,
    ),
    job(
        "SKCE, all pairs, 10,000 x 10, forward + backward",
        partial(rows_of_10, n=10_000, gradient=True),
        partial(gradient, skce),
        **SMALL,
    ),
    job(
        "canonical error, 5,000 x 10",
        partial(rows_of_10, n=5_000),
        canonical_error,
        {partial(peers.dirichlet_error_at_once, bandwidth=0.05): 1.0},
        **SMALL,
    ),
    job(
        "canonical error, 5,000 x 10, forward + backward",
        partial(rows_of_10, n=5_000, gradient=True),
        partial(gradient, canonical_error),
        **SMALL,
    ),
    job(
        "top-5 ECE, 50,000 x 1,000",
        partial(logits, n=50_000, num_classes=1_000, separation=4.0),
        top_5,
        {partial(peers.top_k_ece, k=5, n_bins=15): 0.8},
    ),
]
