"""Arguments of all commands, and the files that they name."""

import argparse
import glob
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchcalib._version import __version__
from torchcalib.io.errors import printable
from torchcalib.io.paths import check_paths, expanded


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. `find` of the parsed arguments checks paths and returns them, by system for `compare`."""
    kind: Any = partial(argparse.ArgumentParser, allow_abbrev=False)
    parser: argparse.ArgumentParser = kind(prog="torchcalib", description="Measure the calibration of classifiers.")
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", parser_class=kind)

    report = commands.add_parser(
        "report",
        help="scores, calibration errors, tables and diagrams of a file of predictions",
        description="Read predictions and targets, print calibration errors and scores, and write a full report. "
        "If torchrun starts several processes, each reads its share of the files, and the first one reports.",
    )
    report.set_defaults(find=lambda arguments: check_paths(expanded(arguments.files)))
    report.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .csv, .parquet (several are shards of one data set), or a pair of .npy files; "
        "a quoted pattern such as 'shards/*.npz' stands for all matches, sorted by name",
    )
    _add_result_options(report).add_argument(
        "--no-calibration", action="store_true", help="try no calibrators, which take most of the time"
    )
    report.add_argument("--no-intervals", action="store_true", help="no bootstrap intervals, which take some seconds")
    report.add_argument(
        "--groups",
        metavar="NAME",
        help="key or column of the groups of rows, integers or text; the report lists the worst "
        "(-1 or an empty text: no group)",
    )
    _add_input_options(report)

    merge = commands.add_parser(
        "merge",
        help="one report of parts that `torchcalib report --save-state` wrote",
        description="Print and write the report of several parts: that of one run over all their files, in this order.",
    )
    merge.set_defaults(find=_parts)
    merge.add_argument(
        "files",
        nargs="+",
        metavar="PART",
        help="a file of `torchcalib report --save-state` or of `torchcalib merge --save-state`; a quoted pattern such "
        "as 'part*.pt' stands for all matches, sorted by name",
    )
    _add_result_options(merge)

    compare = commands.add_parser(
        "compare",
        help="scores and calibration errors of several systems on the same targets, with intervals of the differences",
        description="Compare the predictions of systems for the same targets. Each system is a file, or its shards, of "
        "any format. The others are compared with the first one.",
    )
    compare.set_defaults(find=_systems)
    compare.add_argument(
        "systems",
        nargs="+",
        metavar="[NAME=]FILES",
        help="a file, a pattern in quotes ('shards/*.parquet'), or several with commas between them (a pair of .npy "
        "files); the default name is that of the file",
    )
    compare.add_argument("--out", metavar="DIR", help="write compare.html, compare.json and the picture there")
    _add_input_options(compare)

    demo = commands.add_parser(
        "demo",
        help="train a small classifier until it is over-confident, and report on it",
        description="Train a small classifier on scikit-learn's digits and print its calibration in every epoch.",
    )
    demo.set_defaults(find=lambda _: ())
    demo.add_argument("--out", metavar="DIR", default="demo-report", help="where to write (default: demo-report)")
    demo.add_argument("--epochs", type=int, default=40, help="default: 40")
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    return parser


def _add_input_options(parser: argparse.ArgumentParser) -> None:
    for role, kind in (("preds", "predictions"), ("target", "targets"), ("weights", "weights")):
        parser.add_argument(f"--{role}", metavar="NAME", help=f"key or column of the {kind} (default: by common names)")
    logits = parser.add_mutually_exclusive_group()
    logits.add_argument("--from-logits", action="store_true", help="predictions are logits (default: by their name)")
    logits.add_argument("--from-probs", action="store_true", help="predictions are probabilities (default: by name)")
    parser.add_argument(
        "--task", choices=("binary", "multiclass", "multilabel"), help="kind of targets (default: by the shapes)"
    )
    parser.add_argument(
        "--n-bins",
        type=int,
        default=15,
        metavar="B",
        help="number of bins, of equal width, and for ACE of equal mass (default: 15)",
    )
    parser.add_argument("--right", action="store_true", help="bins are (a, b] instead of [a, b)")
    parser.add_argument("--ignore-index", type=int, metavar="K", help="drop rows with this target")
    parser.add_argument(
        "--nan-policy",
        choices=("raise", "drop"),
        default="raise",
        help="rows with NaN, or with infinities that leave no distribution: an error, or dropped and counted "
        "(default: raise)",
    )


def _add_result_options(parser: argparse.ArgumentParser) -> Any:
    """Add the places of results; return the group of options that exclude a calibrator."""
    parser.add_argument("--out", metavar="DIR", help="write report.html, report.json and the diagrams there")
    parser.add_argument(
        "--save-state",
        metavar="PATH",
        help="write a part of a larger report for `torchcalib merge`; without --out and --save-calibrator, compute "
        "nothing else",
    )
    calibration = parser.add_mutually_exclusive_group()
    calibration.add_argument(
        "--save-calibrator",
        metavar="PATH",
        help="fit the recommended calibrator to all samples and write it for torchcalib.calibration.load_calibrator",
    )
    return calibration


def _parts(arguments: argparse.Namespace) -> tuple[Path, ...]:
    paths = expanded(arguments.files)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("every part must be named once, got one twice. Remove the repetition.")
    for path in paths:
        path.stat()  # an error if there is no such file
    return paths


def _systems(arguments: argparse.Namespace) -> dict[str, tuple[Path, ...]]:
    """Return the files of every system by its name."""
    names: list[str] = []
    paths: list[tuple[Path, ...]] = []
    for given in arguments.systems:
        name, equals, files = given.partition("=")
        if not equals or Path(given).exists():
            name, files = "", given
        elif not name.strip():
            raise ValueError(f"A system must be NAME=FILES with a name, got {given!r}. Write a name before the =.")
        names.append(name)
        paths.append((Path(files),) if Path(files).exists() else expanded(files.split(",")))
    unnamed = [(given, of[0]) for given, of, name in zip(arguments.systems, paths, names, strict=True) if not name]
    defaults = iter(_default_names(unnamed))
    names = [printable(name or next(defaults)) for name in names]
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"Systems must have a name each, got `{repeated[0]}` twice. Name one with NAME=FILES.")
    if len(names) < 2:
        raise ValueError("Systems must be two at least, got one. Name another file, or use `torchcalib report`.")
    return {name: check_paths(of) for name, of in zip(names, paths, strict=True)}


def _default_names(systems: Sequence[tuple[str, Path]]) -> list[str]:
    """Name systems, given as argument and first file: by file, else with its folder, else by the whole argument.

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
