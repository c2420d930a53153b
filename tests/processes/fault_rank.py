"""Work and checks of each rank in test_faults.py. A difference raises an error."""

import copy
import datetime
import os
import pickle
import signal
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.exceptions import TorchMetricsUserError

import torchcalib as tc
from processes import soak_rank

TIMEOUT, N_BATCHES, SAVED_EACH, KILLED_AT, VICTIM = 5, 10, 3, 7, 1


def metrics(group=None):
    """Return metrics with sums, samples, a sketch and a bootstrap, all persistent."""
    options = {"task": "binary", "process_group": group}
    members = {
        "nll": tc.NLL(nan_policy="drop", **options),
        "ece": tc.ECE(n_bins=7, **options),
        "ks": tc.KS(**options),
        "sketch": tc.ACE(resolution=64, **options),
        "interval": tc.Bootstrapped(tc.ECE(task="binary", n_bins=7), n_replicates=39, process_group=group),
    }
    return tc.CalibrationCollection(members, persistent=True)


def batch(rank, number):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    n = int(torch.randint(0, 40, (), generator=generator))
    return torch.rand(n, generator=generator), torch.randint(0, 2, (n,), generator=generator)


def run_epoch(collection, rank, folder, first=0, last=N_BATCHES, dies=False):
    """Update with batches `first` to `last`. Every few batches, save the states and the position in the data."""
    for number in range(first, last):
        if dies and number == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        collection.update(*batch(rank, number))
        if folder is not None and (number + 1) % SAVED_EACH == 0:
            content = {"metrics": collection.state_dict(), "next": number + 1}
            torch.save(content, folder / f"{rank}.tmp")
            (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
    return collection


def killed(rank, world, folder):
    """One rank is killed during the epoch. The others raise an error, and their states are unchanged."""
    group = dist.new_group()
    # A short timeout could also end the start of the group on a busy machine.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), group)
    collection = run_epoch(metrics(group), rank, folder, dies=rank == VICTIM)
    before = copy.deepcopy(collection.state_dict())
    with pytest.raises(RuntimeError) as raised:  # also raised as DistBackendError and DistNetworkError
        collection.compute()
    with pytest.raises(RuntimeError):
        collection["ks"].compute()
    assert all(not m._is_synced and m._cache is None for m in collection.values())
    assert str(collection.state_dict()) == str(before)
    (folder / f"{rank}.error").write_text(f"{type(raised.value).__name__}: {raised.value}")
    os._exit(0)  # the process group cannot be destroyed without the killed rank


def check_restart_equals_the_uninterrupted_run(rank, world, folder):
    saved = torch.load(folder / f"{rank}.pt", weights_only=True)
    assert saved["next"] == (6 if rank == VICTIM else 9)
    restarted = metrics()
    restarted.load_state_dict(saved["metrics"])
    run_epoch(restarted, rank, None, first=saved["next"])
    undisturbed = run_epoch(metrics(), rank, None)
    found, expected = restarted.compute(), undisturbed.compute()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    ours, theirs = (c["interval"].interval().replicates for c in (restarted, undisturbed))
    assert torch.equal(ours, theirs)
    whole = metrics()
    whole["nll"].sync_on_compute = whole["nll"]._to_sync = False
    for r in range(world):
        run_epoch(whole, r, None)
    torch.testing.assert_close(whole["nll"].compute(), found["nll"], rtol=1e-12, atol=0)


def updated(metric, rank):
    metric.update(torch.full((rank + 1,), 0.75), torch.ones(rank + 1, dtype=torch.int64))
    return metric


def n_of(metric):
    statistic = metric.statistic()
    return int(statistic.total.sum() if hasattr(statistic, "total") else statistic.score.shape[-1])


def assert_own(metric, n):
    assert (n_of(metric), metric._is_synced, metric._cache) == (n, False, None)


P, Y = torch.tensor([0.6]), torch.tensor([0])


def assert_read_only(synced, own, *more):
    """Check that no call changes a synced state."""
    for name, *given in (("update", P, Y), ("forward", P, Y), ("compute",), ("load_state_dict", own), *more):
        with pytest.raises(TorchMetricsUserError):
            getattr(synced, name)(*given)


def check_synced_state_is_global_and_read_only(rank, world, folder):
    mine, everyone = rank + 1, sum(r + 1 for r in range(world))
    for cls in (tc.ECE, tc.KS):
        metric = updated(cls(task="binary", persistent=True), rank)
        own = copy.deepcopy(metric.state_dict())
        with pytest.raises(TorchMetricsUserError, match="already been un-synced"):
            metric.unsync()
        metric.sync()
        assert_read_only(metric, own, ("sync",), ("merge_state", cls(task="binary")))
        with pytest.raises(TorchMetricsUserError):
            torch.nn.ModuleDict({"m": metric}).load_state_dict({f"m.{name}": own[name] for name in own})
        assert (n_of(metric), metric._is_synced, metric.update_count) == (everyone, True, 1)
        # While the metric is synced, its statistic is that of all ranks.
        assert metric.n_dropped() == 0
        if cls is tc.ECE:
            assert metric.bin_table().n.sum() == everyone
        whole = cls(task="binary")
        whole.load_state_dict(metric.state_dict())
        assert n_of(whole) == everyone
        merged = updated(cls(task="binary"), rank)
        merged.merge_state(metric)
        assert n_of(merged) == everyone + mine
        for copied in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)):
            assert n_of(copied) == everyone
            copied.unsync()
            assert n_of(copied) == mine
        metric.unsync()
        assert str(metric.state_dict()) == str(own)
        value = metric.compute()
        assert metric.compute() is value
        metric.update(P, Y)
        assert n_of(metric) == mine + 1
        assert metric.compute() != value
        metric.sync()
        metric.reset()
        assert_own(metric, 0)
        assert updated(metric, rank).compute() == value
        dist.barrier()


def check_failed_sync_keeps_the_local_state(rank, world, folder):
    def fails(*_, **__):
        raise OSError("in the middle")

    for cls in (tc.ECE, tc.KS):
        metric = updated(cls(task="binary"), rank)
        within = metric.sync_context()(fails)  # sync_context as a decorator
        synced = (partial(metric.sync, fails), metric.n_dropped, metric.compute)
        calls = [("dist_sync_fn", call) for call in synced]
        for name, call in (*calls, ("_value", metric.compute), ("_value", within)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(metric, name, fails)
                with pytest.raises(OSError, match="in the middle"):
                    call()
            assert_own(metric, rank + 1)
        assert metric.compute().isfinite()
    collection = tc.CalibrationCollection([tc.NLL(task="binary"), tc.ECE(task="binary"), tc.KS(task="binary")])
    updated(collection, rank)
    collection["ECE"]._value = fails
    with pytest.raises(OSError, match="in the middle"):
        collection.compute()
    del collection["ECE"]._value
    assert [(n_of(m), m._is_synced) for m in collection.values()] == [(rank + 1, False)] * 3
    assert all(value.isfinite() for value in collection.compute().values())


def check_collection_with_a_synced_member_is_read_only(rank, world, folder):
    collection = tc.CalibrationCollection([tc.NLL(task="binary"), tc.KS(task="binary")], persistent=True)
    updated(collection, rank)
    own = copy.deepcopy(collection.state_dict())
    collection["KS"].sync()
    assert_read_only(collection, own)
    assert [(m._is_synced, m.update_count) for m in collection.values()] == [(False, 1), (True, 1)]
    collection["KS"].unsync()
    assert str(collection.state_dict()) == str(own)
    collection.update(P, Y)
    assert len(collection.compute()) == 2
    collection["NLL"].sync()
    collection.reset()
    assert not any(m._is_synced or m.update_called for m in collection.values())
    dist.barrier()


def check_dropped_rows_are_counted_over_all_ranks(rank, world, folder):
    options = {"task": "binary", "nan_policy": "drop"}
    collection = tc.CalibrationCollection({"a": tc.NLL(**options), "b": tc.KS(**options)}, prefix="v/")
    with warnings.catch_warnings(action="ignore"):
        for metric in (collection, *(cls(task="binary") for cls in (tc.ECE, tc.KS))):
            values = metric.compute()
            assert all(value.isnan() for value in (values.values() if metric is collection else [values]))
    collection.update(torch.full((rank + 2,), torch.nan), torch.zeros(rank + 2, dtype=torch.int64))
    everyone = sum(r + 2 for r in range(world))
    assert collection.n_dropped() == {"v/a": everyone, "v/b": everyone}
    for metric in collection.values():
        assert not metric._is_synced
        with metric.sync_context():
            assert metric.n_dropped() == everyone
        metric.sync_on_compute = metric._to_sync = False
        assert metric.n_dropped() == rank + 2
    by_hand = tc.NLL(**options, dist_sync_fn=lambda x, group=None: gather_all_tensors(x, group))
    by_hand.update(torch.tensor([torch.nan]), torch.tensor([0]))
    assert by_hand.n_dropped() == tc.CalibrationCollection({"a": by_hand}).n_dropped()["a"] == world


def restarted(*arguments):
    check_restart_equals_the_uninterrupted_run(*arguments)
    soak_rank.usage_over_time(*arguments, 90)


def synced(*arguments):
    check_synced_state_is_global_and_read_only(*arguments)
    check_failed_sync_keeps_the_local_state(*arguments)
    check_collection_with_a_synced_member_is_read_only(*arguments)
    check_dropped_rows_are_counted_over_all_ranks(*arguments)
