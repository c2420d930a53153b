"""What commands that read predictions have in common: the options, the files, and the words for what was read."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from torchcalib.files import PredictionFiles, open_predictions, printable
from torchcalib.predictions import Task

PIECE_BYTES = 4 * 2**20
"""Predictions that are worked on at a time. A class-wise bin needs some 40 bytes for every 4-byte prediction."""


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add how files are to be read, and binned."""
    parser.add_argument("--preds", metavar="NAME", help="key or column of the predictions (default: found by name)")
    parser.add_argument("--target", metavar="NAME", help="key or column of the targets (default: found by name)")
    parser.add_argument("--weights", metavar="NAME", help="key or column of the weights (default: found by name)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--from-logits", action="store_true", help="predictions are logits (default: by their name)")
    kind.add_argument("--from-probs", action="store_true", help="predictions are probabilities (default: by name)")
    parser.add_argument("--task", choices=get_args(Task), help="what is predicted (default: by the shapes)")
    parser.add_argument(
        "--n-bins",
        type=int,
        default=15,
        metavar="B",
        help="bins of equal width, and for ACE of equal mass (default: 15)",
    )
    parser.add_argument("--right", action="store_true", help="bins are (a, b] instead of [a, b)")
    parser.add_argument("--ignore-index", type=int, metavar="K", help="drop rows with this target")


def opened(arguments: argparse.Namespace, paths: Sequence[str]) -> PredictionFiles:
    """Open files as the options say."""
    return open_predictions(
        paths,
        preds=arguments.preds,
        target=arguments.target,
        weights=arguments.weights,
        from_logits=True if arguments.from_logits else False if arguments.from_probs else None,
        task=arguments.task,
    )


def make_folder(out: str) -> None:
    """Find out before the work is done whether there is a place for it."""
    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise ValueError(f"`--out` must be a folder, got {out!r}. Name another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)


def source_of(files: PredictionFiles) -> dict[str, Any]:
    """What was read, for people."""
    source = {
        "files": [str(path) for path in files.paths],
        "format": files.format,
        "predictions": f"{files.preds_name}, read as {'logits' if files.from_logits else 'probabilities'}",
        "targets": files.target_name,
        "weights": files.weights_name or "none",
        "shape": list(files.shape),
        "dtype": files.dtype,
        "not used": list(files.ignored),
    }
    return {
        name: [_shown(v) for v in value] if isinstance(value, list) else _shown(value) for name, value in source.items()
    }


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
