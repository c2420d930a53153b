"""Serialize the state of a `ReportBuilder`, load it from files, and gather it from all ranks."""

import io
from functools import reduce
from operator import add
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist

from torchcalib.io.errors import InputError, shown
from torchcalib.io.saved import load_saved
from torchcalib.metrics.gathering import exchanged, gathered_bytes
from torchcalib.reporting.building import ReportBuilder

FORMAT, VERSION = "torchcalib report state", 16
_GATHER = "gather a report"


def load_builder(path: str | Path) -> ReportBuilder:
    """Load a builder from a file; see `ReportBuilder.load`."""
    try:
        return _builder_of(load_saved(Path(path)))
    except (OSError, _OtherVersionError):
        raise
    # Damaged files cause many types of errors, such as BadZipFile, UnpicklingError and KeyError.
    except Exception as error:
        message = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InputError(
            f"`{path}` must be a complete report state, got {type(error).__name__}: {message}. "
            "Create it with `torchcalib report --save-state` or `ReportBuilder.save`."
        ) from error


def parts_of_ranks(builder: ReportBuilder | None, process_group: Any = None) -> list[ReportBuilder]:
    """Gather the builders of all ranks on rank 0, in the order of ranks; return an empty list on other ranks.

    `builder` is None on a rank without data. Size limits are applied to the totals of all ranks before sending.
    """
    sizes = exchanged(_GATHER, (0, 0, 0) if builder is None else builder.held, process_group)
    rank, mine, problem = dist.get_rank(process_group), b"", None
    try:
        if builder is not None:
            builder.limit(*map(sum, zip(*sizes, strict=True)))
            mine = b"" if rank == 0 else state_bytes(builder)
    except Exception as error:  # for example too little memory; without an answer, other ranks would wait
        problem = error
    received = gathered_bytes(_GATHER, mine, process_group, problem=problem)
    parts = [builder] if builder is not None and rank == 0 else []
    try:
        states = (io.BytesIO(content) for content in received if content)
        parts += [_builder_of(torch.load(state, map_location="cpu", weights_only=True)) for state in states]
    except Exception as error:
        problem = error
    exchanged(_GATHER, (), process_group, problem=problem)
    return parts


def merged_over_ranks(builder: ReportBuilder, process_group: Any = None) -> ReportBuilder | None:
    """Merge the builders of all ranks on rank 0; return None on other ranks. All ranks raise the same errors."""
    whole, problem = None, None
    parts = parts_of_ranks(builder, process_group)
    try:
        whole = reduce(add, parts) if parts else None
    except Exception as error:
        problem = error
    exchanged(_GATHER, (), process_group, problem=problem)
    return whole


def state_bytes(builder: ReportBuilder) -> bytes:
    """Serialize the state of a builder in the format of `torch.save`."""
    content = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **builder.state()}, content)
    return content.getvalue()


class _OtherVersionError(InputError):
    """State in another version of the format."""


def _builder_of(state: Any) -> ReportBuilder:
    """Return the saved builder; raise an exception of any type if the state is invalid."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"`format` must be {FORMAT!r}, got another file. Load a report state.")
    if state.get("version") != VERSION:
        raise _OtherVersionError(
            f"`version` of the report state must be {VERSION}, got {shown(state.get('version'))}. "
            "Save and merge all parts with the same version of torchcalib."
        )
    return ReportBuilder.of_state(state)
