"""Properties of streaming classes only: state, dtype, device moves, failed updates, collections."""

import pickle
from collections import Counter
from functools import partialmethod

import pytest
import torch
from cases import CASES, path_of
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.inputs import InputFormat
from torchcalib.core.state import SumState

ONE_OF_EACH = list({case.cls: case for case in CASES if case.task == "binary"}.values())
# A case for each accumulator of sums, because the behaviour of a state depends only on its accumulator
OF_SUMS = [case for case in ONE_OF_EACH if isinstance(case.metric().kind, SumState)]
OF_SUMS = list({path_of(case)[:2]: case for case in OF_SUMS}.values())
P, Y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])


@pytest.mark.parametrize("one", ONE_OF_EACH, ids=str)
def test_every_class_satisfies_the_interface_of_a_torchmetrics_metric(one):
    metric = one.metric()
    assert isinstance(metric, Metric)
    assert metric.full_state_update is False
    higher = one.cls in (tc.Accuracy, tc.CorrectnessAUROC, tc.AccuracyAtCoverage, tc.CoverageAtRisk, tc.RankingScore)
    assert metric.higher_is_better in ((True,) if higher else (False, None))
    assert metric.state_dict() == {}
    assert isinstance(hash(metric), int)
    assert f"task='{one.task}'" in repr(metric)
    assert metric.half().dtype == torch.float32, "`dtype` does not depend on the state"
    metric.persistent(True)
    assert set(metric.state_dict()) == {*metric.kind.names, "description"}


def test_values_with_axes_of_length_1_keep_their_axes():
    """torchmetrics removes axes of length 1, which breaks loops over batch elements or labels."""
    p, y = torch.rand(1, 5, 1), torch.tensor([[[1], [0], [1], [1], [0]]])
    for metric in (tc.NLL, tc.KS):
        kept = metric(task="multilabel", num_labels=1, average=None, batch_shape=(1,))
        assert kept(p, y).shape == (1, 1)
        for copied in (kept, pickle.loads(pickle.dumps(kept)), pickle.loads(pickle.dumps(kept))):
            assert copied.compute().shape == copied.compute().shape == (1, 1)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_collection_gives_the_values_and_gradients_of_its_members(task):
    cases = [c for c in CASES if c.task == task and c.options.get("from_logits") and not c.in_blocks]
    metrics = tc.CalibrationCollection({case.name: case.metric() for case in cases}, prefix="val/")
    preds, target = cases[0].data(n=50)
    leaf, weights = preds.requires_grad_(), torch.rand(50).mul(4).round()
    batch = metrics(leaf, target, weights=weights)
    for case in cases:
        found, expected = batch[f"val/{case.name}"], case.call(leaf, target, weights=weights)
        torch.testing.assert_close(found, expected)
        if case.differentiable:
            found, expected = (torch.autograd.grad(x.sum(), leaf, retain_graph=True) for x in (found, expected))
            torch.testing.assert_close(found, expected)


def test_collection_converts_the_input_once_for_all_members(monkeypatch):
    counts = Counter()

    def counted(*args, _read, _name, **kwargs):
        counts[_name] += 1
        return _read(*args, **kwargs)

    for cls, name in ((InputFormat, "read"), (EqualWidthBins, "from_predictions")):
        monkeypatch.setattr(cls, name, partialmethod(counted, _read=getattr(cls, name), _name=name))
    members = [tc.NLL, tc.BrierScore, tc.ECD, tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE]
    metrics = tc.CalibrationCollection([cls(task="binary") for cls in members])
    metrics.update(P, Y)
    metrics(P, Y)
    assert counts == {"read": 2, "from_predictions": 2}
    of_priors = tc.NLL(task="multiclass", num_classes=2, priors=[0.5, 0.5])
    metrics = tc.CalibrationCollection([of_priors, tc.ECE(task="multiclass"), tc.BrierScore(task="multiclass")])
    rows = torch.stack([1 - P, P], -1)
    metrics.update(rows, Y)
    assert counts["read"] == 3
    with pytest.raises(TypeError, match="`target` must be integer labels, got"):
        metrics.update(rows, rows)
    assert [m.update_count for m in metrics.values()] == [1, 1, 1]


def test_only_metrics_with_equal_configuration_share_a_compute_group():
    """torchmetrics would form one compute group, because all states are equal after the first batch."""
    for cls, options, others in (
        (tc.NLL, {"eps": 1e-3}, {}),
        (tc.ECE, {}, {"right": True}),
        (tc.ECE, {"ignore_index": -1}, {"ignore_index": -2}),
    ):
        given = {"one": options, "other": others, "same": options}
        metrics = MetricCollection({name: cls(task="binary", **each) for name, each in given.items()})
        metrics.update(torch.tensor([0.5, 0.6]), torch.tensor([0, 1]))
        assert sorted(map(sorted, metrics.compute_groups.values())) == [["one", "same"], ["other"]]
    for metrics in (
        MetricCollection([tc.ECE(task="binary"), tc.MCE(task="binary"), BinaryAccuracy()]),
        tc.CalibrationCollection([tc.ECE(task="binary"), tc.MCE(task="binary")]),
    ):
        for _ in range(3):
            metrics.update(P, Y)
        assert len(metrics.compute_groups) == (2 if "BinaryAccuracy" in metrics else 0)
        for name, function in (("ECE", F.ece), ("MCE", F.mce)):
            torch.testing.assert_close(metrics.compute()[name], function(P, Y, task="binary").double())


def test_collection_behaves_as_a_metric_collection_and_accepts_only_torchcalib_metrics():
    metrics = tc.CalibrationCollection([tc.NLL(task="binary"), tc.ECE(task="binary")], prefix="val/", postfix="/x")
    assert isinstance(metrics, MetricCollection)
    metrics.update(P, Y)
    assert set(metrics.compute()) == {"val/NLL/x", "val/ECE/x"}
    cloned = metrics.clone(prefix="test/")
    cloned.update(P, Y)
    assert set(cloned.compute()) == {"test/NLL/x", "test/ECE/x"}
    metrics.reset()
    assert all(not m.update_called for m in metrics.values())
    for refusing in (tc.CalibrationCollection, metrics.add_metrics):
        with pytest.raises(TypeError, match="must be torchcalib metrics, got BinaryAccuracy"):
            refusing([BinaryAccuracy()])
    assert len(metrics) == 2


@pytest.mark.parametrize("with_ecd", [True, False])
def test_bin_table_of_a_stream_equals_that_of_one_call(with_ecd):
    options = {"task": "multiclass", "mode": "classwise", "n_bins": 5}
    metric = tc.ECE(num_classes=4, with_ecd=with_ecd, **options)
    preds = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    target = torch.arange(60) % 4
    for piece in (slice(0, 31), slice(31, 60)):
        metric.update(preds[piece], target[piece])
    whole = F.calibration_curve(preds, target, **options)
    found, expected = (
        {name: torch.from_numpy(column) for name, column in table.to_dict().items()}
        for table in (metric.bin_table(), whole)
    )
    if not with_ecd:
        expected["ecd"].fill_(torch.nan)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_plot_draws_on_the_given_axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.subplots()
    metric = tc.ECE(task="binary")
    drawn, on = metric.plot([metric(P, Y), metric(P, 1 - Y)], ax=ax)
    assert (drawn, on) == (figure, ax)
    assert ax.lines
    metric.plot(ax=figure.add_subplot())


@pytest.mark.parametrize("make", [tc.TCE, tc.NLL, lambda **options: tc.Bootstrapped(tc.NLL(**options))])
def test_updates_in_the_capture_of_a_cuda_graph_raise_an_error(make, monkeypatch):
    metric = make(task="binary")
    monkeypatch.setattr("torchcalib.metrics.engine.is_captured", lambda _: True)
    monkeypatch.setattr("torchcalib.metrics.base.rows_of", lambda *_: None)  # as for input on a GPU
    collection = tc.CalibrationCollection([tc.ECE(task="binary")])
    monkeypatch.setattr(type(collection), "_are_added", lambda *_: False)
    for call in (metric.update, metric, collection.update, collection):
        with pytest.raises(RuntimeError, match="must be updated outside the capture of a CUDA graph"):
            call(P, Y)
    assert metric.update_count == 0
