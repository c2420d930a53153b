"""Debiased errors: laws of the estimated variance of gaps, `BinStats.gap_variance`."""

import math

import pytest
import torch
from helpers.kernels import F64

import torchcalib as tc
from torchcalib import functional as F

EDGES = [0.0, 0.25, 0.5, 0.75, 1.0]


def sample(n=60, seed=0):
    """Return probabilities, soft targets, labels, and floating weights, of which some are 0."""
    generator = torch.Generator().manual_seed(seed)
    p, soft, weights = (torch.rand(n, generator=generator, dtype=F64) for _ in range(3))
    weights[::7] = 0
    return p, soft, (soft < p).long(), weights


def streamed(cls, p, target, weights=None, **options):
    metric = cls(task="binary", debiased=True, **options)
    for part in torch.arange(len(p)).split(17):
        metric.update(p[part], target[part], weights=None if weights is None else weights[part])
    return metric.compute()


@pytest.mark.parametrize("n", [5, 1000])
def test_debiased_error_of_equal_gaps_is_the_gap(n):
    p, target = torch.full((n,), 0.8, dtype=F64), torch.full((n,), 0.6, dtype=F64)
    found = [
        F.ece(p, target, task="binary", debiased=True),
        F.rmsce(p, target, task="binary", debiased=True),
        F.rmsce(p, target, task="binary", debiased=True, bins=EDGES),
        streamed(tc.RMSCE, p, target, torch.rand(n, dtype=F64) + 0.1),
        streamed(tc.RMSCE, p, target, bins="equal_mass", resolution=2048),
    ]
    assert torch.stack(found).tolist() == pytest.approx([0.2] * len(found), rel=1e-9)


@pytest.mark.parametrize("cls", [tc.ECE, tc.RMSCE])
def test_debiased_error_of_equal_probabilities_in_each_bin_is_the_published_one(cls):
    """Kumar et al. 2019 and Broecker 2012 subtract f (1 - f) / (n - 1), which ignores the spread of p in a bin."""
    p, _, y, _ = sample(200)
    p = ((p * 5).floor() + 0.5) / 5
    total = 0.0
    for value in p.unique():
        own = y[p == value].double()
        n, f = len(own), own.mean()
        square = (f - value) ** 2 - f * (1 - f) / (n - 1)
        total += n / 200 * (square if cls is tc.RMSCE else max(square, 0) ** 0.5)
    expected = max(float(total), 0) ** 0.5 if cls is tc.RMSCE else float(total)
    assert float(streamed(cls, p, y, n_bins=5)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("options", [{"bins": EDGES}, {"bins": EDGES, "resolution": 2048}])
def test_integer_weights_of_debiased_errors_are_copies(options, soft):
    p, share, y, _ = sample()
    target = share if soft else y
    counts = torch.randint(0, 5, p.shape, generator=torch.Generator().manual_seed(1))
    found = streamed(tc.RMSCE, p, target, counts, n_bins=4, **options)
    copied = streamed(tc.RMSCE, p.repeat_interleave(counts), target.repeat_interleave(counts), n_bins=4, **options)
    assert float(found) == pytest.approx(float(copied), rel=1e-12)


@pytest.mark.parametrize("function", [F.ece, F.rmsce])
def test_gradient_of_debiased_errors_is_that_of_the_value(function):
    p, soft, y, weights = sample(40)
    held = weights > 0
    p, soft, y, weights = (x[held] for x in (p, soft, y, weights))
    options = {"task": "binary", "debiased": True, "n_bins": 4}

    def of(p, target, weights):
        return function(p, target, weights=weights, **options)

    leaves = [x.clone().requires_grad_() for x in (p, soft, weights)]
    assert of(*leaves) > 0
    assert torch.autograd.gradcheck(of, leaves)
    assert torch.autograd.gradcheck(lambda p: of(p, y, None), leaves[:1])
    equal = torch.full((6,), 0.8, dtype=F64, requires_grad=True)
    of(equal, torch.full((6,), 0.8, dtype=F64), None).backward()
    assert not equal.grad.any()


def test_bootstrap_and_clusters_compute_debiased_errors():
    p, soft, _, _ = sample()
    metric = tc.RMSCE(task="binary", debiased=True)
    expected = float(streamed(tc.RMSCE, p, soft))
    bootstrapped = tc.Bootstrapped(metric, n_replicates=50)
    bootstrapped.update(p, soft)
    assert float(bootstrapped.interval().value) == pytest.approx(expected, rel=1e-12)
    found = tc.inference.bootstrap(F.rmsce, p, soft, task="binary", debiased=True, n_replicates=50)
    assert float(found.value) == pytest.approx(expected, rel=1e-12)
    compared = tc.compare({"a": p, "b": 1 - p}, soft, task="binary")
    assert compared.line("rmsce_debiased").values["a"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("scale", [1.0, 1.8])
def test_debiased_squared_error_is_unbiased(scale):
    """The mean of each cell of `benchmarks.debiased` is within 3 standard errors of the population."""
    from benchmarks.debiased import DATA, squares

    for data in DATA:
        population, x = squares(data, scale, 1_000)
        error = float(x.std()) / math.sqrt(len(x))
        # Bins with one row are not corrected. There are few of them: 2% of the bins, which have 0.1% of the rows.
        assert abs(float(x.mean() - population)) <= 3 * error + 1e-4, data
