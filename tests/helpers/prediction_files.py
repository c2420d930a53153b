"""Writers of prediction files in every format, and arrays to write."""

import gzip
import json
from functools import partial

import numpy as np
import torch

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 3)).astype(np.float32)
PROBS = RNG.uniform(size=7)
LABELS = np.array([0, 2, 1, 1, 0, 2, 2])
HITS = LABELS % 2
WEIGHTS = np.array([1, 0, 2, 1, 3, 1, 1])


def write_npz(path, arrays):
    np.savez_compressed(path, **arrays)


def tensors(arrays):
    return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}


def write_safetensors(path, arrays):
    from safetensors.torch import save_file

    save_file(tensors(arrays), path)


def write_csv(path, arrays, delimiter=","):
    """Write classes as numbered columns: `logits_0, logits_1, ...`."""
    columns = flat(arrays)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    path.write_text("\n".join([delimiter.join(columns), *(delimiter.join(map(str, row)) for row in rows)]) + "\n")


def write_csv_gz(path, arrays):
    write_csv(path, arrays)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_jsonl(path, arrays):
    rows = zip(*(np.asarray(values).tolist() for values in arrays.values()), strict=True)
    path.write_text("".join(json.dumps(dict(zip(arrays, row, strict=True))) + "\n" for row in rows))


def write_json(path, arrays):
    write_jsonl(path, arrays)
    path.write_text(json.dumps({"results": [json.loads(line) for line in path.read_text().splitlines()]}))


def write_parquet(path, arrays, **options):
    """Write classes as list columns."""
    import pyarrow as pa
    from pyarrow import parquet

    has_classes = {name: isinstance(values, np.ndarray) and values.ndim > 1 for name, values in arrays.items()}
    columns = {name: list(values) if has_classes[name] else values for name, values in arrays.items()}
    parquet.write_table(pa.table(columns), path, **options)


WRITERS = {
    "npz": write_npz,
    "pt": lambda path, arrays: torch.save(tensors(arrays), path),
    "safetensors": write_safetensors,
    "csv": write_csv,
    "csv.gz": write_csv_gz,
    "tsv": partial(write_csv, delimiter="\t"),
    "json": write_json,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "numbered.parquet": lambda path, arrays: write_parquet(path, flat(arrays)),  # classes as numbered columns
}


def flat(arrays):
    """Return each column of arrays with two axes as a separate numbered array."""
    columns = {}
    for name, values in arrays.items():
        columns |= {name: values} if values.ndim == 1 else numbered(f"{name}_", values)
    return columns


def numbered(stem, values):
    return {f"{stem}{i}": column for i, column in enumerate(values.T)}
