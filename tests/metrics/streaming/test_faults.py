"""Metrics on several ranks, also when a rank fails: real gloo processes, and workers of data loaders.

The ranks run rank.py, fault_rank.py, disagreement_rank.py and soak_rank.py. Nothing may wait forever.
"""

import itertools
import multiprocessing
import signal
from pathlib import Path

import pytest
import torch
from processes import SCRIPTS, fault_rank, run_python, run_ranks, run_together
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.utilities.exceptions import TorchMetricsUserError

import torchcalib as tc
import torchcalib.functional as F

WORLD = 3


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.extended) for n in (3, 4))])
def test_ranks_with_uneven_batches_give_the_values_of_one_process(world, tmp_path):
    codes, output = run_ranks(world, tmp_path, "rank", "every_check")
    assert codes == [0] * world, output


def test_local_states_are_kept_during_and_after_a_sync_or_its_failure(tmp_path):
    codes, output = run_ranks(WORLD, tmp_path, "fault_rank", "synced")
    assert codes == [0] * WORLD, output


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=pytest.mark.extended) for n in (2, 4))])
def test_ranks_that_disagree_all_raise_the_same_error(world, tmp_path):
    codes, output = run_ranks(world, tmp_path, "disagreement_rank", "disagreeing")
    assert codes == [0] * world, output


@pytest.mark.extended
def test_an_error_in_update_of_one_rank_ends_all_ranks(tmp_path):
    codes, output = run_ranks(WORLD, tmp_path, "disagreement_rank", "raising")
    assert codes == [3] * WORLD, output
    *others, own = [(tmp_path / f"{rank}.error").read_text() for rank in range(WORLD)]
    assert "`preds` must be probabilities" in own
    for message in others:
        assert message.startswith("all ranks must sync the same metrics, got no answer from another rank (")


@pytest.mark.extended
@pytest.mark.parametrize(("function", "is_failure"), [("disagreeing", False), ("raising", True)])
def test_ranks_of_torchrun_raise_the_same_errors_and_end(function, is_failure, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_python(*torchrun, SCRIPTS / "disagreement_rank.py", function, tmp_path)
    assert bool(done.returncode) == is_failure, done.stderr


@pytest.mark.extended
def test_killed_rank_raises_on_the_others_and_a_restart_gives_the_uninterrupted_value(tmp_path):
    codes, output = run_ranks(WORLD, tmp_path, "fault_rank", "killed")
    assert codes == [-signal.SIGKILL if rank == fault_rank.VICTIM else 0 for rank in range(WORLD)], output
    assert {path.stem for path in tmp_path.glob("*.error")} == {"0", "2"}
    codes, output = run_ranks(WORLD, tmp_path, "fault_rank", "restarted")
    assert codes == [0] * WORLD, output


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_100_000_updates_leak_no_memory_or_files_and_give_the_offline_values(tmp_path):
    codes, output = run_ranks(WORLD, tmp_path, "soak_rank", "soak", 100_000, timeout=3500)
    assert codes == [0] * WORLD, output


P, Y = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])


@pytest.mark.parametrize("cls", [tc.ECE, tc.KS])
def test_sync_in_one_process_does_nothing_and_updates_may_follow_compute(cls):
    metric = cls(task="binary")
    with pytest.warns(UserWarning, match="was called before the ``update`` method"):
        assert metric.compute().isnan()
    metric.update(P[:2], Y[:2])
    value = metric.compute()
    assert metric.compute() is value
    metric.update(P[2:], Y[2:])
    whole = cls(task="binary")
    whole.update(P, Y)
    torch.testing.assert_close(metric.compute(), whole.compute())
    for _ in range(2):
        metric.sync()
    with pytest.raises(TorchMetricsUserError, match="already been un-synced"):
        metric.unsync()
    torch.testing.assert_close(metric.compute(), whole.compute())


# Worker processes of data loaders


METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.extended) for name in ("forkserver", "spawn"))]


@pytest.mark.parametrize("start_method", METHODS)
def test_workers_of_a_data_loader_compute_metrics(start_method):
    if start_method not in multiprocessing.get_all_start_methods():
        pytest.skip("the system does not have this start method")
    command = [SCRIPTS / "loader_workers.py", start_method]
    if start_method == "fork":
        codes, output = run_together([command])
        assert codes == [0], output
    else:
        done = run_python(*command)
        assert done.returncode == 0, done.stderr


# Rows repeated by a `DistributedSampler`, identified from the indices of all ranks


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16])
def test_distinct_rows_marks_the_first_occurrence_of_each_row(world):
    options = itertools.product((1, 2, 3, 5, 8, 13, 16, 17), [False, True], [False, True], range(3))
    for n, shuffle, drop_last, epoch in options:
        samplers = [DistributedSampler(range(n), world, k, shuffle=shuffle, drop_last=drop_last) for k in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        seen = [list(sampler) for sampler in samplers]
        distinct = [tc.integrations.distinct_rows(sampler).tolist() for sampler in samplers]
        assert [len(rows) for rows in distinct] == [len(rows) for rows in seen]
        # Ranks take turns: a row counts where it occurs for the first time.
        had = set()
        turns = (itertools.chain(*zip(*ranks, strict=True)) for ranks in (seen, distinct))
        for row, first in zip(*turns, strict=True):
            assert first == (row not in had)
            had.add(row)
        assert len(had) == sum(map(sum, distinct)) == (sum(map(len, seen)) if drop_last else n)


def test_distinct_rows_as_weights_give_the_value_of_the_data_set():
    p = torch.rand(11, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(p, (p > 0.4).long())
    whole = tc.ECE(task="binary")
    for rank in range(4):
        sampler, metric = DistributedSampler(data, 4, rank, shuffle=True, seed=2), tc.ECE(task="binary")
        batches = zip(
            DataLoader(data, 2, sampler=sampler), tc.integrations.distinct_rows(sampler).split(2), strict=True
        )
        for (x, y), weights in batches:
            metric.update(x, y, weights=weights)
        whole.merge_state(metric)
    torch.testing.assert_close(whole.compute(), F.ece(*data.tensors, task="binary").double(), rtol=1e-6, atol=0)
    assert whole.bin_table().n.sum() == 11
