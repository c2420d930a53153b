"""Predictions and targets in the outputs of a step, and figures for loggers."""

from types import SimpleNamespace

import pytest
import torch

import torchcalib as tc
from torchcalib.integrations.lightning import as_array, log_picture
from torchcalib.integrations.outputs import found_by

LOGITS, LABELS = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
BATCH = (torch.zeros(4, 7), LABELS)


@pytest.mark.parametrize(
    ("outputs", "batch"),
    [
        ({"loss": torch.tensor(1.0), "logits": LOGITS, "target": LABELS}, None),
        ({"y_hat": LOGITS}, BATCH),
        ({"logits": LOGITS, "preds": LABELS}, {"input_ids": LABELS, "labels": LABELS}),
        ((LOGITS, LABELS), None),
        ((torch.tensor(1.0), LOGITS, LABELS), None),
        (LOGITS, BATCH),
        (LOGITS, {"x": None, "y": LABELS}),
    ],
)
def test_predictions_and_targets_are_found_under_common_names(outputs, batch):
    found = found_by(None, outputs, batch, from_logits=True)
    assert found.preds is LOGITS
    assert found.target is LABELS
    assert found.weights is None


@pytest.mark.parametrize(
    ("outputs", "batch", "from_logits", "error"),
    [
        (None, BATCH, True, "must return predictions under a known name, or .*, got None for the batch"),
        ({"logits": LOGITS}, (LABELS,), True, r"must return targets .* got {'logits': float32 \(4, 3\)}"),
        ({"logits": LOGITS, "y": LABELS}, None, False, "`from_logits` must be True .* 'logits' .*, got False"),
        ({"probs": LOGITS, "y": LABELS}, None, True, "`from_logits` must be False .* 'probs' .*, got True"),
    ],
)
def test_missing_predictions_or_targets_raise_an_error_that_lists_the_outputs(outputs, batch, from_logits, error):
    with pytest.raises(ValueError, match=error):
        found_by(None, outputs, batch, from_logits)


def test_custom_getter_is_used_and_its_result_is_checked():
    weights = torch.ones(4)
    found = found_by(lambda outputs, batch: (outputs["z"], batch[1], weights), {"z": LOGITS}, BATCH, from_logits=True)
    assert found == (LOGITS, LABELS, weights)
    with pytest.raises(TypeError, match="`get` must return"):
        found_by(lambda outputs, batch: outputs, LOGITS, BATCH, from_logits=True)


def test_figures_are_logged_by_every_supported_logger():
    class Files:  # an MLflow experiment with a run, and a Comet experiment without
        def log_figure(self, *args, **kwargs):
            self.given = args, kwargs

    ax = tc.plots.ecd_curve()
    comet, mlflow = SimpleNamespace(experiment=Files()), SimpleNamespace(experiment=Files(), run_id="run")
    assert log_picture(comet, "val/reliability", ax, 7)
    assert comet.experiment.given == ((), {"figure_name": "val/reliability", "figure": ax.figure, "step": 7})
    assert log_picture(mlflow, "val/reliability", ax, 7)
    assert mlflow.experiment.given == (("run", ax.figure, "val/reliability_00000007.png"), {})
    assert not log_picture(SimpleNamespace(experiment=object()), "val/reliability", ax, 7)
    pictures = []
    assert log_picture(SimpleNamespace(log_image=lambda **given: pictures.append(given)), "val/reliability", ax, 7)
    assert (pictures[0]["key"], pictures[0]["images"][0].shape[2], pictures[0]["step"]) == ("val/reliability", 3, 7)
    pixels = as_array(ax)
    assert (pixels.dtype.name, pixels.shape[2]) == ("uint8", 3)
    assert pixels.min() < 100 < 255 == pixels.max()
