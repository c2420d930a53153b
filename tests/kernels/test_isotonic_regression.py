"""Isotonic regression of real targets, against a slow loop, scikit-learn and its gradient."""

import numpy as np
import pytest
import torch
from helpers.blocks import PAVA_BACKENDS
from hypothesis import given
from hypothesis import strategies as st
from oracles import ranked as oracle

from torchcalib.kernels.isotonic import isotonic_regression


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
def test_isotonic_regression_parity_with_scikit_learn(backend):
    isotonic = pytest.importorskip("sklearn.isotonic")
    generator = np.random.default_rng(0)
    y = generator.standard_normal(3000) + np.linspace(0, 2, 3000)
    w = generator.random(3000) + 0.1
    expected = isotonic.isotonic_regression(y, sample_weight=w)
    fitted = isotonic_regression(torch.from_numpy(y), torch.from_numpy(w), backend=backend)
    torch.testing.assert_close(fitted.numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.1, 5)), min_size=1, max_size=25))
def test_isotonic_regression_slow_loop(backend, rows):
    y, w = zip(*rows, strict=True)
    fitted = isotonic_regression(
        torch.tensor(y, dtype=torch.float64), torch.tensor(w, dtype=torch.float64), backend=backend
    )
    np.testing.assert_allclose(fitted.numpy(), oracle.weighted_isotonic(y, w), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize("backend", PAVA_BACKENDS)
def test_isotonic_regression_gradcheck(lead, backend):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(*lead, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    w = (torch.rand(*lead, 9, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()

    def fit(y, w):
        return isotonic_regression(y, w, backend=backend)

    assert torch.autograd.gradcheck(fit, (y, w))
    assert torch.autograd.gradgradcheck(fit, (y, w))


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
def test_isotonic_regression_of_any_shape_dtype_and_weight_zero(backend):
    def fit(*columns):
        return isotonic_regression(*columns, backend=backend)

    y = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 2, 50)
    # Sums of up to 50 terms may be taken in another order.
    torch.testing.assert_close(
        fit(y).view(6, 50), torch.stack([fit(row) for row in y.view(6, 50)]), rtol=1e-6, atol=1e-6
    )
    for lead in ((), (3,)):
        assert fit(torch.empty(*lead, 0)).shape == (*lead, 0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(fit(torch.tensor([1, 3, 2, 4], dtype=dtype)), torch.tensor([1, 2.5, 2.5, 4], dtype=dtype))
    y = torch.tensor([9.0, 1.0, 5.0, torch.nan, 3.0], dtype=torch.float64)
    w = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert fit(y, w).tolist() == [1, 1, 5, 5, 5]  # the block before
    assert fit(y, 0 * w).isnan().all()
