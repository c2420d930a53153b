"""Open prediction files, and create folders, for the commands."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from torchcalib.core.mistakes import look_like_probabilities
from torchcalib.io.opening import PredictionFiles, open_predictions


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


def check_logits(arguments: argparse.Namespace, files: PredictionFiles, preds: Tensor, where: str) -> None:
    """Raise ValueError if predictions are logits by their name, but look like probabilities.

    With --from-logits, the builder of the report warns instead, as in Python.
    """
    by_name = files.source.from_logits and not arguments.from_logits
    if by_name and look_like_probabilities(preds, files.task == "multiclass"):
        raise ValueError(
            f"`{files.source.preds}` {where} must be logits, got values in [0, 1] that look like probabilities. "
            "Pass --from-probs."
        )


def make_folder(out: str) -> None:
    """Create the folder for results, unless it exists, if the packages for pages are installed."""
    from torchcalib.reporting.render import html  # noqa: F401 - fails early if the extra `report` is not installed

    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise ValueError(f"`--out` must be a folder, got {out!r}. Name another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)
