"""Commands, their arguments, and suggestions for unknown ones. Neither torch nor the code of a command is imported.

A command is an entry of `COMMANDS`, and a function of the same name in the module of the entry. The function is called
with the parsed arguments, the result of `find` and the `Ranks`. It returns the exit code, or None for 0.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torchcalib
from torchcalib._lazy import SYNONYMS as SYNONYMS_OF_NAMES
from torchcalib._lazy import public_names
from torchcalib._version import __version__
from torchcalib.cli import options
from torchcalib.cli.systems import systems_of
from torchcalib.io.errors import limited, quoted, short_name
from torchcalib.io.names import SYNONYMS
from torchcalib.io.paths import expanded, format_of

_REPORT_EXAMPLES = f"""examples:
  torchcalib report predictions.csv
  torchcalib report predictions.csv --preds 'prob_*' --target y_test --out report/
  torchcalib report logits.npy labels.npy --from-logits
  torchcalib report answers.jsonl --preds confidence --target correct

{options.NAMES}

output:
  The report is printed. --out DIR writes report.html (one page), report.json (all values) and the diagrams."""

_METRIC_EXAMPLES = """examples:
  torchcalib metric ece predictions.csv
  torchcalib metric ece predictions.csv --mode classwise --option debiased=True --json"""

_CHECK_EXAMPLES = """examples:
  torchcalib check predictions.csv
  torchcalib check predictions.csv --fail-if "p(ece) < 0.01 and ece > 0.02 or nll > 0.5"

The condition compares numbers, keys of a report such as ece, nll and ece/classwise, and functions of keys: p(key),
floor(key) (noise floor), low(key) and high(key) (95% interval). Comparisons are joined by and, or, not, ( and )."""

_COMPARE_EXAMPLES = f"""examples:
  torchcalib compare resnet.npz calibrated=resnet_t.npz --out compared/
  torchcalib compare models.csv --preds resnet=prob_resnet --preds vit=prob_vit

{options.NAMES}"""

_CALIBRATE_EXAMPLES = """examples:
  torchcalib calibrate valid.csv --out calibrator.pt
  torchcalib calibrate valid.csv --out calibrator.pt --calibrator TemperatureScaling
  torchcalib apply calibrator.pt test.csv --out calibrated.csv"""


class Command(NamedTuple):
    """A command: its module in `torchcalib.cli`, its texts, its arguments, and what it needs before torch is imported.

    `find` checks the arguments, and returns the paths of the files.
    """

    module: str
    help: str
    description: str
    add_arguments: Sequence[options.Add]
    find: Callable[[argparse.Namespace], Any] = options.found_files
    epilog: str = ""


def _report(parser: argparse.ArgumentParser) -> None:
    options.add_results(parser).add_argument(
        "--no-calibration", action="store_true", help="skip the calibrators, which take most of the time"
    )
    parser.add_argument(
        "--no-intervals",
        action="store_true",
        help="skip the intervals, and the p-values of rank-based errors, which take seconds",
    )
    parser.add_argument(
        "--safe-threshold",
        type=float,
        metavar="NATS",
        help="state whether the model is safe: whether its entropic calibration difference (ECD), positive for "
        "over-confidence, is at most this threshold",
    )
    parser.add_argument(
        "--groups",
        metavar="NAME",
        help="key or column with the group of each row, integers or text; the report lists the worst groups "
        "(-1 or an empty text: no group)",
    )


def _parts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="PART",
        help="a file that `torchcalib report --save-state` or `torchcalib merge --save-state` wrote; a quoted pattern "
        "such as 'part*.pt' expands to all matches, sorted by name",
    )


def _systems(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "systems",
        nargs="+",
        metavar="[NAME=]FILES",
        help="a file, a quoted pattern ('shards/*.parquet'), or files separated by commas (such as a pair of .npy "
        "files); the default NAME is the file name",
    )
    parser.add_argument("--out", metavar="DIR", help="write compare.html, compare.json and the diagram to this folder")
    parser.add_argument("--all", action="store_true", help="print the tables of all metrics, explanations and notes")


def _metric(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="name of the metric, such as ece, nll or brier_score; see torchcalib.functional"
    )


def _metric_options(parser: argparse.ArgumentParser) -> None:
    options.add_mode(parser)
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        help="another option of the metric, such as bins=equal_mass or component=dsc; repeat it for several options",
    )


def _condition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-if",
        metavar="CONDITION",
        help="condition of failure (default: p(ece) < 0.01 and ece > 0.02)",
    )


def _calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="PATH", required=True, help="file for the fitted calibrator, such as cal.pt")
    parser.add_argument(
        "--calibrator",
        metavar="NAME",
        help="class of the calibrator, such as TemperatureScaling (default: the recommended one)",
    )


def _apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("calibrator", metavar="CALIBRATOR", help="a file that `torchcalib calibrate` wrote")
    options.add_files(parser)
    parser.add_argument(
        "--out", metavar="PATH", required=True, help="file for the calibrated predictions, in any of these formats"
    )
    options.add_preds(parser)
    options.add_kind(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="PATH",
        default="reliability.svg",
        help="file for the diagram: .svg, .png or .pdf (default: reliability.svg)",
    )
    options.add_mode(parser)
    parser.add_argument("--logit", action="store_true", help="use a logit scale, to show probabilities near 0 and 1")
    parser.add_argument("--title", help="title of the diagram")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="DIR", default="demo-report", help="folder for the report (default: demo-report)"
    )
    parser.add_argument("--epochs", type=int, default=40, help="number of epochs (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")


def _found_parts(arguments: argparse.Namespace) -> tuple[Path, ...]:
    paths = expanded(arguments.files)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("Every part must be named once, got a repeated file. Remove it.")
    for path in paths:
        path.stat()  # raises an error for a missing file
    return paths


def _found_for_metric(arguments: argparse.Namespace) -> tuple[Path, ...]:
    known = metrics()
    arguments.name = arguments.name.lower().replace("-", "_")
    if arguments.name not in known:
        arguments.name = next((name for name, kind in known.items() if kind.lower() == arguments.name), arguments.name)
    if arguments.name not in known:
        similar = _similar_metric(arguments.name)
        advice = f"Did you mean `{similar}`?" if similar else f"Names are {', '.join(known)}."
        raise ValueError(f"`NAME` must be a metric, got `{short_name(arguments.name, 60)}`. {advice}")
    return options.found_files(arguments)


def _found_for_apply(arguments: argparse.Namespace) -> tuple[Path, ...]:
    Path(arguments.calibrator).stat()  # raises an error for a missing file
    if format_of(Path(arguments.out)) is None:
        raise ValueError(f"`--out` must be a prediction file, got {arguments.out!r}. Name a .csv file, for example.")
    return options.found_files(arguments)


def metrics() -> dict[str, str]:
    """Return the class of each metric by the name of its function, such as "BrierScore" by "brier_score"."""
    functions = public_names("functional") - {"by_group"}  # `ByGroup` wraps metrics
    classes = {name.lower(): name for name in dir(torchcalib) if not name.islower()}
    joined = {name: name.replace("_", "") for name in sorted(functions) if name.islower()}
    return {name: classes[of_class] for name, of_class in joined.items() if of_class in classes}


def _similar_metric(name: str) -> str | None:
    """Return the name of the metric that a person means by `name`; None if there is none."""
    known = metrics()
    name = name.lower().replace("-", "_")
    synonym = SYNONYMS_OF_NAMES.get(name, name)
    # Short names that differ in one letter are other quantities, such as ECE and ENCE.
    close = get_close_matches(name, known, 1, 0.8) if len(name) > 5 else []
    return next((each for each in (synonym, *close) if each in known), None)


COMMANDS: Mapping[str, Command] = {
    "report": Command(
        "report",
        "compute scores, calibration errors, tables and diagrams for a file of predictions",
        "Read predictions and targets, and print scores and calibration errors. --out writes a report.\n"
        "If torchrun starts several processes, each process reads part of the files, and the first one reports.",
        (options.add_files, _report, options.add_input, options.add_clusters, options.add_bins),
        epilog=_REPORT_EXAMPLES,
    ),
    "metric": Command(
        "metric",
        "compute one metric",
        "Print the value of one metric.",
        (_metric, options.add_files, options.add_input, options.add_bins, _metric_options),
        _found_for_metric,
        _METRIC_EXAMPLES,
    ),
    "check": Command(
        "check",
        "fail if predictions are miscalibrated, for continuous integration",
        "Compute a report without calibrators, and return exit code 1 if a condition holds.\n"
        "By default, the error must be significant and large: sampling noise alone is no failure.",
        (options.add_files, _condition, options.add_input, options.add_clusters, options.add_bins),
        epilog=_CHECK_EXAMPLES,
    ),
    "plot": Command(
        "plot",
        "draw the reliability diagram",
        "Write the reliability diagram, with consistency bands and the expected calibration error, to a file.",
        (options.add_files, _plot, options.add_input, options.add_clusters, options.add_bins),
    ),
    "compare": Command(
        "compare",
        "compare scores and calibration errors of several systems on the same targets",
        "Compare the predictions of several systems for the same targets, with intervals of differences.\n"
        "A system is a file, several shards, or one --preds of a common file. The first system is the baseline.",
        (_systems, partial(options.add_input, several=True), options.add_clusters, options.add_bins),
        systems_of,
        _COMPARE_EXAMPLES,
    ),
    "calibrate": Command(
        "calibrate",
        "fit a calibrator to a file of predictions",
        "Fit a calibrator to predictions and targets, and write it for `torchcalib apply` and\n"
        "torchcalib.calibration.load_calibrator.",
        (options.add_files, _calibrate, options.add_input),
        epilog=_CALIBRATE_EXAMPLES,
    ),
    "apply": Command(
        "calibrate",
        "calibrate the predictions in a file",
        "Write a copy of prediction files with calibrated predictions. Targets are not needed. Names and order do not\n"
        "change: calibrated logits replace logits, and calibrated probabilities replace probabilities.",
        (_apply,),
        _found_for_apply,
        _CALIBRATE_EXAMPLES,
    ),
    "merge": Command(
        "report",
        "compute one report from the states that `torchcalib report --save-state` wrote",
        "Print and write one report for several parts, as if one run had read all their files in order.",
        (_parts, options.add_results),
        _found_parts,
    ),
    "demo": Command(
        "demo",
        "train a small classifier until it is over-confident, and report on it",
        "Train a small classifier on the scikit-learn digits, and print its calibration after every epoch.",
        (_demo,),
        lambda _: (),
    ),
}
"""All commands, by name."""

_SYNONYMS = {
    **dict.fromkeys(("evaluate", "eval", "score", "measure", "run"), "report"),
    **dict.fromkeys(("test", "assert", "gate", "ci"), "check"),
    **dict.fromkeys(("diagram", "draw", "reliability"), "plot"),
    **dict.fromkeys(("diff", "versus"), "compare"),
    **dict.fromkeys(("fit", "recalibrate"), "calibrate"),
    **dict.fromkeys(("transform", "predict"), "apply"),
    **dict.fromkeys(("combine", "join"), "merge"),
    "metrics": "metric",
    "example": "demo",
}
"""Commands, by other words for them."""


class _Parser(argparse.ArgumentParser):
    """Argument parser that suggests a known command or option in the error for an unknown one."""

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line, or exit with an error."""
        words = [word for word in (sys.argv[1:] if args is None else args) if not word.startswith("-")]
        if words and words[0] not in self.commands:
            self.error(_unknown_command(words[0]))
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


def _unknown_command(word: str) -> str:
    """Return the error for an unknown command, with the command that a person means by it."""
    name = word.lower()
    similar = _SYNONYMS.get(name) or next(iter(get_close_matches(name, COMMANDS, 1, 0.7)), None)
    if metric := _similar_metric(name):
        similar = f"metric {metric}"
    elif format_of(Path(word)) is not None or Path(word).exists():
        similar = f"report {short_name(word, 100)}"
    advice = f"Did you mean `torchcalib {similar}`?" if similar else "See `torchcalib --help`."
    return f"`COMMAND` must be one of {', '.join(COMMANDS)}, got {quoted([word])}. {advice}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. After parsing, `arguments.find(arguments)` checks and returns the paths.

    For `compare`, the result is a dict of `System` tuples by system name. `arguments.module` contains the command.
    """
    kind: Any = partial(_Parser, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser: _Parser = kind(prog="torchcalib", description="Measure the calibration of classifiers.")
    parser.add_argument("--version", action="version", version=f"torchcalib {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=kind)
    parser.commands = commands.choices
    for name, command in COMMANDS.items():
        each = commands.add_parser(name, help=command.help, description=command.description, epilog=command.epilog)
        each.set_defaults(module=command.module, find=command.find)
        for add in command.add_arguments:
            add(each)
        each.add_argument("--json", action="store_true", help="print the result as JSON instead of text")
    return parser
