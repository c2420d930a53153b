"""Properties of all calibrators: batches, weights, module behaviour, saving and loading."""

import copy
import math

import pytest
import torch
from helpers.fits import (
    AFFINE,
    ALL,
    CIR,
    ENSEMBLE,
    OF_CLASSES,
    PLATT,
    SCALED,
    SPLINE,
    VA,
    H,
    T,
    binary,
    data,
    fresh,
    multi,
    name,
    single,
)

import torchcalib as tc
from torchcalib.core.saved import content_of, saved_bytes
from torchcalib.ops.newton import NO_DATA
from torchcalib.reporting.building import ReportBuilder

each_calibrator = pytest.mark.parametrize("calibrator", ALL, ids=name)
each_of_any_task = pytest.mark.parametrize("calibrator", ALL + OF_CLASSES, ids=name)


def with_either_input(calibrators):
    """Return parameters with both kinds of predictions; the normal run has one kind for each calibrator."""
    kinds = ((k, c, logits) for k, c in enumerate(calibrators) for logits in (False, True))
    rows = [
        pytest.param(c, logits, marks=[pytest.mark.extended] * ((k + logits) % 2), id=f"{name(c)}-{logits}")
        for k, c, logits in kinds
    ]
    return pytest.mark.parametrize(("calibrator", "from_logits"), rows)


def draw(calibrator, n, lead=()):
    """Return logits, labels, and the options of a task that the calibrator supports."""
    if calibrator in OF_CLASSES:
        return *data(n, 3, lead), multi
    return *single(n, lead), binary


@each_of_any_task
def test_without_data_a_fit_is_not_converged(calibrator):
    preds, target, given = draw(calibrator, 6)
    for n, weights in ((6, torch.zeros(6)), (0, None)):
        with pytest.warns(UserWarning, match="no samples of positive weight"):
            fitted = fresh(calibrator).fit(preds[:n], target[:n], weights=weights, **given)
        assert not fitted.converged
        if hasattr(fitted, "outcome"):
            assert fitted.outcome == NO_DATA
            assert fitted(preds).isnan().all()
    no_series = torch.rand(0, 5, *preds.shape[1:])
    none = fresh(calibrator).fit(no_series, torch.zeros(0, 5, dtype=torch.int64), batch_dims=1, **given)
    assert none.converged.shape == (0,)
    assert none(no_series).shape == no_series.shape
    if given is binary:
        labels = fresh(calibrator).fit(torch.rand(5, 0), torch.zeros(5, 0, dtype=torch.int64), task="multilabel")
        assert labels(torch.rand(7, 0)).shape == (7, 0)


@each_of_any_task
def test_batches_labels_and_replicate_weights_equal_separate_fits(calibrator):
    """Folds and bootstrap replicates are solved in one batch, as a leading axis of the weights."""
    logits, target, given = draw(calibrator, 90, lead=(3,))
    fits = [fresh(calibrator).fit(*series, **given) for series in zip(logits, target, strict=True)]
    batch = fresh(calibrator).fit(logits, target, batch_dims=1, **given)
    found = [batch(logits), torch.stack([batch.part(k)(logits[k]) for k in range(3)])]
    if given is binary:
        labels = fresh(calibrator).fit(logits.T, target.T, task="multilabel", from_logits=True)
        found.append(labels(logits.T).T)
    for each in found:
        for calibrated, one, own in zip(each, fits, logits, strict=True):
            assert calibrated.allclose(one(own), atol=1e-8)
    logits, target = logits[0], target[0]
    weights = torch.randint(0, 4, (4, 90), generator=torch.Generator().manual_seed(5))
    p = calibrator.read(logits, target, task=given["task"], options={"from_logits": True})
    batched = calibrator.fit_to(p, weights.double())
    for r, row in enumerate(weights):
        repeats = logits.repeat_interleave(row, 0), target.repeat_interleave(row)
        expected = fresh(calibrator).fit(*repeats, **given)(logits)
        unread = torch.where((row == 0).reshape(90, *[1] * (logits.dim() - 1)), math.nan, logits)
        one = fresh(calibrator).fit(unread, target.masked_fill(row == 0, 7), weights=row, **given)
        for found in (batched(logits.expand(4, *logits.shape))[r], batched.part(r)(logits), one(logits)):
            assert found.allclose(expected, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("calibrator", [*SCALED, *OF_CLASSES[:3]], ids=name)
def test_scaled_logits_get_the_same_calibrated_predictions(calibrator, scale):
    """For log-odds of 1e-6, a float32 log-probability (near -log 2) would keep one significant digit.

    The penalties of Dirichlet calibration depend on the scale.
    """
    logits, target = data(200, 4)
    log_odds, labels = single(200)
    cases = [(scale * logits, target, multi, {"rtol": 0, "atol": 1e-9 if calibrator in SCALED else 1e-8})]
    if calibrator in SCALED:
        cases.append(((scale * log_odds).float(), labels, binary, {"rtol": 1e-5, "atol": 1e-6}))
    for scores, of, given, tolerance in cases:
        exact_scores = scores.double() / scale
        fitted, exact = fresh(calibrator).fit(scores, of, **given), fresh(calibrator).fit(exact_scores, of, **given)
        assert fitted.converged
        if calibrator in SCALED:
            assert scale * fitted.alpha.item() == pytest.approx(exact.alpha.item(), rel=1e-9)
        assert fitted(scores).double().allclose(exact(exact_scores), **tolerance)


@pytest.mark.parametrize("calibrator", [*AFFINE, *OF_CLASSES], ids=name)
def test_every_dtype_class_axis_and_probabilities_get_the_float64_fit(calibrator):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits, target = data(60, 3, dtype=dtype)
        fitted, exact = (fresh(calibrator).fit(scores, target, **multi) for scores in (logits, logits.double()))
        assert fitted(logits).dtype == torch.float32
        if calibrator in AFFINE:
            assert fitted.alpha.item() == pytest.approx(exact.alpha.item(), abs=1e-12)
        else:
            assert fitted.bias.tolist() == pytest.approx(exact.bias.tolist(), abs=1e-8)
        assert fitted(logits).double().allclose(exact(logits.double()), atol=1e-5)
        turned = fresh(calibrator).fit(logits.T, target, class_axis=0, **multi)
        assert turned(logits.T).T.allclose(fitted(logits))
    log_q = logits.double().log_softmax(-1)
    by_logits = fresh(calibrator).fit(log_q, target, **multi)(log_q)
    by_probs = fresh(calibrator).fit(log_q.exp(), target, task="multiclass")(log_q.exp())
    assert by_logits.exp().allclose(by_probs, atol=1e-9)


@with_either_input(ALL + OF_CLASSES)
def test_fitted_calibrators_support_gradients_compile_and_vmap(calibrator, from_logits):
    """Gradients are finite at certain predictions too, and exist for a calibrator that was fitted in inference mode."""
    logits, target, given = draw(calibrator, 60)
    as_probs = torch.Tensor.sigmoid if given is binary else lambda x: x.softmax(-1)
    preds = logits if from_logits else as_probs(logits)
    with torch.inference_mode():
        fitted = fresh(calibrator).fit(preds.clone(), target, task=given["task"], from_logits=from_logits)
    if hasattr(fitted, "outcome"):  # smooth maps
        assert torch.autograd.gradcheck(fitted, (preds[:4] + 1e-3 * (given is binary)).requires_grad_())
    certain = [-math.inf, math.inf] if given is binary else [[math.inf, 0, 0]]
    certain = torch.tensor(certain, dtype=torch.float64)
    leaf = torch.cat((preds, certain if from_logits else as_probs(certain.nan_to_num()))).requires_grad_()
    found = fitted(leaf)
    assert (as_probs(found) if from_logits and given is binary else found.exp()).isfinite().all()
    found.clamp(-5, 5).sum().backward()
    assert leaf.grad.isfinite().all()
    if given is binary:
        assert fitted(torch.tensor([math.nan, 0.3])).isnan().tolist() == [True, False]
    torch.compiler.reset()
    whole = torch.compile(fitted, fullgraph=True, backend="eager")
    assert whole(preds).allclose(fitted(preds))
    batch = preds.unflatten(0, (6, 10))
    assert torch.vmap(fitted)(batch).allclose(fitted(preds).unflatten(0, (6, 10)))


@pytest.mark.parametrize("calibrator", [c for c in ALL if "multiclass" in c.tasks and c is not PLATT], ids=name)
def test_smooth_maps_of_classes_have_gradients_and_keep_certain_rows(calibrator):
    logits, target = data(40, 3)
    fitted = fresh(calibrator).fit(logits, target, **multi)
    if not hasattr(fitted, "outcome"):
        return
    assert torch.autograd.gradcheck(fitted, logits[:4].clone().requires_grad_())
    limit = torch.tensor([[math.inf, 0, 0]], dtype=torch.float64, requires_grad=True)
    certain = fitted(limit).softmax(-1)
    if calibrator in AFFINE:
        assert certain.tolist() == [[1, 0, 0]]
    certain[0, 0].backward()
    assert limit.grad.isfinite().all()


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("calibrator", [*AFFINE, CIR, VA, SPLINE, ENSEMBLE], ids=name)
def test_two_classes_equal_the_binary_task(calibrator, from_logits):
    log_odds, target = single(90)
    for odds in (log_odds, (log_odds.sigmoid() * 10).round().clamp(1, 9).div(10).logit(), 3 * log_odds):
        pairs = torch.stack((-odds / 2, odds / 2), -1)
        preds, rows = (odds, pairs) if from_logits else (odds.sigmoid(), pairs.softmax(-1))
        one = fresh(calibrator).fit(preds, target, task="binary", from_logits=from_logits)
        two = fresh(calibrator).fit(rows, target, task="multiclass", from_logits=from_logits)
        assert two.predict_proba(rows)[:, 1].allclose(one.predict_proba(preds), rtol=0, atol=1e-7)


@each_of_any_task
def test_buffers_keep_their_dtype_when_the_model_is_cast_to_half(calibrator):
    logits, target, given = draw(calibrator, 50)
    fitted = fresh(calibrator).fit(logits, target, **given)
    before, dtypes = fitted(logits), {key: x.dtype for key, x in fitted.named_buffers()}
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), fitted).to(torch.bfloat16).half().type(torch.float16)
    assert model[0].weight.dtype == torch.float16
    assert torch.equal(copy.deepcopy(model)[1](logits), before)
    assert {key: x.dtype for key, x in fitted.named_buffers()} == dtypes
    assert not list(fitted.parameters())
    assert f"task='{given['task']}', from_logits=True" in repr(fitted)


@each_of_any_task
def test_autocast_has_no_effect(calibrator):
    preds, target, options = draw(calibrator, 60)
    preds = preds.float()
    fitted = fresh(calibrator).fit(preds, target, **options)
    expected = fitted(preds)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found, again = fitted(preds), fresh(calibrator).fit(preds, target, **options)(preds)
        assert found.equal(expected)
        torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


@with_either_input(ALL)
def test_positive_classes_calibrate_the_probability_of_the_set(calibrator, from_logits):
    logits, target = data(80, 4)
    preds = logits if from_logits else logits.softmax(-1)
    fitted = fresh(calibrator).fit(preds, target, task="multiclass", positive_classes=[0, 3])
    inside = logits.softmax(-1)[:, [0, 3]].sum(-1)
    of_set = inside.logit() if from_logits else inside
    expected = fresh(calibrator).fit(of_set, ((target == 0) | (target == 3)).long(), from_logits=from_logits)
    assert fitted(preds).shape == (80,)
    assert fitted(preds).allclose(expected(of_set), atol=1e-6)
    assert fitted.predict_proba(preds).allclose(expected.predict_proba(of_set), atol=1e-6)
    turned = fresh(calibrator).fit(preds.T, target, task="multiclass", positive_classes=[0, 3], class_axis=0)
    assert turned(preds.T).allclose(fitted(preds))


@with_either_input([T, H, PLATT])
def test_calibrators_of_positive_classes_are_loaded_merged_and_compiled(calibrator, from_logits):
    logits, target = data(80, 4)
    preds = logits if from_logits else logits.softmax(-1)
    fitted = fresh(calibrator).fit(preds, target, task="multiclass", positive_classes=[0, 3])
    again = fresh(calibrator)
    again.load_state_dict(fitted.state_dict())
    assert again(preds).equal(fitted(preds))
    builder = ReportBuilder(task="multiclass", positive_classes=[0, 3], from_logits=from_logits, class_axis=0)
    builder.update(preds.T, target)
    builder = builder + ReportBuilder.of_state(ReportBuilder(**builder.settings).state())
    for whole in (builder, ReportBuilder.of_state(builder.state())):
        assert whole.fit(calibrator)(preds.T).allclose(fitted(preds))
    torch.compiler.reset()
    assert torch.compile(fitted, fullgraph=True, backend="eager")(preds).allclose(fitted(preds))


@each_calibrator
def test_fit_returns_the_calibrator_and_infers_the_task_and_logits_from_any_array(calibrator):
    logits, target = single(60)
    expected = fresh(calibrator).fit(logits, target, **binary)(logits)
    for preds, labels in (
        (logits.numpy(), target.numpy()),
        (logits.tolist(), target.tolist()),
        (logits[:, None], target[:, None]),
    ):
        own = fresh(calibrator)
        assert own.fit(preds, labels) is own
        assert (own.task, own.from_logits) == ("binary", True)
        assert own(preds).reshape(-1).allclose(expected)
        assert own.predict_proba(preds).reshape(-1).allclose(expected.sigmoid())
        if calibrator not in (CIR, PLATT):  # they depend on the units of the scores
            assert own.fit(logits.sigmoid(), target)(logits.sigmoid()).allclose(expected.sigmoid(), atol=1e-6)
    names = fresh(calibrator).fit(logits, [("no", "yes")[k] for k in target], class_names=["no", "yes"])
    assert names(logits).allclose(expected)
    labels = fresh(calibrator).fit(logits[:, None].expand(-1, 2), target[:, None].expand(-1, 2), num_labels=2)
    assert (labels.task, labels.predict_proba(logits[:, None].expand(-1, 2)).shape) == ("multilabel", (60, 2))
    if "multiclass" not in calibrator.tasks:
        return
    rows, classes = data(60, 3)
    of_rows = fresh(calibrator).fit(rows, classes)
    assert of_rows.task == "multiclass"
    assert of_rows.predict_proba(rows).sum(-1).allclose(torch.ones(60, dtype=torch.float64))
    images = fresh(calibrator).fit(rows.T.reshape(1, 3, 6, 10), classes.reshape(1, 6, 10))
    assert images.predict_proba(rows.T.reshape(1, 3, 6, 10)).reshape(3, 60).T.allclose(of_rows.predict_proba(rows))


def test_repr_shows_settings_and_fitted_parameters():
    preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
    assert repr(tc.TemperatureScaling()) == "TemperatureScaling()"
    temperature = tc.TemperatureScaling().fit(preds, target)
    assert repr(temperature) == f"TemperatureScaling(temperature={temperature.temperature:.4g}, {KIND})"
    affine = tc.AffineScaling().fit(preds, target)
    beta = ", ".join(f"{value:.4g}" for value in affine.beta)
    assert repr(affine) == f"AffineScaling(temperature={affine.temperature:.4g}, beta=[{beta}], {KIND})"
    settings = "n_bins=3, right=True, empty='keep'"
    assert repr(tc.HistogramBinning(3, right=True)) == f"HistogramBinning({settings})"
    assert repr(tc.HistogramBinning(3, right=True).fit(preds, target)) == f"HistogramBinning({settings}, {KIND})"
    assert repr(tc.IsotonicCalibration().fit(preds, target)) == f"IsotonicCalibration(n_knots=6, {KIND})"
    batch = tc.TemperatureScaling().fit(preds.expand(7, 5), target.expand(7, 5), task="binary", batch_dims=1)
    temperatures = ", ".join([f"{batch.temperature[0]:.4g}"] * 4)
    assert repr(batch) == f"TemperatureScaling(temperature=[{temperatures}, ...], {KIND})"


KIND = "task='binary', from_logits=False"


@pytest.mark.filterwarnings("ignore:no finite:UserWarning")
@each_calibrator
def test_predictions_may_have_other_axes_after_those_of_the_batch(calibrator):
    series = fresh(calibrator).fit(*single(30, lead=(2,)), batch_dims=1, **binary)
    assert series(torch.rand(5, 2, 3)).shape == (5, 2, 3)
    assert series.part(1)(torch.rand(4)).shape == (4,)


@pytest.mark.parametrize("calibrator", [c for c in (*ALL, *OF_CLASSES) if not c.whole_weights], ids=repr)
def test_fit_to_soft_targets_is_the_fit_to_one_row_for_each_class_weighted_by_its_probability(calibrator):
    """The cross entropy of a soft target is the weighted mean of the NLL of all labels. Rows of weight 0 may be NaN."""
    g = torch.Generator().manual_seed(0)
    task = "multiclass" if calibrator in OF_CLASSES else "binary"
    n_classes = 3 if task == "multiclass" else 2
    logits = torch.randn(60, n_classes, generator=g, dtype=torch.float64)
    shares = (logits / 2 + torch.randn(60, n_classes, generator=g, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(60, generator=g, dtype=torch.float64)
    weights[:5], logits[0] = 0, torch.nan
    rows = torch.arange(60).repeat_interleave(n_classes)
    given = {"task": task, "from_logits": True}
    preds, target = (logits, shares) if task == "multiclass" else (logits[:, 1] - logits[:, 0], shares[:, 1])
    soft = fresh(calibrator).fit(preds, target, weights=weights, **given)
    labels = torch.arange(n_classes).repeat(60)
    slow = fresh(calibrator).fit(preds[rows], labels, weights=(weights[:, None] * shares).flatten(), **given)
    torch.testing.assert_close(soft(preds[1:]), slow(preds[1:]), rtol=0, atol=1e-7)
    folds = torch.arange(60) % 3
    held_out = tc.cross_val_calibrate(preds[5:], target[5:], calibrator=calibrator, folds=folds[5:], **given)
    part = fresh(calibrator).fit(preds[5:][folds[5:] != 1], target[5:][folds[5:] != 1], **given)
    torch.testing.assert_close(held_out[folds[5:] == 1], part(preds[5:])[folds[5:] == 1], rtol=0, atol=1e-7)


P, Y = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
FITTED = tc.AffineScaling().fit([0.9, 0.99, 0.3, 0.8, 0.6], [1, 1, 0, 0, 1])


def test_loading_other_files_raises_errors(tmp_path):
    path = tmp_path / "other.pt"
    tc.save_calibrator(tc.HistogramBinning(4).fit(P, Y), path)
    saved = content_of(path, "calibrator")
    described, parameters = saved["described"], saved["parameters"]
    refused = [
        {"described": {**described, name: value}, "parameters": parameters}
        for name, value in {
            "kind": "Calibrator", "task": "regression", "class_axis": "x", "from_logits": 1, "n_bins": -3,
            "positive_classes": "ab",
        }.items()
    ]  # fmt: skip
    changes = (
        {"rate": parameters["rate"] + 1},
        {"rate": parameters["rate"] > 0},
        {"rate": 3},
        {"grad_norm": -torch.ones((), dtype=torch.float64)},
        {"converged": torch.tensor(1.0)},
        {"more": torch.ones(2)},
    )
    refused += [{"described": described, "parameters": {**parameters, **change}} for change in changes]
    refused.append({"described": described, "parameters": {"rate": parameters["rate"]}})
    for content in ({"weight": torch.ones(2)}, *refused):
        path.write_bytes(saved_bytes("calibrator", content))
        with pytest.raises(ValueError, match=r"other\.pt` must be a complete calibrator, got"):
            tc.load_calibrator(path)


def test_checkpoints_of_torch_contain_a_calibrator_or_raise_an_error(tmp_path):
    path, state = tmp_path / "checkpoint.ckpt", FITTED.state_dict()
    torch.save({"epoch": 3, "torchcalib_calibrator": state}, path)
    assert torch.equal(tc.load_calibrator(path)(P), FITTED(P))
    # a tensor that declares more values than the file has
    expanded = {**state, "beta": torch.zeros(1, dtype=torch.float64).expand(30_000_000)}
    for content in (state, torch.ones(2), torch.nn.Identity(), {"torchcalib_calibrator": expanded}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"checkpoint\.ckpt` must be a complete calibrator, got"):
            tc.load_calibrator(path)
    with pytest.raises(FileNotFoundError):
        tc.load_calibrator(tmp_path / "missing.pt")


def test_loading_sets_only_saved_attributes_and_a_state_of_another_class_raises(tmp_path):
    p, y = torch.tensor([0.25, 0.5, 0.75, 1.0]), torch.tensor([0, 1, 0, 1])
    tc.save_calibrator(tc.HistogramBinning(4, right=True).fit(p, y, task="binary"), tmp_path / "cal.pt")
    assert torch.equal(tc.load_calibrator(tmp_path / "cal.pt")(p), y.float())
    state = FITTED.state_dict()
    state["_extra_state"] |= {"forward": 1, "from_logits": True}
    loaded = tc.AffineScaling()
    loaded.load_state_dict(state)
    assert "forward" not in vars(loaded)
    assert (loaded.task, loaded.from_logits, loaded.class_axis) == ("binary", True, -1)
    other = tc.TemperatureScaling().fit(P, Y)
    before = other(P)
    with pytest.raises(ValueError, match="`state_dict` must be of TemperatureScaling, got one of AffineScaling"):
        other.load_state_dict(state)
    assert other(P).equal(before)
