"""Distances to label distributions, compared with closed forms and slow loops, and scores of predictive distributions.

tests/contract compares values with slow loops.
"""

import math
from functools import partial

import oracles
import pytest
import torch
from scipy.stats import chi2
from torch.distributions import Normal

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.functional import Density, ecd, nees_interval
from torchcalib.special.shares import mean_distance_of_share, mean_log_share

DISTANCES = {
    "tv": (F.total_variation, tc.TotalVariation),
    "kl": (F.kl_divergence, tc.KLDivergence),
    "entropy": (F.entropy_gap, tc.EntropyGap),
    "counts": (F.squared_distance, tc.SquaredDistance),
}
SETTINGS = [(name, c) for name in DISTANCES for c in ("value", "noise_floor", "corrected")]
SETTINGS.remove(("tv", "corrected"))
TASKS = ("binary", "multiclass", "multilabel")
C = 4


def data(task, n=30, lead=()):
    """Return logits, and counts of at least two annotators for each row."""
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, n) if task == "binary" else (*lead, n, C)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, 9, shape if task == "multiclass" else (*shape, 2), generator=generator)
    counts[..., 0] += 2 * (counts.sum(-1) < 2)
    return logits, counts


def test_saturated_logits_are_exact_with_finite_gradients():
    logits = torch.tensor([[800.0, 0.0, -800.0], [0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([[0, 3, 1], [2, 0, 2]])
    certain = torch.tensor([[1.0, 0.0]], requires_grad=True)
    for name, component in SETTINGS:
        of_sample = partial(DISTANCES[name][0], task="multiclass", component=component, reduction="none")
        values = of_sample(logits, counts, from_logits=True)
        assert values.isfinite().all()
        gradients = torch.autograd.grad(values.sum(), logits)
        gradients += torch.autograd.grad(of_sample(certain, torch.tensor([[3, 1]])).sum(), certain)
        assert all(gradient.isfinite().all() for gradient in gradients), (name, component)
    kl = F.kl_divergence(logits, counts, task="multiclass", from_logits=True, reduction="none")
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(kl, torch.tensor([0.75 * 800 + 0.25 * 1600 - entropy, 0.0], dtype=torch.float64))
    found = F.kl_divergence(certain.expand(2, 2), torch.tensor([[3, 1], [3, 0]]), task="multiclass", reduction="none")
    assert found.tolist() == [math.inf, 0]


@pytest.mark.parametrize("name", DISTANCES)
def test_counts_of_rows_with_weight_0_are_not_checked(name):
    logits, counts = data("multiclass", n=8)
    keep = torch.arange(8) % 3 != 2
    without, negative = counts * keep[:, None], counts - 9 * ~keep[:, None]
    given = {"task": "multiclass", "from_logits": True}
    for component in ("value", "noise_floor"):
        call = partial(DISTANCES[name][0], component=component, **given)
        expected = call(logits[keep], counts[keep])
        torch.testing.assert_close(call(logits, negative, weights=keep.float()), expected)
        torch.testing.assert_close(call(logits, without, nan_policy="drop"), expected)
    metric = DISTANCES[name][1](nan_policy="drop", **given)
    metric.update(logits, without)
    assert metric.n_dropped() == 2
    torch.testing.assert_close(metric.compute(), DISTANCES[name][0](logits[keep], counts[keep], **given))


def test_a_collection_refuses_rows_of_one_annotator_if_a_member_needs_two():
    logits, counts = data("multiclass")
    given = {"task": "multiclass", "from_logits": True}
    alone = counts.index_put((torch.tensor(3),), torch.tensor([0, 1, 0, 0]))
    collection = tc.CalibrationCollection([tc.NLL(**given), tc.KLDivergence(**given, component="corrected")])
    collection.update(logits, counts)
    with pytest.raises(ValueError, match="at least 2 annotators"):
        collection.update(logits, alone)
    expected = F.kl_divergence(logits, counts, **given, component="corrected")
    torch.testing.assert_close(collection.compute()["KLDivergence"], expected)


# Order of the classes


@pytest.mark.parametrize("task", TASKS)
def test_ranking_score_of_counts_equals_slow_loop(task):
    """Logits are rounded, so that classes are tied in predictions, counts or both."""
    logits, counts = data(task, n=300)
    logits, counts = logits.round(), counts.clamp(max=3)
    rows = logits.reshape(-1, C).tolist() if task == "multiclass" else [[0, z] for z in logits.flatten().tolist()]
    ts = counts.reshape(-1, counts.shape[-1]).tolist()
    expected = torch.tensor([float(oracles.same_ranking(*row)) for row in zip(rows, ts, strict=True)])
    assert 0.2 < expected.mean() < 0.9
    found = F.ranking_score(logits, counts, task=task, from_logits=True, reduction="none")
    assert found.flatten().tolist() == expected.tolist()


def test_ranking_score_distinguishes_logits_of_equal_probability():
    logits, counts = torch.tensor([[-800.0, 0.0, -900.0], [-900.0, 0.0, -800.0]]), torch.tensor([[1, 5, 0]] * 2)
    assert F.ranking_score(logits, counts, task="multiclass", from_logits=True, reduction="none").tolist() == [1, 0]
    assert F.ranking_score(logits.softmax(-1), counts, task="multiclass", reduction="none").tolist() == [1, 1]


# Sampling noise of few annotators


@pytest.mark.parametrize("n", [1, 2, 7, 48, 49, 50, 99, 150, 400, 3000])
def test_expectations_of_a_binomial_fraction_equal_the_sum_over_all_counts(n):
    """Rounding of the slow sum grows with n. Up to 100 expected counts the tested rule has an error of 1e-10."""
    n_annotators = torch.tensor(float(n), dtype=torch.float64)
    for p in (0.0, 1.0):
        share = torch.tensor(p, dtype=torch.float64)
        assert mean_distance_of_share(share, n_annotators) == 0
        assert float(p * mean_log_share(share, n_annotators)) == pytest.approx(0, abs=2e-9)
    for p in (1e-6, 0.02, 1 / 3, 0.5, 0.97, 1 - 1e-9):
        share = torch.tensor(p, dtype=torch.float64)
        distance = oracles.expected_of_share(lambda t, p=p: abs(t - p), p, n)
        assert float(mean_distance_of_share(share, n_annotators)) == pytest.approx(distance, rel=1e-9, abs=1e-15), p
        entropy = oracles.expected_of_share(lambda t: oracles.xlogy(t, t), p, n)
        tolerance = max(1e-14 * n, 0 if n * p < 50 else 1e-10 if n * p < 100 else 2e-9)
        assert float(p * mean_log_share(share, n_annotators)) == pytest.approx(entropy, rel=0, abs=tolerance), p


# Predictive distributions: user-defined densities, and the consistency interval of NEES


def test_ecd_of_a_density_equals_that_of_the_distribution():
    g = torch.Generator().manual_seed(0)
    mean, scale = torch.randn(50, generator=g, dtype=torch.float64).requires_grad_(), torch.rand(50, generator=g) + 0.5
    x, normal = mean.detach() + 2 * torch.randn(50, generator=g), Normal(mean, scale)
    density = Density(normal.log_prob, normal.entropy())
    weights = torch.rand(50, generator=g)
    for options in ({}, {"weights": weights}, {"reduction": "none"}):
        assert ecd(density, x, **options).equal(ecd(normal, x, **options))
    (slope,) = torch.autograd.grad(ecd(density, x), mean)
    assert slope.allclose((mean - x).detach() / scale.square() / 50)
    of_one = Density(Normal(0.0, 1.0).log_prob, 0.5 * math.log(2 * math.pi * math.e))
    assert of_one != density
    assert ecd(of_one, [0.0, 1.0, 2.0]).item() == pytest.approx((5 / 3 - 1) / 2)
    with pytest.raises(ValueError, match=r"`entropy` must have the shape of the log-densities \(50,\)"):
        ecd(Density(normal.log_prob, scale[:3]), x)


@pytest.mark.parametrize(("n", "dimension", "level"), [(1, 1, 0.95), (50, 4, 0.95), (7, 2, 0.5), (10**6, 3, 0.999)])
def test_interval_of_nees_equals_chi_squared_quantiles(n, dimension, level):
    expected = [chi2.ppf(p, n * dimension) / n for p in ((1 - level) / 2, (1 + level) / 2)]
    assert nees_interval(n, dimension, level=level) == pytest.approx(expected, rel=1e-9)
