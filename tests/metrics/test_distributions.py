"""Scores of predictive distributions: user-defined densities, and the consistency interval of NEES."""

import math

import pytest
import torch
from scipy.stats import chi2
from torch.distributions import Normal

from torchcalib.functional import Density, ecd, nees_interval


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
