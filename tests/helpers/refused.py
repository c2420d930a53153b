"""Writers of unreadable files, and the check that each raises an error of one line."""

import numpy as np
import torch
from helpers.written import write_parquet

from torchcalib.files import InputError, open_predictions

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 3)).astype(np.float32)
PROBS = RNG.uniform(size=7)
LABELS = np.array([0, 2, 1, 1, 0, 2, 2])
HITS = LABELS % 2
WEIGHTS = np.array([1, 0, 2, 1, 3, 1, 1])


def assert_refused(table, folder, monkeypatch):
    """Check that every entry (writer, words of the error, options) raises `InputError`. All failures are reported."""
    wrong = {}
    for k, (name, (write, words, *options)) in enumerate(table.items()):
        (folder / str(k)).mkdir()
        monkeypatch.chdir(folder / str(k))
        try:
            for _ in open_predictions(write(folder / str(k)), **dict(*options)).chunks(max_bytes=4096):
                pass
            said = "nothing was raised"
        except InputError as error:
            said = str(error)
        if words not in said or "\n" in said or not said.endswith((".", "...")):
            wrong[name] = said
    assert wrong == {}


def npz(**arrays):
    def write(folder):
        np.savez(folder / "a.npz", **arrays)
        return ["a.npz"]

    return write


def text(name, content):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [name]

    return write


def table(**columns):
    def write(folder):
        write_parquet(folder / "a.parquet", columns)
        return ["a.parquet"]

    return write


def saved(content):
    def write(folder):
        torch.save(content, folder / "a.pt")
        return ["a.pt"]

    return write


def npys(**arrays):
    def write(folder):
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)
        return [f"{name}.npy" for name in arrays]

    return write


def shards(*arrays):
    def write(folder):
        for i, held in enumerate(arrays):
            np.savez(folder / f"{i}.npz", **held)
        return [f"{i}.npz" for i in range(len(arrays))]

    return write


def cut(write, keep):
    """Return a writer of the same file, truncated to the share `keep`."""

    def written(folder):
        (name,) = write(folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])
        return [name]

    return written
