"""Interface of `torchmetrics.Metric`: custom gather functions, TorchScript, attributes read by wrappers, options."""

import inspect
import io
import math
import threading
from concurrent.futures import ThreadPoolExecutor
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
from torchcalib.metrics.base import CalibrationMetric

P, Y = torch.tensor([0.2, 0.7, 0.9, 0.4], dtype=torch.float64), torch.tensor([0, 1, 1, 1])
CLASSES = [
    cls for name in tc.__all__ if inspect.isclass(cls := getattr(tc, name)) and issubclass(cls, CalibrationMetric)
]
WRAPPERS = (tc.ByGroup, tc.Clustered, tc.Bootstrapped)


def on_ranks(n, work):
    """Return the results of `work(rank, gather)` on n ranks: threads that communicate only by `gather`."""
    barrier, sent = threading.Barrier(n, timeout=600), [None] * n

    def gather_of(rank):
        def gather(tensor, *, group):
            sent[rank] = tensor
            barrier.wait()
            everyone = list(sent)
            barrier.wait()
            assert len({(theirs.shape, theirs.dtype) for theirs in everyone}) == 1, "a plain all_gather would fail"
            return everyone

        return gather

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(lambda rank: work(rank, gather_of(rank)), range(n)))


def connected(gather):
    return {"dist_sync_fn": gather, "distributed_available_fn": lambda: True}


def close(found, expected):
    """Compare up to rounding of float64 sums: 40 terms of size 1 in another order, 40 * 2.2e-16, with a margin."""
    torch.testing.assert_close(found, expected.double(), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric .* was called before")  # for the rank without data
def test_ranks_with_a_custom_gather_have_the_value_of_all_data(path):
    """Without `torch.distributed`; 0, 10 and 30 rows. Metrics over blocks form their blocks on each rank."""
    preds, target = path.data(n=40)
    shares = [slice(0, 0), slice(0, 10), slice(10, 40)]  # 10 and 30 rows are whole blocks of 2 and of 5

    def work(rank, gather):
        metric = path.metric(**connected(gather))
        if rank:
            metric.update(preds[shares[rank]], target[shares[rank]])
        return metric.compute(), metric.n_dropped(), metric.compute()

    for value, n_dropped, again in on_ranks(3, work):
        close(value, path.call(preds, target))
        assert again is value
        assert n_dropped == 0


def test_wrappers_and_collections_sync_by_a_custom_gather_and_different_metrics_raise():
    preds, target = next(case for case in CASES if case.name == "brier-binary-probs").data(n=40)
    groups = torch.arange(40) % 3

    def work(rank, gather):
        options = {"task": "binary", **connected(gather)}
        rows = (slice(0, 11), slice(11, 40))[rank]
        by_group = tc.ByGroup(tc.KS(task="binary"), num_groups=3, **connected(gather))
        by_group.update(preds[rows], target[rows], groups=groups[rows])
        bootstrapped = tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=39, seed=rank, **connected(gather))
        clustered = {
            name: tc.Clustered(cls(task="binary"), **connected(gather)) for name, cls in (("E", tc.ECE), ("K", tc.KS))
        }
        clustered["B"] = tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=999, **connected(gather))
        for metric in clustered.values():  # every cluster has rows on both ranks
            metric.update(preds[rows], target[rows], clusters=torch.arange(40)[rows] % 8)
        tests = {name: clustered[name].test(n_replicates=19) for name in "EK"}
        of_clusters = [test.p_value for test in tests.values()] + [test.n_clusters for test in tests.values()]
        of_clusters += [clustered["E"].interval(n_replicates=199).low, clustered["B"].interval().low]
        members = tc.CalibrationCollection([tc.ECE(**options), tc.KS(**options)])
        plain = MetricCollection([tc.ECE(**options), tc.NLL(**options)])
        different = tc.ECE(**options, right=rank == 1)
        for metric in (bootstrapped, members, plain, different):
            metric.update(preds[rows], target[rows])
        with pytest.raises(RuntimeError, match="all ranks must sync the same metrics"):
            different.compute()
        assert by_group.n().tolist() == groups.bincount().tolist()
        values = {**members.compute(), **plain.compute(), "bootstrapped": bootstrapped.compute()}
        return values, by_group.compute(), of_clusters, bootstrapped.interval().replicates

    (values, by_group, of_clusters, replicates), (*_, others) = on_ranks(2, work)
    clusters = torch.arange(40) % 8
    single = tc.Clustered(tc.ECE(task="binary")), tc.Clustered(tc.KS(task="binary"))
    single += (tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=999),)
    for metric in single:
        metric.update(preds, target, clusters=clusters)
    expected = [metric.test(n_replicates=19).p_value for metric in single[:2]] + [8, 8]
    expected += [single[0].interval(n_replicates=199).low, single[2].interval().low]
    assert all(map(math.isfinite, map(float, expected)))
    close(torch.tensor(of_clusters), torch.tensor(expected))
    assert torch.equal(replicates, others)
    assert len(set(replicates.tolist())) > 30
    close(by_group, F.by_group(F.ks, preds, target, groups, task="binary"))
    for name, function in (("ECE", F.ece), ("KS", F.ks), ("NLL", F.nll), ("bootstrapped", F.nll)):
        close(values[name], function(preds, target, task="binary"))


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
def test_module_with_a_metric_can_be_scripted_and_saved():
    one_of_each = {case.cls: case for case in CASES}
    assert set(one_of_each) | {*WRAPPERS, tc.GCE} >= set(CLASSES)
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
    assert {case.cls for case in cases} == others | selective
    for case in cases:
        preds, target = case.data()
        leaf = preds.requires_grad_()
        assert not case.call(leaf, target).requires_grad, case
        assert not case.metric()(leaf, target).requires_grad, case
