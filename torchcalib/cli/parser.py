"""Arguments of all commands, and the files that they name."""

import argparse
import glob
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from torchcalib._version import __version__
from torchcalib.io.errors import printable
from torchcalib.io.names import CONFIDENCES, CORRECT, LOGITS, NEUTRAL, PROBS, TARGETS, WEIGHTS
from torchcalib.io.paths import check_paths, expanded


class System(NamedTuple):
    """Files of a system, and the name of its predictions; None for common names."""

    paths: tuple[Path, ...]
    preds: str | None


def _words(names: Sequence[str]) -> str:
    return fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


_NAMES = f"""names that are found without options (upper and lower case alike):
  logits:
{_words(LOGITS)}
  probabilities:
{_words(PROBS)}
  either, with --from-logits or --from-probs:
{_words(NEUTRAL)}
  targets:
{_words([name for name in TARGETS if name not in CORRECT])}
  weights:
{_words(WEIGHTS)}
  Tables may have a column for each class: prob_0 .. prob_9, prob_cat prob_dog, 0 .. 9, or the names in the targets.
  {CONFIDENCES[0]} and {CORRECT[0]} are the confidence in a prediction or answer, and whether that is right (1 or 0)."""

_REPORT_EXAMPLES = f"""examples:
  torchcalib report predictions.csv
  torchcalib report predictions.csv --preds 'prob_*' --target y_test --out report/
  torchcalib report logits.npy labels.npy --from-logits
  torchcalib report answers.jsonl --preds confidence --target correct

{_NAMES}

output:
  The report is printed. --out DIR writes report.html (one page), report.json (all values) and the diagrams."""

_COMPARE_EXAMPLES = f"""examples:
  torchcalib compare resnet.npz calibrated=resnet_t.npz --out compared/
  torchcalib compare models.csv --preds resnet=prob_resnet --preds vit=prob_vit

{_NAMES}"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. `find` of the parsed arguments checks paths and returns them, by system for `compare`."""
    kind: Any = partial(
        argparse.ArgumentParser, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser: argparse.ArgumentParser = kind(prog="torchcalib", description="Measure the calibration of classifiers.")
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=kind)

    report = commands.add_parser(
        "report",
        help="scores, calibration errors, tables and diagrams of a file of predictions",
        description="Read predictions and targets, print calibration errors and scores, and write a full report.\n"
        "If torchrun starts several processes, each reads its share of the files, and the first one reports.",
        epilog=_REPORT_EXAMPLES,
    )
    report.set_defaults(find=lambda arguments: check_paths(expanded(arguments.files)))
    report.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .csv, .tsv, .jsonl (these also with .gz), .parquet (several are shards of one "
        "data set), or a pair of .npy files; "
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
    _add_input_options(report, several=False)

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
        "any\nformat; or a --preds of one file. The others are compared with the first one.",
        epilog=_COMPARE_EXAMPLES,
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
    _add_input_options(compare, several=True)

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


def _add_input_options(parser: argparse.ArgumentParser, several: bool) -> None:
    columns = "key or column of the predictions, or columns of one class each: a,b,c or 'prob_*' or 0..3"
    if several:
        columns += "; given several times as [NAME=]COLUMNS, one for each system in a single file"
    action = "append" if several else "store"
    parser.add_argument("--preds", metavar="NAME", action=action, help=f"{columns} (default: by common names)")
    for role, kind in (("target", "targets"), ("weights", "weights")):
        parser.add_argument(f"--{role}", metavar="NAME", help=f"key or column of the {kind} (default: by common names)")
    parser.add_argument(
        "--class-names",
        metavar="A,B,...",
        help="names of the classes in the order of the predictions; for one probability the negative and the positive "
        "class (default: from the columns and from text targets)",
    )
    logits = parser.add_mutually_exclusive_group()
    logits.add_argument("--from-logits", action="store_true", help="predictions are logits (default: by their name)")
    logits.add_argument("--from-probs", action="store_true", help="predictions are probabilities (default: by name)")
    parser.add_argument(
        "--normalize", action="store_true", help="divide rounded probabilities of several classes by their sum"
    )
    parser.add_argument(
        "--task",
        choices=("binary", "multiclass", "multilabel", "confidence"),
        help="kind of targets (default: by the shapes); confidence: whether a prediction of this confidence is correct",
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
        help="rows with NaN, empty cells, or infinities that leave no distribution: an error, or dropped and counted "
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


def _systems(arguments: argparse.Namespace) -> dict[str, System]:
    """Return files and name of predictions of every system, by its name."""
    several = arguments.preds or []
    if len(several) > 1 and len(arguments.systems) == 1:
        return _systems_in_one_file(arguments.systems[0], several)
    if len(several) > 1:
        raise ValueError(
            f"--preds must be given once for several files, got {len(several)} times. Name one file to compare its "
            "columns, or write files with equal names of columns."
        )
    names: list[str] = []
    paths: list[tuple[Path, ...]] = []
    for given in arguments.systems:
        name, equals, files = given.partition("=")
        if not equals or Path(given).exists():
            name, files = "", given
        elif not name.strip():
            raise ValueError(f"A system must be NAME=FILES with a name, got {given!r}. Write a name before the =.")
        names.append(name)
        paths.append(_files_of(files))
    unnamed = [(given, of[0]) for given, of, name in zip(arguments.systems, paths, names, strict=True) if not name]
    defaults = iter(_default_names(unnamed))
    names = [printable(name or next(defaults)) for name in names]
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"Systems must have a name each, got `{repeated[0]}` twice. Name one with NAME=FILES.")
    if len(names) < 2:
        check_paths(paths[0])
        raise ValueError(
            "Systems must be two at least, got one. Name another file, or each system in this file: --preds A --preds "
            "B; or use `torchcalib report`."
        )
    preds = several[0] if several else None
    return {name: System(check_paths(of), preds) for name, of in zip(names, paths, strict=True)}


def _systems_in_one_file(given: str, several: Sequence[str]) -> dict[str, System]:
    """Return the systems whose predictions are several arrays of one file."""
    paths = check_paths(_files_of(given))
    systems: dict[str, System] = {}
    for option in several:
        name, equals, preds = option.partition("=")
        if not equals:
            name = preds = option
        name = printable(name.strip())
        if not name or not preds or name in systems:
            raise ValueError(f"--preds must be [NAME=]COLUMNS with a different name each, got {option!r}. Rename it.")
        systems[name] = System(paths, preds)
    return systems


def _files_of(given: str) -> tuple[Path, ...]:
    return (Path(given),) if Path(given).exists() else expanded(given.split(","))


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
