"""Coordinate the processes (ranks) of a launcher such as torchrun: all fail together, and rank 0 reports."""

from __future__ import annotations

import datetime
import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchcalib.cli.messages import fail, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchcalib.reporting.building import ReportBuilder

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that launchers set for `torch.distributed`."""

_TIMEOUT = datetime.timedelta(days=1)
"""Timeout for ranks that wait for slower ranks. A rank that dies closes its connections, which ends the wait."""

_CALL = "run the same command"


class _SharedError(Exception):
    """Error on one rank, raised on all ranks."""


@contextmanager
def _shared() -> Iterator[None]:
    """Convert an error that all ranks raise to a `_SharedError` with the message of the first rank."""
    from torchcalib.core.gathering import RanksError

    try:
        yield
    except RanksError as error:
        raise _SharedError(error.problem or str(error)) from None


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, and the group of all processes."""

    rank: int = 0
    n_ranks: int = 1
    group: Any = None  # process group of all ranks; None for a single process

    @property
    def is_first(self) -> bool:
        """True for rank 0, which prints the results and writes the files."""
        return self.rank == 0

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait for all ranks at the end of a `with` block. If one rank fails, all fail with the first error message.

        The block must not use collective operations, because a failed rank would not join them.
        """
        if self.n_ranks == 1:
            yield
            return
        from torchcalib.core.gathering import exchanged

        problem: Exception | None = None
        exit_request: SystemExit | None = None
        try:
            yield
        except SystemExit as error:  # raised when the reader of stdout closes the pipe
            exit_request = error
        except Exception as error:
            problem = ValueError(line_of(error))
        with _shared():
            exchanged(_CALL, (), self.group, problem=problem)
        if exit_request is not None:
            raise exit_request

    def check_same(self, name: str, value: object) -> None:
        """Raise an error on all ranks if `value` differs between ranks. `name` describes it in the message."""
        if self.n_ranks == 1:
            return
        from torchcalib.core.gathering import exchanged

        checksum = zlib.crc32(repr(value).encode())
        if exchanged(_CALL, (checksum,), self.group) != [[checksum]] * self.n_ranks:
            raise _SharedError(f"all ranks must have the same {name}, got different {name}. Use a shared folder.")

    def gathered(self, part: ReportBuilder | None) -> list[ReportBuilder]:
        """Return the report builders of all ranks on rank 0, and an empty list on other ranks."""
        if self.n_ranks == 1:
            return [] if part is None else [part]
        from torchcalib.reporting.saving import parts_of_ranks

        with _shared():
            return parts_of_ranks(part, self.group)


def on_first(run: Callable[[Any, Any], int | None]) -> Callable[[Any, Any, Ranks], int | None]:
    """Decorate a command to run on rank 0 only, while other ranks wait."""

    def run_on_first(arguments: Any, paths: Any, ranks: Ranks) -> int | None:
        with ranks.agreed():
            return run(arguments, paths) if ranks.is_first else None

    return run_on_first


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the process group of a launcher, if its environment variables are set.

    After an error, all processes exit with the same code. They first wait until rank 0 has printed the error, because
    a launcher ends all processes when one fails.
    """
    if not all(os.environ.get(name) for name in _LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield Ranks()
        return
    import torch.distributed as dist

    # gloo works with and without GPUs, and all tensors are on the CPU. The default timeout applies until all ranks
    # have started. The second group has a longer timeout, because reading takes longer on some ranks.
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(timeout=_TIMEOUT))
    try:
        yield ranks
    except _SharedError as error:
        code = fail(str(error)) if ranks.is_first else 2
        dist.barrier(ranks.group)
        raise SystemExit(code) from None
    finally:
        dist.destroy_process_group()
