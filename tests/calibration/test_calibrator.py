"""Properties of all calibrators and their transforms: batches, weights, module behaviour, and wrong calls."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers.fits import AFFINE, ALL, binary, data, multi, name, single
from helpers.refusals import assert_refused

from torchcalib.ops.newton.problem import NO_DATA

each_calibrator = pytest.mark.parametrize("calibrator", ALL, ids=name)


@each_calibrator
def test_without_data_a_fit_is_not_converged(calibrator):
    preds, target = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
    for n, weights in ((2, torch.zeros(2)), (0, None)):
        with pytest.warns(UserWarning, match="no samples of positive weight"):
            transform = calibrator.fit(preds[:n], target[:n], weights=weights, task="binary")
        assert not transform.converged
        if calibrator in AFFINE:
            assert transform.outcome == NO_DATA
            assert transform(preds).isnan().all()
    none = calibrator.fit(torch.rand(0, 5), torch.zeros(0, 5, dtype=torch.int64), task="binary", batch_dims=1)
    assert none.converged.shape == (0,)
    assert none(torch.rand(0, 7)).shape == (0, 7)
    labels = calibrator.fit(torch.rand(5, 0), torch.zeros(5, 0, dtype=torch.int64), task="multilabel")
    assert labels(torch.rand(7, 0)).shape == (7, 0)


@each_calibrator
def test_labels_and_replicate_weights_equal_separate_fits(calibrator):
    """Folds and bootstrap replicates are solved in one batch, as a leading axis of the weights."""
    logits, target = single(90, lead=(3,))
    fits = [calibrator.fit(*series, **binary) for series in zip(logits, target, strict=True)]
    labels = calibrator.fit(logits.T, target.T, task="multilabel", from_logits=True)
    for found, one, own in zip(labels(logits.T).T, fits, logits, strict=True):
        assert found.allclose(one(own), atol=1e-8)
    logits, target = logits[0], target[0]
    weights = torch.randint(0, 4, (7, 90), generator=torch.Generator().manual_seed(5))
    p = calibrator.read(logits, target, task="binary", options={"from_logits": True})
    batched = calibrator.fit_to(p, weights.double())
    for r, row in enumerate(weights):
        repeats = logits.repeat_interleave(row), target.repeat_interleave(row)
        expected = calibrator.fit(*repeats, **binary)(logits)
        unread = logits.masked_fill(row == 0, math.nan)
        one = calibrator.fit(unread, target.masked_fill(row == 0, 7), weights=row, **binary)
        for found in (batched(logits.expand(7, -1))[r], batched.part(r)(logits), one(logits)):
            assert found.allclose(expected, atol=1e-8)


@pytest.mark.parametrize("from_logits", [False, True])
@each_calibrator
def test_transforms_support_gradients_compile_and_vmap(calibrator, from_logits):
    """Gradients are finite at certain predictions too, and exist for a transform that was fitted in inference mode."""
    logits, target = single(60)
    preds = logits if from_logits else logits.sigmoid()
    with torch.inference_mode():
        transform = calibrator.fit(preds.clone(), target, task="binary", from_logits=from_logits)
    if calibrator in AFFINE:
        assert torch.autograd.gradcheck(transform, (preds[:6] + 1e-3).requires_grad_())
        rows, labels = data(40, 3)
        of_rows = calibrator.fit(rows, labels, **multi)
        assert torch.autograd.gradcheck(of_rows, rows[:4].clone().requires_grad_())
        certain = of_rows(torch.tensor([[math.inf, 0, 0]], dtype=torch.float64)).softmax(-1)
        assert certain.tolist() == [[1, 0, 0]]
    ends = torch.tensor([-math.inf, math.inf] if from_logits else [0.0, 1.0], dtype=torch.float64)
    leaf = torch.cat((preds, ends)).requires_grad_()
    found = transform(leaf)
    assert (found.sigmoid() if from_logits else found).isfinite().all()
    found.clamp(-5, 5).sum().backward()
    assert leaf.grad.isfinite().all()
    assert transform(torch.tensor([math.nan, 0.3])).isnan().tolist() == [True, False]
    torch.compiler.reset()
    whole = torch.compile(transform, fullgraph=True, backend="eager")
    assert whole(preds).allclose(transform(preds))
    assert torch.vmap(transform)(preds.view(6, 10)).allclose(transform(preds).view(6, 10))


@each_calibrator
def test_buffers_of_a_transform_keep_their_dtype_when_the_model_is_cast_to_half(calibrator):
    logits, target = single(50)
    transform = calibrator.fit(logits, target, **binary)
    before, dtypes = transform(logits), {key: x.dtype for key, x in transform.named_buffers()}
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), transform).to(torch.bfloat16).half().type(torch.float16)
    assert model[0].weight.dtype == torch.float16
    assert torch.equal(copy.deepcopy(model)[1](logits), before)
    assert {key: x.dtype for key, x in transform.named_buffers()} == dtypes
    assert not list(transform.parameters())
    assert "task='binary', from_logits=True" in repr(transform)


P, Y = torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1])
CALLS = [
    ("soft targets", lambda c: c.fit(P, P, task="binary"), TypeError, "`target` must be integer labels"),
    ("logits as probabilities", lambda c: c.fit(3 * P, Y, task="binary"), ValueError, "from_logits=True"),
    ("unknown option", lambda c: c.fit(P, Y, task="binary", l2=1), TypeError, "l2"),
    ("integers in forward", lambda c: c.fit(P, Y, task="binary")(Y), TypeError, "`preds` must be floating"),
]


@pytest.mark.filterwarnings("ignore:no finite scale:UserWarning")
@each_calibrator
def test_wrong_calls_of_calibrators_and_transforms_raise_errors(calibrator):
    logits, target = single(30, lead=(2,))
    series = calibrator.fit(logits, target, batch_dims=1, **binary)
    labels = calibrator.fit(logits.T, target.T, task="multilabel", from_logits=True)
    rows = [(what, partial(call, calibrator), error, parts) for what, call, error, *parts in CALLS]
    rows += [
        ("a number", partial(series, torch.tensor(0.3)), ValueError, ["at least 1 axes", "got shape ()"]),
        ("one series", partial(series, logits[0]), ValueError, ["leading axes (2,) of the batch", "got ()"]),
        ("three series", partial(series, torch.rand(3, 30)), ValueError, ["leading axes (2,) of", "got (3,)"]),
        ("no labels", partial(labels, torch.rand(7)), ValueError, ["at least 2 axes"]),
        ("seven labels", partial(labels, torch.rand(2, 7)), ValueError, ["leading axes (2,)", "labels last, got (7,)"]),
    ]
    if calibrator in AFFINE:
        of_rows = calibrator.fit(*data(30, 3), class_axis=-1, **multi)
        rows.append(("four classes", partial(of_rows, torch.rand(30, 4)), ValueError, ["`preds` must have 3 classes"]))
    else:
        of_classes = partial(calibrator.fit, torch.eye(3), torch.arange(3), task="multiclass")
        said = ["`task` must be one of 'binary', 'multilabel'", "positive_classes"]
        rows.append(("classes", of_classes, ValueError, said))
    assert_refused(rows)
    assert series(torch.rand(5, 2, 3)).shape == (5, 2, 3)
    assert series.part(1)(torch.rand(4)).shape == (4,)
