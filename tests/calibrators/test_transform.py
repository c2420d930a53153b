"""What all calibrators and their transforms keep: laws of batches and weights, modules, and wrong calls."""

import copy
import math

import pytest
import torch
from helpers.fits import AFFINE, ALL, ISO, D, H, T, binary, data, multi, name, single
from helpers.wrong_calls import assert_all_raise

import torchcalib as tc
from torchcalib.calibrators import AffineTransform, HistogramTransform, IsotonicTransform
from torchcalib.kernels.newton import NO_DATA


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_no_series_and_no_labels_have_no_fits(calibrator):
    none = calibrator.fit(torch.rand(0, 5), torch.zeros(0, 5, dtype=torch.int64), task="binary")
    assert none.converged.shape == (0,)
    assert none(torch.rand(0, 7)).shape == (0, 7)
    labels = calibrator.fit(torch.rand(5, 0), torch.zeros(5, 0, dtype=torch.int64), task="multilabel")
    assert labels(torch.rand(7, 0)).shape == (7, 0)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_without_data_a_fit_is_not_converged(calibrator):
    preds, target = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
    with pytest.warns(UserWarning, match="no samples of positive weight"):
        transform = calibrator.fit(preds, target, weights=torch.zeros(2), task="binary")
    assert not transform.converged
    with pytest.warns(UserWarning, match="no samples of positive weight"):
        transform = calibrator.fit(preds[:0], target[:0], task="binary")
    assert not transform.converged
    if calibrator in AFFINE:
        assert transform.outcome == NO_DATA
        assert transform(preds).isnan().all()


# Laws.


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_law_a_batch_of_series_is_a_loop(calibrator):
    logits, target = data(80, 3, lead=(2, 3))
    batched = calibrator.fit(logits, target, **multi)
    assert batched.alpha.shape == batched.converged.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = calibrator.fit(logits[i, j], target[i, j], **multi)
            assert batched.alpha[i, j].item() == pytest.approx(one.alpha.item(), abs=1e-9)
            assert batched(logits)[i, j].allclose(one(logits[i, j]), atol=1e-8)
            assert batched.part(i).part(j)(logits[i, j]).allclose(one(logits[i, j]), atol=1e-8)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_labels_are_series(calibrator):
    logits, target = single(90, lead=(3,))
    preds, labels = logits.sigmoid().T, target.T
    batched = calibrator.fit(preds, labels, task="multilabel")
    for k in range(3):
        one = calibrator.fit(preds[:, k], labels[:, k], task="binary")
        assert batched(preds)[:, k].allclose(one(preds[:, k]), atol=1e-8)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_weightings_are_fits_of_their_own(calibrator):
    """What folds and bootstrap replicates use: a leading axis of weights, one solve."""
    logits, target = single(90)
    g = torch.Generator().manual_seed(5)
    weights = torch.randint(0, 3, (7, 90), generator=g).double()
    p = calibrator.read(logits, target, task="binary", options={"from_logits": True})
    batched = calibrator.fit_to(p, weights)
    for r in range(7):
        one = calibrator.fit(logits, target, weights=weights[r], **binary)
        assert batched(logits.expand(7, -1))[r].allclose(one(logits), atol=1e-8)
        assert batched.part(r)(logits).allclose(one(logits), atol=1e-8)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_integer_weights_are_repeats(calibrator):
    logits, target = single(70)
    counts = torch.randint(0, 4, (70,), generator=torch.Generator().manual_seed(3))
    weighted = calibrator.fit(logits, target, weights=counts, **binary)
    repeated = calibrator.fit(
        logits.repeat_interleave(counts), target.repeat_interleave(counts), task="binary", from_logits=True
    )
    assert weighted(logits).allclose(repeated(logits), atol=1e-9)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_order_and_absent_rows_do_not_matter(calibrator):
    logits, target = single(70)
    plain = calibrator.fit(logits, target, **binary)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(4))
    assert calibrator.fit(logits[order], target[order], **binary)(logits).allclose(plain(logits), atol=1e-9)
    more = torch.cat((logits, torch.tensor([math.nan, 3.0])))
    labels = torch.cat((target, torch.tensor([7, 0])))
    weights = torch.cat((torch.ones(70), torch.zeros(2)))
    assert calibrator.fit(more, labels, weights=weights, **binary)(logits).allclose(plain(logits), atol=1e-9)
    ignored = torch.cat((target, torch.tensor([-1, -1])))
    assert calibrator.fit(more, ignored, ignore_index=-1, **binary)(logits).allclose(plain(logits), atol=1e-9)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_gradient_in_the_predictions(calibrator):
    logits, target = single(40)
    for from_logits in (False, True):
        preds = logits if from_logits else logits.sigmoid()
        transform = calibrator.fit(preds, target, task="binary", from_logits=from_logits)
        middle = (preds[:6] + 1e-3).clone().requires_grad_()
        if calibrator in AFFINE:
            assert torch.autograd.gradcheck(transform, middle)
            values, labels = data(40, 3)
            of_classes = calibrator.fit(values, labels, **multi)
            assert torch.autograd.gradcheck(of_classes, values[:4].clone().requires_grad_())
        else:
            transform(middle).clamp(-5, 5).sum().backward()
            assert middle.grad.isfinite().all()
        ends = torch.tensor(
            [-math.inf, math.inf] if from_logits else [0.0, 1.0], dtype=torch.float64, requires_grad=True
        )
        assert (transform(ends).sigmoid() if from_logits else transform(ends)).isfinite().all()
        transform(ends).clamp(-5, 5).sum().backward()
        assert ends.grad.isfinite().all()


# A module.


@pytest.mark.parametrize(
    ("calibrator", "cls"),
    [(T, AffineTransform), (D, AffineTransform), (H, HistogramTransform), (ISO, IsotonicTransform)],
)
def test_state_dict_goes_to_a_file_and_into_a_bare_transform(calibrator, cls, tmp_path):
    logits, target = single(50)
    transform = calibrator.fit(logits, target, **binary)
    model = torch.nn.Sequential(torch.nn.Identity(), transform)
    torch.save(model.state_dict(), tmp_path / "cal.pt")
    bare = torch.nn.Sequential(torch.nn.Identity(), cls())
    bare.load_state_dict(torch.load(tmp_path / "cal.pt", weights_only=True))
    assert torch.equal(bare(logits), transform(logits))
    assert bare[1].converged.equal(transform.converged)
    assert torch.equal(copy.deepcopy(transform)(logits), transform(logits))
    assert not list(transform.parameters())


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_numbers_and_flags_keep_their_dtype_when_the_model_is_halved(calibrator):
    logits, target = single(50)
    transform = calibrator.fit(logits, target, **binary)
    before, dtypes = transform(logits), {key: x.dtype for key, x in transform.named_buffers()}
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), transform).to(torch.bfloat16).half().type(torch.float16)
    assert model[0].weight.dtype == torch.float16
    assert torch.equal(model[1](logits), before)
    assert {key: x.dtype for key, x in transform.named_buffers()} == dtypes


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_a_transform_fitted_in_inference_mode_takes_gradients_and_nan_stays_nan(calibrator):
    logits, target = single(50)
    with torch.inference_mode():
        transform = calibrator.fit(logits.clone(), target, **binary)
    x = logits.clone().requires_grad_()
    transform(x).clamp(-9, 9).sum().backward()
    assert x.grad.isfinite().all()
    assert transform(torch.tensor([math.nan, 0.3])).isnan().tolist() == [True, False]


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_a_transform_compiles_whole_and_maps(calibrator):
    logits, target = single(60)
    for from_logits in (False, True):
        preds = logits if from_logits else logits.sigmoid()
        transform = calibrator.fit(preds, target, task="binary", from_logits=from_logits)
        whole = torch.compile(transform, fullgraph=True, backend="eager")
        assert whole(preds).allclose(transform(preds))
        assert torch.vmap(transform)(preds.view(6, 10)).allclose(transform(preds).view(6, 10))


def test_repr_and_equality_of_calibrators():
    assert tc.HistogramBinning(n_bins=5) == H
    assert hash(D) == hash(tc.DPCalibration())
    assert "task='binary', from_logits=True" in repr(T.fit(*single(), **binary))


# Wrong calls.


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_wrong_axes_of_predictions(calibrator):
    logits, target = single(30, lead=(2,))
    series = calibrator.fit(logits, target, **binary)
    labels = calibrator.fit(logits.T, target.T, task="multilabel", from_logits=True)
    for call, part in (
        (lambda: series(torch.tensor(0.3)), r"at least 1 axes.*got shape \(\)"),
        (lambda: series(logits[0]), r"leading axes \(2,\) of the batch.*got \(\)"),
        (lambda: series(torch.rand(3, 30)), r"leading axes \(2,\) of the batch.*got \(3,\)"),
        (lambda: labels(torch.rand(7)), "at least 2 axes"),
        (lambda: labels(torch.rand(2, 7)), r"leading axes \(2,\).*labels last, got \(7,\)"),
    ):
        with pytest.raises(ValueError, match=part):
            call()
    assert series(torch.rand(5, 2, 3)).shape == (5, 2, 3)
    assert series.part(1)(torch.rand(4)).shape == (4,)


P, Y = torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])


CALLS = [
    ("shapes differ", lambda c: c.fit(P, Y[:2], task="binary"), ValueError, "`target` must"),
    ("soft targets", lambda c: c.fit(P, P, task="binary"), TypeError, "`target` must be integer labels"),
    ("logits as probabilities", lambda c: c.fit(3 * P, Y, task="binary"), ValueError, "from_logits=True"),
    ("NaN", lambda c: c.fit(P * math.nan, Y, task="binary"), ValueError, "`preds` must not hold NaN"),
    ("label 3", lambda c: c.fit(P, 3 * Y, task="binary"), ValueError, "`target` must be a class index"),
    ("negative weights", lambda c: c.fit(P, Y, weights=-P, task="binary"), ValueError, "`weights` must"),
    ("a list", lambda c: c.fit([0.2], Y, task="binary"), TypeError, "`preds` must be a torch.Tensor"),
    ("unknown task", lambda c: c.fit(P, Y, task="ordinal"), ValueError, "`task` must"),
    ("unknown option", lambda c: c.fit(P, Y, task="binary", l2=1), TypeError, "l2"),
    ("no task", lambda c: c.fit(P, Y), TypeError, "task"),
    ("integers in forward", lambda c: c.fit(P, Y, task="binary")(Y), TypeError, "`preds` must be floating"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:no finite scale:UserWarning")
@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_wrong_fit(calibrator):
    assert_all_raise(CALLS, calibrator)


@pytest.mark.parametrize("calibrator", [H, ISO], ids=name)
def test_wrong_task_of_binary_calibrators(calibrator):
    with pytest.raises(ValueError, match=r"`task` must be one of 'binary', 'multilabel'.*positive_classes"):
        calibrator.fit(Q, torch.tensor([1, 0, 2]), task="multiclass")
