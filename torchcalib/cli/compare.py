"""The command `torchcalib compare [NAME=]FILES [NAME=]FILES ...`."""

import argparse
from collections.abc import Iterator, Mapping

from torch import Tensor

from torchcalib.cli.files import check_logits, check_pages, in_rows
from torchcalib.cli.inputs import make_place, opened_systems
from torchcalib.cli.messages import computing, output, working
from torchcalib.cli.systems import System
from torchcalib.io.opening import PIECE_BYTES, PredictionFiles
from torchcalib.io.rows import Rows
from torchcalib.reporting.catalogue import check_size
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.render import terminal


def compare(arguments: argparse.Namespace, systems: Mapping[str, System]) -> None:
    """Compare the predictions of several systems (models), then write and print the comparison."""
    if arguments.out is not None:
        check_pages(arguments.out)
        make_place(arguments.out, [path for system in systems.values() for path in system.paths])
    files = opened_systems(arguments, systems)
    first = next(iter(files.values()))
    builder = ComparisonBuilder(
        tuple(files),
        task=first.task_of_report,
        class_names=first.source.class_names or None,
        n_bins=arguments.n_bins,
        right=arguments.right,
        nan_policy=arguments.nan_policy,
        from_logits={name: predictions.source.from_logits for name, predictions in files.items()},
        ignore_index=first.ignore_index,
        class_axis=-1,  # the last axis in a file contains the classes
    )
    check_size(first.task, first.source.shape[-1], arguments.n_bins)  # fail early, before rows are read
    with working(f"reading {len(files)} systems", first.n_rows) as advance:
        row = 1
        for parts in _aligned_chunks(files):
            shared = _common_rows(parts, row)
            with in_rows(row, len(shared)):
                for name, predictions in files.items() if row == 1 else ():
                    check_logits(arguments, predictions, parts[name].preds, f"in system `{name}`")
                preds = {name: rows.preds for name, rows in parts.items()}
                builder.update(preds, shared.target, weights=shared.weights, clusters=shared.clusters)
            row += len(shared)
            advance(len(shared))
    with computing("computing differences and their intervals"):
        compared = builder.comparison({name: predictions.source.in_words() for name, predictions in files.items()})
    with working("writing the files"):
        paths = () if arguments.out is None else compared.save(arguments.out, diagrams=arguments.diagrams)
    if arguments.json:
        output(compared.to_json())
        return
    terminal.show_comparison(compared, arguments.all)
    terminal.show_paths(paths)


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
    """Return the rows of the first system, after a check that all systems have the same targets, weights and clusters.

    `row` is the number of the first row, from 1.
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
                    f"`{name}` in row {row + k:,}, the first that differs. Compare predictions of the same rows."
                )
    return rows


def _text_of(values: Tensor) -> str:
    flat = values.flatten()
    shown = ", ".join(f"{value:g}" if values.is_floating_point() else f"{value}" for value in flat[:6].tolist())
    return f"{shown}, ..." if len(flat) > 6 else shown
