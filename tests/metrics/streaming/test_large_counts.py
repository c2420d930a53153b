"""Metrics of 10^9 samples, compared with exact arithmetic.

Probabilities are multiples of 2^-10. Their sums over 10^9 samples are multiples of 2^-10 below 2^30, and so exact
in float64.
"""

import math
from collections import defaultdict
from fractions import Fraction
from itertools import accumulate

import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F

N, TIMES, N_BINS, N_MISSING = 1000, 10**6, 10, 3
GENERATOR = torch.Generator().manual_seed(0)
UNITS = torch.randint(1, 1024, (N,), generator=GENERATOR)
P, Y = UNITS.double() / 1024, (torch.rand(N, generator=GENERATOR) < 0.4).long()
EXACT = [(Fraction(int(k), 1024), int(y)) for k, y in zip(UNITS, Y, strict=True)]
BINARY = {"task": "binary"}
CLOSE = {"rtol": 1e-14, "atol": 1e-16}  # a few roundings after the exact sums


def bins():
    """Return the number of rows, and the sums of confidences and outcomes, by bin."""
    found = defaultdict(lambda: [0, Fraction(0), 0])
    for p, y in EXACT:
        row = found[min(math.floor(p * N_BINS), N_BINS - 1)]
        row[0], row[1], row[2] = row[0] + 1, row[1] + p, row[2] + y
    return [found[k] for k in range(N_BINS)]


def largest_deviation():
    """Return the largest difference between the cumulative confidences and outcomes."""
    differences = defaultdict(Fraction)
    for p, y in EXACT:
        differences[p] += p - y
    return max(abs(total) for total in accumulate(differences[p] for p in sorted(differences))) / N


EXPECTED = {
    "ECE": sum(abs(p - y) for _, p, y in bins()) / N,
    "MCE": max(abs(p - y) / n for n, p, y in bins() if n),
    "BrierScore": sum((p - y) ** 2 for p, y in EXACT) / N,
    "Accuracy": Fraction(sum((p >= Fraction(1, 2)) == (y == 1) for p, y in EXACT), N),
    "KS": largest_deviation(),
}
OPTIONS = {"ECE": {"n_bins": N_BINS}, "MCE": {"n_bins": N_BINS}}


def value_of(exact):
    return torch.tensor(float(exact), dtype=torch.float64)


def metric_of(name, **options):
    return getattr(tc, name)(**BINARY, **OPTIONS.get(name, {}), **options)


def ten_times(metric, times):
    """Merge ten copies of the state, `times` times."""
    for _ in range(times):
        state = metric.metric_state
        for _ in range(9):
            metric.merge_state(state)
    return metric


@pytest.mark.parametrize("name", ["ECE", "MCE", "BrierScore", "Accuracy"])
def test_merged_states_of_a_billion_samples_are_exact(name):
    metric = metric_of(name, nan_policy="drop")
    preds, target = torch.cat((P, torch.full((N_MISSING,), torch.nan))), torch.cat((Y, Y[:N_MISSING]))
    metric.update(preds, target)
    ten_times(metric, 6)
    assert metric.n_dropped() == N_MISSING * TIMES
    torch.testing.assert_close(metric.compute(), value_of(EXPECTED[name]), **CLOSE)
    if name == "ECE":
        table = metric.bin_table()
        assert table.n.tolist() == [n * TIMES for n, *_ in bins()]
        means = torch.stack([value_of(p / n) for n, p, _ in bins()])
        torch.testing.assert_close(table.confidence, means, **CLOSE)


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_that_sum_to_a_billion_are_exact(name):
    weights = torch.full((N,), TIMES)
    expected = value_of(EXPECTED[name])
    function = {"BrierScore": F.brier_score}.get(name) or getattr(F, name.lower())
    options = {**BINARY, **OPTIONS.get(name, {})}
    torch.testing.assert_close(function(P, Y, weights=weights, **options), expected, **CLOSE)
    metric = metric_of(name)
    for part in (slice(0, 300), slice(300, N)):
        metric.update(P[part], Y[part], weights[part])
    torch.testing.assert_close(metric.compute(), expected, **CLOSE)


def test_sketches_and_groups_of_a_billion_samples_count_exactly():
    sketch = tc.KS(**BINARY, resolution=64)
    sketch.update(P, Y)
    before = sketch.compute()
    ten_times(sketch, 6)
    torch.testing.assert_close(sketch.compute(), before, **CLOSE)
    groups = torch.arange(N) % 3
    grouped = tc.ByGroup(tc.NLL(**BINARY), num_groups=3)
    grouped.update(P, Y, groups=groups)
    ten_times(grouped, 6)
    assert grouped.n().tolist() == (groups.bincount() * TIMES).tolist()


def test_reports_of_a_billion_samples_count_exactly():
    builder = tc.ReportBuilder(**BINARY, n_bins=N_BINS, with_calibration=False, with_intervals=False)
    for part in (slice(0, 300), slice(300, N)):
        builder.update(P[part], Y[part], weights=torch.full_like(Y[part], TIMES))
    report = builder.report()
    assert report.n == N * TIMES
    assert report["ece"] == pytest.approx(float(EXPECTED["ECE"]), rel=1e-14)
    assert report["accuracy"] == float(EXPECTED["Accuracy"])
