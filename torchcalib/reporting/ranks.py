"""Builders of all ranks on the first of them."""

from functools import reduce
from operator import add
from typing import Any

import torch.distributed as dist

from torchcalib.metrics.gathering import gathered_bytes, gathered_numbers
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.saving import builder_of_bytes, state_bytes


def gather_report(builder: ReportBuilder | None, process_group: Any = None) -> ReportBuilder | None:
    """Bring together what the builders of all ranks hold, on the first rank, in the order of ranks.

    The report there is that of all predictions, as if one builder had been given them, those of rank 0 first. All
    states meet in one collective; what goes before it are a few numbers from each rank.

    Args:
        builder: of this rank, None if it has none; it stays as it is, but for samples that are too many together: they
            become a sketch, or are no longer kept, as they would have in one builder.
        process_group: the ranks; by default all. Gloo or NCCL.

    Returns:
        The builder of all on the first rank of the group, None on the others (and if there is none on any).

    Raises:
        ValueError: on the first rank, if the builders cannot be merged; see `ReportBuilder.merge`.
    """
    parts = parts_of_ranks(builder, process_group)
    return reduce(add, parts) if parts else None


def parts_of_ranks(builder: ReportBuilder | None, process_group: Any = None) -> list[ReportBuilder]:
    """Return the builders of all ranks that have one, on the first rank; nothing on the others."""
    held = (0, 0, 0) if builder is None else builder.held
    everyone = gathered_numbers(held, process_group)
    if builder is not None:
        total = everyone.sum(0).tolist()
        builder.relieve((total[0] - held[0], total[1] - held[1], total[2] - held[2]))
    rank = dist.get_rank(process_group)
    mine = b"" if builder is None or rank == 0 else state_bytes(builder)
    parts = [builder_of_bytes(content) for content in gathered_bytes(mine, process_group) if content]
    return [builder, *parts] if builder is not None and rank == 0 else parts
