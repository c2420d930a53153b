"""Temperature scaling of hidden states and a head is that of the logits, which are not written."""

import pytest
import torch
from helpers.hidden import BIAS, HIDDEN, WEIGHT, logits

import torchcalib as tc
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.ops import newton


def labels_of(z):
    """Draw labels for which the best temperature is near 1."""
    uniform = torch.rand(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    return (z - (-uniform.log()).log()).argmax(-1)


H = HIDDEN.reshape(60, 8)
T = labels_of(logits(H))


def both(hidden, target, bias=BIAS, weights=None, ignore_index=None, **head):
    """Return the fit to hidden states and that to logits, without warnings."""
    how = {"weights": weights, "ignore_index": ignore_index}
    found = tc.TemperatureScaling().fit_from_hidden(
        hidden, WEIGHT.to(hidden), target, bias=bias.to(hidden), **head, **how
    )
    z = logits(hidden.double(), WEIGHT.to(hidden).double(), bias.to(hidden).double(), **head)
    return found, tc.TemperatureScaling().fit(z, target, "multiclass", from_logits=True, **how)


def assert_same(found, expected, tolerance=1e-9):
    for name in ("alpha", "beta", "outcome", "lost", "converged"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    assert (found.task, found.from_logits, found.class_axis) == (expected.task, expected.from_logits, -1)


@pytest.mark.parametrize("scale", [0.01, 0.8, 1.3, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_temperature_is_that_of_the_logits_after_five_products(scale, dtype, monkeypatch):
    products = []
    method = LinearLogits.moments
    monkeypatch.setattr(LinearLogits, "moments", lambda x, *args: products.append(len(x.hidden)) or method(x, *args))
    hidden = torch.randn(400, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = labels_of(logits(hidden))
    found, expected = both((hidden * scale).to(dtype), target, BIAS * scale)
    assert_same(found, expected, 1e-9 if dtype == torch.float64 else 1e-6)
    assert sum(products) <= 5 * 400
    z = logits()
    torch.testing.assert_close(found(z), expected(z), rtol=1e-6, atol=1e-6)


def test_weights_ignored_rows_and_transformations_count():
    weights = torch.arange(60) % 4
    target = torch.where(torch.arange(60) % 5 == 0, -100, T)
    head = {"logit_scale": 2.0, "softcap": 3.0}
    hidden = H.clone()
    hidden[weights == 0] = torch.nan
    found, _ = both(hidden, target, weights=weights, ignore_index=-100, **head)
    _, expected = both(H, target, weights=weights, ignore_index=-100, **head)
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fits_without_an_optimum_have_the_same_outcome():
    z, masked = logits().reshape(60, 40), BIAS.clone()
    masked[3] = -torch.inf
    lost = T.clone()
    lost[:5] = 3
    for outcome, target, options in (
        (newton.SEPARABLE, z.argmax(-1), {}),
        (newton.AT_ZERO, z.argmin(-1), {}),
        (newton.NO_DATA, T, {"weights": torch.zeros(60)}),
        (newton.AT_ZERO, lost, {"bias": masked}),
    ):
        found, expected = both(H, target, **options)
        if "bias" not in options:
            assert found.outcome == outcome
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": T + 40}, ValueError, "`target` must be a class index"),
        ({"hidden": H / 0 * 0}, ValueError, "`hidden` must give logits without NaN"),
        ({"weights": -torch.ones(60)}, ValueError, "`weights` must be finite"),
        ({"weight": WEIGHT[:0]}, ValueError, "GatheredParameters"),
    ],
)
def test_wrong_input_raises_and_changes_nothing(change, error, message):
    calibrator = tc.TemperatureScaling()
    before = repr(calibrator.state_dict())
    with pytest.raises(error, match=message):
        calibrator.fit_from_hidden(**{"hidden": H, "weight": WEIGHT, "target": T, **change})
    assert repr(calibrator.state_dict()) == before
