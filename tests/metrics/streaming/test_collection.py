"""A collection updates its metrics as if each of them were updated alone, also if it shares their computations."""

from unittest import mock

import pytest
import torch

import torchcalib as tc
from torchcalib.core.state import SumState

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, TARGET = torch.randn(60, 4, generator=GENERATOR, dtype=torch.float64), torch.arange(60) % 4
OPTIONS = {"task": "multiclass", "num_classes": 4, "from_logits": True}


class DoubledState(SumState):
    """State in which each row counts twice."""

    def from_predictions(self, p):
        return 2 * super().from_predictions(p)


class Doubled(tc.ECE):
    def _state_kind(self):
        kind = super()._state_kind()
        return DoubledState(kind.accumulator, kind.shape)


def metrics():
    """Return metrics with shared and separate conversions, sums and samples."""
    found = [cls(**OPTIONS) for cls in (tc.NLL, tc.ECE, tc.MCE, Doubled, tc.KS, tc.ACE, tc.CORP, tc.Accuracy)]
    return [*found, tc.ECE(**OPTIONS, n_bins=7), tc.NLL(**OPTIONS, ignore_index=0), tc.ECE(**OPTIONS, batch_shape=())]


def updated_alone(batches, weights=None):
    alone = metrics()
    for metric in alone:
        for rows in batches:
            metric.update(LOGITS[rows], TARGET[rows], None if weights is None else weights[rows])
    return alone


@pytest.mark.parametrize("weights", [None, torch.arange(60) % 3])
def test_states_counts_and_values_equal_those_of_separate_updates(weights):
    batches = torch.arange(60).split(25)
    together = tc.CalibrationCollection({f"{k:02}": metric for k, metric in enumerate(metrics())})
    for rows in batches:
        together.update(LOGITS[rows], TARGET[rows], None if weights is None else weights[rows])
    for alone, metric in zip(updated_alone(batches, weights), together.values(), strict=True):
        torch.testing.assert_close(alone.metric_state, metric.metric_state, rtol=1e-12, atol=1e-12)
        assert alone.update_count == metric.update_count == 3


def test_members_that_change_between_updates_are_updated():
    collection = tc.CalibrationCollection([tc.ECE(**OPTIONS)])
    collection.update(LOGITS, TARGET)
    collection.add_metrics({"second": tc.NLL(**OPTIONS)})
    collection.update(LOGITS, TARGET)
    first = collection["ECE"]
    del collection["ECE"]
    collection.update(LOGITS, TARGET)
    assert (first.update_count, collection["second"].update_count) == (2, 2)


def test_a_metric_under_two_names_counts_each_batch_twice_in_update_and_forward():
    twice = tc.ECE(**OPTIONS)
    tc.CalibrationCollection({"a": twice, "b": twice}).update(LOGITS, TARGET)
    assert twice.bin_table().n.sum() == 120


def test_a_replaced_update_is_called():
    metric = tc.ECE(**OPTIONS)
    collection = tc.CalibrationCollection([metric])
    with mock.patch.object(metric, "update") as update:
        collection.update(LOGITS, TARGET)
    update.assert_called_once()
    assert metric.update_count == 0


@pytest.mark.parametrize("method", ["update", "forward"])
def test_a_batch_that_one_metric_refuses_changes_no_metric(method):
    """Errors found by the collection, and by one of its metrics. test_fuzz has other bad input."""
    of_four = tc.NLL(task="multiclass", num_classes=4, normalize="prior")
    metrics = tc.CalibrationCollection([tc.ECE(task="multiclass"), tc.KS(task="multiclass"), of_four])
    preds, target = LOGITS.softmax(-1), TARGET
    metrics.update(preds, target)
    values, attributes = metrics.compute(), str([m.__dict__ for m in metrics.values()])
    for bad, message in ((preds[:, :3].softmax(-1), "must have 4 entries"), (preds.to("meta"), "must be on")):
        with pytest.raises(ValueError, match=message):
            getattr(metrics, method)(bad, (target % 3).to(bad.device))
        assert str([m.__dict__ for m in metrics.values()]) == attributes
    assert metrics.compute() == values


# Batches without weights have a summary.
def test_states_that_change_after_a_refused_batch_are_kept():
    given = {"task": "binary"}
    collection, other = tc.CalibrationCollection([tc.ECE(**given), tc.NLL(**given)]), tc.NLL(**given)
    preds, target = torch.tensor([0.2, 0.9]), torch.tensor([0, 1])
    other.update(preds, target)
    with pytest.raises(ValueError, match="must be probabilities"):
        collection.update(1 + preds, target)
    collection["NLL"].state.copy_(other.state)
    collection.update(preds, target)
    torch.testing.assert_close(collection["NLL"].state, 2 * other.state)


def test_members_on_another_device_raise():
    collection = tc.CalibrationCollection([tc.ECE(**OPTIONS), tc.NLL(**OPTIONS)])
    collection["NLL"].to("meta")
    with pytest.raises(ValueError, match="must be on the metric's device"):
        collection.update(LOGITS, TARGET)
    assert collection["ECE"].update_count == 0
