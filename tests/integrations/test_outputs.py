"""Predictions and targets in the outputs of a step."""

import pytest
import torch

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


def test_custom_getter_is_used():
    weights = torch.ones(4)
    found = found_by(lambda outputs, batch: (outputs["z"], batch[1], weights), {"z": LOGITS}, BATCH, from_logits=True)
    assert found == (LOGITS, LABELS, weights)
