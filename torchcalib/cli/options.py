"""Arguments that several commands share, each declared once, and the names of arrays and columns for their help."""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from torchcalib.io.errors import shown
from torchcalib.io.names import CONFIDENCES, CORRECT, LOGITS, NEUTRAL, PROBS, TARGETS, TASKS, WEIGHTS
from torchcalib.io.paths import FORMATS, check_paths, expanded

MODES = ("positive", "top_label", "classwise")
"""Kinds of confidence with a name; see `torchcalib.core.events.NamedMode`."""


class Option:
    """An argument of commands.

    Args:
        name: name on the command line; without hyphens, that of a positional argument.
        metavar: word for the value in the help. Without it and other arguments, the option is a flag.
        text: help.
        group: options of the same group exclude each other.
        **how: further arguments of `add_argument`.
    """

    def __init__(self, name: str, metavar: str | None, text: str, group: str = "", **how: Any) -> None:
        how = how if metavar or how else {"action": "store_true"}
        self.name, self.group = name, group
        self.how = {**how, "help": text, **({"metavar": metavar} if metavar else {})}


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options to the parser of a command."""
    groups: dict[str, Any] = {}
    for option in options:
        if option.group and option.group not in groups:
            groups[option.group] = parser.add_mutually_exclusive_group()
        groups.get(option.group, parser).add_argument(option.name, **option.how)


def _words(names: Sequence[str]) -> str:
    return fill(", ".join(names), 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


NAMES = f"""names that are found without options (case-insensitive):
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
"""Names of arrays and columns, for the help of commands."""


def found_files(arguments: argparse.Namespace) -> tuple[Path, ...]:
    """Return the checked paths of the prediction files."""
    return check_paths(expanded(arguments.files))


def is_file(out: str | None) -> bool:
    """Return whether --out names a single file, by its ending, instead of a folder."""
    return out is not None and Path(out).suffix.lower() in (".html", ".json", ".md", ".tex") and not Path(out).is_dir()


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError unless numbers such as that of bins are at least 1, and files for --out have a folder."""
    for name in ("diagrams", "pages"):
        if getattr(arguments, name, False) and (arguments.out is None or is_file(arguments.out)):
            found = "none" if arguments.out is None else shown(arguments.out)
            raise ValueError(f"`--out` must be a folder with --{name}, got {found}. Pass --out DIR, or omit --{name}.")
    for name in ("n_bins", "epochs", "batch", "interval"):
        if getattr(arguments, name, 1) < 1:
            found = getattr(arguments, name)
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least 1, got {found}. Pass a positive number.")


def mode(text: str) -> str:
    """Return the mode that a text names, "top5" for `TopK(5)`."""
    if ranked := re.fullmatch(r"top_?(?:k[=(]?)?([1-9]\d{0,8})\)?", text, re.IGNORECASE):
        return f"top{ranked[1]}"
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"must be {', '.join(MODES)} or top5 (any number), got {shown(text)}")
    return text


def word(text: str) -> tuple[str, float]:
    """Return the word and the confidence of `WORD=P`."""
    name, _, value = text.rpartition("=")
    try:
        p = float(value)
    except ValueError:
        p = math.nan
    if not (name and 0 <= p <= 1):
        raise argparse.ArgumentTypeError(
            f"must be a word and its confidence in [0, 1], as in high=0.9, got {shown(text)}"
        )
    return name, p


FILES = Option(
    "files",
    "FILE",
    f"{', '.join(FORMATS)}; .npy files are a pair of predictions and targets; several files are shards of one data "
    "set; a quoted pattern such as 'shards/*.npz' expands to all matches, sorted by name",
    nargs="+",
)
_COLUMNS = "key or column of the predictions, or one column per class: a,b,c or 'prob_*' or 0..3"
PREDS = Option("--preds", "NAME", f"{_COLUMNS} (default: found by name)")
PREDS_OF_SYSTEMS = Option(
    "--preds",
    "NAME",
    f"{_COLUMNS}; repeat as [NAME=]COLUMNS to compare systems in a single file (default: found by name)",
    action="append",
)
KIND = (
    Option("--from-logits", None, "predictions are logits (default: from the name)", "kind"),
    Option("--from-probs", None, "predictions are probabilities (default: from the name)", "kind"),
)
CONTENT = (
    Option(
        "--pred",
        "NAME",
        "key or column of the predicted labels, if predictions are their probabilities (default: found by name)",
    ),
    Option("--target", "NAME", "key or column of the targets (default: found by name)"),
    Option("--weights", "NAME", "key or column of the weights (default: found by name)"),
    Option(
        "--class-names",
        "A,B,...",
        "class names in the order of the predictions; for one probability the negative class, then the positive class "
        "(default: from column names or text targets)",
    ),
    *KIND,
    Option("--normalize", None, "divide rounded multi-class probabilities by their sum"),
    Option(
        "--task",
        None,
        "task (default: from the shapes); confidence: predictions are confidences, targets are 1 if correct",
        choices=(*TASKS, "confidence"),
    ),
    Option("--ignore-index", "K", "drop rows with this target", type=int),
    Option(
        "--nan-policy",
        None,
        "raise an error for rows with NaN, empty cells or invalid infinities, or drop and count such rows (default: "
        "raise)",
        choices=("raise", "drop"),
        default="raise",
    ),
)
"""Content of files, which `torchcalib.cli.inputs.opened` passes to the readers, except for the predictions."""

N_BINS = Option(
    "--n-bins",
    "B",
    "number of equal-width bins, and of equal-mass bins for the adaptive calibration error (default: 15)",
    type=int,
    default=15,
)
BINS = (N_BINS, Option("--right", None, "use bins (a, b] instead of [a, b)"))
CLUSTERS = Option(
    "--clusters",
    "NAME",
    "key or column with the cluster of each row, integers or text, such as a patient, an image or a question; only "
    "rows of different clusters are independent",
)
MODE = Option(
    "--mode",
    None,
    "kind of confidence: positive, top_label, classwise, or top5 for the 5 most probable classes together (default: "
    "the first one of the task)",
    type=mode,
)
DIAGRAMS = Option("--diagrams", None, "add every diagram as PNG and SVG to the folder of --out")


def out(name: str) -> Option:
    """Return the option for files of results, whose page is `name`.html."""
    return Option(
        "--out", "PATH", f"write a file (.html, .json, .md, .tex), or a folder with {name}.html and {name}.json"
    )


RESULTS = (
    out("report"),
    DIAGRAMS,
    Option("--all", None, "print all tables, explanations and notes"),
    Option(
        "--save-state",
        "PATH",
        "write the state of a part of a larger report for `torchcalib merge`; without --out and --save-calibrator, "
        "compute no report",
    ),
    Option(
        "--save-calibrator",
        "PATH",
        "fit the recommended calibrator, if there is one, to all samples, and write it for "
        "torchcalib.calibration.load_calibrator",
        "calibration",
    ),
)
"""Results of a report."""
