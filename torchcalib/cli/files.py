"""Open prediction files, and create folders, for the commands."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcalib.cli.messages import output, working
from torchcalib.core.mistakes import look_like_probabilities
from torchcalib.io.opening import PredictionFiles, Rows, open_predictions
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.reading import PIECE_BYTES, builder_for
from torchcalib.results.base import plain


def opened(arguments: argparse.Namespace, paths: Sequence[Path], preds: str | None = None) -> PredictionFiles:
    """Open prediction files with the command line options. `preds` overrides the option --preds."""
    return open_predictions(
        paths,
        preds=arguments.preds if preds is None else preds,
        target=arguments.target,
        weights=arguments.weights,
        groups=getattr(arguments, "groups", None),
        clusters=getattr(arguments, "clusters", None),
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


def read(arguments: argparse.Namespace, files: PredictionFiles, update: Callable[[Rows], None]) -> None:
    """Pass all rows to `update` in chunks, and show the progress. Errors contain the numbers of the rows."""
    row = 1
    with working("reading", files.n_rows) as advance:
        for rows in files.chunks(PIECE_BYTES):
            with in_rows(row, len(rows)) if len(rows) < files.n_rows else nullcontext():
                if row == 1:
                    check_logits(arguments, files, rows.preds, f"in `{files.source.files[0]}`")
                update(rows)
            row += len(rows)
            advance(len(rows))


def read_builder(arguments: argparse.Namespace, paths: Sequence[Path], **settings: Any) -> ReportBuilder:
    """Read prediction files into a builder for reports. `settings` are further arguments of `ReportBuilder`."""
    with working("opening the files"):
        files = opened(arguments, paths)
    for name in ("n_bins", "right", "ignore_index", "nan_policy"):
        if hasattr(arguments, name):
            settings[name] = getattr(arguments, name)
    builder = builder_for(files, **settings)
    read(arguments, files, lambda rows: builder.update(**vars(rows)))
    return builder


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


def check_place(option: str, place: str, inputs: Sequence[Path]) -> Path:
    """Return the path of a file for results. Raise ValueError unless it can be written, and is not an input file."""
    path, folder = Path(place), Path(place).parent
    if path.is_dir() or not path.name:
        raise ValueError(f"`{option}` must be a file, got the folder {str(path)!r}. Name a file in it.")
    if not folder.is_dir():
        raise ValueError(f"`{option}` must be in a folder that exists, got {str(path)!r}. Create the folder.")
    if not os.access(folder, os.W_OK):
        found = f"got {str(path)!r}. Name another one."
        raise ValueError(f"`{option}` must be in a folder that can be written to, {found}")
    if any(path.exists() and path.samefile(other) for other in inputs):
        raise ValueError(f"`{option}` must not be an input file, got {str(path)!r}. Name another one.")
    return path


def print_json(content: Mapping[str, Any]) -> None:
    """Print plain values, or those of data classes, as strict JSON."""
    output(json.dumps(plain(content), indent=2, allow_nan=False))
