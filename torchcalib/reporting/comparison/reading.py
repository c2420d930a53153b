"""Read the rows of systems to compare from their files, or from DataFrames with all columns."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchcalib.io.opening import PIECE_BYTES, PredictionFiles
from torchcalib.io.rows import Rows


def settings_of(files: Mapping[str, PredictionFiles]) -> dict[str, Any]:
    """Return the arguments of `ComparisonBuilder` that the files of all systems determine."""
    shared = {name: value for name, value in next(iter(files.values())).settings.items() if name != "source"}
    return {**shared, "names": tuple(files), "from_logits": {name: x.source.from_logits for name, x in files.items()}}


def batches_of(files: Mapping[str, PredictionFiles]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of the first row, from 1, and the arguments of `ComparisonBuilder.update`, for all rows.

    With ids, a batch has rows of one system. Otherwise it has the same rows of all systems, which must have the same
    targets, weights and clusters.
    """
    row = 1
    if all(predictions.source.ids is None for predictions in files.values()):
        for parts in _aligned_chunks(files):
            shared = _common_rows(parts, row)
            columns = {"target": shared.target, "weights": shared.weights, "clusters": shared.clusters}
            yield row, {"preds": {name: rows.preds for name, rows in parts.items()}, **columns}
            row += len(shared)
        return
    for name, predictions in files.items():
        row = 1
        for rows in predictions.chunks(PIECE_BYTES):
            columns = {"preds": rows.preds, "target": rows.target, "weights": rows.weights, "clusters": rows.clusters}
            yield row, {key: None if x is None else {name: x} for key, x in {**columns, "ids": rows.ids}.items()}
            row += len(rows)


def _aligned_chunks(files: Mapping[str, PredictionFiles]) -> Iterator[dict[str, Rows]]:
    """Yield the same rows of all systems, by system, in chunks. Systems may divide their rows into different files."""
    streams = {name: predictions.chunks(PIECE_BYTES) for name, predictions in files.items()}
    pending: dict[str, Rows] = {}
    while True:
        for name, stream in streams.items():
            if name not in pending and (rows := next(stream, None)) is not None:
                pending[name] = rows
        if not pending:
            return
        n = min(map(len, pending.values()))
        yield {name: pending[name][:n] for name in streams}
        pending = {name: rows[n:] for name, rows in pending.items() if len(rows) > n}


def _common_rows(parts: Mapping[str, Rows], row: int) -> Rows:
    """Return the rows of the first system. `row` is the number of the first row, from 1.

    Raises:
        ValueError: If systems have different targets, weights or clusters.
    """
    (first, rows), *others = parts.items()
    for name, other in others:
        for kind, a, b in (
            ("targets", rows.target, other.target),
            ("weights", rows.weights, other.weights),
            ("clusters", rows.clusters, other.clusters),
        ):
            if a is None or b is None:
                continue
            if a.shape != b.shape:
                raise ValueError(
                    f"Systems must have the same {kind}, got rows of shape {tuple(a.shape[1:])} in `{first}` and "
                    f"{tuple(b.shape[1:])} in `{name}`. Compare predictions of the same rows."
                )
            differ = ((a != b) & ~(a.isnan() & b.isnan())).reshape(len(a), -1).any(1)
            if differ.any():
                k = int(differ.int().argmax())
                raise ValueError(
                    f"Systems must have the same {kind}, got {_text_of(a[k])} in `{first}` and {_text_of(b[k])} in "
                    f"`{name}` in row {row + k:,}, the first that differs. Compare predictions of the same rows, "
                    "or join them by ids."
                )
    return rows


def _text_of(values: Tensor) -> str:
    """Return the first six values as text."""
    flat = values.flatten()
    shown = ", ".join(f"{value:g}" if values.is_floating_point() else f"{value}" for value in flat[:6].tolist())
    return f"{shown}, ..." if len(flat) > 6 else shown
