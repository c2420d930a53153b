"""`torchcalib compare [NAME=]FILES [NAME=]FILES ...`."""

import argparse
import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchcalib.cli.reading import PIECE_BYTES, add_input_options, in_rows, opened
from torchcalib.cli.results import make_folder
from torchcalib.core.arguments import check_count
from torchcalib.io.finding import expanded
from torchcalib.io.opening import PredictionFiles
from torchcalib.io.reader import printable
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.metrics import check_size


def add_to(commands: Any) -> None:
    """Add the command."""
    compare = commands.add_parser(
        "compare",
        help="scores and calibration errors of several systems on the same targets, with intervals of the differences",
        description=(
            "Compare systems that predicted the same targets: each is a file, or its shards, of any format. The first "
            "one is what the others are compared with."
        ),
        allow_abbrev=False,
    )
    compare.add_argument(
        "systems",
        nargs="+",
        metavar="[NAME=]FILES",
        help="a file, a pattern in quotes ('shards/*.parquet'), or several with commas between them (a pair of .npy "
        "files); its name is by default that of the file",
    )
    compare.add_argument("--out", metavar="DIR", help="write compare.html, compare.json and the picture there")
    add_input_options(compare)
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from torchcalib.reporting import terminal  # needs the extra `report`, as does the page

    if arguments.out is not None:
        from torchcalib.reporting import html

        make_folder(arguments.out)
    check_count("n_bins", arguments.n_bins)
    files = {name: opened(arguments, paths) for name, paths in _named(arguments.systems).items()}
    _check_alike(files)
    first = next(iter(files.values()))
    check_size(first.task, first.shape[-1], arguments.n_bins)  # before the first row is read
    builder = ComparisonBuilder(
        tuple(files),
        task=first.task,
        n_bins=arguments.n_bins,
        right=arguments.right,
        nan_policy=arguments.nan_policy,
        from_logits={name: of.from_logits for name, of in files.items()},
        ignore_index=arguments.ignore_index,
    )
    with terminal.progress(first.n_rows, f"reading {len(files)} systems") as advance:
        row = 1
        for pieces in _together(files):
            target, weights, n = _shared(pieces, row)
            with in_rows(row, n):
                builder.update({name: piece.preds for name, piece in pieces.items()}, target, weights=weights)
            row += n
            advance(n)
    compared = builder.comparison({name: of.source.in_words() for name, of in files.items()})
    paths = () if arguments.out is None else html.save_comparison(compared, arguments.out)
    terminal.show_comparison(compared)
    terminal.show_paths(paths)


class _Piece(NamedTuple):
    """Some rows of one system."""

    preds: Tensor
    target: Tensor
    weights: Tensor | None

    def rows(self, start: int, stop: int | None) -> "_Piece":
        run = slice(start, stop)
        return _Piece(self.preds[run], self.target[run], None if self.weights is None else self.weights[run])


def _named(systems: Sequence[str]) -> dict[str, tuple[Path, ...]]:
    """The files of every system, by its name."""
    found: list[tuple[str, tuple[Path, ...]]] = []
    unnamed: list[int] = []
    for given in systems:
        name, equals, files = given.partition("=")
        if not equals or Path(given).exists():
            unnamed.append(len(found))
            name, files = "", given
        elif not name.strip():
            raise ValueError(f"A system must be NAME=FILES with a name, got {given!r}. Write a name before the =.")
        found.append((name, _files_of(files)))
    stems = _stems([found[k][1][0] for k in unnamed], [systems[k] for k in unnamed])
    for k, stem in zip(unnamed, stems, strict=True):
        found[k] = (stem, found[k][1])
    names = [printable(name) for name, _ in found]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"Systems must have a name each, got `{twice[0]}` twice. Name one with NAME=FILES.")
    if len(names) < 2:
        raise ValueError("Systems must be two at least, got one. Name another file, or use `torchcalib report`.")
    return dict(zip(names, (files for _, files in found), strict=True))


def _files_of(given: str) -> tuple[Path, ...]:
    """A file as it is; a pattern as what it matches; several, each with a comma before the next."""
    if Path(given).exists():
        return (Path(given),)
    return expanded(given.split(","))


def _stems(files: Sequence[Path], given: Sequence[str]) -> list[str]:
    """Names for systems without: the stem of the file; with what tells them apart where stems are equal.

    A pattern names the files of a folder, so it goes by that folder.
    """
    wild = [glob.has_magic(one) and not Path(one).exists() for one in given]
    short = [f.parent.name or f.stem if w else f.stem for f, w in zip(files, wild, strict=True)]
    for longer in ([f"{f.parent.name}/{s}" for f, s in zip(files, short, strict=True)], list(given)):
        times = Counter(short)
        short = [long if times[name] > 1 else name for name, long in zip(short, longer, strict=True)]
    return short


def _check_alike(files: Mapping[str, PredictionFiles]) -> None:
    """Check all that can be told before a row is read."""
    for (a, one), (b, other) in pairwise(files.items()):
        for what, here, there in (
            ("task", one.task, other.task),
            ("number of rows", one.n_rows, other.n_rows),
            ("shape of a row of predictions", one.shape[1:], other.shape[1:]),
            ("weights, or none", *("some" if of.weights_name else "none" for of in (one, other))),
        ):
            if here != there:
                raise ValueError(
                    f"Systems must have one {what}, got {here} in `{a}` and {there} in `{b}`. "
                    "Compare predictions of the same rows."
                )


def _together(files: Mapping[str, PredictionFiles]) -> Iterator[dict[str, _Piece]]:
    """Yield pieces of equally many rows of all systems, whatever pieces their files come in."""
    streams = {name: of.chunks(PIECE_BYTES) for name, of in files.items()}
    held: dict[str, _Piece] = {}
    while True:
        for name, stream in streams.items():
            if name not in held and (piece := next(stream, None)) is not None:
                held[name] = _Piece(*piece)
        if not held:
            return
        n = min(len(piece.preds) for piece in held.values())
        yield {name: held[name].rows(0, n) for name in streams}
        held = {name: piece.rows(n, None) for name, piece in held.items() if len(piece.preds) > n}


def _shared(pieces: Mapping[str, _Piece], row: int) -> tuple[Tensor, Tensor | None, int]:
    """The targets and weights that all systems have, and the number of rows; `row` is that of the first."""
    (first, piece), *others = pieces.items()
    for name, other in others:
        for what, a, b in (("targets", piece.target, other.target), ("weights", piece.weights, other.weights)):
            if a is None or b is None:
                continue
            if a.shape != b.shape:
                raise ValueError(
                    f"Systems must have the same {what}, got rows of shape {tuple(a.shape[1:])} in `{first}` and "
                    f"{tuple(b.shape[1:])} in `{name}`. Compare predictions of the same rows."
                )
            differ = (a != b) & ~(a.isnan() & b.isnan())
            if differ.any():
                k = int(differ.flatten(1).any(1).int().argmax()) if differ.dim() > 1 else int(differ.int().argmax())
                raise ValueError(
                    f"Systems must have the same {what}, got {_words(a[k])} in `{first}` and {_words(b[k])} in "
                    f"`{name}` in row {row + k:,}, the first that differs. Compare predictions of the same rows."
                )
    return piece.target, piece.weights, len(piece.preds)


def _words(values: Tensor) -> str:
    """The values of a row, or the first of them."""
    flat = values.flatten()
    shown = ", ".join(f"{value:g}" if values.is_floating_point() else f"{value}" for value in flat[:6].tolist())
    return f"{shown}, ..." if len(flat) > 6 else shown
