"""The command `torchcalib report FILE ...`, in one process or in several processes of a launcher."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from hashlib import blake2b
from operator import add
from pathlib import Path

from torchcalib.cli.inputs import PIECE_BYTES, check_logits, in_rows, opened
from torchcalib.cli.progress import working
from torchcalib.cli.ranks import Ranks
from torchcalib.cli.results import check_places, finish, no_calibrator
from torchcalib.io.errors import NoSamplesError
from torchcalib.io.opening import PredictionFiles
from torchcalib.io.paths import share_of
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.catalogue import check_size
from torchcalib.reporting.render import terminal

_FEW_ROWS = 20
"""Largest number of rows for which equal targets in two shards cause no warning: they may be a coincidence."""


def run(arguments: argparse.Namespace, paths: Sequence[Path], ranks: Ranks) -> None:
    """Read the files, then write and print their report."""
    ranks.check_same("files", [(str(path), path.stat().st_size) for path in paths])
    with ranks.agreed():
        if ranks.is_first:
            check_places(arguments, paths)
        with working("opening the files", shown=ranks.is_first):
            files = _opened(arguments, share_of(paths, ranks.rank, ranks.n_ranks))
        if ranks.n_ranks > 1 and files is not None and files.has_names_of_labels and arguments.class_names is None:
            raise ValueError(
                "--class-names must be given if several processes read text labels, got none. Pass the names of all "
                "classes in the order of the predictions."
            )
    warnings: list[str] = []
    with ranks.agreed():
        part = None if files is None else _accumulated(arguments, files, len(paths), ranks, warnings)
    parts = ranks.gathered(part)
    with ranks.agreed():
        if ranks.is_first:
            if not parts:
                raise NoSamplesError(paths[0])
            finish(reduce(add, parts), arguments, warnings)


def _opened(arguments: argparse.Namespace, paths: Sequence[Path]) -> PredictionFiles | None:
    """Open the files of this rank. Return None without files or rows, because other ranks may have rows."""
    try:
        return opened(arguments, paths) if paths else None
    except NoSamplesError:
        return None


def _accumulated(
    arguments: argparse.Namespace, files: PredictionFiles, n_files: int, ranks: Ranks, warnings: list[str]
) -> ReportBuilder:
    """Accumulate the files of this rank, and append a message to `warnings` for files with the same targets.

    `n_files` is the total number of files on all ranks.
    """
    source = files.source
    builder = ReportBuilder(
        task=files.task,
        class_names=source.class_names or None,
        n_bins=arguments.n_bins,
        right=arguments.right,
        with_calibration=not arguments.no_calibration,
        with_intervals=not arguments.no_intervals,
        source=source,
        from_logits=source.from_logits,
        class_axis=-1,  # the last axis in a file contains the classes
        ignore_index=arguments.ignore_index,
        nan_policy=arguments.nan_policy,
    )
    check_size(files.task, source.shape[-1], arguments.n_bins)  # fail early, before rows are read
    several = ranks.n_ranks > 1
    reading = f"rank {ranks.rank} of {ranks.n_ranks}, reading" if several else "reading"
    seen: dict[tuple[int, bytes], str] = {}
    total = f" ({n_files} on all ranks)" if several else ""
    with terminal.progress(files.n_rows, reading, shown=ranks.is_first) as advance:
        for k, reader in enumerate(files.readers, 1):
            names = reader.paths
            label = " + ".join(path.name for path in names)
            advance(0, f"{reading} {label}, file {k} of {len(source.files)}{total}")
            where = f" of `{names[0]}`" if n_files > len(names) else ""
            first, digest, is_constant = 1, blake2b(), True
            for rows in files.chunks_of(reader, PIECE_BYTES):
                whole = len(rows) == files.n_rows
                with nullcontext() if whole else in_rows(first, len(rows), where):
                    if first == 1:
                        check_logits(arguments, files, rows.preds, f"in `{names[0]}`")
                    builder.update(**vars(rows))
                digest.update(rows.target.numpy().tobytes())
                is_constant &= bool((rows.target == rows.target.flatten()[0]).all())
                first += len(rows)
                if arguments.save_calibrator is not None and (why_not := builder.why_no_calibration()):
                    raise no_calibrator(why_not)
                advance(len(rows))
            same = seen.setdefault((first, digest.digest()), str(names[0]))
            if same != str(names[0]) and first > _FEW_ROWS and not is_constant:
                warnings.append(
                    f"`{same}` and `{names[0]}` have the same {first - 1:,} targets in the same order, and their "
                    f"predictions are pooled. If these are two models, run torchcalib compare {same} {names[0]}."
                )
    return builder
