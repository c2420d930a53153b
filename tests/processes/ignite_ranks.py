"""Functions that test_ignite.py runs on every rank; see `processes.run_ranks`."""

import pytest
import torch
from ignite import distributed as idist
from ignite.engine import Engine

import torchcalib as tc
from torchcalib.integrations import IgniteMetric
from torchcalib.torchmetrics import BinaryCalibrationError

N_BATCHES, SIZE = 6, 20


def batches():
    g = torch.Generator().manual_seed(3)
    preds = torch.rand(N_BATCHES, SIZE, generator=g, dtype=torch.float64)
    return list(zip(preds, (torch.rand(N_BATCHES, SIZE, generator=g) < preds).long(), strict=True))


def make_metrics():
    quick = {"with_intervals": False, "with_calibration": False}
    return {
        "ece": tc.ECE(task="binary"),
        "drop_in": BinaryCalibrationError(),
        "several": tc.CalibrationCollection([tc.NLL(task="binary"), tc.ACE(task="binary")]),
        "report": tc.ReportBuilder(task="binary", **quick),
    }


def evaluator():
    """Return a real Engine and its adapters."""
    engine = Engine(lambda _, batch: batch)
    adapters = {name: IgniteMetric(metric) for name, metric in make_metrics().items()}
    for name, adapter in adapters.items():
        adapter.attach(engine, name)
    return engine, adapters


def assert_same(found, expected):
    for name in ("ece", "drop_in"):
        assert abs(found[name] - expected[name]) < 1e-7, name
    for name in ("several", "report"):
        assert list(found[name]) == list(expected[name])
        for key, value in expected[name].items():
            assert abs(found[name][key] - value) < 1e-9 or value != value, (name, key)


def sync(rank, world, folder):
    """Every rank has some batches, in different numbers. Values, and restored states, are those of all data."""
    assert (idist.get_world_size(), idist.get_rank()) == (world, rank)
    whole = reference()
    engine, adapters = evaluator()
    assert_same(engine.run(batches()[:4] if rank == 0 else batches()[4:]).metrics, whole)
    states = {name: adapter.state_dict() for name, adapter in adapters.items()}
    for state in states.values():
        assert [len(ranks) for ranks in state.values()] == [world]
    _, restored = evaluator()
    for name, adapter in restored.items():
        adapter.load_state_dict(states[name])
    assert_same({name: adapter.compute() for name, adapter in restored.items()}, whole)
    empty = IgniteMetric(make_metrics()["ece"])
    if rank == 0:
        for batch in batches():
            empty.update(batch)
    assert abs(empty.compute() - whole["ece"]) < 1e-9
    nothing = IgniteMetric(make_metrics()["report"])
    with pytest.raises(RuntimeError, match="without an error"):  # on all ranks
        nothing.compute()


def reference():
    """Return the values of all batches, computed by functions."""
    preds, target = (torch.cat(column) for column in zip(*batches(), strict=True))
    report = tc.report(preds, target, with_intervals=False, with_calibration=False)
    ece = tc.ece(preds, target).item()
    several = {"NLL": tc.nll(preds, target).item(), "ACE": tc.ace(preds, target).item()}
    return {"ece": ece, "drop_in": ece, "several": several, "report": report}
