"""Open and check prediction files for the commands `report` and `compare`."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from torchcalib.io.opening import PredictionFiles, open_predictions

PIECE_BYTES = 4 * 2**20
"""Size of a piece of predictions in bytes. Class-wise bins need about 40 bytes for each 4-byte prediction."""

_MIN_ROWS = 20
"""Smallest number of rows that `check_logits` tests: logits in fewer rows may sum to 1 accidentally."""


def opened(arguments: argparse.Namespace, paths: Sequence[Path], preds: str | None = None) -> PredictionFiles:
    """Open prediction files with the command line options. `preds` overrides the option --preds."""
    return open_predictions(
        paths,
        preds=arguments.preds if preds is None else preds,
        target=arguments.target,
        weights=arguments.weights,
        groups=getattr(arguments, "groups", None),
        clusters=arguments.clusters,
        from_logits=True if arguments.from_logits else False if arguments.from_probs else None,
        task=arguments.task,
        class_names=None if arguments.class_names is None else arguments.class_names.split(","),
        nan_policy=arguments.nan_policy,
        normalize=arguments.normalize,
    )


@contextmanager
def in_rows(first: int, n: int, file: str = "") -> Iterator[None]:
    """Prepend the row numbers `first` to `first + n - 1` to errors, and `file`, such as " of `a.npz`"."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"in rows {first:,} to {first + n - 1:,}{file}: {error}") from error


def check_logits(preds: Tensor, task: str, where: str) -> None:
    """Raise an error if multi-class logits are probabilities: all rows are in [0, 1] and sum to 1."""
    if task != "multiclass" or len(preds) < _MIN_ROWS:
        return
    inside = bool(((preds >= 0) & (preds <= 1)).all())
    if inside and bool(((preds.double().sum(-1) - 1).abs() <= 1e-3).all()):
        raise ValueError(
            f"{where} must be logits, got probabilities: all rows are in [0, 1] and sum to 1. Pass --from-probs."
        )
