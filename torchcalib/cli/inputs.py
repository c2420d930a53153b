"""Files of the commands that read predictions."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from torchcalib.io.opening import PredictionFiles, open_predictions

PIECE_BYTES = 4 * 2**20
"""Bytes of predictions in memory at once. Class-wise bins need about 40 bytes for every prediction of 4 bytes."""

_ENOUGH_ROWS = 20
"""Number of rows of logits that do not sum to 1 by chance."""


def opened(arguments: argparse.Namespace, paths: Sequence[Path], preds: str | None = None) -> PredictionFiles:
    """Open files according to the options; `preds` replaces the option of this name."""
    return open_predictions(
        paths,
        preds=arguments.preds if preds is None else preds,
        target=arguments.target,
        weights=arguments.weights,
        groups=getattr(arguments, "groups", None),
        from_logits=True if arguments.from_logits else False if arguments.from_probs else None,
        task=arguments.task,
        class_names=None if arguments.class_names is None else arguments.class_names.split(","),
        nan_policy=arguments.nan_policy,
        normalize=arguments.normalize,
    )


@contextmanager
def in_rows(first: int, n: int, of: str = "") -> Iterator[None]:
    """Add to an error the rows where it occurred: n of them, from row `first` on."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"in rows {first:,} to {first + n - 1:,}{of}: {error}") from error


def check_logits(preds: Tensor, task: str, where: str) -> None:
    """Raise if logits of classes are probabilities: all rows are in [0, 1] and sum to 1."""
    if task != "multiclass" or len(preds) < _ENOUGH_ROWS:
        return
    inside = bool(((preds >= 0) & (preds <= 1)).all())
    if inside and bool(((preds.double().sum(-1) - 1).abs() <= 1e-3).all()):
        raise ValueError(
            f"{where} must be logits, got probabilities: all rows are in [0, 1] and sum to 1. Pass --from-probs."
        )
