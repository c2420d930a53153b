"""What only the streaming classes do: state, dtype, device moves, faults, collections."""

import copy
import itertools
import pickle
from collections import Counter
from functools import partial, partialmethod

import pytest
import torch
from cases import CASES, covering, formula_of, path_of
from helpers.each import check_each
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy

import torchcalib as tc
from torchcalib.predictions import InputFormat
from torchcalib.states import SumsKind
from torchcalib.statistics import EqualWidthBins

ONE_OF_EACH = list({case.cls: case for case in CASES if case.task == "binary"}.values())
# A case for each recipe: what a state does depends on nothing else.
STATES = list({path_of(case)[:2]: case for case in ONE_OF_EACH}.values())
OF_SUMS = [case for case in STATES if isinstance(case.metric().kind, SumsKind)]
# A case for each path and for each formula; the others in the extended run.
PATHS_AND_FORMULAS = list(covering(CASES, lambda case: {path_of(case), formula_of(case)}))
P, Y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])


@pytest.fixture(params=STATES, ids=lambda case: case.cls.__name__)
def one(request):
    return request.param


def tensors(metric):
    """Every tensor of the state."""
    parts = metric.kind.parts(metric.state)
    return [tensor for part in parts for tensor in (part if isinstance(part, list) else [part])]


def contract(one):
    metric = one.metric()
    assert isinstance(metric, Metric)
    assert metric.full_state_update is False
    assert metric.is_differentiable is (one.cls not in (tc.TCE, tc.BayesRisk, tc.Accuracy))
    assert metric.higher_is_better in ((True,) if one.cls is tc.Accuracy else (False, None))
    assert metric.state_dict() == {}
    assert isinstance(hash(metric), int)
    assert f"task='{one.task}'" in repr(metric)
    metric.persistent(True)
    assert set(metric.state_dict()) == {*metric.kind.names, "description"}


def test_every_class_keeps_the_contract_of_a_torchmetrics_metric():
    check_each(ONE_OF_EACH, contract)
    assert "n_bins=5, right=True" in repr(tc.ECE(task="binary", n_bins=5, right=True))


@pytest.mark.parametrize("one", OF_SUMS, ids=lambda case: case.cls.__name__)
def test_state_is_constant_in_the_number_of_samples(one):
    metric = one.metric()
    size = len(pickle.dumps(metric.metric_state))
    for seed in range(3):
        metric.update(*one.data(n=2000, seed=seed))
    assert len(pickle.dumps(metric.metric_state)) == size
    assert [name for name, value in metric.__dict__.items() if torch.is_tensor(value)] == list(metric.state_names)


CASTS = [
    lambda m: m.half(),
    lambda m: m.set_dtype(torch.float16),
    lambda m: torch.nn.ModuleList([m]).to(torch.bfloat16)[0],
    lambda m: m.to("cpu", torch.float16),
]


def test_sums_survive_a_cast_inference_mode_and_reset(one):
    preds, target = one.data(n=100)
    for cast in CASTS:
        metric = one.metric()
        with torch.inference_mode():
            metric.update(preds, target)
            metric.reset()
            metric.update(preds[:50], target[:50])
        before = [tensor.clone() for tensor in tensors(metric)]
        metric = cast(metric)
        torch.testing.assert_close(tensors(metric), before, rtol=0, atol=0)  # the same tensors
        assert metric.dtype == torch.float32, "`dtype` is of no state"
        metric.update(preds[50:], target[50:])
        metric.reset()
        leaf = preds.clone().requires_grad_()
        value = metric(leaf, target)
        if one.differentiable:
            value.backward()
            assert leaf.grad.isfinite().all()
        torch.testing.assert_close(metric.compute(), one.call(preds, target), rtol=1e-12, atol=1e-12)


def test_a_single_value_keeps_its_axes():
    """Of one series, one label: torchmetrics would take them away, and code that loops over series would fail."""
    p, y = torch.rand(1, 5, 1), torch.tensor([[[1], [0], [1], [1], [0]]])
    for metric in (tc.NLL, tc.KS):
        kept = metric(task="multilabel", num_labels=1, average=None, batch_shape=(1,))
        assert kept(p, y).shape == (1, 1)
        for copied in (kept, pickle.loads(pickle.dumps(kept)), pickle.loads(pickle.dumps(kept))):
            assert copied.compute().shape == copied.compute().shape == (1, 1)


BAD_UPDATES = {
    "NaN": (torch.tensor([0.2, torch.nan]), torch.tensor([0, 1]), {}),
    "range": (torch.tensor([0.2, 1.2]), torch.tensor([0, 1]), {}),
    "label": (torch.tensor([0.2, 0.3]), torch.tensor([0, 2]), {}),
    "shape": (torch.tensor([0.2, 0.3]), torch.tensor([0]), {}),
    "dtype": (torch.tensor([0, 1]), torch.tensor([0, 1]), {}),
    "weight": (torch.tensor([0.2, 0.3]), torch.tensor([0, 1]), {"weights": torch.tensor([1.0, -1.0])}),
    "device": (P.to("meta"), Y.to("meta"), {}),
}


def leaves_everything_as_it_was(bad):
    members = [tc.NLL(task="binary"), tc.ECE(task="binary", n_bins=4), tc.MCE(task="binary"), tc.KS(task="binary")]
    alone = [tc.ECE(task="binary"), tc.KS(task="binary")]
    for metric in (tc.CalibrationCollection(members), *alone):
        metric.update(P, Y)
        value = metric.compute()
        parts = metric.values() if metric not in alone else [metric]
        before = [{name: copy.copy(item) for name, item in part.__dict__.items()} for part in parts]
        method, (preds, target, kwargs) = bad[0], BAD_UPDATES[bad[1]]
        with pytest.raises((TypeError, ValueError)):
            getattr(metric, method)(preds, target, **kwargs)
        for part, items in zip(parts, before, strict=True):
            for name, item in items.items():
                after = part.__dict__[name]
                assert torch.equal(after, item) if torch.is_tensor(item) else after == item, name
        assert metric.compute() == value
        metric.update(P, Y)
        torch.testing.assert_close(metric.compute(), value)


def test_an_update_that_fails_leaves_every_metric_and_every_member_as_it_was():
    check_each(itertools.product(("update", "forward"), BAD_UPDATES), leaves_everything_as_it_was)
    of_four = tc.NLL(task="multiclass", num_classes=4, normalize="prior")
    metrics = tc.CalibrationCollection([tc.ECE(task="multiclass"), of_four])
    with pytest.raises(ValueError, match="must have 4 entries"):
        metrics.update(torch.full((2, 3), 1 / 3), torch.tensor([0, 1]))
    assert [m.update_count for m in metrics.values()] == [0, 0]


def test_collection_is_the_metrics_on_their_own_with_their_gradient():
    for task in ("binary", "multiclass", "multilabel"):
        cases = [c for c in CASES if c.task == task and c.options.get("from_logits") and not c.in_blocks]
        metrics = tc.CalibrationCollection({case.name: case.metric() for case in cases}, prefix="val/")
        preds, target = cases[0].data(n=50)
        weights = torch.rand(50).mul(4).round()
        metrics.update(preds[:20], target[:20], weights=weights[:20])
        leaf = preds[20:].clone().requires_grad_()
        batch = metrics(leaf, target[20:], weights=weights[20:])
        for case in cases:
            torch.testing.assert_close(
                batch[f"val/{case.name}"], case.call(preds[20:], target[20:], weights=weights[20:])
            )
        name = f"val/nll-{task}-logits"
        (gradient,) = torch.autograd.grad(batch[name], leaf)
        tc.nll(leaf, target[20:], task=task, from_logits=True, weights=weights[20:]).backward()
        torch.testing.assert_close(gradient, leaf.grad)
        final = metrics.compute()
        for case in cases:
            torch.testing.assert_close(final[f"val/{case.name}"], case.call(preds, target, weights=weights))


def test_collection_reads_the_input_once_also_for_members_that_demand_different_things(monkeypatch):
    counts = Counter()
    for cls, name in ((InputFormat, "read"), (EqualWidthBins, "of")):

        def counted(*args, _read, _name, **kwargs):
            counts[_name] += 1
            return _read(*args, **kwargs)

        monkeypatch.setattr(cls, name, partialmethod(counted, _read=getattr(cls, name), _name=name))
    members = [tc.NLL, tc.Brier, tc.ECD, tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE]
    metrics = tc.CalibrationCollection([cls(task="binary") for cls in members])
    metrics.update(P, Y)
    metrics(P, Y)
    assert counts == {"read": 2, "of": 2}
    of_priors = tc.NLL(task="multiclass", num_classes=2, priors=[0.5, 0.5])
    metrics = tc.CalibrationCollection([of_priors, tc.ECE(task="multiclass"), tc.Brier(task="multiclass")])
    rows = torch.stack([1 - P, P], -1)
    metrics.update(rows, Y)
    assert counts["read"] == 3
    with pytest.raises(TypeError, match="`target` must be integer labels where labels are counted"):
        metrics.update(rows, rows)
    assert [m.update_count for m in metrics.values()] == [1, 1, 1]


JOINED_NEVER = [
    (lambda: tc.NLL(task="binary", eps=1e-3), lambda: tc.NLL(task="binary")),
    (lambda: tc.ECE(task="binary"), lambda: tc.ECE(task="binary", right=True)),
    (lambda: tc.ECE(task="binary", ignore_index=-1), lambda: tc.ECE(task="binary", ignore_index=-2)),
]


def test_only_what_counts_the_same_is_joined_and_goes_on_together():
    """After the first batch all of these have equal states, which torchmetrics would make one compute group."""
    for one, other in JOINED_NEVER:
        metrics = MetricCollection({"one": one(), "other": other(), "same": one()})
        metrics.update(torch.tensor([0.5, 0.6]), torch.tensor([0, 1]))
        assert sorted(map(sorted, metrics.compute_groups.values())) == [["one", "same"], ["other"]]
    for metrics in (
        MetricCollection([tc.ECE(task="binary"), tc.MCE(task="binary"), BinaryAccuracy()]),
        tc.CalibrationCollection([tc.ECE(task="binary"), tc.MCE(task="binary")]),
    ):
        for _ in range(3):
            metrics.update(P, Y)
        assert len(metrics.compute_groups) == (2 if "BinaryAccuracy" in metrics else 0)
        for name, function in (("ECE", tc.ece), ("MCE", tc.mce)):
            torch.testing.assert_close(metrics.compute()[name], function(P, Y, task="binary").double())


def test_collection_behaves_as_a_metric_collection_of_torchcalib_metrics_alone():
    metrics = tc.CalibrationCollection([tc.NLL(task="binary"), tc.ECE(task="binary")], prefix="val/", postfix="/x")
    assert isinstance(metrics, MetricCollection)
    metrics.update(P, Y)
    for copied in (pickle.loads(pickle.dumps(metrics)), metrics.clone(prefix="test/")):
        copied.update(P, Y)
        assert len(copied.compute()) == 2
    assert set(metrics.compute()) == {"val/NLL/x", "val/ECE/x"}
    metrics.reset()
    assert all(not m.update_called for m in metrics.values())
    metrics.to(torch.bfloat16)
    assert metrics["val/ECE/x"].state.dtype == torch.float64
    for refusing in (tc.CalibrationCollection, metrics.add_metrics):
        with pytest.raises(TypeError, match="must be torchcalib metrics, got BinaryAccuracy"):
            refusing([BinaryAccuracy()])
    assert len(metrics) == 2


@pytest.mark.parametrize("with_ecd", [True, False])
def test_bin_table_of_a_stream_is_that_of_one_call(with_ecd):
    options = {"task": "multiclass", "reduction": "classwise", "n_bins": 5}
    metric = tc.ECE(num_classes=4, with_ecd=with_ecd, **options)
    preds = torch.softmax(torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1)
    target = torch.arange(60) % 4
    for piece in (slice(0, 31), slice(31, 60)):
        metric.update(preds[piece], target[piece])
    whole = tc.bin_table(preds, target, **options).to_dict()
    for name, column in metric.bin_table().to_dict().items():
        expected = torch.from_numpy(whole[name])
        expected = expected if with_ecd or name != "ecd" else torch.full_like(expected, torch.nan)
        torch.testing.assert_close(torch.from_numpy(column), expected, equal_nan=True)


def test_plot_draws_on_the_given_axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.subplots()
    metric = tc.ECE(task="binary")
    drawn, on = metric.plot([metric(P, Y), metric(P, 1 - Y)], ax=ax)
    assert (drawn, on) == (figure, ax)
    assert ax.lines
    metric.plot(ax=figure.add_subplot())


def never_asks_for_a_value(case):
    preds, target = (tensor.to("meta") for tensor in case.data())
    metric = case.metric(ignore_index=-100).to("meta")
    metric.update(preds, target, weights=torch.rand(40, device="meta"))
    metric.update(preds, target)
    if isinstance(metric.kind, SumsKind):  # bins of a sample depend on its values: there `forward` reads them
        metric(preds, target)
    assert all(tensor.device.type == "meta" for tensor in tensors(metric))
    with pytest.raises((RuntimeError, NotImplementedError)):
        metric.compute()


@pytest.mark.parametrize("extended", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_update_off_the_cpu_never_asks_for_a_value(extended):
    """Meta tensors have no values: whatever would wait for a GPU to read one raises here."""
    check_each((p.values[0] for p in PATHS_AND_FORMULAS if bool(p.marks) == extended), never_asks_for_a_value)


@pytest.mark.parametrize("case", PATHS_AND_FORMULAS)
def test_bad_rows_off_the_cpu_are_counted_left_out_and_raised_by_compute(case, monkeypatch):
    """What `update` does on CUDA, with the numbers on the CPU where they can be looked at."""
    original = InputFormat.read
    monkeypatch.setattr(
        InputFormat, "read", lambda self, *args, **kwargs: original(self, *args, **{**kwargs, "drop_invalid": True})
    )
    preds, target = case.data(n=40)
    clean, spoiled = case.metric(), case.metric()
    keep = torch.ones(40, dtype=torch.bool)
    keep[[3, 7]] = False
    bad_preds, bad_target = preds.clone(), target.clone()
    bad_preds[3], bad_target[7] = torch.nan, 99
    clean.update(preds[keep], target[keep])
    leaf = bad_preds.requires_grad_()
    value = spoiled(leaf, bad_target)
    per_row = 4 if case.task == "multilabel" else 1
    assert spoiled.kind.left_out(spoiled.state).tolist() == [2 * per_row, 0]
    torch.testing.assert_close(value, clean.compute(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=rf"got {2 * per_row} with NaN"):
        spoiled.compute()
    if case.differentiable:
        value.sum().backward()
        assert leaf.grad[keep].isfinite().all()
    spoiled.reset()
    spoiled.update(preds, target)
    torch.testing.assert_close(spoiled.compute(), case.call(preds, target).double())


@pytest.fixture
def capture(monkeypatch):
    """Switch the capture of a CUDA graph on and off; here what is captured is also done."""
    on = []
    monkeypatch.setattr("torchcalib.streaming.metric.is_captured", lambda _: bool(on))
    return on


def test_what_a_cuda_graph_adds_to_stays_in_its_place(capture):
    metric, p, y = tc.ECE(task="binary"), P, Y
    expected = tc.ece(p, y, task="binary").double()
    metric.update(p, y)
    capture.append(True)
    metric.update(p, y)
    capture.clear()
    held = metric.state
    before = held.clone()
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
    close(metric.compute(), expected)
    metric.update(p, y)
    close(metric(p, y), expected)
    metric.merge_state(metric.clone())
    assert metric.state is held
    close(held, 4 * before)
    with pytest.raises(ValueError, match="probabilities"):
        metric.update(p + 1, y)
    assert metric.state is held
    metric.reset()
    assert metric.state is held
    assert not held.any()
    held += before  # a replay, which Python does not see
    close(metric.compute(), expected)
    held[2:] = 0
    assert metric.compute().isnan()


def test_capture_of_what_a_replay_would_not_repeat_is_refused(capture):
    tce, nll = tc.TCE(task="binary"), tc.NLL(task="binary")
    capture.append(True)
    for metric, method in ((tce, "update"), (tc.Bootstrapped(nll), "update"), (nll, "forward")):
        with pytest.raises(RuntimeError, match="must be updated outside of the capture of a CUDA graph"):
            getattr(metric, method)(P, Y)
        assert metric.update_count == 0
    tc.TCE(task="binary", resolution=64).update(P, Y)
