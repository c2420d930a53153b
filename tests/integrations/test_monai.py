"""Metrics per image as metrics of MONAI: the values of MONAI's own metric, in its loops and handlers."""

import pytest
import torch

import torchcalib as tc

monai = pytest.importorskip("monai")
from monai.handlers import IgniteMetricHandler  # noqa: E402
from monai.metrics import CalibrationErrorMetric  # noqa: E402
from monai.networks.utils import one_hot  # noqa: E402

from torchcalib.integrations.monai import MonaiMetric  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
PREDS = torch.randn(7, 3, 8, 9, 4, generator=GENERATOR).softmax(1)
LABELS = torch.randint(0, 3, (7, 1, 8, 9, 4), generator=GENERATOR)
CLASSES = {"expected": tc.ECE, "average": tc.MeanBinError, "maximum": tc.MCE}
OPTIONS = {"num_classes": 3, "mode": "classwise", "n_bins": 20, "right": True}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_channel", "sum", "sum_batch", "sum_channel", "none"])
@pytest.mark.parametrize("background", [True, False])
def test_values_are_those_of_monai(name, reduction, background):
    how = {"include_background": background, "metric_reduction": reduction, "get_not_nans": True}
    theirs = CalibrationErrorMetric(calibration_reduction=name, **how)
    metric = CLASSES[name](**OPTIONS, per_image=tc.Images(include_background=background))
    mine = MonaiMetric(metric, metric_reduction=reduction, get_not_nans=True)
    for start in range(0, 7, 3):
        rows = slice(start, start + 3)
        labels = one_hot(LABELS[rows], 3)
        theirs(PREDS[rows], labels)
        mine(PREDS[rows], LABELS[rows].float() if start else labels)
    for found, expected in zip(mine.aggregate(), theirs.aggregate(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert len(metric.cases().names) == 7
    mine.reset()
    assert mine.get_buffer() is None
    assert not metric.cases().names


def test_lists_of_images_and_handlers():
    """MONAI passes lists of images after `decollate_batch`, also in the handler of an evaluator."""
    from ignite.engine import Engine

    metric = tc.ECE(**OPTIONS, per_image=True)
    wrapped = MonaiMetric(metric)
    wrapped(list(PREDS), list(LABELS))
    expected = tc.ece(PREDS, LABELS, mode="classwise", n_bins=20, right=True, per_image=True)
    assert float(wrapped.aggregate()) == pytest.approx(float(expected), abs=1e-6)
    evaluator = Engine(lambda _, batch: batch)
    IgniteMetricHandler(metric_fn=MonaiMetric(metric)).attach(evaluator, "ece")
    state = evaluator.run([(list(PREDS[:4]), list(LABELS[:4])), (list(PREDS[4:]), list(LABELS[4:]))])
    assert float(state.metrics["ece"]) == pytest.approx(float(expected), abs=1e-6)


def test_wrong_metrics():
    with pytest.raises(TypeError, match="`metric` must be a torchcalib metric with per_image=True"):
        MonaiMetric(tc.ECE(num_classes=3))
    with pytest.raises(ValueError, match="got no data"):
        MonaiMetric(tc.ECE(num_classes=3, per_image=True)).aggregate()
