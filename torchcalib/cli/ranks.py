"""Processes that a launcher such as torchrun has started together: they fail together, and the first one speaks."""

import datetime
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchcalib.cli.errors import fail, line_of
from torchcalib.metrics.gathering import gathered_bytes, gathered_numbers

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells its processes, and `torch.distributed` reads."""

_PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for others that read more. One that dies closes its connections, and is not waited for."""


class _TogetherError(Exception):
    """What went wrong on some rank, known to all of them."""


@dataclass(frozen=True)
class Ranks:
    """One process among those that work together.

    Attributes:
        rank: its number.
        n_ranks: how many there are; 1 without a launcher.
        group: all of them, who wait for one another as long as it takes.
    """

    rank: int
    n_ranks: int
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait for all ranks to finish the body. If it fails on any of them it fails on all, with the first's words.

        The body must not communicate.
        """
        if self.n_ranks == 1:
            yield
            return
        problem = ""
        left: SystemExit | None = None
        try:
            yield
        except SystemExit as error:  # the reader of the output has seen enough
            left = error
        except Exception as error:
            problem = line_of(error)
        if gathered_numbers((len(problem),), self.group).any():
            told = [words.decode() for words in gathered_bytes(problem.encode(errors="replace"), self.group) if words]
            raise _TogetherError(told[0] if told else "")
        if left is not None:
            raise left

    def check_same(self, name: str, value: object) -> None:
        """Raise on all ranks unless a value is the same on all of them."""
        if self.n_ranks == 1:
            return
        marks = gathered_numbers((zlib.crc32(repr(value).encode()),), self.group)
        if (marks != marks[0]).any():
            raise _TogetherError(f"all ranks must see the same {name}, got others on some of them. Share the folder.")


@contextmanager
def together() -> Iterator[Ranks]:
    """Join the other processes that a launcher has started, if one has: by its environment variables.

    All of them leave with the same exit code, the others not before the first has said what there is to say: a launcher
    ends all when one of them fails.
    """
    if not all(os.environ.get(name) for name in _LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield Ranks(0, 1)
        return
    # Files are read on the CPU, where states stay: gloo takes them, with or without GPUs. That all ranks come is soon
    # known, which is torch's own timeout; how long they read is not.
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(timeout=_PATIENCE))
    try:
        yield ranks
    except _TogetherError as error:
        code = fail(str(error)) if ranks.is_first else 2
        dist.barrier(ranks.group)
        raise SystemExit(code) from None
    finally:
        dist.destroy_process_group()
