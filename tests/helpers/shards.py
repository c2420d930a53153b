"""Data sets, their division into shards, and comparison of their reports."""

import math

import numpy as np
import torch
from helpers.prediction_files import WRITERS

TASKS = ("binary", "multiclass", "multilabel")


def data_set(task, n=240, weights="none", soft=False, seed=0, parts=False):
    """Return logits, targets and weights as arrays, by their names in files."""
    rng = np.random.default_rng(seed)
    shape = (n,) if task == "binary" else (n, 4)
    logits = 2 * rng.normal(size=shape).astype(np.float32)
    if soft:
        target = rng.dirichlet(np.ones(4), n) if task == "multiclass" else rng.random(shape).round(1)
    elif task == "multiclass":
        target = (logits / 2 + rng.gumbel(size=shape)).argmax(-1)
    else:
        target = (logits / 2 + rng.logistic(size=shape) > 0).astype(int)
    arrays = {"logits": logits, "targets": target}
    if weights != "none":
        arrays["weights"] = rng.integers(0, 3, n) if weights == "counts" else rng.random(n)
    if parts:  # each third of the rows has another group
        arrays |= {"groups": np.arange(n) * 3 // n, "clusters": np.arange(n) // 2}
    return arrays


def cut(arrays, *ends):
    """Cut the rows at the indices `ends` into pieces."""
    n = len(arrays["targets"])
    starts = (0, *ends)
    return [{name: values[a:b] for name, values in arrays.items()} for a, b in zip(starts, (*ends, n), strict=True)]


def add_to(builder, arrays):
    builder.update(
        **{
            {"logits": "preds", "targets": "target"}.get(name, name): torch.from_numpy(np.array(values))
            for name, values in arrays.items()
        }
    )


def assert_same(found, expected, where="report"):
    """Compare reports as plain values: equal text and counts, other numbers to 1e-12. Names of files may differ."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            if name != "files":
                assert_same(found[name], value, f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for k, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, theirs, f"{where}/{k}")
    elif isinstance(expected, float) and not expected.is_integer():
        assert math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-12), f"{where}: {found} != {expected}"
    elif isinstance(expected, float):
        same = found == expected or (not where.endswith("/n") and math.isclose(found, expected, abs_tol=1e-12))
        assert same, f"{where}: {found} != {expected}"
    else:
        assert found == expected, where


def shards(folder, arrays, *ends, suffix="npz"):
    """Write the rows to one file and to several. Return the name of the single file and the pattern of the others."""
    folder.mkdir(exist_ok=True)
    WRITERS[suffix](folder / f"whole.{suffix}", arrays)
    for k, part in enumerate(cut(arrays, *ends)):
        WRITERS[suffix](folder / f"shard-{k}.{suffix}", part)
    return str(folder / f"whole.{suffix}"), str(folder / f"shard-*.{suffix}")
