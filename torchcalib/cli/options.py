"""Arguments that several commands share, each declared once, and the names of arrays and columns for their help."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from torchcalib.io.errors import shown
from torchcalib.io.names import CONFIDENCES, CORRECT, LOGITS, NEUTRAL, PROBS, TARGETS, TASKS, WEIGHTS
from torchcalib.io.paths import check_paths, expanded

MODES = ("positive", "top_label", "classwise")
"""Kinds of confidence with a name; see `torchcalib.core.events.NamedMode`."""

Add = Callable[[argparse.ArgumentParser], Any]
"""Function that adds arguments to the parser of a command."""


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


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the prediction files of one system."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".npz, .pt, .safetensors, .parquet, .csv, .tsv or .jsonl (the last three also with .gz), or a pair of "
        ".npy files; several files are shards of one data set; "
        "a quoted pattern such as 'shards/*.npz' expands to all matches, sorted by name",
    )


def found_files(arguments: argparse.Namespace) -> tuple[Path, ...]:
    """Return the checked paths of the prediction files."""
    return check_paths(expanded(arguments.files))


def add_preds(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the option that names the predictions; with `several`, those of each system."""
    columns = "key or column of the predictions, or one column per class: a,b,c or 'prob_*' or 0..3"
    if several:
        columns += "; repeat as [NAME=]COLUMNS to compare systems in a single file"
    action = "append" if several else "store"
    parser.add_argument("--preds", metavar="NAME", action=action, help=f"{columns} (default: found by name)")


def is_file(out: str | None) -> bool:
    """Return whether --out names a single file, by its ending, instead of a folder."""
    return out is not None and Path(out).suffix.lower() in (".html", ".json", ".md", ".tex") and not Path(out).is_dir()


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError unless numbers of bins and epochs are at least 1, and files for --out have a folder."""
    for name in ("diagrams", "pages"):
        if getattr(arguments, name, False) and (arguments.out is None or is_file(arguments.out)):
            found = "none" if arguments.out is None else shown(arguments.out)
            raise ValueError(f"`--out` must be a folder with --{name}, got {found}. Pass --out DIR, or omit --{name}.")
    for name in ("n_bins", "epochs"):
        if getattr(arguments, name, 1) < 1:
            found = getattr(arguments, name)
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least 1, got {found}. Pass a positive number.")


def _mode(text: str) -> str:
    """Return the name of a mode, "top5" for `TopK(5)`."""
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


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Add the option for the kind of confidence."""
    parser.add_argument(
        "--mode",
        type=_mode,
        help="kind of confidence: positive, top_label, classwise, or top5 for the 5 most probable classes together "
        "(default: the first one of the task)",
    )


def add_kind(parser: argparse.ArgumentParser) -> None:
    """Add the options for logits or probabilities."""
    logits = parser.add_mutually_exclusive_group()
    logits.add_argument("--from-logits", action="store_true", help="predictions are logits (default: from the name)")
    logits.add_argument(
        "--from-probs", action="store_true", help="predictions are probabilities (default: from the name)"
    )


def add_input(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the options for the content of the files, which `torchcalib.cli.files.opened` passes to the readers."""
    add_preds(parser, several)
    parser.add_argument(
        "--pred",
        metavar="NAME",
        help="key or column of the predicted labels, if predictions are their probabilities (default: found by name)",
    )
    for role, kind in (("target", "targets"), ("weights", "weights")):
        parser.add_argument(f"--{role}", metavar="NAME", help=f"key or column of the {kind} (default: found by name)")
    parser.add_argument(
        "--class-names",
        metavar="A,B,...",
        help="class names in the order of the predictions; for one probability the negative class, then the positive "
        "class (default: from column names or text targets)",
    )
    add_kind(parser)
    parser.add_argument(
        "--normalize", action="store_true", help="divide rounded multi-class probabilities by their sum"
    )
    parser.add_argument(
        "--task",
        choices=(*TASKS, "confidence"),
        help="task (default: from the shapes); confidence: predictions are confidences, targets are 1 if correct",
    )
    parser.add_argument("--ignore-index", type=int, metavar="K", help="drop rows with this target")
    parser.add_argument(
        "--nan-policy",
        choices=("raise", "drop"),
        default="raise",
        help="raise an error for rows with NaN, empty cells or invalid infinities, or drop and count such rows "
        "(default: raise)",
    )


def add_bins(parser: argparse.ArgumentParser) -> None:
    """Add the options for bins."""
    parser.add_argument(
        "--n-bins",
        type=int,
        default=15,
        metavar="B",
        help="number of equal-width bins, and of equal-mass bins for the adaptive calibration error (default: 15)",
    )
    parser.add_argument("--right", action="store_true", help="use bins (a, b] instead of [a, b)")


def add_clusters(parser: argparse.ArgumentParser) -> None:
    """Add the option for clusters of dependent rows."""
    parser.add_argument(
        "--clusters",
        metavar="NAME",
        help="key or column with the cluster of each row, integers or text, such as a patient, an image or a question; "
        "only rows of different clusters are independent",
    )


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options for files of results, whose page is `name`.html."""
    words = f"write a file (.html, .json, .md, .tex), or a folder with {name}.html and {name}.json"
    parser.add_argument("--out", metavar="PATH", help=words)
    add_diagrams(parser)


def add_diagrams(parser: argparse.ArgumentParser) -> None:
    """Add the option for image files of the diagrams."""
    parser.add_argument(
        "--diagrams", action="store_true", help="add every diagram as PNG and SVG to the folder of --out"
    )


def add_results(parser: argparse.ArgumentParser) -> Any:
    """Add the options for results, and return the group for options that cannot be combined with --save-calibrator."""
    add_out(parser, "report")
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
