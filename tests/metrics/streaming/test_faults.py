"""Streams on several ranks, and what becomes of them when something fails: real gloo processes.

The work is in rank.py and fault_rank.py.
"""

import signal
from pathlib import Path

import pytest
import torch
from processes import SCRIPTS, fault_rank, run_together
from torchmetrics.utilities.exceptions import TorchMetricsUserError

import torchcalib as tc

WORLD = 3


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.extended) for n in (3, 4))])
def test_ranks_with_uneven_shares_agree_with_one_process(world, tmp_path):
    codes, said = run_together([[SCRIPTS / "rank.py", rank, world, tmp_path / "store"] for rank in range(world)])
    assert codes == [0] * world, said


def launched(part, folder, *more, script="fault_rank.py", timeout=240):
    commands = [[SCRIPTS / script, part, rank, WORLD, folder, *more] for rank in range(WORLD)]
    return run_together(commands, timeout=timeout)


def test_ranks_that_sync_or_fail_to_keep_their_own_state(tmp_path):
    codes, said = launched("synced", tmp_path)
    assert codes == [0] * WORLD, said


@pytest.mark.extended
def test_a_rank_that_is_killed_is_told_to_the_others_and_a_restart_gives_the_undisturbed_answer(tmp_path):
    codes, said = launched("killed", tmp_path)
    assert codes == [-signal.SIGKILL if rank == fault_rank.VICTIM else 0 for rank in range(WORLD)], said
    assert {path.stem for path in tmp_path.glob("*.told")} == {"0", "2"}
    codes, said = launched("restarted", tmp_path)
    assert codes == [0] * WORLD, said


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_soak_of_100_000_updates_keeps_memory_and_files_flat_and_gives_the_offline_values(tmp_path):
    codes, said = launched("soak", tmp_path, "100000", script="soak_rank.py", timeout=3500)
    assert codes == [0] * WORLD, said


P, Y = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])


@pytest.mark.parametrize("cls", [tc.ECE, tc.KS])
def test_in_one_process_sync_does_nothing_and_data_may_come_after_compute(cls):
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
