"""Metrics, collections and reports in a real Engine of PyTorch-Ignite, in one process and in two."""

import io

import pytest
import torch
from processes import run_ranks

import torchcalib as tc

pytest.importorskip("ignite")
from ignite import distributed as idist
from ignite.engine import Engine, Events, create_supervised_evaluator
from processes.ignite_ranks import assert_same, batches, evaluator, reference

from torchcalib.integrations import IgniteMetric


def test_values_in_an_engine_are_those_of_functions_and_epochs_are_separate():
    engine, _ = evaluator()
    for n in (6, 3, 6):
        metrics = engine.run(batches()[:n]).metrics
    assert_same(metrics, reference())
    assert isinstance(metrics["ece"], float)
    assert metrics["nll"] == metrics["report"]["nll"]  # values of a report are also stored by key


def test_weights_clusters_classes_and_outputs_by_name():
    g = torch.Generator().manual_seed(0)
    logits, target = torch.randn(4, 10, 3, generator=g), torch.randint(0, 3, (4, 10), generator=g)
    weights = torch.rand(4, 10, generator=g)
    patients = torch.arange(40).view(4, 10) // 3
    common = {"num_classes": 3, "from_logits": True}
    adapters = {
        "weighted": IgniteMetric(tc.ECE(**common), lambda out: (out["y_pred"], out["y"], out["w"])),
        "named": IgniteMetric(tc.ECE(mode="classwise", average=None, **common)),
        "clustered": IgniteMetric(tc.Clustered(tc.ECE(**common)), lambda out: (out["y_pred"], out["y"], out["more"])),
    }
    engine = Engine(
        lambda _, k: {"y_pred": logits[k], "y": target[k], "w": weights[k], "more": {"clusters": patients[k]}}
    )
    for name, adapter in adapters.items():
        adapter.attach(engine, name)
    found = engine.run(range(4)).metrics
    flat = logits.flatten(0, 1), target.flatten()
    options = {"from_logits": True}
    torch.testing.assert_close(found["weighted"], tc.ece(*flat, weights=weights.flatten(), **options).item())
    expected = tc.ece(*flat, mode="classwise", average=None, **options)
    torch.testing.assert_close(found["named"], expected.double())
    torch.testing.assert_close(found["clustered"], tc.ece(*flat, **options).item())
    assert adapters["clustered"].metric.test(n_replicates=19).n_clusters == 14


def test_a_supervised_evaluator_and_lists_of_tensors():
    model = torch.nn.Linear(2, 3)
    x, y = torch.randn(12, 2), torch.randint(0, 3, (12,))
    metric = IgniteMetric(tc.NLL(num_classes=3, from_logits=True))
    engine = create_supervised_evaluator(model, {"nll": metric})
    found = engine.run([(x[:8], y[:8]), (x[8:], y[8:])]).metrics["nll"]
    assert found == pytest.approx(torch.nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)
    lists = Engine(lambda _, batch: batch)
    IgniteMetric(tc.ECE(task="binary")).attach(lists, "ece")
    preds, target = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
    assert lists.run([(list(preds), list(target))]).metrics["ece"] == pytest.approx(tc.ece(preds, target).item())


def test_a_checkpoint_continues_inside_an_epoch():
    data = batches()
    engine, adapters = evaluator()
    saved = io.BytesIO()

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def save(engine):
        states = {name: adapter.state_dict() for name, adapter in adapters.items()}
        torch.save({"engine": engine.state_dict(), **states}, saved)

    engine.run(data)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    engine, adapters = evaluator()
    engine.load_state_dict(loaded["engine"])

    @engine.on(Events.EPOCH_STARTED)
    def load(engine):  # after the reset at the start of an epoch
        for name, adapter in adapters.items():
            adapter.load_state_dict(loaded[name])

    resumed = engine.run(data[2:], max_epochs=1, epoch_length=len(data))
    assert resumed.iteration == len(data)
    assert_same(resumed.metrics, reference())


def test_wrong_arguments_input_and_states_raise_errors():
    with pytest.raises(TypeError, match="`metric` must be a torchcalib metric"):
        IgniteMetric("ece")
    _, adapters = evaluator()
    for adapter in adapters.values():
        for wrong in (torch.tensor([0.5]), (torch.tensor([0.5]),)):
            with pytest.raises(ValueError, match="`output` must be"):
                adapter.update(wrong)
        with pytest.raises((TypeError, ValueError)):
            adapter.load_state_dict({"a": 1})


def test_another_library_for_communication_is_an_error(monkeypatch):
    _, adapters = evaluator()
    monkeypatch.setattr(idist, "get_world_size", lambda: 2)
    monkeypatch.setattr(idist, "backend", lambda: "horovod")
    with pytest.raises(RuntimeError, match=r"`idist` must use torch.distributed, got horovod"):
        adapters["ece"].compute()


@pytest.mark.extended
def test_two_processes_compute_the_values_of_all_data(tmp_path):
    codes, output = run_ranks(2, tmp_path, "ignite_ranks", "sync")
    assert codes == [0, 0], output
