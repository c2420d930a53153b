"""`torchcalib compare [NAME=]FILES [NAME=]FILES ...`."""

import argparse
from collections.abc import Iterator, Mapping
from itertools import pairwise

from torch import Tensor

from torchcalib.cli.inputs import PIECE_BYTES, check_logits, in_rows, opened
from torchcalib.cli.parser import System
from torchcalib.cli.progress import working
from torchcalib.cli.ranks import on_first
from torchcalib.cli.results import make_folder
from torchcalib.io.opening import PredictionFiles, Rows
from torchcalib.reporting import terminal
from torchcalib.reporting.accumulators import check_size
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.confidences import comparison_of_confidences


@on_first
def run(arguments: argparse.Namespace, systems: Mapping[str, System]) -> None:
    """Compare the systems, and write and print the comparison."""
    if arguments.out is not None:
        from torchcalib.reporting import html  # noqa: F401 - needs the extra `report`

        make_folder(arguments.out)
    with working("opening the files"):
        files = {name: opened(arguments, of.paths, of.preds) for name, of in systems.items()}
    _check_alike(files)
    first = next(iter(files.values()))
    builder = ComparisonBuilder(
        tuple(files),
        task=first.task,
        class_names=first.source.class_names or None,
        n_bins=arguments.n_bins,
        right=arguments.right,
        nan_policy=arguments.nan_policy,
        from_logits={name: of.source.from_logits for name, of in files.items()},
        ignore_index=arguments.ignore_index,
        class_axis=-1,  # as in all files
    )
    check_size(first.task, first.source.shape[-1], arguments.n_bins)  # before any row is read
    with terminal.progress(first.n_rows, f"reading {len(files)} systems") as advance:
        row = 1
        for parts in _together(files):
            shared = _shared(parts, row)
            with in_rows(row, len(shared)):
                for name, of in files.items() if row == 1 else ():
                    if of.source.from_logits:
                        check_logits(parts[name].preds, of.task, f"`{of.source.preds}` of system `{name}`")
                preds = {name: rows.preds for name, rows in parts.items()}
                builder.update(preds, shared.target, weights=shared.weights)
            row += len(shared)
            advance(len(shared))
    with working("computing differences and their intervals"):
        compared = builder.comparison({name: of.source.in_words() for name, of in files.items()})
    if first.source.are_confidences:
        compared = comparison_of_confidences(compared)
    with working("writing the files"):
        paths = () if arguments.out is None else compared.save(arguments.out)
    terminal.show_comparison(compared)
    terminal.show_paths(paths)


def _check_alike(files: Mapping[str, PredictionFiles]) -> None:
    """Check what the headers of the files show."""
    for (a, one), (b, other) in pairwise(files.items()):
        for kind, here, there in (
            ("task", _task_in_words(one), _task_in_words(other)),
            ("number of rows", one.n_rows, other.n_rows),
            ("shape of a row of predictions", one.source.shape[1:], other.source.shape[1:]),
            ("order of classes", *_names_of_both(one, other)),
            ("weights, or none", *("some" if of.source.weights else "none" for of in (one, other))),
        ):
            if here != there:
                raise ValueError(
                    f"Systems must have one {kind}, got {here} in `{a}` and {there} in `{b}`. "
                    "Compare predictions of the same rows."
                )


def _task_in_words(files: PredictionFiles) -> str:
    return "confidence" if files.source.are_confidences else files.task


def _names_of_both(one: PredictionFiles, other: PredictionFiles) -> tuple[str, str]:
    """Return the names of classes, where both systems have some."""
    mine, theirs = one.source.class_names, other.source.class_names
    return (", ".join(mine), ", ".join(theirs)) if mine and theirs else ("", "")


def _together(files: Mapping[str, PredictionFiles]) -> Iterator[dict[str, Rows]]:
    """Yield the same rows of all systems, however their files divide them."""
    streams = {name: of.chunks(PIECE_BYTES) for name, of in files.items()}
    held: dict[str, Rows] = {}
    while True:
        for name, stream in streams.items():
            if name not in held and (rows := next(stream, None)) is not None:
                held[name] = rows
        if not held:
            return
        n = min(map(len, held.values()))
        yield {name: held[name][:n] for name in streams}
        held = {name: rows[n:] for name, rows in held.items() if len(rows) > n}


def _shared(parts: Mapping[str, Rows], row: int) -> Rows:
    """Check that all systems have the same targets and weights, and return them; `row` is the number of the first."""
    (first, rows), *others = parts.items()
    for name, other in others:
        for kind, a, b in (("targets", rows.target, other.target), ("weights", rows.weights, other.weights)):
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
                    f"Systems must have the same {kind}, got {_shown(a[k])} in `{first}` and {_shown(b[k])} in "
                    f"`{name}` in row {row + k:,}, the first that differs. Compare predictions of the same rows."
                )
    return rows


def _shown(values: Tensor) -> str:
    """Return the first values of a row as text."""
    flat = values.flatten()
    shown = ", ".join(f"{value:g}" if values.is_floating_point() else f"{value}" for value in flat[:6].tolist())
    return f"{shown}, ..." if len(flat) > 6 else shown
