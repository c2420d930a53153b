"""Serialize the state of a builder, load it from files, and gather it from all ranks."""

import io
from functools import reduce
from operator import add
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchcalib.core.gathering import exchanged, gathered_bytes
from torchcalib.io.errors import InputError, shown
from torchcalib.io.saved import load_saved, saved_bytes
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.comparison.building import ComparisonBuilder

B = TypeVar("B", ReportBuilder, ComparisonBuilder)

_GATHER = "gather a report"


def builder_from(content: Path | bytes, name: str, kind: type[B]) -> B:
    """Load a builder from a file, or from its content; see `ReportBuilder.load`. `name` is that in errors."""
    try:
        return _builder_of(load_saved(content), kind)
    except (OSError, _OtherVersionError):
        raise
    # Damaged files cause many types of errors, such as BadZipFile, UnpicklingError and KeyError.
    except Exception as error:
        what, message = kind.FORMAT[0].partition(" ")[2], shorten(str(error), 200, placeholder=" ...").rstrip(".")
        how = "`ComparisonBuilder.state_bytes`"
        if kind is ReportBuilder:
            how = "`torchcalib report --save-state` or `ReportBuilder.save`"
        raise InputError(
            f"`{name}` must be a complete {what}, got {type(error).__name__}: {message}. Create it with {how}."
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
        parts += [
            _builder_of(torch.load(state, map_location="cpu", weights_only=True), ReportBuilder) for state in states
        ]
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


def state_bytes(builder: ReportBuilder | ComparisonBuilder) -> bytes:
    """Serialize the state of a builder in the format of `torch.save`."""
    name, version = builder.FORMAT
    return saved_bytes({"format": name, "version": version, **builder.state()})


class _OtherVersionError(InputError):
    """State in another version of the format."""


def _builder_of(state: Any, kind: type[B]) -> B:
    """Return the saved builder; raise an exception of any type if the state is invalid."""
    name, version = kind.FORMAT
    if not isinstance(state, dict) or state.get("format") != name:
        raise ValueError(f"`format` must be {name!r}, got another file. Load a {name.partition(' ')[2]}.")
    if state.get("version") != version:
        raise _OtherVersionError(
            f"`version` of the {name.partition(' ')[2]} must be {version}, got {shown(state.get('version'))}. "
            "Save and merge all parts with the same version of torchcalib."
        )
    return kind.of_state(state)
