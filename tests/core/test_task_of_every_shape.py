"""Inference of the task: one table of the shapes, with every dtype and kind of array."""

import numpy as np
import pytest
import torch

import torchcalib.functional as F
from torchcalib.core.tasks import infer_task, prepare

N, C, D = 6, 3, 5
KINDS = {"tensor": torch.clone, "array": lambda x: np.asarray(x.tolist()), "list": lambda x: x.tolist()}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LABELS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
BOTH = ("Pass task='multiclass'", "task='multilabel'")

# Shapes of predictions and targets, the largest label or a kind of targets, and the task or the calls that are named.
SHAPES = [
    ((N,), (N,), 1, "binary"),
    ((0,), (0,), 1, "binary"),
    ((N, 1), (N,), 1, "binary"),
    ((N,), (N, 1), 1, "binary"),
    ((N, 1), (N, 1), 1, "binary"),
    ((N, 1, D), (N, D), 1, "binary"),
    ((N,), (N,), "soft", "binary"),
    ((N, C), (N,), C - 1, "multiclass"),
    ((0, C), (0,), C - 1, "multiclass"),
    ((N, 2), (N,), 1, "multiclass"),
    ((N, C), (N, 1), C - 1, "multiclass"),
    ((N, C, D), (N, D), C - 1, "multiclass"),
    ((N, D, C), (N, D), C - 1, "multiclass"),
    ((N, C), (N, C), "sets", BOTH),
    ((N, D), (N, D), "sets", BOTH),
    ((N, C), (N, C), "one-hot", BOTH),
    ((N, C), (N, C), "ones", BOTH),
    ((N, C), (N, C), "counts", BOTH),
    ((N, C), (N, C), "soft", BOTH),
    ((0, C), (0, C), "ones", BOTH),
    ((N, 2), (N, 2), "sets", BOTH),
    ((N, C, D), (N, C, D), "sets", (*BOTH, "task='binary' if")),
    ((N,), (N, 2), "ones", ("Pass task='binary' if",)),
    ((N, C), (N, C, 2), "ones", ("Pass task='multilabel' if",)),
    ((N,), (N + 1,), 1, ("one label for each sample", "task='multilabel'")),
    ((N, C), (N + 1,), C - 1, None),  # the number of samples does not change the task; the call refuses it
    ((N, C), (C, N), "ones", ("one label for each sample", "multi-class (N, C) and (N,)")),
    ((N,), (), 1, ("one label for each sample",)),
]


def targets(shape, kind):
    """Return whole numbers, or probabilities for soft targets."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(kind, int):
        return torch.arange(int(np.prod(shape))).reshape(shape) % (kind + 1)
    if kind == "soft":
        return torch.rand(shape, generator=generator).softmax(-1) if len(shape) > 1 else torch.rand(shape) / 2
    if kind == "one-hot":
        return torch.eye(shape[-1])[torch.arange(shape[0]) % shape[-1]]
    if kind == "sets":
        return (torch.arange(shape[-1]) <= torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))).expand(shape)
    return torch.full(shape, {"ones": 1, "counts": 4}[kind])


def predictions(preds, target, task):
    """Return valid probabilities; with shape (N, C, D), the classes are the axis that the target does not have."""
    values = torch.rand(preds, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if task != "multiclass":
        return values
    return values.softmax(1 if len(preds) > 2 and target[1:] == preds[2:] else -1)


def dtypes_of(kind):
    """Return the dtypes that targets may have."""
    if kind == "soft":
        return FLOATS
    return LABELS if kind in (1, "sets", "one-hot", "ones") else LABELS[1:]


@pytest.mark.parametrize(("preds", "target", "kind", "expected"), SHAPES)
def test_task_of_every_shape_and_dtype(preds, target, kind, expected):
    """Every dtype and kind of array gives the same task. Ambiguous shapes raise an error that names the calls."""
    values, labels = predictions(preds, target, expected), targets(target, kind)
    for dtype in FLOATS:
        for label_dtype in dtypes_of(kind):
            if label_dtype.is_floating_point and isinstance(expected, tuple) and target[-1:] == (2,) and kind == "ones":
                continue  # floating targets are no annotator counts
            given = values.to(dtype), labels.to(label_dtype)
            if isinstance(expected, tuple):
                with pytest.raises(ValueError, match="must") as caught:
                    infer_task(*given)
                assert all(part in str(caught.value) for part in expected), str(caught.value)
            elif expected is not None:
                assert prepare(*given).task == expected
    if expected is None:
        with pytest.raises(ValueError, match="`target` must"):
            F.brier_score(values, labels)


@pytest.mark.parametrize("convert", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("preds", "target", "kind", "expected"), [row for row in SHAPES if isinstance(row[3], str) and row[0][0]]
)
def test_inferred_task_gives_the_value_of_the_explicit_one(preds, target, kind, expected, convert):
    """A function without a task has the value of the call with the inferred task."""
    values, labels = predictions(preds, target, expected), targets(target, kind)
    for dtype in FLOATS if convert is KINDS["tensor"] else FLOATS[2:]:
        for label_dtype in dtypes_of(kind) if convert is KINDS["tensor"] else dtypes_of(kind)[-3:]:
            given = convert(values.to(dtype)), convert(labels.to(label_dtype))
            if expected == "multiclass" and label_dtype.is_floating_point:
                with pytest.raises(TypeError, match=r"target\.long\(\)"):
                    F.brier_score(*given)
                continue
            torch.testing.assert_close(F.brier_score(*given), F.brier_score(*given, task=expected))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.complex64])
def test_predictions_that_are_no_probabilities_are_refused(dtype):
    """Predictions that are whole numbers, bools or complex numbers raise TypeError for each task."""
    for preds, target in (((N,), (N,)), ((N, C), (N,)), ((N, C), (N, C))):
        with pytest.raises((TypeError, ValueError), match=r"`(preds|task)` must"):
            F.ece(torch.ones(preds, dtype=dtype), torch.ones(target, dtype=torch.int64))
