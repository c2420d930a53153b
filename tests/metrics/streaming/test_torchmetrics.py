"""Interface of `torchmetrics.Metric`: custom gather functions, TorchScript, attributes read by wrappers, options."""

import io
from operator import attrgetter
from unittest.mock import Mock

import pytest
import torch
from cases import CASES, N_CLASSES, Case
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.utilities.exceptions import TorchMetricsUserError
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, Running

import torchcalib as tc
import torchcalib.functional as F

P, Y = torch.tensor([0.2, 0.7, 0.9, 0.4], dtype=torch.float64), torch.tensor([0, 1, 1, 1])
CLASS_OF = attrgetter("cls")


def close(found, expected):
    """Compare up to rounding of float64 sums: 40 terms of size 1 in another order, 40 * 2.2e-16, with a margin."""
    torch.testing.assert_close(found, expected.double(), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("cls", [tc.ECE, tc.KS])
def test_only_compute_calls_the_gather_function(cls):
    """Modelled on torchmetrics' test of `distributed_available_fn`. The hook is called with `group` by keyword."""
    available, gather = Mock(return_value=True), Mock(wraps=lambda x, group=None: [x, x])
    metric = cls(task="binary", dist_sync_fn=gather, distributed_available_fn=available, process_group="mine")
    metric.update(P, Y)
    gather.assert_not_called()
    available.assert_not_called()
    close(metric.compute(), getattr(F, cls.__name__.lower())(torch.cat((P, P)), torch.cat((Y, Y)), task="binary"))
    available.assert_called_once()
    assert all(call.kwargs == {"group": "mine"} for call in gather.call_args_list)
    assert metric.update_count == 1
    assert not metric._is_synced


def test_load_state_dict_of_a_synced_collection_raises_an_error():
    collection = tc.CalibrationCollection([tc.ECE(task="binary", persistent=True), tc.NLL(task="binary")])
    collection.update(P, Y)
    state = collection.state_dict()
    collection["ECE"].sync(dist_sync_fn=lambda x, group=None: [x, x], distributed_available=lambda: True)
    with pytest.raises(TorchMetricsUserError, match="load_state_dict"):
        collection.load_state_dict(state)
    collection["ECE"].unsync()
    collection.load_state_dict(state)


class Model(nn.Module):
    def __init__(self, metric):
        super().__init__()
        self.layer, self.metric = nn.Linear(3, 1), metric

    def forward(self, x):
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # since torch 2.13
@pytest.mark.filterwarnings("ignore:This property will be removed:DeprecationWarning")  # a property of torchmetrics
@pytest.mark.parametrize("key", [lambda case: case.cls.__bases__, pytest.param(CLASS_OF, marks=pytest.mark.extended)])
def test_module_with_a_metric_can_be_scripted_and_saved(key):
    one_of_each = {key(case): case for case in CASES}
    nll = tc.NLL(task="binary")
    nll.update(P, Y)
    wrapped = [tc.ByGroup(nll, num_groups=2), tc.Clustered(nll), tc.Bootstrapped(nll), tc.CalibrationCollection([nll])]
    for metric in (*(case.metric() for case in one_of_each.values()), *wrapped):
        model, file, x = Model(metric), io.BytesIO(), torch.ones(2, 3)
        torch.jit.save(torch.jit.script(model), file)
        file.seek(0)
        torch.testing.assert_close(torch.jit.load(file)(x), model(x))


def test_num_classes_and_num_labels_are_read_only_attributes():
    of_seven = tc.ECE(task="multiclass", num_classes=7)
    of_five = tc.ECE(task="multilabel", num_labels=5)
    for metric, outputs in (
        (tc.ECE(task="binary"), (None, None)),
        (tc.ECE(task="multiclass"), (None, None)),
        (of_seven, (7, None)),
        (tc.ECE(task="multiclass", num_classes=7, positive_classes=[1]), (7, None)),
        (of_five, (5, 5)),
        (tc.Bootstrapped(of_five), (5, 5)),
    ):
        assert (metric.num_classes, metric.num_labels) == outputs
    with pytest.raises(AttributeError):
        of_seven.num_classes = 3


@pytest.mark.parametrize(("task", "size"), [("multiclass", "num_classes"), ("multilabel", "num_labels")])
def test_metric_tracker_of_a_classwise_wrapper_finds_the_best_value_of_each_class(task, size):
    case = Case("", F.ece, tc.ECE, task, {"mode": "classwise", "average": None}, {size: N_CLASSES})
    tracker = MetricTracker(MetricCollection([ClasswiseWrapper(case.metric())]), maximize=None)
    assert tracker.maximize == [False] * N_CLASSES
    values = []
    for seed in range(2):
        tracker.increment()
        tracker.update(*case.data(20, seed=seed))
        values.append(case.call(*case.data(20, seed=seed)))
    close(torch.tensor(list(tracker.best_metric().values()), dtype=torch.float64), torch.stack(values).amin(0))


@pytest.mark.parametrize("method", ["update", "forward"])
@pytest.mark.parametrize("name", ["ece", "ks"])  # sums, and samples
def test_running_wrapper_returns_the_value_of_the_last_updates(name, method):
    function, cls = getattr(F, name), getattr(tc, name.upper())
    running = Running(cls(task="binary"), window=2)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4)):
        getattr(running, method)(P[rows], Y[rows])
    close(running.compute(), function(P[1:], Y[1:], task="binary"))


def test_values_of_non_differentiable_metrics_have_no_gradient():
    cases = [case for case in CASES if not case.differentiable]
    selective = {tc.AURC, tc.EAURC, tc.AUGRC, tc.CorrectnessAUROC, tc.RiskAtCoverage, tc.AccuracyAtCoverage}
    others = {tc.Accuracy, tc.BayesRisk, tc.TCE, tc.EstimationError, tc.CoverageAtRisk, tc.RankingScore}
    others.add(tc.SequentialTest)
    assert {case.cls for case in cases} == others | selective
    for case in cases:
        preds, target = case.data()
        leaf = preds.requires_grad_()
        assert not case.call(leaf, target).requires_grad, case
        assert not case.metric()(leaf, target).requires_grad, case
