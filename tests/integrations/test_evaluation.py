"""`evaluate` returns the report of the predictions of the model, which are found in the outputs of a step."""

from collections import OrderedDict, namedtuple
from functools import cache

import pytest
import torch
from helpers.reports import QUICK
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchcalib as tc
from torchcalib.integrations.outputs import found_by

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(70, 4, dtype=torch.float64, generator=G), torch.randint(0, 3, (70,), generator=G)
NAMES = ["cat", "dog", "eel"]
Batch = namedtuple("Batch", ["image", "label"])


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        return model.double()  # rounding errors of a product depend on the number of rows on some processors


class HuggingFace(nn.Module):
    """Model with the arguments and outputs of Hugging Face models."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        assert labels is None, "labels must not be passed to the model"
        return OrderedDict(logits=self.inner(input_ids * attention_mask), hidden_states=(input_ids,))


def loader(make=lambda x, y: (x, y), size=32):
    """Return batches of 32, 32 and 6 rows."""
    return [make(x, y) for x, y in DataLoader(TensorDataset(X, Y), size)]


@cache
def expected(**options):
    return report_of(Y, **options)


def report_of(target, **options):
    logits = make_model().eval()(X).detach()
    return tc.report(logits, target, task="multiclass", from_logits=True, **options, **QUICK)


def hugging_face(x, y):
    return {"input_ids": x, "attention_mask": torch.ones(()), "labels": y, "idx": y}


LOGITS = {"from_logits": True}
CASES = {
    "tuples": (make_model, loader(), LOGITS),
    "lists": (make_model, loader(lambda x, y: [x, y]), LOGITS),
    "a generator": (make_model, (batch for batch in loader()), LOGITS),
    "mappings": (make_model, loader(lambda x, y: {"image": x, "label": y, "path": ["a"] * len(y)}), LOGITS),
    "named tuples": (make_model, loader(lambda x, y: Batch(x, y)), LOGITS),
    "names of classes": (
        make_model,
        loader(lambda x, y: (x, [NAMES[k] for k in y.tolist()])),
        {**LOGITS, "class_names": NAMES},
    ),
    "Hugging Face": (HuggingFace, loader(hugging_face), {}),
    "a function": (lambda: make_model().eval().forward, loader(), LOGITS),
    "a tuple of one": (lambda: nn.Sequential(make_model(), Wrapped()), loader(), LOGITS),
    "predict": (
        make_model,
        loader(lambda x, y: (x, y, y)),
        {**LOGITS, "predict": lambda model, batch: (model(batch[0]), batch[1], torch.ones(len(batch[1])))},
    ),
    "named probabilities": (lambda: nn.Sequential(make_model(), Probabilities()), loader(), {}),
}


class Wrapped(nn.Module):
    def forward(self, x):
        return (x, None)


class Probabilities(nn.Module):
    def forward(self, x):
        return {"probs": x.softmax(-1), "features": x}


@pytest.mark.parametrize("case", CASES)
def test_evaluate_returns_the_report_of_predictions_in_evaluation_mode(case):
    make, batches, options = CASES[case]
    report = tc.evaluate(make(), batches, **options, **QUICK)
    assert (report.task, report.n, report.task_is_inferred) == ("multiclass", 70.0, True)
    # probabilities are computed from logits that were rounded to float32
    tolerance = 1e-5 if case == "named probabilities" else 1e-12
    values = {line.key: line.value for line in report.lines if line.group == "scores"}
    assert values == pytest.approx({key: expected()[key] for key in values}, rel=tolerance)
    assert report["ece"] == pytest.approx(expected()["ece/top_label"], rel=tolerance)


def test_modes_gradients_and_devices_are_restored_also_after_an_error():
    model = make_model()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    tc.evaluate(model, loader(), from_logits=True, device="cpu", **QUICK)
    with pytest.raises(TypeError):
        tc.evaluate(model, loader(lambda x, y: ("text", y)), from_logits=True)
    assert [module.training for module in model.modules()] == modes
    assert model(X).requires_grad
    assert next(model.parameters()).device.type == "cpu"


def test_autocast_runs_the_model_in_lower_precision():
    seen = []
    model, batches = nn.Sequential(make_model(), Seen(seen)).float(), loader(lambda x, y: (x.float(), y))
    tc.evaluate(model, batches, from_logits=True, autocast=torch.bfloat16, **QUICK)
    tc.evaluate(model, batches, from_logits=True, autocast=True, **QUICK)
    assert set(seen) == {torch.bfloat16}


class Seen(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(x.dtype)
        return x


def test_labels_of_minus_100_are_dropped_and_a_single_logit_is_binary():
    marked = Y.where(torch.arange(70) % 2 == 0, -100)
    report = tc.evaluate(make_model(), [(X, marked)], from_logits=True, **QUICK)
    assert report["nll"] == pytest.approx(report_of(marked, ignore_index=-100)["nll"], rel=1e-12)
    assert report.n == 35
    head = nn.Linear(4, 1).double()
    report = tc.evaluate(head, [(X, (Y > 0).double())], from_logits=True, **QUICK)
    logits = head(X).squeeze(-1).detach()
    value = nn.functional.binary_cross_entropy_with_logits(logits, (Y > 0).double())
    assert (report.task, report["nll"]) == ("binary", pytest.approx(value.item(), rel=1e-12))


SCORES, LABELS = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
STEP = (torch.zeros(4, 7), LABELS)


@pytest.mark.parametrize(
    ("outputs", "batch"),
    [
        ({"loss": torch.tensor(1.0), "logits": SCORES, "target": LABELS}, None),
        ({"y_hat": SCORES}, STEP),
        ({"logits": SCORES, "preds": LABELS}, {"input_ids": LABELS, "labels": LABELS}),
        ((SCORES, LABELS), None),
        ((torch.tensor(1.0), SCORES, LABELS), None),
        (SCORES, STEP),
        (SCORES, {"x": None, "y": LABELS}),
    ],
)
def test_predictions_and_targets_are_found_under_common_names(outputs, batch):
    found = found_by(None, outputs, batch, from_logits=True)
    assert found.preds is SCORES
    assert found.target is LABELS
    assert found.weights is None


def test_custom_getter_is_used():
    weights = torch.ones(4)
    found = found_by(lambda outputs, batch: (outputs["z"], batch[1], weights), {"z": SCORES}, STEP, from_logits=True)
    assert found == (SCORES, LABELS, weights)
