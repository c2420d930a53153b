"""Read prediction files, create folders and print results, for the commands."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from torchcalib.cli.inputs import opened
from torchcalib.cli.messages import output, working
from torchcalib.cli.options import is_file
from torchcalib.core.events import Mode, NamedMode, TopK
from torchcalib.core.mistakes import look_like_probabilities
from torchcalib.io.opening import PIECE_BYTES, PredictionFiles
from torchcalib.io.rows import Rows

if TYPE_CHECKING:
    from torchcalib.reporting.building import ReportBuilder


def mode_of(name: str) -> Mode:
    """Return the mode that the option --mode names, `TopK(5)` for "top5"."""
    rank = name.removeprefix("top")
    return TopK(int(rank)) if rank.isdecimal() else cast("NamedMode", name)


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


def report_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of builders of reports, comparisons and audits that a command has as options."""
    given = vars(arguments)
    found = {name: given[name] for name in ("n_bins", "right", "nan_policy", "safe_threshold") if name in given}
    omitted = {name: given[f"no_{name}"] for name in ("calibration", "intervals") if f"no_{name}" in given}
    return found | {f"with_{name}": not is_omitted for name, is_omitted in omitted.items()}


def read_builder(arguments: argparse.Namespace, paths: Sequence[Path], **settings: Any) -> "ReportBuilder":
    """Read prediction files into a builder for reports. `settings` are further arguments of `ReportBuilder`."""
    from torchcalib.reporting.building import ReportBuilder  # `torchcalib metric` does not need reports

    files = opened(arguments, paths)
    builder = ReportBuilder(**files.settings, **report_settings(arguments), **settings)
    read(arguments, files, lambda rows: builder.update(**rows.arguments))
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


def check_pages(out: str) -> None:
    """Raise ImportError unless the packages for the page among the results are installed."""
    if not is_file(out) or out.lower().endswith(".html"):
        from torchcalib.reporting.render import html  # noqa: F401 - fails early if the extra `report` is not installed


def print_json(content: Mapping[str, Any]) -> None:
    """Print plain values, or those of data classes, as strict JSON."""
    from torchcalib.results.base import plain

    output(json.dumps(plain(content), indent=2, allow_nan=False))
