"""Functions that `test_hidden.py` runs on every rank, with a part of the vocabulary on each; see `run_ranks`."""

import torch
from helpers.hidden import BIAS, COMMON, HIDDEN, TARGET, TRANSFORMED, WEIGHT, logits
from torch import distributed

import torchcalib as tc

METRICS = {"nll": tc.NLL, "brier": tc.BrierScore, "ece": tc.ECE, "aurc": tc.AURC, "accuracy": tc.Accuracy}


def check_values(weight, bias, vocab_group):
    """Compare all metrics with those of the logits. Ranks have the same rows, so their states are not added."""
    found, expected = (
        tc.CalibrationCollection({name: m(sync_on_compute=False, **COMMON) for name, m in METRICS.items()})
        for _ in range(2)
    )
    found.update_from_hidden(HIDDEN, weight, TARGET, bias=bias, vocab_group=vocab_group, **TRANSFORMED)
    expected.update(logits(**TRANSFORMED), TARGET)
    torch.testing.assert_close(found.compute(), expected.compute(), rtol=1e-9, atol=1e-12)


def plain(rank, world, _):
    """Each rank has a part of the vocabulary, of unequal sizes."""
    part = slice(0, 13) if rank == 0 else slice(13, None)
    check_values(WEIGHT[part], BIAS[part], distributed.group.WORLD)


def sharded(rank, world, _):
    """A `DTensor` is gathered, unless it belongs to the ranks of a group."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    weight, bias = (DTensor.from_local(x.chunk(world)[rank], mesh, [Shard(0)]) for x in (WEIGHT, BIAS))
    check_values(weight, bias, distributed.group.WORLD)
    check_values(weight, bias, None)
