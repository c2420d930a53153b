"""Files of the commands that read predictions."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchcalib.io.opening import PredictionFiles, open_predictions

PIECE_BYTES = 4 * 2**20
"""Bytes of predictions in memory at once. Class-wise bins need about 40 bytes for every prediction of 4 bytes."""


def opened(arguments: argparse.Namespace, paths: Sequence[Path]) -> PredictionFiles:
    """Open files according to the options."""
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
