"""The state of a report as bytes: what a file holds, and what ranks send one another."""

import io
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from torchcalib.io.errors import InputError
from torchcalib.io.saved import load_saved, write_whole
from torchcalib.reporting.building import ReportBuilder

FORMAT, VERSION = "torchcalib report state", 5


def save_report_state(builder: ReportBuilder, path: str | Path) -> None:
    """Write what a builder holds to a file, which is there whole or not at all.

    `load_report_state` makes the builder again, to add more predictions, to `merge` with others, or to report. The file
    is a part of a report: `torchcalib merge FILE ...` prints and writes the report of several. It holds sums and, up to
    the limits of `ReportBuilder`, the predictions themselves: for what is read from samples in order, intervals and
    calibrators. A builder made with both `with_calibration` and `with_intervals` False saves far less.

    Args:
        builder: what to save.
        path: the file; one of the same name is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(Path(path), state_bytes(builder))


def load_report_state(path: str | Path) -> ReportBuilder:
    """Read what `save_report_state`, or `torchcalib report --save-state`, wrote.

    The file need not be trusted: nothing in it is run, no more memory is taken than it is long, and all that is read
    later on is checked as the predictions were when they were added.

    Args:
        path: the file.

    Returns:
        The builder, on the CPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, is damaged, or is of another version.

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
    # Damage and malice show in many ways: BadZipFile, UnpicklingError, KeyError, RuntimeError, TypeError ...
    except Exception as error:
        said = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InputError(
            f"`{path}` must be a report state that torchcalib wrote to its end, got {type(error).__name__}: {said}. "
            "Make it with `torchcalib report --save-state` or `save_report_state`."
        ) from error


def state_bytes(builder: ReportBuilder) -> bytes:
    """Return the content of a file."""
    content = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **_on_cpu(builder.state())}, content)
    return content.getvalue()


def builder_of_bytes(content: bytes) -> ReportBuilder:
    """Return the builder of `state_bytes`, which this very program made."""
    return _builder_of(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


class _OtherVersionError(InputError):
    """A state of a format that this version of the library does not know."""


def _builder_of(state: Any) -> ReportBuilder:
    """Return the builder that was saved; raise anything if there is none."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError("something that is no report state")
    if state.get("version") != VERSION:
        raise _OtherVersionError(
            f"`version` of a report state must be {VERSION} for this torchcalib, got {state.get('version')!r}. "
            "Make all parts with the torchcalib that merges them."
        )
    return ReportBuilder.of_state(state)


def _on_cpu(value: Any) -> Any:
    """Return tensors on the CPU, each with no more memory than it needs: a part would be saved with its whole."""
    if isinstance(value, Tensor):
        own = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value.cpu() if own else value.cpu().clone()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return type(value)(map(_on_cpu, value)) if isinstance(value, list | tuple) else value
