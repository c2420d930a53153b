"""Newton steps: derivatives of the NLL in the scale of scores, and logistic regression on several features."""

import math

import pytest
import torch
from helpers.kernels import F64, of_backends

from torchcalib.ops.dispatch import source_of
from torchcalib.ops.newton import CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.regression import fit_logistic_regression
from torchcalib.ops.newton.scores import LabelledScores
from torchcalib.ops.newton.temperature import nll_derivatives


def labelled(scores, w, label_mean, in_standard_form):
    """Return one batch element, with scores in standard form or scores 2 (s + 1)."""
    scale, unused = torch.ones(1, dtype=w.dtype), torch.zeros(1)
    given = scores if in_standard_form else 2 * scores + 2
    top = None if in_standard_form else given.amax(-1, keepdim=True)[None]
    scale = scale if in_standard_form else 2 * scale
    return LabelledScores(given[None], top, unused, unused, unused, w[None, None], unused, scale, label_mean)


@of_backends
@pytest.mark.parametrize("in_standard_form", [True, False])
@pytest.mark.parametrize(("dtype", "of_weights"), [(torch.float32, torch.float32), (torch.bfloat16, F64), (F64, F64)])
@pytest.mark.parametrize("n_classes", [3, 1500])
def test_derivatives_equal_those_of_loops(backend, in_standard_form, dtype, of_weights, n_classes):
    generator = torch.Generator().manual_seed(n_classes)
    scores = 8 * torch.randn(5, n_classes, generator=generator)
    scores = (scores - scores.amax(-1, keepdim=True)).to(torch.bfloat16).to(dtype)  # sums with 1 are exact in float32
    w = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4], dtype=of_weights)
    if in_standard_form:
        scores[:, 1] = -1e18  # a masked class, whose cube is not finite in float32
    p = labelled(scores, w, torch.tensor([[-0.5]], dtype=of_weights), in_standard_form)
    given = p.scores[0].tolist()
    expected = [0.5, 0.0, 0.0]
    for row, weight in zip(given, w.tolist(), strict=True):
        s = [x if in_standard_form else (x - max(row)) / 2 for x in row]
        q = [math.exp(1.3 * x) for x in s]
        q = [x / math.fsum(q) for x in q]
        mean = math.fsum(map(math.prod, zip(q, s, strict=True)))
        central = [math.fsum(a * (b - mean) ** k for a, b in zip(q, s, strict=True)) for k in (2, 3)]
        expected = [total + weight * x for total, x in zip(expected, (mean, *central), strict=True)]
    found = nll_derivatives(p, backend)(torch.tensor([[1.3]], dtype=of_weights))
    rounding = {"rtol": 1e-4, "atol": 1e-4} if of_weights == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for x, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(x, torch.tensor([[exact]], dtype=of_weights), **rounding)


@of_backends
def test_row_means_are_those_of_differences(backend):
    """The offset is common to all scores of a row, and does not affect the precision of the mean."""
    scores = 1e8 + torch.arange(6, dtype=F64).view(2, 1, 3) ** 2
    found = source_of("moments", "cpu", F64, 1, backend).row_means(scores, scores.amax(-1, keepdim=True))
    torch.testing.assert_close(found, torch.tensor([[-7 / 3], [-25 / 3]], dtype=F64), rtol=1e-14, atol=0)


# Logistic regression on several features


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
