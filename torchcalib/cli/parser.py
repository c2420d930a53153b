"""Argument parsers of all commands, and conversion of arguments to file paths."""

import argparse
import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, NoReturn

from torchcalib._version import __version__
from torchcalib.io.errors import limited, printable, short_name
from torchcalib.io.names import CONFIDENCES, CORRECT, LOGITS, NEUTRAL, PROBS, SYNONYMS, TARGETS, TASKS, WEIGHTS
from torchcalib.io.paths import check_paths, expanded


class System(NamedTuple):
    """Files of one system in a comparison, and the name of its predictions; None to search for a common name."""

    paths: tuple[Path, ...]
    preds: str | None


def _words(names: Sequence[str]) -> str:
    return fill(", ".join(names), 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


_NAMES = f"""names that are found without options (case-insensitive):
  logits:
{_words(LOGITS)}
  probabilities:
{_words(PROBS)}
  logits or probabilities, with --from-logits or --from-probs:
{_words(NEUTRAL)}
  targets:
{_words([name for name in TARGETS if name not in CORRECT])}
  weights:
{_words(WEIGHTS)}
  Tables may have one column per class: prob_0 .. prob_9, prob_cat prob_dog, 0 .. 9, or the class names in the targets.
  {CONFIDENCES[0]}, {CORRECT[0]}: the confidence in a prediction or answer, and 1 if it is correct, else 0."""

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


class _Parser(argparse.ArgumentParser):
    """Argument parser that suggests a known option in the error for an unknown option."""

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line, or exit with an error."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0].replace("_", "-")
            synonym = SYNONYMS.get(option.lstrip("-").replace("-", "_"), "")
            known = re.findall(r"--[a-z][a-z-]+", self.commands.get(parsed.command, self).format_help())
            similar: str | None = f"--{synonym.replace('_', '-')}"
            if similar not in known:
                similar = next(iter(get_close_matches(option, known, 1, 0.8)), None)
            advice = f" Did you mean {similar}?" if similar else ""
            self.error(f"unrecognized arguments: {short_name(' '.join(unknown), 200)}.{advice}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the usage and a message of at most 500 characters, and exit."""
        super().error(limited(message))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. After parsing, `arguments.find(arguments)` checks and returns the paths.

    For `compare`, the result is a dict of `System` tuples by system name. `arguments.module` contains the command.
    """
    kind: Any = partial(_Parser, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser: _Parser = kind(prog="torchcalib", description="Measure the calibration of classifiers.")
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=kind)
    parser.commands = commands.choices

    report = commands.add_parser(
        "report",
        help="compute scores, calibration errors, tables and diagrams for a file of predictions",
        description="Read predictions and targets, and print scores and calibration errors. --out writes a report.\n"
        "If torchrun starts several processes, each process reads part of the files, and the first one reports.",
        epilog=_REPORT_EXAMPLES,
    )
    report.set_defaults(module="report", find=lambda arguments: check_paths(expanded(arguments.files)))
    report.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .parquet, .csv, .tsv or .jsonl (the last three also with .gz), or a pair of "
        ".npy files; several files are shards of one data set; "
        "a quoted pattern such as 'shards/*.npz' expands to all matches, sorted by name",
    )
    _add_result_options(report).add_argument(
        "--no-calibration", action="store_true", help="skip the calibrators, which take most of the time"
    )
    report.add_argument(
        "--no-intervals",
        action="store_true",
        help="skip the intervals, and the p-values of rank-based errors, which take seconds",
    )
    report.add_argument(
        "--safe-threshold",
        type=float,
        metavar="NATS",
        help="state whether the model is safe: whether its entropic calibration difference (ECD), positive for "
        "over-confidence, is at most this threshold",
    )
    report.add_argument(
        "--groups",
        metavar="NAME",
        help="key or column with the group of each row, integers or text; the report lists the worst groups "
        "(-1 or an empty text: no group)",
    )
    _add_input_options(report, several=False)

    merge = commands.add_parser(
        "merge",
        help="compute one report from the states that `torchcalib report --save-state` wrote",
        description="Print and write one report for several parts, as if one run had read all their files in order.",
    )
    merge.set_defaults(module="report", find=_parts)
    merge.add_argument(
        "files",
        nargs="+",
        metavar="PART",
        help="a file that `torchcalib report --save-state` or `torchcalib merge --save-state` wrote; a quoted pattern "
        "such as 'part*.pt' expands to all matches, sorted by name",
    )
    _add_result_options(merge)

    compare = commands.add_parser(
        "compare",
        help="compare scores and calibration errors of several systems on the same targets",
        description="Compare the predictions of several systems for the same targets, with intervals of differences.\n"
        "A system is a file, several shards, or one --preds of a common file. The first system is the baseline.",
        epilog=_COMPARE_EXAMPLES,
    )
    compare.set_defaults(module="compare", find=_systems)
    compare.add_argument(
        "systems",
        nargs="+",
        metavar="[NAME=]FILES",
        help="a file, a quoted pattern ('shards/*.parquet'), or files separated by commas (such as a pair of .npy "
        "files); the default NAME is the file name",
    )
    compare.add_argument("--out", metavar="DIR", help="write compare.html, compare.json and the diagram to this folder")
    compare.add_argument("--all", action="store_true", help="print the tables of all metrics, explanations and notes")
    _add_input_options(compare, several=True)

    demo = commands.add_parser(
        "demo",
        help="train a small classifier until it is over-confident, and report on it",
        description="Train a small classifier on the scikit-learn digits, and print its calibration after every epoch.",
    )
    demo.set_defaults(module="demo", find=lambda _: ())
    demo.add_argument(
        "--out", metavar="DIR", default="demo-report", help="folder for the report (default: demo-report)"
    )
    demo.add_argument("--epochs", type=int, default=40, help="number of epochs (default: 40)")
    demo.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    return parser


def _add_input_options(parser: argparse.ArgumentParser, several: bool) -> None:
    columns = "key or column of the predictions, or one column per class: a,b,c or 'prob_*' or 0..3"
    if several:
        columns += "; repeat as [NAME=]COLUMNS to compare systems in a single file"
    action = "append" if several else "store"
    parser.add_argument("--preds", metavar="NAME", action=action, help=f"{columns} (default: found by name)")
    for role, kind in (("target", "targets"), ("weights", "weights")):
        parser.add_argument(f"--{role}", metavar="NAME", help=f"key or column of the {kind} (default: found by name)")
    parser.add_argument(
        "--clusters",
        metavar="NAME",
        help="key or column with the cluster of each row, integers or text, such as a patient, an image or a question; "
        "only rows of different clusters are independent",
    )
    parser.add_argument(
        "--class-names",
        metavar="A,B,...",
        help="class names in the order of the predictions; for one probability the negative class, then the positive "
        "class (default: from column names or text targets)",
    )
    logits = parser.add_mutually_exclusive_group()
    logits.add_argument("--from-logits", action="store_true", help="predictions are logits (default: from the name)")
    logits.add_argument(
        "--from-probs", action="store_true", help="predictions are probabilities (default: from the name)"
    )
    parser.add_argument(
        "--normalize", action="store_true", help="divide rounded multi-class probabilities by their sum"
    )
    parser.add_argument(
        "--task",
        choices=(*TASKS, "confidence"),
        help="task (default: from the shapes); confidence: predictions are confidences, targets are 1 if correct",
    )
    parser.add_argument(
        "--n-bins",
        type=int,
        default=15,
        metavar="B",
        help="number of equal-width bins, and of equal-mass bins for the adaptive calibration error (default: 15)",
    )
    parser.add_argument("--right", action="store_true", help="use bins (a, b] instead of [a, b)")
    parser.add_argument("--ignore-index", type=int, metavar="K", help="drop rows with this target")
    parser.add_argument(
        "--nan-policy",
        choices=("raise", "drop"),
        default="raise",
        help="raise an error for rows with NaN, empty cells or invalid infinities, or drop and count such rows "
        "(default: raise)",
    )


def _add_result_options(parser: argparse.ArgumentParser) -> Any:
    """Add the options for results, and return the group for options that cannot be combined with --save-calibrator."""
    parser.add_argument("--out", metavar="DIR", help="write report.html, report.json and the diagrams to this folder")
    parser.add_argument("--all", action="store_true", help="print all tables, explanations and notes")
    parser.add_argument(
        "--save-state",
        metavar="PATH",
        help="write the state of a part of a larger report for `torchcalib merge`; without --out and "
        "--save-calibrator, compute no report",
    )
    calibration = parser.add_mutually_exclusive_group()
    calibration.add_argument(
        "--save-calibrator",
        metavar="PATH",
        help="fit the recommended calibrator, if there is one, to all samples, and write it for "
        "torchcalib.calibration.load_calibrator",
    )
    return calibration


def _parts(arguments: argparse.Namespace) -> tuple[Path, ...]:
    paths = expanded(arguments.files)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("Every part must be named once, got a repeated file. Remove it.")
    for path in paths:
        path.stat()  # raises an error for a missing file
    return paths


def _systems(arguments: argparse.Namespace) -> dict[str, System]:
    """Return the files and the name of the predictions of every system, by system name."""
    several = arguments.preds or []
    if len(several) > 1 and len(arguments.systems) == 1:
        return _systems_in_one_file(arguments.systems[0], several)
    if len(several) > 1:
        raise ValueError(
            f"--preds must be given once for several files, got {len(several)} times. Name one file to compare its "
            "columns, or use the same column names in all files."
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
        raise ValueError(f"Systems must have different names, got `{repeated[0]}` twice. Rename one with NAME=FILES.")
    if len(names) < 2:
        check_paths(paths[0])
        raise ValueError(
            "There must be at least two systems, got one. Name another file, or each system in this file: --preds A "
            "--preds B. For a single system use `torchcalib report`."
        )
    preds = several[0] if several else None
    return {name: System(check_paths(of), preds) for name, of in zip(names, paths, strict=True)}


def _systems_in_one_file(given: str, several: Sequence[str]) -> dict[str, System]:
    """Return systems whose predictions are different columns or arrays in one file, by system name."""
    paths = check_paths(_files_of(given))
    systems: dict[str, System] = {}
    for option in several:
        name, equals, preds = option.partition("=")
        if not equals:
            name = preds = option
        name = printable(name.strip())
        if not name or not preds or name in systems:
            raise ValueError(f"--preds must be [NAME=]COLUMNS with different names, got {option!r}. Rename it.")
        systems[name] = System(paths, preds)
    return systems


def _files_of(given: str) -> tuple[Path, ...]:
    return (Path(given),) if Path(given).exists() else expanded(given.split(","))


def _default_names(systems: Sequence[tuple[str, Path]]) -> list[str]:
    """Return a name for each system, given as pairs of argument and first file.

    The name is the file stem, or the folder name for a pattern. Repeated names are prefixed with the folder, or else
    are the whole argument.
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
