"""States of report builders as bytes, and their exchange between ranks."""

import io
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist

from torchcalib.io.errors import InputError
from torchcalib.io.saved import load_saved
from torchcalib.metrics.gathering import gathered_bytes, gathered_numbers
from torchcalib.reporting.building import ReportBuilder

FORMAT, VERSION = "torchcalib report state", 8


def load_builder(path: str | Path) -> ReportBuilder:
    """Return the builder in a file; see `ReportBuilder.load`."""
    try:
        return _builder_of(load_saved(Path(path)))
    except (OSError, _OtherVersionError):
        raise
    # Damaged and malicious files raise BadZipFile, UnpicklingError, KeyError, RuntimeError, TypeError ...
    except Exception as error:
        message = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InputError(
            f"`{path}` must be a report state that torchcalib wrote to its end, got {type(error).__name__}: {message}. "
            "Make it with `torchcalib report --save-state` or `ReportBuilder.save`."
        ) from error


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
