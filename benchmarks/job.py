"""What a job is: our side, a peer's side, and the goal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sides:
    """What is timed, over data that is ready.

    Attributes:
        ours: our side.
        peer: what it is held against, over the same data; None for nothing.
        peer_share: the share of the work that `peer` does. Its time is divided by it, and the table says so.
    """

    ours: Callable[[], object]
    peer: Callable[[], object] | None = None
    peer_share: float = 1.0


@dataclass(frozen=True)
class Job:
    """One line of the table.

    Attributes:
        name: what is computed, of how much.
        prepare: makes the data and returns the sides. It runs, and both sides run, in a process of their own.
        peer: what the peer is.
        within: goal in seconds for our side; None for none.
        of_peer: goal as a share of the peer's time; None for none.
        numba: whether our side may use numba. Without it, the process cannot import numba.
        rounds: how many times both sides run, in turn.
        needs: packages without which the job is left out.
    """

    name: str
    prepare: Callable[[], Sides]
    peer: str = ""
    within: float | None = None
    of_peer: float | None = None
    numba: bool = True
    rounds: int = 9
    needs: tuple[str, ...] = ()


def named(jobs: Sequence[Job], name: str) -> Job:
    """Return the job of this name."""
    return next(job for job in jobs if job.name == name)
