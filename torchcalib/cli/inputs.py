"""Options and files of the commands that read predictions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torchcalib.io.opening import PredictionFiles

PIECE_BYTES = 4 * 2**20
"""Bytes of predictions in memory at once. Class-wise bins need about 40 bytes for every prediction of 4 bytes."""


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add the names and meaning of arrays, and the binning."""
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
        help="number of bins: equal width, equal mass for ACE (default: 15)",
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


def opened(arguments: argparse.Namespace, paths: Sequence[Path]) -> PredictionFiles:
    """Open files according to the options."""
    from torchcalib.io.opening import open_predictions

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
    """Add to an error the rows where it occurred: n of them, from row `first` on."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"in rows {first:,} to {first + n - 1:,}{of}: {error}") from error
