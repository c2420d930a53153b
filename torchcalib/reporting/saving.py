"""Save, load and gather the states of report builders."""

import io
from functools import reduce
from operator import add
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist

from torchcalib.io.errors import InputError
from torchcalib.io.saved import load_saved, write_whole
from torchcalib.metrics.gathering import gathered_bytes, gathered_numbers
from torchcalib.reporting.building import ReportBuilder

FORMAT, VERSION = "torchcalib report state", 7


def save_report_state(builder: ReportBuilder, path: str | Path) -> None:
    """Write the state of a builder to a file, which is complete or absent.

    `load_report_state` restores the builder, to add predictions, to `merge` it with others, or to report. The command
    `torchcalib merge FILE ...` makes the report of several files. A file holds sums and, up to the limits of
    `ReportBuilder`, the predictions themselves, for rank-based values, intervals and calibrators. It is far smaller if
    both `with_calibration` and `with_intervals` are False.

    Args:
        builder: to save.
        path: the file; one of the same name is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(Path(path), state_bytes(builder))


def load_report_state(path: str | Path) -> ReportBuilder:
    """Load a file of `save_report_state`, or of `torchcalib report --save-state`.

    The file need not be trusted: no code in it runs, it takes no more memory than its size, and its values are checked
    like predictions.

    Args:
        path: the file.

    Returns:
        The builder, on the CPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: if it is no report state, damaged, or of another version.

    Example:
        >>> import tempfile, torch
        >>> parts = [ReportBuilder(task="binary"), ReportBuilder(task="binary")]
        >>> parts[0].update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
        >>> parts[1].update(torch.tensor([0.9, 0.4]), torch.tensor([1, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for k in range(2):
        ...         save_report_state(parts[k], f"{folder}/part{k}.pt")
        ...     whole = load_report_state(f"{folder}/part0.pt")
        ...     whole.merge(load_report_state(f"{folder}/part1.pt"))
        >>> whole.report().n
        4.0
    """
    try:
        return _builder_of(load_saved(Path(path)))
    except (OSError, _OtherVersionError):
        raise
    # Damaged and malicious files raise BadZipFile, UnpicklingError, KeyError, RuntimeError, TypeError ...
    except Exception as error:
        message = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InputError(
            f"`{path}` must be a report state that torchcalib wrote to its end, got {type(error).__name__}: {message}. "
            "Make it with `torchcalib report --save-state` or `save_report_state`."
        ) from error


def gather_report(builder: ReportBuilder | None, process_group: Any = None) -> ReportBuilder | None:
    """Merge the builders of all ranks on the first rank, in the order of ranks.

    Its report is that of all predictions, those of rank 0 first. All states are sent in one collective, after a few
    numbers from each rank.

    Args:
        builder: of this rank, or None. It changes only where samples are too many together: they become a sketch, or
            are no longer kept, as they would in one builder.
        process_group: the ranks, by default all; Gloo or NCCL.

    Returns:
        The builder of all on the first rank of the group, None on the others (and if there is none on any).

    Raises:
        ValueError: on the first rank, if the builders cannot be merged; see `ReportBuilder.merge`.
    """
    parts = parts_of_ranks(builder, process_group)
    return reduce(add, parts) if parts else None


def parts_of_ranks(builder: ReportBuilder | None, process_group: Any = None) -> list[ReportBuilder]:
    """Return the builders of all ranks on the first rank; none on the others."""
    held = (0, 0, 0) if builder is None else builder.held
    everyone = gathered_numbers(held, process_group)
    if builder is not None:
        builder.limit(*everyone.sum(0).tolist())
    rank = dist.get_rank(process_group)
    mine = b"" if builder is None or rank == 0 else state_bytes(builder)
    parts = [builder_of_bytes(content) for content in gathered_bytes(mine, process_group) if content]
    return [builder, *parts] if builder is not None and rank == 0 else parts


def state_bytes(builder: ReportBuilder) -> bytes:
    """Return the state of a builder as the content of a file."""
    content = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **builder.state()}, content)
    return content.getvalue()


def builder_of_bytes(content: bytes) -> ReportBuilder:
    """Return the builder of `state_bytes` from this program."""
    return _builder_of(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


class _OtherVersionError(InputError):
    """A state of another version of the format."""


def _builder_of(state: Any) -> ReportBuilder:
    """Return the saved builder; raise any exception for a bad state."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError("no report state")
    if state.get("version") != VERSION:
        raise _OtherVersionError(
            f"`version` of a report state must be {VERSION} for this torchcalib, got {state.get('version')!r}. "
            "Make all parts with the torchcalib that merges them."
        )
    return ReportBuilder.of_state(state)
