"""Work and checks of each rank in test_faults.py, where one rank differs from the others. Failures raise an error."""

import copy
import datetime
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

import torchcalib as tc

P, Y = torch.tensor([0.1, 0.4, 0.7, 0.8], dtype=torch.float64), torch.tensor([0, 1, 1, 0])
BINARY, CLASSES = {"task": "binary"}, {"task": "multiclass", "mode": "classwise"}
TIMEOUT = 2  # seconds


def own_gather(x, group=None):
    return gather_all_tensors(x, group)


def updated(metric, **columns):
    n_classes = getattr(metric, "num_classes", None)
    metric.update(torch.full((4, n_classes), 1 / n_classes) if n_classes else P, Y, **columns)
    return metric


def either(cls, usual, unusual, call="compute", **options):
    """Return a method call for each rank. The metric of the odd rank has the options `unusual`."""
    return lambda odd: getattr(updated(cls(**options, **(unusual if odd else usual))), call)()


def collection(usual, unusual, together=tc.CalibrationCollection):
    return lambda odd: updated(
        together([getattr(tc, name)(**BINARY) for name in (unusual if odd else usual)])
    ).compute()


def by_group(odd):
    return updated(tc.ByGroup(tc.ECE(**BINARY), num_groups=3 + odd), groups=torch.tensor([0, 1, 2, 2])).compute()


def replicates(odd):
    return updated(tc.Bootstrapped(tc.ECE(**BINARY), n_replicates=39 + odd)).compute()


def clusters(odd):
    metric = tc.ECE(**BINARY)
    return (updated(metric) if odd else updated(tc.Clustered(metric), clusters=Y)).compute()


def method(odd):
    metric = updated(tc.KS(**BINARY))
    return metric.n_dropped() if odd else metric.compute()


def report(odd, columns=(), **unusual):
    builder = tc.ReportBuilder(**BINARY, with_intervals=False, **(unusual if odd else {}))
    builder.update(P, Y, **{name: Y for name in columns if odd})
    return builder.gather()


def call(odd):
    return report(odd=False) if odd else updated(tc.ECE(**BINARY)).compute()


def invalid_row(odd):
    metric = updated(tc.ECE(**BINARY))
    metric.state = metric.state + odd * torch.eye(1, len(metric.state))[0]  # as `update` does on a GPU
    return metric.compute()


def memory(odd):
    metric = updated(tc.KS(**BINARY))
    if odd:
        metric.kind = Mock(wraps=metric.kind, payload=Mock(side_effect=MemoryError("none is left")))
    return metric.compute()


SITUATIONS = (
    ("`n_bins` of ECE: 15 on rank 0, 7 on rank {odd}", either(tc.ECE, {}, {"n_bins": 7}, **BINARY)),
    ("`n_bins` of ECE: 15 on rank 0, 7 on rank {odd}", either(tc.ECE, {}, {"n_bins": 7}, "test", **BINARY)),
    ("`n_bins` of ECE: 15 on rank 0, 7 on rank {odd}", either(tc.ECE, {}, {"n_bins": 7}, "n_dropped", **BINARY)),
    ("`n_bins` of ACE: 15 on rank 0, 7 on rank {odd}", either(tc.ACE, {}, {"n_bins": 7}, **BINARY)),
    ("`average` of KS: macro on rank 0, none", either(tc.KS, {}, {"average": "none"}, **CLASSES, num_classes=3)),
    ("`num_classes` of ECE: 3", either(tc.ECE, {"num_classes": 3}, {"num_classes": 4}, **CLASSES)),
    ("`num_classes` of KS: 3", either(tc.KS, {"num_classes": 3}, {"num_classes": 4}, **CLASSES)),
    ("`resolution` of KS: 64", either(tc.KS, {"resolution": 64}, {"resolution": 32}, **BINARY)),
    ("`right` of ECE: False", either(tc.ECE, {}, {"right": True}, **BINARY, dist_sync_fn=own_gather)),
    ("`num_groups` of ByGroup: 3 on rank 0, 4", by_group),
    ("`n_replicates` of Bootstrapped: 39 on rank 0, 40", replicates),
    ("the metrics: Clustered on rank 0, ECE", clusters),
    ("the metrics: ECE, NLL on rank 0, NLL, ECE", collection(("ECE", "NLL"), ("NLL", "ECE"))),
    ("the metrics: ECE, KS on rank 0, ECE on rank", collection(("ECE", "KS"), ("ECE",))),
    ("the metrics: KS on rank 0, NLL", collection(("KS", "NLL"), ("NLL", "KS"), MetricCollection)),
    ("the method: sync on rank 0, n_dropped", method),
    ("the call: sync the same metrics on rank 0, gather a report", call),
    ("`other` must have the same arguments, got n_bins=7 instead of n_bins=15", partial(report, n_bins=7)),
    ("`other` must have groups if this builder has groups", partial(report, columns=("groups",))),
    ("got 1 with NaN, values out of range", invalid_row),
    ("on rank {odd}: MemoryError: none is left", memory),
)  # fmt: skip


def check_all_ranks_raise_the_same_error(rank, world):
    """Any number of errors leaves the ranks in step: the next call is possible."""
    for words, compute in SITUATIONS:
        with pytest.raises((RuntimeError, ValueError)) as raised:
            compute(rank == world - 1)
        messages = [None] * world
        dist.all_gather_object(messages, f"{type(raised.value).__name__}: {raised.value}")
        assert len(set(messages)) == 1, messages
        assert words.format(odd=world - 1) in messages[0], (words, messages[0])
        if compute is memory and rank == world - 1:
            assert isinstance(raised.value.__cause__, MemoryError)
        assert len(messages[0]) <= 520
    torch.testing.assert_close(updated(tc.ECE(**BINARY)).compute(), tc.functional.ece(P, Y, **BINARY))


def check_subset_groups(rank, world):
    """Ranks of a group disagree. A rank that is not in the group raises at once, and no other rank waits for it.

    The error names the ranks of the default group.
    """
    members = [world - 2, world - 1]
    group = dist.new_group(members)
    metric = updated(tc.ECE(**BINARY, n_bins=5 + (rank == members[1]), process_group=group))
    words = f"got a group without rank {rank}"
    if rank in members:
        words = f"`n_bins` of ECE: 5 on rank {members[0]}, 6 on rank {members[1]}"
    with pytest.raises((RuntimeError, ValueError), match=words):
        metric.compute()
    builder = tc.ReportBuilder(**BINARY, with_intervals=False)
    builder.update(P, Y)
    if rank in members:
        whole = builder.gather(group)
        assert (whole is None) == (rank == members[1])
        assert whole is None or whole.report().n == 8
    else:
        with pytest.raises(ValueError, match=words):
            builder.gather(group)


def check_a_rank_that_makes_no_call(rank, world):
    """The other ranks raise after the timeout, and their states are unchanged."""
    group = dist.new_group()
    # A short timeout could also end the start of the group on a busy machine.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), group)
    metrics = tc.CalibrationCollection([tc.ECE(**BINARY, process_group=group), tc.KS(**BINARY, process_group=group)])
    updated(metrics)
    if rank < world - 1:
        before = copy.deepcopy({name: m.metric_state for name, m in metrics.items()})
        with pytest.raises(RuntimeError, match="all ranks must sync the same metrics, got no answer from another rank"):
            metrics.compute()
        assert str(before) == str({name: m.metric_state for name, m in metrics.items()})
    dist.barrier()


def disagreeing(rank, world, folder):
    check_all_ranks_raise_the_same_error(rank, world)
    check_subset_groups(rank, world)
    check_a_rank_that_makes_no_call(rank, world)


def raising(rank, world, folder):
    """The update of one rank raises, which ends the rank. The other ranks raise in `compute`, and end as well."""
    metric = tc.ECE(**BINARY)
    try:
        metric.update(P + (rank == world - 1), Y)
        metric.compute()
    except (RuntimeError, ValueError) as error:
        (folder / f"{rank}.error").write_text(str(error))
        sys.exit(3)


def main(function, folder):
    """Run a function on every rank of torchrun."""
    dist.init_process_group("gloo")
    globals()[function](dist.get_rank(), dist.get_world_size(), Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
