"""Work and checks of each rank in the soak test of test_faults.py.

Updates have random sizes, dtypes and missing rows, between other operations of a long run. Memory and the number of
open files must not grow, and the values must equal those of all rows at once.
"""

import ctypes
import gc
import json
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist

import torchcalib as tc
import torchcalib.functional as F

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST, IN_BETWEEN = 64, 20
MAX_GROWTH = 8 * 2**20
OPTIONS = {"task": "binary", "nan_policy": "drop"}
FUNCTIONS = {"nll": F.nll, "brier": F.brier_score, "ece": F.ece, "ks": F.ks}


def batch(rank, number):
    """Return probabilities, targets, and weights or None."""
    generator = torch.Generator().manual_seed((rank << 32) + number)
    n, dtype, has_weights, missing = torch.randint(0, 2**31, (4,), generator=generator).tolist()
    n %= LARGEST
    preds = (0.01 + 0.98 * torch.rand(n, generator=generator, dtype=torch.float64)).to(DTYPES[dtype % 4])
    if n and missing % 7 == 0:
        preds[missing % n] = torch.nan
    weights = torch.randint(0, 3, (n,), generator=generator) if has_weights % 3 == 0 else None
    return preds, torch.randint(0, 2, (n,), generator=generator), weights


def offline(world, n_each):
    """Return the values of all rows at once, by name, and the number of missing rows."""
    rows = [batch(rank, number) for rank in range(world) for number in range(n_each)]
    preds, target = torch.cat([row[0].double() for row in rows]), torch.cat([row[1] for row in rows])
    weights = torch.cat([torch.ones_like(row[1]) if row[2] is None else row[2] for row in rows])
    values = {name: function(preds, target, weights=weights, **OPTIONS) for name, function in FUNCTIONS.items()}
    return values, int((preds.isnan() & (weights > 0)).sum())


def resource_usage():
    """Return the memory in bytes and the number of open files of this process, after freed memory is returned."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir()))


def usage_over_time(rank, world, folder, n_updates):
    """Return memory and open files at regular intervals after a warm-up."""
    members = {"nll": tc.NLL(**OPTIONS), "brier": tc.BrierScore(**OPTIONS), "ece": tc.ECE(**OPTIONS)}
    metrics = tc.CalibrationCollection({**members, "ks": tc.KS(**OPTIONS, resolution=64)}, persistent=True)
    n_each, usages, path = -(-n_updates // world), [], folder / f"soak-{rank}.pt"
    for number in range(n_each):
        preds, target, weights = batch(rank, number)
        (metrics if number % 5 == 0 else metrics.update)(preds, target, weights=weights)
        if (number + 1) % max(5, n_each // IN_BETWEEN) == 0:
            values = metrics.compute()
            assert metrics.compute() == values
            metrics.n_dropped()
            torch.save(metrics.state_dict(), path)
            metrics = pickle.loads(pickle.dumps(metrics.clone()))
            metrics.reset()
            metrics.load_state_dict(torch.load(path, weights_only=True))
            usages.append(resource_usage())
    values, n_dropped = metrics.compute(), set(metrics.n_dropped().values())
    if rank == 0:
        expected, n_missing = offline(world, n_each)
        assert n_dropped == {n_missing}
        for name, value in values.items():
            tolerance = 5e-3 if name == "ks" else 1e-9  # ks is computed from a sketch
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
    dist.barrier()
    return usages[len(usages) // 5 :]


def soak(rank, world, folder, n_updates):
    usages = usage_over_time(rank, world, folder, int(n_updates))
    memory, files = zip(*usages, strict=True)
    (folder / f"{rank}.usages").write_text(json.dumps(usages))
    assert max(memory) - memory[0] < MAX_GROWTH, f"memory grew: {memory}"
    assert max(files) <= files[0], f"open files grew: {files}"
