"""What commands that read predictions have in common: the options, the files, and where an error lies in them."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from torchcalib.core.arguments import NanPolicy, Task
from torchcalib.io.opening import PredictionFiles, open_predictions

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
    parser.add_argument(
        "--nan-policy",
        choices=get_args(NanPolicy),
        default="raise",
        help="rows that hold NaN, or an infinity that leaves no distribution: an error, or dropped and counted "
        "(default: raise)",
    )


def opened(arguments: argparse.Namespace, paths: Sequence[str | Path]) -> PredictionFiles:
    """Open files as the options say."""
    return open_predictions(
        paths,
        preds=arguments.preds,
        target=arguments.target,
        weights=arguments.weights,
        groups=getattr(arguments, "groups", None),
        from_logits=True if arguments.from_logits else False if arguments.from_probs else None,
        task=arguments.task,
    )


@contextmanager
def in_rows(first: int, n: int, of: str = "") -> Iterator[None]:
    """Say in an error which rows it is about: n of them, from row `first` on."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"in rows {first:,} to {first + n - 1:,}{of}: {error}") from error
