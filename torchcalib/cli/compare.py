"""`torchcalib compare [NAME=]FILES [NAME=]FILES ...`."""

from __future__ import annotations

import glob
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcalib.cli.inputs import PIECE_BYTES, add_input_options, in_rows, opened
from torchcalib.cli.results import make_folder
from torchcalib.io.errors import printable
from torchcalib.io.paths import check_paths, expanded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from torchcalib.io.opening import PredictionFiles, Rows


def add_to(commands: Any) -> None:
    """Add the command."""
    compare = commands.add_parser(
        "compare",
        help="scores and calibration errors of several systems on the same targets, with intervals of the differences",
        description="Compare the predictions of systems for the same targets. Each system is a file, or its shards, of "
        "any format. The others are compared with the first one.",
        allow_abbrev=False,
    )
    compare.add_argument(
        "systems",
        nargs="+",
        metavar="[NAME=]FILES",
        help="a file, a pattern in quotes ('shards/*.parquet'), or several with commas between them (a pair of .npy "
        "files); the default name is that of the file",
    )
    compare.add_argument("--out", metavar="DIR", help="write compare.html, compare.json and the picture there")
    add_input_options(compare)
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    paths = {name: check_paths(of) for name, of in _named(arguments.systems).items()}
    from torchcalib.reporting import terminal  # needs the extra `report`, as does the page
    from torchcalib.reporting.comparison.building import ComparisonBuilder
    from torchcalib.reporting.metrics import check_size

    if arguments.out is not None:
        from torchcalib.reporting import html

        make_folder(arguments.out)
    files = {name: opened(arguments, of) for name, of in paths.items()}
    _check_alike(files)
    first = next(iter(files.values()))
    builder = ComparisonBuilder(
        tuple(files),
        task=first.task,
        n_bins=arguments.n_bins,
        right=arguments.right,
        nan_policy=arguments.nan_policy,
        from_logits={name: of.source.from_logits for name, of in files.items()},
        ignore_index=arguments.ignore_index,
    )
    check_size(first.task, first.source.shape[-1], arguments.n_bins)  # before any row is read
    with terminal.progress(first.n_rows, f"reading {len(files)} systems") as advance:
        row = 1
        for parts in _together(files):
            shared = _shared(parts, row)
            with in_rows(row, len(shared)):
                preds = {name: rows.preds for name, rows in parts.items()}
                builder.update(preds, shared.target, weights=shared.weights)
            row += len(shared)
            advance(len(shared))
    compared = builder.comparison({name: of.source.in_words() for name, of in files.items()})
    written = () if arguments.out is None else html.save_comparison(compared, arguments.out)
    terminal.show_comparison(compared)
    terminal.show_paths(written)


def _named(systems: Sequence[str]) -> dict[str, tuple[Path, ...]]:
    """Return the files of every system by its name."""
    names: list[str] = []
    paths: list[tuple[Path, ...]] = []
    for given in systems:
        name, equals, files = given.partition("=")
        if not equals or Path(given).exists():
            name, files = "", given
        elif not name.strip():
            raise ValueError(f"A system must be NAME=FILES with a name, got {given!r}. Write a name before the =.")
        names.append(name)
        paths.append((Path(files),) if Path(files).exists() else expanded(files.split(",")))
    unnamed = [k for k, name in enumerate(names) if not name]
    for k, name in zip(unnamed, _default_names([(systems[k], paths[k][0]) for k in unnamed]), strict=True):
        names[k] = name
    names = [printable(name) for name in names]
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"Systems must have a name each, got `{repeated[0]}` twice. Name one with NAME=FILES.")
    if len(names) < 2:
        raise ValueError("Systems must be two at least, got one. Name another file, or use `torchcalib report`.")
    return dict(zip(names, paths, strict=True))


def _default_names(systems: Sequence[tuple[str, Path]]) -> list[str]:
    """Name systems, given as argument and first file: by file, else with folder, else by the whole argument.

    A pattern takes the name of the folder of its files.
    """
    names = []
    for given, file in systems:
        is_pattern = glob.has_magic(given) and not Path(given).exists()
        names.append(file.parent.name or file.stem if is_pattern else file.stem)
    in_folders = [f"{file.parent.name}/{name}" for (_, file), name in zip(systems, names, strict=True)]
    for longer in (in_folders, [given for given, _ in systems]):
        times = Counter(names)
        names = [long if times[name] > 1 else name for name, long in zip(names, longer, strict=True)]
    return names


def _check_alike(files: Mapping[str, PredictionFiles]) -> None:
    """Check what the headers of the files show."""
    for (a, one), (b, other) in pairwise(files.items()):
        for kind, here, there in (
            ("task", one.task, other.task),
            ("number of rows", one.n_rows, other.n_rows),
            ("shape of a row of predictions", one.source.shape[1:], other.source.shape[1:]),
            ("weights, or none", *("some" if of.source.weights else "none" for of in (one, other))),
        ):
            if here != there:
                raise ValueError(
                    f"Systems must have one {kind}, got {here} in `{a}` and {there} in `{b}`. "
                    "Compare predictions of the same rows."
                )


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
