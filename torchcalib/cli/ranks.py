"""Processes that a launcher such as torchrun started: they fail together, and the first one prints and writes."""

from __future__ import annotations

import datetime
import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchcalib.cli.errors import fail, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchcalib.reporting.building import ReportBuilder

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for `torch.distributed`."""

_PATIENCE = datetime.timedelta(days=1)
"""Waiting time for ranks that read more. A rank that dies closes its connections, which ends the waiting."""


class _SharedError(Exception):
    """An error of some rank, raised on all of them."""


@dataclass(frozen=True)
class Ranks:
    """One of the processes that work together."""

    rank: int = 0
    n_ranks: int = 1
    group: Any = None  # process group of all of them

    @property
    def is_first(self) -> bool:
        """True for the process that prints and writes."""
        return self.rank == 0

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait until all ranks finish the body. If one fails, all fail with the first error message.

        The body must not communicate.
        """
        if self.n_ranks == 1:
            yield
            return
        from torchcalib.metrics.gathering import gathered_bytes, gathered_numbers

        problem = ""
        left: SystemExit | None = None
        try:
            yield
        except SystemExit as error:  # the reader of the output closed the pipe
            left = error
        except Exception as error:
            problem = line_of(error)
        if gathered_numbers((len(problem),), self.group).any():
            problems = [line.decode() for line in gathered_bytes(problem.encode(errors="replace"), self.group) if line]
            raise _SharedError(problems[0] if problems else "")
        if left is not None:
            raise left

    def check_same(self, name: str, value: object) -> None:
        """Raise on all ranks unless they have the same value."""
        if self.n_ranks == 1:
            return
        from torchcalib.metrics.gathering import gathered_numbers

        checksums = gathered_numbers((zlib.crc32(repr(value).encode()),), self.group)
        if (checksums != checksums[0]).any():
            raise _SharedError(f"all ranks must see the same {name}, got others on some of them. Share the folder.")

    def gathered(self, part: ReportBuilder | None) -> list[ReportBuilder]:
        """Return the parts of all ranks on the first one, and nothing on the others."""
        if self.n_ranks == 1:
            return [] if part is None else [part]
        from torchcalib.reporting.saving import parts_of_ranks

        return parts_of_ranks(part, self.group)


def on_first(run: Callable[[Any, Any], None]) -> Callable[[Any, Any, Ranks], None]:
    """Make a command run on the first rank only, while the others wait."""

    def run_on_first(arguments: Any, paths: Any, ranks: Ranks) -> None:
        with ranks.agreed():
            if ranks.is_first:
                run(arguments, paths)

    return run_on_first


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other processes, if environment variables of a launcher are set.

    All processes leave with the same exit code, after the first has printed: a launcher ends all when one of them
    fails.
    """
    if not all(os.environ.get(name) for name in _LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield Ranks()
        return
    import torch.distributed as dist

    # Files are read on the CPU, where states stay, so gloo is enough, with or without GPUs. torch's own timeout limits
    # the time until all ranks have started, but not the time that they read.
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(timeout=_PATIENCE))
    try:
        yield ranks
    except _SharedError as error:
        code = fail(str(error)) if ranks.is_first else 2
        dist.barrier(ranks.group)
        raise SystemExit(code) from None
    finally:
        dist.destroy_process_group()
