"""One rank of the soak test in test_faults.py: `python soak_rank.py soak RANK WORLD FOLDER UPDATES` (of all ranks).

Updates have random sizes and dtypes and missing rows, mixed with the other operations of a long run. Memory and the
number of open files must not grow, and the values must be those of all rows at once.
"""

import ctypes
import datetime
import gc
import json
import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import torchcalib as tc

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
N_CLASSES, LARGEST, IN_BETWEEN = 5, 64, 20
MOST_GROWTH = 8 * 2**20


def batch(rank, number):
    """Return binary or multi-class probabilities and targets, and weights or None."""
    generator = torch.Generator().manual_seed((rank << 32) + number)
    n, dtype, has_weights, missing = torch.randint(0, 2**31, (4,), generator=generator).tolist()
    n, dtype = n % LARGEST, DTYPES[dtype % 4]
    if number % 2:
        preds = torch.randn(n, N_CLASSES, generator=generator).mul(2).softmax(-1).to(dtype)
        target = torch.randint(0, N_CLASSES, (n,), generator=generator)
    else:
        preds = (0.01 + 0.98 * torch.rand(n, generator=generator, dtype=torch.float64)).to(dtype)
        target = torch.randint(0, 2, (n,), generator=generator)
    if n and missing % 7 == 0:
        preds[missing % n] = torch.nan
    weights = torch.randint(0, 3, (n,), generator=generator) if has_weights % 3 == 0 else None
    return preds, target, weights


def collections():
    binary = {"task": "binary", "nan_policy": "drop"}
    several = {"task": "multiclass", "num_classes": N_CLASSES, "nan_policy": "drop"}
    return (
        tc.CalibrationCollection(
            {"nll": tc.NLL(**binary), "ece": tc.ECE(**binary), "ks": tc.KS(**binary, resolution=64)}, persistent=True
        ),
        tc.CalibrationCollection(
            {
                "brier": tc.Brier(**several),
                "top_label": tc.ECE(**several),
                "classwise": tc.ECE(**several, reduction="classwise"),
            },
            persistent=True,
        ),
    )


def offline(world, n_each):
    """Return the values from all rows at once, by name, and the number of missing rows."""
    found = []
    for parity in (0, 1):
        rows = [batch(rank, number) for rank in range(world) for number in range(parity, n_each, 2)]
        preds, target = torch.cat([row[0].double() for row in rows]), torch.cat([row[1] for row in rows])
        weights = torch.cat([torch.ones_like(row[1]) if row[2] is None else row[2] for row in rows])
        options = {"task": "binary", "weights": weights, "nan_policy": "drop"}
        if parity:
            # Rows of half types sum to 1 as these do.
            options |= {"task": "multiclass", "validate_args": False}
            values = {"brier": tc.brier_score(preds, target, **options)}
            values |= {r: tc.ece(preds, target, reduction=r, **options) for r in ("top_label", "classwise")}
        else:
            values = {f.__name__: f(preds, target, **options) for f in (tc.nll, tc.ece, tc.ks)}
        missing = preds.isnan() if preds.dim() == 1 else preds.isnan().any(-1)
        found.append((values, int((missing & (weights > 0)).sum())))
    return found


def held():
    """Return the memory in bytes and the number of open files of this process, after freed memory is returned."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir()))


def soak(rank, world, folder, n_updates):
    """Return memory and open files at regular intervals, after a warm-up."""
    both, n_each, looks = list(collections()), -(-n_updates // world), []
    for number in range(n_each):
        preds, target, weights = batch(rank, number)
        collection = both[number % 2]
        if number % 5 == 0:
            collection(preds, target, weights=weights)
        else:
            collection.update(preds, target, weights=weights)
        if (number + 1) % max(5, n_each // IN_BETWEEN) == 0:
            for which, each in enumerate(both):
                values = each.compute()
                assert each.compute() == values
                each.n_dropped()
                path = folder / f"soak-{rank}.pt"
                torch.save(each.state_dict(), path)
                both[which] = pickle.loads(pickle.dumps(each.clone()))
                both[which].reset()
                both[which].load_state_dict(torch.load(path, weights_only=True))
            looks.append(held())
    found = [(each.compute(), set(each.n_dropped().values())) for each in both]
    if rank == 0:
        for (values, n_dropped), (expected, n_missing) in zip(found, offline(world, n_each), strict=True):
            assert n_dropped == {n_missing}
            for name, value in values.items():
                tolerance = 5e-3 if name == "ks" else 1e-9  # ks is of a sketch
                torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
    dist.barrier()
    return looks[len(looks) // 5 :]


def main(rank, world, folder, n_updates):
    timeout = datetime.timedelta(seconds=600)
    store = f"file://{folder}/store-soak"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    torch.set_num_threads(1)
    looks = soak(rank, world, folder, n_updates)
    memory, files = zip(*looks, strict=True)
    (folder / f"{rank}.looks").write_text(json.dumps(looks))
    assert max(memory) - memory[0] < MOST_GROWTH, f"memory grew: {memory}"
    assert max(files) <= files[0], f"open files grew: {files}"
    dist.destroy_process_group()


if __name__ == "__main__":
    _, _, own, of, where, updates = sys.argv
    main(int(own), int(of), Path(where), int(updates))
