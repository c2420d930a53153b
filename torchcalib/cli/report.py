"""`torchcalib report FILE ...`, in one process or in several that a launcher has started."""

import argparse
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from torchcalib.cli.ranks import Ranks, together
from torchcalib.cli.reading import PIECE_BYTES, add_input_options, in_rows, opened
from torchcalib.cli.results import add_result_options, check_places, finish, no_calibrator
from torchcalib.core.arguments import check_count
from torchcalib.io.finding import expanded, share_of
from torchcalib.io.opening import NoSamplesError, PredictionFiles, existing
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.metrics import check_size
from torchcalib.reporting.saving import parts_of_ranks


def add_to(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report",
        help="scores, calibration errors, tables and diagrams of a file of predictions",
        description="Read predictions and targets, print how well calibrated they are, and write a full report. "
        "Started by torchrun, each process reads its share of the files, and the first one reports.",
        allow_abbrev=False,
    )
    report.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .csv, .parquet (several are shards of one data set), or a pair of .npy files; "
        "a quoted pattern such as 'shards/*.npz' stands for all that it matches, in the order of their names",
    )
    add_result_options(report).add_argument(
        "--no-calibration", action="store_true", help="try no calibrators, which takes longer than all the rest"
    )
    report.add_argument("--no-intervals", action="store_true", help="no bootstrap intervals, which take some seconds")
    report.add_argument(
        "--groups",
        metavar="NAME",
        help="key or column of the groups of rows, whole numbers or text, of which the worst are listed "
        "(-1 or an empty text: none)",
    )
    add_input_options(report)
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    with together() as ranks:
        with ranks.agreed():
            from torchcalib.reporting import terminal  # noqa: F401 - needs the extra `report`, as does the page

            check_count("n_bins", arguments.n_bins)
            paths = existing(expanded(arguments.files))
            sizes = [(str(path), path.stat().st_size) for path in paths]
            if ranks.is_first:
                check_places(arguments, paths)
        ranks.check_same("files", sizes)
        with ranks.agreed():
            files = _opened_share(arguments, paths, ranks)
        with ranks.agreed():
            part = None if files is None else _read(arguments, files, len(paths), ranks)
        parts = parts_of_ranks(part, ranks.group) if ranks.n_ranks > 1 else [part] if part else []
        with ranks.agreed():
            if ranks.is_first:
                if not parts:
                    raise NoSamplesError(paths[0])
                finish(reduce(add, parts), arguments)


def _opened_share(arguments: argparse.Namespace, paths: Sequence[Path], ranks: Ranks) -> PredictionFiles | None:
    """Open the files of this rank; None if there are none, or none with rows, which says nothing about the others."""
    mine = share_of(paths, ranks.rank, ranks.n_ranks)
    try:
        return opened(arguments, mine) if mine else None
    except NoSamplesError:
        return None


def _read(arguments: argparse.Namespace, files: PredictionFiles, n_files: int, ranks: Ranks) -> ReportBuilder:
    """Read the files of this rank, out of so many in all."""
    from torchcalib.reporting import terminal

    check_size(files.task, files.shape[-1], arguments.n_bins)  # before the first row is read
    builder = ReportBuilder(
        task=files.task,
        n_bins=arguments.n_bins,
        right=arguments.right,
        with_calibration=not arguments.no_calibration,
        with_intervals=not arguments.no_intervals,
        source=files.source,
        from_logits=files.from_logits,
        ignore_index=arguments.ignore_index,
        nan_policy=arguments.nan_policy,
    )
    whose = f"rank {ranks.rank} of {ranks.n_ranks}, " if ranks.n_ranks > 1 else ""
    with terminal.progress(files.n_rows, f"{whose}reading", shown=ranks.is_first) as advance:
        for k, shard in enumerate(files.shards(), 1):
            name = " + ".join(path.name for path in shard.paths)
            advance(0, f"{whose}reading {name}, file {k} of {len(files.paths)}{f', of {n_files} in all' * bool(whose)}")
            of = f" of `{shard.paths[0]}`" if n_files > len(shard.paths) else ""
            first = 1
            for preds, target, weights, of_rows in shard.grouped_chunks(PIECE_BYTES):
                groups, names = (None, None) if of_rows is None else of_rows
                with in_rows(first, len(preds), of):
                    builder.update(preds, target, weights=weights, groups=groups, group_names=names)
                first += len(preds)
                if arguments.save_calibrator is not None and (why_not := builder.why_no_calibration()):
                    raise no_calibrator(why_not)
                advance(len(preds))
    return builder
