"""`torchcalib.torchmetrics` has the names, arguments, checks and values of torchmetrics, in constant memory."""

import inspect
import math

import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics import classification as their_classes
from torchmetrics.functional import classification as their_functions

import torchcalib as tc
from torchcalib import torchmetrics as ours

THEIRS = {name: getattr(their_classes if name[0].isupper() else their_functions, name) for name in ours.__all__}
N_BINS = 7


def rows(task, kind, n=60, seed=0):
    """Return predictions and labels with a further axis of 3 samples; label 1 is ignored in some tests."""
    g = torch.Generator().manual_seed(seed)
    shape = (n, 3) if task == "binary" else (n, 4, 3)
    logits = 2 * torch.randn(shape, generator=g)
    target = torch.randint(0, 2 if task == "binary" else 4, (n, 3), generator=g)
    if kind == "logits":
        return logits, target
    return logits.sigmoid() if task == "binary" else logits.softmax(1), target


def slow(preds, target, task, norm, ignored, n_bins=N_BINS):
    """Compute the error by a loop over float64 rows: the norms of torchmetrics over bins [a, b)."""
    preds = preds.double()
    if not bool(((preds >= 0) & (preds <= 1)).all()):
        preds = preds.sigmoid() if task == "binary" else preds.softmax(1)
    if task == "binary":
        events = list(zip(preds.flatten().tolist(), target.flatten().tolist(), target.flatten().tolist(), strict=True))
    else:
        probs, labels = preds.movedim(1, -1).reshape(-1, preds.shape[1]).tolist(), target.flatten().tolist()
        events = [(max(p), float(p.index(max(p)) == y), y) for p, y in zip(probs, labels, strict=True)]
    bins = {}
    for confidence, outcome, label in events:
        if label != ignored:
            bins.setdefault(min(int(confidence * n_bins), n_bins - 1), []).append((confidence, outcome))
    total = sum(map(len, bins.values()))
    gaps = [(len(b) / total, sum(c - o for c, o in b) / len(b)) for b in bins.values()]
    if norm == "max":
        return max(abs(gap) for _, gap in gaps)
    power = {"l1": 1, "l2": 2}[norm]
    return sum(share * abs(gap) ** power for share, gap in gaps) ** (1 / power)


@pytest.mark.parametrize("name", ours.__all__)
def test_signatures_are_those_of_torchmetrics(name):
    def parameters(x):
        found = inspect.signature(x.__new__ if name == "CalibrationError" else x).parameters.values()
        return [(p.name, p.default, p.kind) for p in found]

    assert parameters(getattr(ours, name)) == parameters(THEIRS[name])


@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_values_are_those_of_a_loop_and_of_torchmetrics(task, kind, norm, ignored):
    preds, target = rows(task, kind)
    options = {"n_bins": N_BINS, "norm": norm, "ignore_index": ignored}
    options |= {"num_classes": 4} if task == "multiclass" else {}
    expected = slow(preds, target, task, norm, ignored)
    metric = ours.CalibrationError(task, **options)
    assert isinstance(metric, getattr(ours, f"{task.capitalize()}CalibrationError"))
    for piece, labels in zip(preds.split(25), target.split(25), strict=True):
        metric.update(piece, labels)
    by_task = getattr(ours, f"{task}_calibration_error")(preds, target, **options)
    for value in (metric.compute(), by_task, ours.calibration_error(preds, target, task, **options)):
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(expected, abs=1e-6)
        assert THEIRS["calibration_error"](preds, target, task, **options).item() == pytest.approx(
            value.item(), abs=1e-5
        )


WRONG = [
    lambda m: m.BinaryCalibrationError(n_bins=0),
    lambda m: m.BinaryCalibrationError(norm="l3"),
    lambda m: m.BinaryCalibrationError(ignore_index=0.5),
    lambda m: m.MulticlassCalibrationError(num_classes=1),
    lambda m: m.CalibrationError(task="multilabel"),
    lambda m: m.CalibrationError(task="multiclass"),
    lambda m: m.BinaryCalibrationError().update(torch.tensor([0.5]), torch.tensor([2])),
    lambda m: m.BinaryCalibrationError().update(torch.tensor([0.5]), torch.tensor([0, 1])),
    lambda m: m.BinaryCalibrationError().update(torch.tensor([1]), torch.tensor([0])),
    lambda m: m.MulticlassCalibrationError(3).update(torch.rand(2, 4), torch.tensor([0, 1])),
]


@pytest.mark.parametrize("call", WRONG)
def test_arguments_are_checked_as_by_torchmetrics(call):
    with pytest.raises((ValueError, RuntimeError)) as expected:
        call(their_classes)
    with pytest.raises(type(expected.value)) as found:
        call(ours)
    assert str(found.value) == str(expected.value)


def test_a_bad_norm_is_an_error_also_without_checks():
    with pytest.raises(ValueError, match="`norm` must be one of 'l1', 'l2', 'max'"):
        ours.BinaryCalibrationError(norm="l3", validate_args=False)


def test_faults_of_torchmetrics_are_not_reproduced():
    certain, outcome = torch.tensor([0.95, 0.97, 1.0, 1.0]), torch.tensor([1, 1, 1, 0])
    assert ours.binary_calibration_error(certain, outcome).item() == pytest.approx(0.98 - 0.75)
    half = torch.full((70_000,), 0.75, dtype=torch.float16)
    value = ours.binary_calibration_error(half, (torch.arange(70_000) % 2))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(0.25)
    for target, ignored in (([0, 3], None), ([0, -100], -1)):
        with pytest.raises(ValueError, match=r"`target` must contain labels from 0 to 2, got (3|-100)"):
            ours.multiclass_calibration_error(torch.rand(2, 3), torch.tensor(target), 3, ignore_index=ignored)
    unknown = torch.tensor([0.2, math.nan])
    assert ours.binary_calibration_error(unknown, torch.tensor([0, 1])).isnan()
    calibrated = ours.binary_calibration_error(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), norm="l2")
    assert (calibrated.item(), calibrated.dtype) == (0.0, torch.float32)


def test_values_have_the_dtypes_of_torchmetrics():
    preds, target = rows("multiclass", "logits")
    metric = ours.MulticlassCalibrationError(4)
    for given in (preds, preds.double()):  # torchmetrics converts confidences of several classes to float32
        metric.update(given, target)
        assert metric.double().compute().dtype == torch.float32
    binary = ours.BinaryCalibrationError()
    binary.update(torch.rand(5, dtype=torch.float64), torch.ones(5, dtype=torch.long))
    assert binary.compute().dtype == torch.float64


def test_metrics_have_noise_floor_diagram_and_no_gradient():
    preds, target = rows("multiclass", "logits", n=200)
    metric = ours.MulticlassCalibrationError(4)
    value = metric(preds.requires_grad_(), target)
    assert not value.requires_grad
    assert metric.num_classes == 4
    tested = metric.test(n_replicates=99)
    assert tested.statistic.item() == pytest.approx(value.item(), abs=1e-6)
    assert 0 < tested.noise_floor.item() < tested.statistic.item()
    figure, axes = metric.plot()
    assert "confidence" in axes.get_xlabel()
    figure.clear()


@pytest.mark.parametrize("collection", [MetricCollection, tc.CalibrationCollection])
def test_metrics_of_a_collection_do_not_share_converted_predictions(collection):
    preds, target = rows("multiclass", "probs")
    members = {
        "all": ours.MulticlassCalibrationError(4),
        "some": ours.MulticlassCalibrationError(4, ignore_index=1),
        "max": ours.MulticlassCalibrationError(4, norm="max"),
        "ece": tc.ECE(num_classes=4, class_axis=1),
    }
    metrics = collection({name: metric.clone() for name, metric in members.items()})
    for _ in range(2):
        metrics.update(preds, target)
    values = metrics.compute()
    for name, metric in members.items():
        metric.update(preds, target)
        assert values[name].item() == pytest.approx(metric.compute().item(), abs=1e-6)
