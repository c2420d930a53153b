"""Fits to batches, of which only sums are stored, and to hidden states and a head, whose logits are not written.

The parameters are those of `fit` to all rows.
"""

import weakref

import pytest
import torch
from helpers.hidden import BIAS, HIDDEN, WEIGHT, logits

import torchcalib as tc
from torchcalib.calibration import BiasCorrection
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.ops import newton

CALIBRATORS = (tc.TemperatureScaling, tc.AffineScaling, BiasCorrection, tc.VectorScaling)
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 4, 10, 12, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.multinomial(
    (0.7 * LOGITS + torch.tensor([0.3, 0, -0.2, 0])[:, None, None]).softmax(1).movedim(1, -1).reshape(-1, 4), 1,
    generator=GENERATOR,
).view(6, 10, 12)  # fmt: skip
WEIGHTS = torch.rand(LABELS.shape, generator=GENERATOR, dtype=torch.float64)


class Loader:
    """Batches of volumes, and the number of passes over them."""

    def __init__(self, *columns, size=4):
        self.columns, self.size, self.n_passes = columns, size, 0

    def __iter__(self):
        self.n_passes += 1
        for start in range(0, len(self.columns[0]), self.size):
            yield tuple(column[start : start + self.size] for column in self.columns)


def assert_same_fit(calibrator, *columns, size=4, **options):
    """Compare the fit to batches with that to all rows; return both."""
    preds, target, *weights = columns
    loader = Loader(*columns, size=size)
    found = calibrator().fit_batches(loader, **options)
    expected = calibrator().fit(preds, target, **options, **({"weights": weights[0]} if weights else {}))
    for (name, mine), (_, theirs) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        if name != "grad_norm":
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8, equal_nan=True)
    torch.testing.assert_close(found(preds), expected(preds), rtol=1e-8, atol=1e-8, equal_nan=True)
    assert (found.task, found.from_logits, found.class_axis) == (
        expected.task,
        expected.from_logits,
        expected.class_axis,
    )
    assert loader.n_passes <= 16
    return found, expected


@pytest.mark.parametrize("calibrator", CALIBRATORS)
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.filterwarnings("ignore:.*gives probability 0")
def test_volumes(calibrator, from_logits):
    """Class-first volumes of logits and probabilities, with weights, ignored voxels and a smaller last batch."""
    preds = 2 * LOGITS if from_logits else (2 * LOGITS).softmax(1)
    assert_same_fit(calibrator, preds, LABELS, from_logits=from_logits)
    assert_same_fit(calibrator, preds, LABELS, WEIGHTS, size=1, from_logits=from_logits)
    ignored = LABELS.masked_fill(WEIGHTS < 0.3, 255)
    assert_same_fit(calibrator, preds, ignored, from_logits=from_logits, ignore_index=255)
    impossible = preds.clone()
    impossible[0, 1] = -torch.inf if from_logits else 0
    if not from_logits:
        impossible = impossible / impossible.sum(1, keepdim=True)
    found, _ = assert_same_fit(calibrator, impossible, LABELS, from_logits=from_logits)
    assert float(found.lost) > 0


@pytest.mark.parametrize("calibrator", CALIBRATORS[:3])
def test_other_tasks(calibrator):
    regions = torch.stack([(k == LABELS) | ((k + 1) % 4 == LABELS) for k in range(4)], 1).long()
    assert_same_fit(calibrator, LOGITS, regions, task="multilabel", class_axis=1, from_logits=True)
    assert_same_fit(calibrator, LOGITS[:, 0].sigmoid(), (LABELS == 0).long(), task="binary")
    soft = (LOGITS / 3).softmax(1)
    assert_same_fit(calibrator, LOGITS.softmax(1), soft, class_axis=1, task="multiclass")


@pytest.mark.parametrize("calibrator", CALIBRATORS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_special_cases(calibrator):
    """Absent classes, no useful scale, separable data and no data end as in `fit`."""
    absent = LABELS.clamp(max=2)
    assert_same_fit(calibrator, LOGITS, absent, from_logits=True)
    if calibrator is not tc.VectorScaling:
        reversed_, _ = assert_same_fit(calibrator, -LOGITS, LABELS, from_logits=True)
        assert calibrator is BiasCorrection or float(reversed_.alpha) == 0
    separable = 5 * torch.nn.functional.one_hot(LABELS, 4).movedim(-1, 1).double() + 0.1 * LOGITS
    found = calibrator().fit_batches(Loader(separable, LABELS), from_logits=True)
    if calibrator is not BiasCorrection:
        assert not bool(found.converged)
        torch.testing.assert_close(found(separable).exp(), separable.softmax(1), rtol=1e-9, atol=1e-9)
    assert_same_fit(calibrator, LOGITS, LABELS, torch.zeros_like(WEIGHTS), from_logits=True)


def test_only_sums_are_stored():
    """A batch is freed before the next one is read."""
    alive = []

    class Counted:
        def __iter__(self):
            for k in range(3):
                preds = LOGITS[k : k + 1].clone()
                alive.append(weakref.ref(preds))
                yield preds, LABELS[k : k + 1]
                del preds

    tc.AffineScaling().fit_batches(Counted(), from_logits=True)
    assert all(one() is None for one in alive)


def test_wrong_batches():
    fit = tc.TemperatureScaling().fit_batches
    batch = LOGITS, LABELS
    with pytest.raises(TypeError, match="`batches` must be iterated several times, got a generator"):
        fit(one for one in [batch])
    with pytest.raises(ValueError, match="`batches` must contain at least one batch, got none"):
        fit([])
    with pytest.raises(TypeError, match=r"`batches` must yield \(preds, target\)"):
        fit([LOGITS])
    with pytest.raises(ValueError, match="`positive_classes` must be None for batches"):
        fit([batch], positive_classes=[1])


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
