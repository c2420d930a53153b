"""`torchcalib report FILE ...`, in one process or in several started by a launcher."""

from __future__ import annotations

from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcalib.cli.inputs import PIECE_BYTES, add_input_options, in_rows, opened
from torchcalib.cli.ranks import Ranks, joined
from torchcalib.cli.results import add_result_options, check_places, finish, no_calibrator
from torchcalib.io.errors import NoSamplesError
from torchcalib.io.paths import check_paths, expanded, share_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torchcalib.io.opening import PredictionFiles
    from torchcalib.reporting.building import ReportBuilder


def add_to(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report",
        help="scores, calibration errors, tables and diagrams of a file of predictions",
        description="Read predictions and targets, print calibration errors and scores, and write a full report. "
        "If torchrun starts several processes, each reads its share of the files, and the first one reports.",
        allow_abbrev=False,
    )
    report.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .csv, .parquet (several are shards of one data set), or a pair of .npy files; "
        "a quoted pattern such as 'shards/*.npz' stands for all matches, sorted by name",
    )
    add_result_options(report).add_argument(
        "--no-calibration", action="store_true", help="try no calibrators, which take most of the time"
    )
    report.add_argument("--no-intervals", action="store_true", help="no bootstrap intervals, which take some seconds")
    report.add_argument(
        "--groups",
        metavar="NAME",
        help="key or column of the groups of rows, integers or text; the report lists the worst "
        "(-1 or an empty text: no group)",
    )
    add_input_options(report)
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    with joined() as ranks:
        with ranks.agreed():
            paths = check_paths(expanded(arguments.files))
            sizes = [(str(path), path.stat().st_size) for path in paths]
            if ranks.is_first:
                check_places(arguments, paths)
        ranks.check_same("files", sizes)
        with ranks.agreed():
            files = _opened_share(arguments, share_of(paths, ranks.rank, ranks.n_ranks))
        with ranks.agreed():
            part = None if files is None else _read(arguments, files, len(paths), ranks)
        parts = ranks.gathered(part)
        with ranks.agreed():
            if ranks.is_first:
                if not parts:
                    raise NoSamplesError(paths[0])
                finish(reduce(add, parts), arguments)


def _opened_share(arguments: argparse.Namespace, paths: Sequence[Path]) -> PredictionFiles | None:
    """Open the files of this rank; None if it has no files or no rows, because other ranks may have some."""
    try:
        return opened(arguments, paths) if paths else None
    except NoSamplesError:
        return None


def _read(arguments: argparse.Namespace, files: PredictionFiles, n_files: int, ranks: Ranks) -> ReportBuilder:
    """Read the files of this rank; all ranks together read `n_files`."""
    from torchcalib.reporting import terminal
    from torchcalib.reporting.building import ReportBuilder
    from torchcalib.reporting.metrics import check_size

    source = files.source
    builder = ReportBuilder(
        task=files.task,
        n_bins=arguments.n_bins,
        right=arguments.right,
        with_calibration=not arguments.no_calibration,
        with_intervals=not arguments.no_intervals,
        source=source,
        from_logits=source.from_logits,
        ignore_index=arguments.ignore_index,
        nan_policy=arguments.nan_policy,
    )
    check_size(files.task, source.shape[-1], arguments.n_bins)  # before any row is read
    several = ranks.n_ranks > 1
    reading = f"rank {ranks.rank} of {ranks.n_ranks}, reading" if several else "reading"
    with terminal.progress(files.n_rows, reading, shown=ranks.is_first) as advance:
        for k, shard in enumerate(files.shards, 1):
            names = shard.source.files
            in_all = f", of {n_files} in all" if several else ""
            advance(
                0, f"{reading} {' + '.join(Path(name).name for name in names)}, file {k} of {len(source.files)}{in_all}"
            )
            of = f" of `{names[0]}`" if n_files > len(names) else ""
            first = 1
            for rows in shard.chunks(PIECE_BYTES):
                with in_rows(first, len(rows), of):
                    builder.update(**vars(rows))
                first += len(rows)
                if arguments.save_calibrator is not None and (why_not := builder.why_no_calibration()):
                    raise no_calibrator(why_not)
                advance(len(rows))
    return builder
