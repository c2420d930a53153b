"""Commands and their arguments. Neither torch nor the code of a command is imported.

A command is an entry of `COMMANDS`, and a function of the same name in the module of the entry. The function is called
with the parsed arguments and the result of `find`. It returns the exit code, or None for 0.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torchcalib
from torchcalib._bridges import NAMES, SHORTEST, nearest
from torchcalib._lazy import public_names
from torchcalib.cli import inputs, options
from torchcalib.cli.options import Option
from torchcalib.cli.systems import systems_of
from torchcalib.io.errors import short_name, shown
from torchcalib.io.paths import check_paths, expanded, format_of
from torchcalib.results.conditions import DEFAULT, Condition

_REPORT_EXAMPLES = f"""examples:
  torchcalib report predictions.csv
  torchcalib report predictions.csv --preds 'prob_*' --target y_test --out report/
  torchcalib report logits.npy labels.npy --from-logits
  torchcalib report answers.jsonl --preds confidence --target correct
  torchcalib report --per-image softmax/ labels/ --no-calibration

{options.NAMES}

output:
  The report is printed. --out DIR writes report.html (one page) and report.json (all values), and --out PAGE.html the
  page only."""

_METRIC_EXAMPLES = """examples:
  torchcalib metric ece predictions.csv
  torchcalib metric ece predictions.csv --mode classwise --option debiased=True --json"""

_CHECK_EXAMPLES = """examples:
  torchcalib check predictions.csv
  torchcalib check predictions.csv --fail-if "p(ece) < 0.01 and ece > 0.02 or nll > 0.5"
  torchcalib check predictions.csv --require-detectable 0.02

The condition compares numbers, keys of a report such as ece, nll and ece/classwise, and functions of keys: p(key),
floor(key) (noise floor), low(key) and high(key) (95% interval). Comparisons are joined by and, or, not, ( and )."""

_WATCH_EXAMPLES = """examples:
  torchcalib watch predictions.csv --state watch.state
  torchcalib watch batches/ --state watch.state --follow --prometheus /var/lib/node_exporter/torchcalib.prom
  torchcalib watch 'batches/*.parquet' --state watch.state --restart --level 0.001 --json

.csv, .tsv and .jsonl files may grow by complete lines. Files of other formats are read once. New files of a folder or
pattern are read in the order of their names. Rows must be in the order in which outcomes became known."""

_COMPARE_EXAMPLES = f"""examples:
  torchcalib compare resnet.npz calibrated=resnet_t.npz --out compared/
  torchcalib compare models.csv --preds resnet=prob_resnet --preds vit=prob_vit
  torchcalib compare old.csv new.csv --id question

{options.NAMES}"""

_AUDIT_EXAMPLES = """examples:
  torchcalib audit samples_arc_easy.jsonl
  torchcalib audit answers.csv --as-published hle
  torchcalib audit answers.csv --confidence p --target right --pred chosen --by model
  torchcalib audit 'samples_mmlu_*.jsonl' --out mmlu/
  torchcalib audit samples_a.jsonl samples_b.jsonl --names small,large --out compared/
  torchcalib audit logs/2026-01-31T10-00-00_task.eval --out audit/

Logs are recognised by their content: samples of lm-eval, logs of Inspect, runs of HELM (scenario_state.json),
predictions of OLMES, details of LightEval, responses of chat interfaces with log-probabilities, and lines with
probabilities by option: {"item_id": 1, "gold": "A", "probs": {"A": 0.7, "B": 0.3}}. Files of several tasks of one
system are pooled, with a table by task. Files of the same questions are compared."""

_CALIBRATE_EXAMPLES = """examples:
  torchcalib calibrate valid.csv --out calibrator.safetensors
  torchcalib calibrate valid.csv --out calibrator.safetensors --calibrator TemperatureScaling
  torchcalib apply calibrator.safetensors test.csv --out calibrated.csv"""


class Command(NamedTuple):
    """A command: its module in `torchcalib.cli`, its texts, its arguments, and checks before the import of torch.

    `find` checks the arguments, and returns the paths of the files. `open` opens them, which reads headers only, and
    keeps them in the arguments for the command. `places` are the options for files of results.
    """

    module: str
    help: str
    description: str
    arguments: Sequence[Option]
    find: Callable[[argparse.Namespace], Any] = options.found_files
    epilog: str = ""
    open: Callable[[argparse.Namespace, Any], Any] = inputs.opened
    places: Sequence[str] = ()


_PARTS = Option(
    "files",
    "PART",
    "a file that `torchcalib report --save-state` or `torchcalib merge --save-state` wrote; a quoted pattern such as "
    "'part*.safetensors' expands to all matches, sorted by name",
    nargs="+",
)
_SYSTEMS = Option(
    "systems",
    "[NAME=]FILES",
    "a file, a quoted pattern ('shards/*.parquet'), or files separated by commas (such as a pair of .npy files); the "
    "default NAME is the file name",
    nargs="+",
)
_COMPARE = (
    options.out("compare"),
    options.DIAGRAMS,
    Option("--all", None, "print the tables of all metrics, explanations and notes"),
    Option(
        "--id",
        "NAME",
        "key or column with the id of each row, integers or text, by which rows of the systems are joined; the systems "
        "may then have different rows, in any order",
    ),
)
_METRIC = Option("name", "NAME", "name of the metric, such as ece, nll or brier_score; see torchcalib.functional")
_METRIC_OPTION = Option(
    "--option",
    "NAME=VALUE",
    "another option of the metric, such as bins=equal_mass or component=dsc; repeat it for several options",
    action="append",
)
_REPORT = (
    Option("--no-calibration", None, "skip the calibrators, which take most of the time", "calibration"),
    Option("--no-intervals", None, "skip the intervals, and the p-values of rank-based errors, which take seconds"),
    Option(
        "--safe-threshold",
        "NATS",
        "state whether the model is safe: whether its entropic calibration difference (ECD), positive for "
        "over-confidence, is at most this threshold",
        type=float,
    ),
    Option(
        "--groups",
        "NAME",
        "key or column with the group of each row, integers or text; the report lists the worst groups (-1 or an empty "
        "text: no group). Several columns, as in age,sex, form groups, and their intersections are searched",
    ),
)
_PER_IMAGE = Option(
    "--per-image",
    None,
    "FILES are a folder of predictions (classes first) and a folder of labels, with a .npz or .npy file per image; "
    "images are independent units, and the report lists the worst",
)
_LOG = (
    Option(
        "logs",
        "LOG",
        "a file (.jsonl, .jsonl.gz, .eval, .json, .csv, .tsv, .parquet), or a folder or quoted pattern with files of "
        "several tasks, which are pooled; several logs of the same questions are compared",
        nargs="+",
    ),
    Option(
        "--confidence",
        "NAME",
        "field with the confidence, or definition that the sentence names, such as choices_per_byte",
    ),
    Option("--correct", "NAME", "field with whether the answer is right"),
    Option("--target", "NAME", "field with the right answer: text, letter or index (from 0) of an option"),
    Option("--pred", "NAME", "field with the answer of the model"),
    Option("--id", "NAME", "field with the identifier of the question"),
    Option("--by", "NAME", "field whose values are reported apart, such as the model (default: pooled)"),
    Option("--gold", "FILE", "file with the right answer to each question, joined by its identifier"),
    Option("--names", "A,B", "names of several logs (default: the names of their files)"),
    Option(
        "--select",
        "NAME",
        "filter (lm-eval) or scorer (Inspect) whose answers are read (default: the first in the log)",
    ),
    Option(
        "--scale",
        None,
        "scale of stated confidences without a percent sign (default: inferred from all of them)",
        choices=("percent", "fraction"),
    ),
    Option(
        "--word",
        "WORD=P",
        "confidence in [0, 1] for a word, such as high=0.9; repeat it for several words",
        type=options.word,
        action="append",
    ),
    Option(
        "--as-published",
        None,
        "add the calibration error of stated confidences that this benchmark publishes",
        choices=("hle", "browsecomp", "browsecomp_plus"),
    ),
    Option("--n-bins", "N", "number of equal-width bins (default: 15)", type=int, default=15),
    Option("--no-intervals", None, "skip the intervals, which take seconds"),
    Option("--no-calibration", None, "skip the calibrators"),
    options.out("audit"),
    Option("--pages", None, "add a page for each definition to the folder of --out"),
)
_WATCH = (
    Option("files", "FILE", "a file that grows, or a folder or quoted pattern of files with batches", nargs="+"),
    Option("--state", "PATH", "file that keeps the evidence and the positions in the files between runs"),
    Option("--follow", None, "wait for new rows until an alarm"),
    Option("--interval", "SECONDS", "time between two looks at the files (default: 60)", type=int, default=60),
    Option(
        "--level",
        "P",
        "probability of a false alarm at any look; with --restart the inverse of the mean number of batches until a "
        "false alarm (default: 0.01)",
        type=float,
        default=0.01,
    ),
    Option("--restart", None, "detect changes: start the evidence anew at each batch, too"),
    Option("--batch", "N", "largest number of rows of a batch (default: 1000)", type=int, default=1000),
    Option("--prometheus", "PATH", "write the evidence in the text format of Prometheus, such as torchcalib.prom"),
)
_DETECTABLE = Option(
    "--require-detectable",
    "ERROR",
    "also fail if the rows are too few to find a mean error of this size, such as 0.02, with 80 percent probability",
    type=float,
)
_CONDITION = Option("--fail-if", "CONDITION", "condition of failure (default: p(ece) < 0.01 and ece > 0.02)")
_CALIBRATE = (
    Option("--out", "PATH", "file for the fitted calibrator, such as cal.safetensors", required=True),
    Option(
        "--calibrator", "NAME", "class of the calibrator, such as TemperatureScaling (default: the recommended one)"
    ),
)
_APPLY = (
    Option("calibrator", "CALIBRATOR", "a file that `torchcalib calibrate` wrote"),
    options.FILES,
    Option("--out", "PATH", "file for the calibrated predictions, in any of these formats", required=True),
    options.PREDS,
    *options.KIND,
)
_PLOT = (
    Option(
        "--out",
        "PATH",
        "file for the diagram: .svg, .png or .pdf (default: reliability.svg)",
        default="reliability.svg",
    ),
    options.MODE,
    Option("--logit", None, "use a logit scale, to show probabilities near 0 and 1"),
    Option("--title", None, "title of the diagram", default=None),
)
_DEMO = (
    Option("--out", "DIR", "folder for the report (default: demo-report)", default="demo-report"),
    options.DIAGRAMS,
    Option("--epochs", None, "number of epochs (default: 40)", type=int, default=40),
    Option("--seed", None, "random seed (default: 0)", type=int, default=0),
)
_INPUT = (options.PREDS, *options.CONTENT)
_REST = (*_INPUT, options.CLUSTERS, *options.BINS)
"""Options at the end of several commands."""


def _found_parts(arguments: argparse.Namespace) -> tuple[Path, ...]:
    paths = expanded(arguments.files)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("Every part must be named once, got a repeated file. Remove it.")
    for path in paths:
        path.stat()  # raises an error for a missing file
    return paths


def _found_for_metric(arguments: argparse.Namespace) -> tuple[Path, ...]:
    name = metric_named(arguments.name)
    if name is None:
        known, advice = metrics(), NAMES.get(arguments.name, "")
        if " " not in advice:  # a name of a function, not advice
            similar = nearest(arguments.name.lower(), known, shortest=SHORTEST)
            advice = f"Did you mean `{similar}`?" if similar else f"Names are {', '.join(known)}."
        raise ValueError(f"`NAME` must be a metric, got `{short_name(arguments.name, 60)}`. {advice}")
    arguments.name = name
    return options.found_files(arguments)


def _found_log(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if len(arguments.logs) > 1 and options.is_file(arguments.out):
        raise ValueError(f"`--out` must be a folder for several logs, got {arguments.out!r}. Name another one.")
    return tuple(map(Path, arguments.logs))


def _opened_log(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Check that a log is of a known kind, before torch is imported, and whether several files are pooled."""
    from torchcalib.io.logs import golds_of, named_fields, open_log, task_of  # needs pyarrow

    tasks = [task_of(path) for path in paths]
    are_tasks = None not in tasks and len({*tasks}) == len(tasks) > 1 and arguments.names is None
    arguments.pools = list(paths) if are_tasks else None
    named = ("confidence", "correct", "target", "pred", "id")
    fields = named_fields(**{name: getattr(arguments, name) for name in named})
    gold = None if arguments.gold is None else golds_of(arguments.gold, fields)
    for each in [arguments.pools] if are_tasks else paths:
        open_log(each, arguments.select, fields=fields, by=arguments.by, gold=gold)


def _found_for_report(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if not arguments.per_image:
        return options.found_files(arguments)
    if arguments.groups is not None or arguments.clusters is not None:
        raise ValueError("`--per-image` must be used without --groups and --clusters, got both. Omit them.")
    from torchcalib.io.image_folders import case_files  # needs numpy

    arguments.cases = case_files([Path(file) for file in arguments.files])
    return tuple(path for case in arguments.cases for path in (case.preds, case.target))


def _opened_for_report(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    if not arguments.per_image:
        inputs.opened(arguments, paths)


def _found_for_check(arguments: argparse.Namespace) -> tuple[Path, ...]:
    arguments.condition = Condition.parse(DEFAULT if arguments.fail_if is None else arguments.fail_if)
    required = arguments.require_detectable
    if required is not None and not 0 < required < 1:
        raise ValueError(f"`--require-detectable` must be between 0 and 1, got {required:g}. An error of 2% is 0.02.")
    return options.found_files(arguments)


def _found_for_watch(arguments: argparse.Namespace) -> tuple[Path, ...]:
    folders = [Path(name) for name in arguments.files if Path(name).is_dir()]
    files = expanded([name for name in arguments.files if not Path(name).is_dir()])
    return (*folders, *(check_paths(files) if files else ()))


def _found_for_plot(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if Path(arguments.out).suffix.lower() not in PICTURES:
        raise ValueError(f"`--out` must end in {', '.join(PICTURES)}, got {arguments.out!r}. Name another file.")
    return options.found_files(arguments)


def _found_for_calibrate(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if arguments.calibrator is not None:
        arguments.calibrator = _named_calibrator(arguments.calibrator)
    return options.found_files(arguments)


def _named_calibrator(name: str) -> str:
    """Return the class of a calibrator by its name or its name in reports; case, spaces and hyphens do not matter."""
    known = calibrators()
    by_name = {_letters(each): each for each in known} | _IN_REPORTS
    if found := by_name.get(_letters(name)):
        return found
    starts = (each for each in known if _letters(name) and _letters(each).startswith(_letters(name)))
    similar = NAMES[name] if NAMES.get(name) in known else next(starts, nearest(name, known, 0.6))
    advice = f"Did you mean `{similar}`?" if similar else f"Calibrators are {', '.join(known)}."
    raise ValueError(f"`--calibrator` must be the name of a calibrator, got {shown(name)}. {advice}")


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower())


def calibrators() -> list[str]:
    """Return the names of the classes of calibrators."""
    kinds = ("Scaling", "Correction", "Calibration", "Binning")
    return sorted(name for name in public_names("calibration") if name.endswith(kinds))


_IN_REPORTS = {"bayesianbinningintoquantiles": "BayesianBinning", "splinerecalibration": "SplineCalibration"}
"""Classes of calibrators by their names in reports, where these differ."""

PICTURES = (".svg", ".png", ".pdf")
"""Endings of the files that `torchcalib plot` writes."""


def _found_for_apply(arguments: argparse.Namespace) -> tuple[Path, ...]:
    Path(arguments.calibrator).stat()  # raises an error for a missing file
    inputs.check_places(arguments, ["out"], [Path(arguments.calibrator)])
    if format_of(Path(arguments.out)) is None:
        raise ValueError(f"`--out` must be a prediction file, got {arguments.out!r}. Name a .csv file, for example.")
    return options.found_files(arguments)


def metrics() -> dict[str, str]:
    """Return the class of each metric by the name of its function, such as "BrierScore" by "brier_score"."""
    functions = public_names("functional") - {"by_group"}  # `ByGroup` wraps metrics
    classes = {name.lower(): name for name in dir(torchcalib) if not name.islower()}
    joined = {name: name.replace("_", "") for name in sorted(functions) if name.islower()}
    return {name: classes[of_class] for name, of_class in joined.items() if of_class in classes}


def metric_named(word: str) -> str | None:
    """Return the function of a metric by its name, that of its class, or that in another package; or None."""
    known = metrics()
    name = word.lower().replace("-", "_")
    by_class = {kind.lower(): function for function, kind in known.items()}
    return next((each for each in (name, by_class.get(name), NAMES.get(name)) if each in known), None)


def _no_predictions(*_: Any) -> None:
    """Open no predictions, for commands that read none."""


_PLACES = ("save_calibrator", "save_state")

COMMANDS: Mapping[str, Command] = {
    "report": Command(
        "report",
        "compute scores, calibration errors, tables and diagrams for a file of predictions",
        "Read predictions and targets, and print scores and calibration errors. --out writes a report.",
        (options.FILES, *options.RESULTS, *_REPORT, _PER_IMAGE, *_REST),
        _found_for_report,
        _REPORT_EXAMPLES,
        _opened_for_report,
        places=_PLACES,
    ),
    "metric": Command(
        "metric",
        "compute one metric",
        "Print the value of one metric. The word metric may be omitted: torchcalib ece predictions.csv",
        (_METRIC, options.FILES, *_INPUT, *options.BINS, options.MODE, _METRIC_OPTION),
        _found_for_metric,
        _METRIC_EXAMPLES,
    ),
    "check": Command(
        "check",
        "fail if predictions are miscalibrated, for continuous integration",
        "Compute a report without calibrators, and return exit code 1 if a condition holds.\n"
        "By default, the error must be significant and large: sampling noise alone is no failure.\n"
        "p-values hold for one look at the data: repeated checks give more false alarms than torchcalib watch.",
        (options.FILES, _CONDITION, _DETECTABLE, *_REST),
        _found_for_check,
        _CHECK_EXAMPLES,
    ),
    "watch": Command(
        "watch",
        "test calibration after deployment, as often as rows arrive",
        "Add new rows of files to the evidence against calibration, and return exit code 1 after an alarm.\n"
        "The evidence holds at every look: a calibrated model ever causes an alarm with probability --level at most.",
        (*_WATCH, *_INPUT),
        _found_for_watch,
        _WATCH_EXAMPLES,
        _no_predictions,
        ("state", "prometheus"),
    ),
    "audit": Command(
        "audit",
        "measure the calibration of a language model from the log of an evaluation",
        "Read a log, and print the calibration under each definition of the confidence that it contains.",
        _LOG,
        _found_log,
        _AUDIT_EXAMPLES,
        _opened_log,
    ),
    "plot": Command(
        "plot",
        "draw the reliability diagram",
        "Write the reliability diagram, with consistency bands and the expected calibration error, to a file.",
        (options.FILES, *_PLOT, *_REST),
        _found_for_plot,
        places=("out",),
    ),
    "compare": Command(
        "compare",
        "compare scores and calibration errors of several systems on the same targets",
        "Compare the predictions of several systems for the same targets, with intervals of differences.\n"
        "A system is a file, several shards, or one --preds of a common file. The first system is the baseline.\n"
        "Files have the same rows, or ids by which rows are joined (--id).",
        (_SYSTEMS, *_COMPARE, options.PREDS_OF_SYSTEMS, *options.CONTENT, options.CLUSTERS, *options.BINS),
        systems_of,
        _COMPARE_EXAMPLES,
        inputs.opened_systems,
    ),
    "calibrate": Command(
        "calibrate",
        "fit a calibrator to a file of predictions",
        "Fit a calibrator to predictions and targets, and write it for `torchcalib apply` and\n"
        "torchcalib.calibration.load_calibrator.",
        (options.FILES, *_CALIBRATE, *_INPUT),
        _found_for_calibrate,
        _CALIBRATE_EXAMPLES,
        places=("out",),
    ),
    "apply": Command(
        "calibrate",
        "calibrate the predictions in a file",
        "Write a copy of prediction files with calibrated predictions. Targets are not needed. Names and order do not\n"
        "change: calibrated logits replace logits, and calibrated probabilities replace probabilities.",
        _APPLY,
        _found_for_apply,
        _CALIBRATE_EXAMPLES,
        inputs.opened_to_convert,
        ("out",),
    ),
    "merge": Command(
        "report",
        "compute one report from the states that `torchcalib report --save-state` wrote",
        "Print and write one report for several parts, as if one run had read all their files in order.",
        (_PARTS, *options.RESULTS),
        _found_parts,
        open=_no_predictions,
        places=_PLACES,
    ),
    "demo": Command(
        "demo",
        "train a small classifier until it is over-confident, and report on it",
        "Train a small classifier on the scikit-learn digits, and print its calibration after every epoch.",
        _DEMO,
        lambda _: (),
        open=_no_predictions,
    ),
}
"""All commands, by name."""
