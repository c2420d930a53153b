"""Logistic regression on several features: the gradient at the fit, and separable data."""

import pytest
import torch

from torchcalib.ops.newton import CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.regression import fit_logistic_regression


def correlated(n=400, n_features=3, seed=0):
    """Return features `(2, D, N)` that differ in scale by nine orders of magnitude and are correlated, and labels."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(2, n_features, n, generator=g, dtype=torch.float64)
    z = z.cumsum(-2) + 3
    target = torch.rand(2, n, generator=g, dtype=torch.float64) < (z[:, 0] - 0.4 * z[:, -1]).sigmoid()
    return z * 10 ** torch.linspace(-3, 6, n_features, dtype=torch.float64).unsqueeze(-1), target.double()


@pytest.mark.parametrize("ridge", [None, (0.1, 0.0, 0.02, 0.0)])
def test_gradient_of_the_penalised_log_loss_is_zero_at_the_fit(ridge):
    """The objective is convex: mean of -log sigmoid((2 y - 1) theta * (1, x)), plus sum_k r_k theta_k^2.

    The fit bounds the norm of the gradient for orthonormal columns by 1e-9. The derivative in theta_k is therefore at
    most 1e-9 times the root mean square of column k, by the Cauchy-Schwarz inequality. The weights of the replicates
    differ from the mean, for which the columns are orthonormal, so the bound is doubled.
    """
    x, target = correlated()
    w = torch.randint(0, 4, (3, 2, 400), generator=torch.Generator().manual_seed(1)).double()
    fit = fit_logistic_regression(x.masked_fill((w == 0).all(0).unsqueeze(-2), torch.nan), target, w, ridge)
    assert (fit.outcome == CONVERGED).all()
    assert (fit.grad_norm <= 1e-9).all()
    for r in range(3):
        for s in range(2):
            theta = torch.cat((fit.intercept[r, s, None], fit.coefficients[r, s])).requires_grad_()
            columns = torch.cat((torch.ones(1, 400, dtype=torch.float64), x[s]))
            share = w[r, s] / w[r, s].sum()
            loss = -(share * torch.nn.functional.logsigmoid((2 * target[s] - 1) * (theta @ columns))).sum()
            assert fit.nll[r, s].item() == pytest.approx(loss.item(), rel=1e-12)
            (loss + sum(r_k * t.square() for r_k, t in zip(ridge or (), theta, strict=False))).backward()
            assert (theta.grad.abs() <= 2e-9 * (share * columns.square()).sum(-1).sqrt()).all()


def test_data_without_a_unique_finite_optimum_have_defined_results():
    x = torch.tensor([[1.0, 2, 3, 4], [1, 2, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [5, 5, 5, 5]], dtype=torch.float64)
    target = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]]).double()
    w = torch.ones(2, 5, 4, dtype=torch.float64)
    w[1, 3] = 0
    fit = fit_logistic_regression(torch.stack((x, 2 * x - 7), 1), target, w)
    # Separable; separable with a tie; one class; the second feature is determined by the first; a constant feature.
    assert fit.outcome[0].tolist() == [SEPARABLE, SEPARABLE, CONVERGED, CONVERGED, CONVERGED]
    assert fit.outcome[1, 3] == NO_DATA
    assert fit.coefficients[1, 3].isnan().all()
    assert fit.grad_norm[0, :2].isnan().all()
    assert (fit.intercept[0, 2], fit.nll[0, 2]) == (torch.inf, 0)
    assert fit.coefficients[0, 2].tolist() == [0, 0]
    assert fit.coefficients[0, 3, 1] == 0
    assert fit.coefficients[0, 4].tolist() == [0, 0]
    assert fit.intercept[0, 4].item() == pytest.approx(-torch.tensor(3.0).log().item(), abs=1e-6)


def test_vmap_and_empty_batches_have_the_shapes_of_separate_fits():
    x, target = correlated()
    w = torch.ones(1, 2, 400, dtype=torch.float64)
    separate = fit_logistic_regression(x, target, w)
    mapped = torch.vmap(lambda *s: fit_logistic_regression(*(t[None] for t in s), w[:, :1]))(x, target)
    assert mapped.coefficients.reshape(2, 3).allclose(separate.coefficients[0], rtol=1e-9, atol=0)
    assert fit_logistic_regression(x[:0], target[:0], w[:, :0]).coefficients.shape == (1, 0, 3)
    assert (fit_logistic_regression(x[..., :0], target[:, :0], w[..., :0]).outcome == NO_DATA).all()
