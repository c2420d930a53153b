"""Area under the Bayes risk curve with any weight: slow integrals, special cases."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, special
from torch.distributions import Beta, Dirichlet

import torchcalib as tc
import torchcalib.functional as F

F64 = torch.float64
binary, multi = {"task": "binary"}, {"task": "multiclass"}
LOG_ODDS = [-300.0, -40.0, -5.0, -0.3, 0.0, 1.0, 4.0, 36.0, 300.0]
BETAS = [(2, 2), (2.3, 1.7), (3, 0.5), (0.5, 0.5), (1, 1.5), (0.1, 0.2), (200, 300)]


def beta_of(a, b):
    return Beta(*torch.tensor([a, b], dtype=F64))


def slow_area(z, y, a, b):
    """[EPSR] eq. 34 times the density of Beta(a, b), integrated over the log-odds u of operating points."""

    def integrand(u):
        log_c, log_not_c = -np.logaddexp(0, -u), -np.logaddexp(0, u)
        # dc = c (1-c) du, and the cost is 1/c of a miss or 1/(1-c) of a false alarm
        log_density = (a - 1) * log_c + (b - 1) * log_not_c - special.betaln(a, b)
        return math.exp(log_density + (log_not_c if y else log_c))

    beyond = 60 / min(1, b if y else a)
    low, high = (z, max(z, 0) + beyond) if y else (min(z, 0) - beyond, z)
    ends = np.unique(np.concatenate(([low, high], np.linspace(-45, 45, 91), np.linspace(-700, 700, 71))))
    ends = ends[(ends >= low) & (ends <= high)]
    return sum(integrate.quad(integrand, *pair, epsabs=0, epsrel=1e-12)[0] for pair in pairwise(ends))


@pytest.mark.parametrize(("a", "b"), BETAS)
def test_beta_weight_equals_slow_integral_with_its_gradient(a, b):
    z = torch.tensor(LOG_ODDS, dtype=F64, requires_grad=True)
    for y in (0, 1):
        area = F.bayes_risk_area(
            z, torch.full((9,), y), weight=beta_of(a, b), from_logits=True, reduction="none", **binary
        )
        expected = torch.tensor([slow_area(u, y, a, b) for u in LOG_ODDS], dtype=F64)
        torch.testing.assert_close(area, expected, rtol=1e-9, atol=1e-300)
        (grad,) = torch.autograd.grad(area.sum(), z)
        with torch.no_grad():  # derivative of the integral: the integrand at its end
            log_c, log_not_c = torch.nn.functional.logsigmoid(torch.stack((z, -z)))
            slope = ((a - 1) * log_c + (b - 1) * log_not_c - special.betaln(a, b) + (log_not_c if y else log_c)).exp()
        torch.testing.assert_close(grad, -slope if y else slope, rtol=1e-8, atol=1e-12)


SCORES = [  # weights for the costs 1/c and 1/(1-c), and the proper score
    (torch.ones_like, F.nll),
    (lambda c: 2 * c * (1 - c), F.brier_score),
    (beta_of(1, 1), F.nll),
    (lambda c: beta_of(2, 2).log_prob(c).exp() / 3, F.brier_score),
]


@pytest.mark.parametrize(("weight", "score"), SCORES)
def test_cross_entropy_and_brier_score_are_special_cases(weight, score):
    """For the costs 1-c and c the weight is w(c) / (c (1-c)): 1 / (c (1-c)) and 2."""
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(60, generator=generator, dtype=F64)
    y = torch.randint(0, 2, (60,), generator=generator)
    given = {"from_logits": True, **binary}
    torch.testing.assert_close(F.bayes_risk_area(z, y, weight=weight, **given), score(z, y, **given))
    for more in ({"normalize": "prior"}, {"priors": [0.9, 0.1]}):
        found = F.bayes_risk_area(z, y, weight=weight, **more, **given)
        torch.testing.assert_close(found, score(z, y, **more, **given))
    a, b = (z.clone().requires_grad_() for _ in range(2))
    for order in (1, 2):
        slopes = []
        for x, value in ((a, F.bayes_risk_area(a, y, weight=weight, **given)), (b, score(b, y, **given))):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            slopes.append(slope if order == 1 else torch.autograd.grad(slope.square().sum(), x)[0])
        torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-12)
    columns = torch.stack((0 * z, z), -1)
    rows = (lambda c: weight(c[..., 1])) if not isinstance(weight, Beta) else weight
    found = F.bayes_risk_area(columns, y, weight=rows, from_logits=True, **multi)
    torch.testing.assert_close(found, score(z, y, **given))


def test_weight_with_jumps_ignores_other_thresholds():
    """The costs of an interval of thresholds: the integral of 1/c from max(p, 0.2) to 0.4 for y = 1."""
    p = torch.tensor([0.05, 0.25, 0.39, 0.6], dtype=F64)
    found = F.bayes_risk_area(
        p, torch.ones(4, dtype=torch.int64), weight=lambda c: ((c > 0.2) & (c < 0.4)).to(c), reduction="none", **binary
    )
    expected = (0.4 / p.clamp(0.2, 0.4)).log()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_certain_and_wrong_predictions_are_finite_if_the_weight_vanishes():
    p, y = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=F64), torch.tensor([1, 0, 0, 1])
    for weight, ends in (
        (torch.ones_like, [math.inf, math.inf]),
        (lambda c: 2 * c * (1 - c), [1, 1]),
        (lambda c: c, [1, math.inf]),
        (beta_of(3, 0.5), [1.25, math.inf]),  # B(2, 0.5) / B(3, 0.5)
    ):
        area = F.bayes_risk_area(p, y, weight=weight, reduction="none", **binary)
        torch.testing.assert_close(area, torch.tensor([*ends, 0, 0], dtype=F64))


# Several classes


def slow_dirichlet_area(q, h, a):
    """Mean of the cost 1/c_h of wrong decisions over c of Dirichlet(a), divided by C-1.

    With independent gamma variables g, c_h is g_h divided by their sum. The decision h is correct if
    g_j > g_h q_j / q_h for all j.
    """

    def integrand(log_g):
        g = math.exp(log_g)
        correct = math.prod(special.gammaincc(a[j], g * q[j] / q[h]) for j in range(len(q)) if j != h)
        return math.exp((a[h] - 1) * log_g - g - special.gammaln(a[h])) * (1 - correct)

    area = sum(integrate.quad(integrand, k, k + 5, epsabs=1e-12)[0] for k in range(-40, 5, 5))
    return area * (sum(a) - 1) / (len(q) - 1)


@pytest.mark.parametrize("a", [(1, 1, 1), (2, 2, 2), (1.5, 3, 1, 2)])
def test_monte_carlo_estimate_is_within_its_standard_error(a):
    generator = torch.Generator().manual_seed(1)
    q = (2 * torch.randn(12, len(a), generator=generator, dtype=F64)).softmax(-1)
    h = torch.randint(0, len(a), (12,), generator=generator)
    density = Dirichlet(torch.tensor(a, dtype=F64))

    def weight(c):
        return density.log_prob(c).exp() / math.factorial(len(a) - 1)  # relative to the uniform density

    given = {"weight": weight, "n_points": 20_000, **multi}
    expected = [slow_dirichlet_area(row, k, a) for row, k in zip(q.tolist(), h.tolist(), strict=True)]
    if set(a) == {1}:
        assert expected == pytest.approx(F.nll(q, h, reduction="none", **multi).tolist(), rel=1e-6)
    found = F.bayes_risk_area(q, h, reduction="none", **given)
    error = F.bayes_risk_area(q, h, component="standard_error", reduction="none", **given)
    assert ((found - torch.tensor(expected, dtype=F64)).abs() < 4.5 * error).all()  # of 36 values, each 1 in 150,000
    assert (error < 0.05 * torch.tensor(expected, dtype=F64) + 0.01).all()
    torch.testing.assert_close(F.bayes_risk_area(q, h, **given), found.mean())


def test_monte_carlo_estimate_is_a_proper_score():
    """The expected score of sampled labels is smallest for the distribution of the labels."""
    generator = torch.Generator().manual_seed(2)
    t, q = torch.randn(2, 200, 3, generator=generator, dtype=F64).softmax(-1)
    given = {"weight": lambda c: c[..., 0], "n_points": 50, "reduction": "none", **multi}
    own, other = F.bayes_risk_area(t, t, **given), F.bayes_risk_area(q, t, **given)
    assert (own <= other + 1e-12).all()
    of_labels = [F.bayes_risk_area(q, torch.full((200,), k), **given) for k in range(3)]
    torch.testing.assert_close(other, (t * torch.stack(of_labels, -1)).sum(-1))
    h, f = torch.tensor([0, 1, 1, 2]), torch.tensor([[0.25, 0.5, 0.25]] * 4, dtype=F64)
    prior = F.bayes_risk_area(f, h, weight=given["weight"], normalize="prior", **multi)
    torch.testing.assert_close(prior, torch.ones((), dtype=F64))


def test_area_of_a_metric_equals_the_function_for_every_weight():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(40, 3, generator=generator, dtype=F64).softmax(-1)
    h = torch.randint(0, 3, (40,), generator=generator)
    for task, weight in (("binary", beta_of(2, 3)), ("binary", torch.sqrt), ("multiclass", lambda c: c.amax(-1))):
        preds, target = (q, h) if task == "multiclass" else (q[:, 0], (h == 0).long())
        metric = tc.BayesRiskArea(task=task, weight=weight)
        for part in (slice(15), slice(15, None)):
            metric.update(preds[part], target[part])
        torch.testing.assert_close(metric.compute(), F.bayes_risk_area(preds, target, task=task, weight=weight))
        assert "0x" not in "".join(metric.state_names)
