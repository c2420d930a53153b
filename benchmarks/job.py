"""What a job is: our side, the sides it is held against, and the goals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Call = Callable[[], object]
OURS = "ours"
WITHOUT_NUMBA = ", without numba"


def version_of(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Sides:
    """What is measured, over data that is ready.

    Attributes:
        ours: our side.
        peers: what it is held against, over the same data, by the name of the peer.
        shares: peers that do only a share of the work, and which. Their times are divided by it, and the table says so.
        error: how far our result is from the right one.
        states: how many bytes a side (`OURS`, or a peer) keeps after so many updates.
        result_bytes: size of what a call is asked to give back (a gradient): no extra memory.
    """

    ours: Call
    peers: Mapping[str, Call] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    states: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    result_bytes: int = 0

    def call(self, side: str) -> Call:
        """Return what a side does."""
        return self.ours if side == OURS else self.peers[side]


@dataclass(frozen=True)
class Peer:
    """One thing that our side is held against.

    Attributes:
        name: what it is; its key in `Sides.peers`.
        goal: at most this share of its time; None for no goal.
        needs: packages without which it is left out.
    """

    name: str
    goal: float | None = None
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """What it needs and is not installed."""
        return [package for package in self.needs if version_of(package) is None]


@dataclass(frozen=True)
class Job:
    """Some lines of the table.

    Attributes:
        name: what is computed, of how much.
        prepare: makes the data and returns the sides. Its keyword arguments are sizes; `n`, the number of rows, where
            memory is measured. It runs, and all sides run, in a process of their own.
        peers: what our side is held against.
        seconds: goal for the time of our side; None for none.
        extra_bytes: goal for the memory that our side takes beside data and result; None to measure none.
        error: goal for `Sides.error`.
        updates: after how many updates the state is looked at; the goal is that its size stays.
        grows: sizes at which our side is timed as well: arguments of `prepare`, `n` among them.
        numba: whether our side may use numba. Without it, the process cannot import numba.
        rounds: how many times all sides run, in turn.
        why: what stands in the way of a goal; said where one is missed.
    """

    name: str
    prepare: Callable[..., Sides]
    peers: tuple[Peer, ...] = ()
    seconds: float | None = None
    extra_bytes: int | None = None
    error: float | None = None
    updates: tuple[int, ...] = ()
    grows: tuple[Mapping[str, int], ...] = ()
    numba: bool = True
    rounds: int = 9
    why: str = ""

    @property
    def sides(self) -> list[str]:
        """Our side, and the peers that are installed."""
        return [OURS, *(peer.name for peer in self.peers if not peer.missing)]

    def without_numba(self, **changes: Any) -> "Job":
        """Return this job in plain torch: no peers that need numba, no goals for times but those in `changes`."""
        peers = tuple(replace(peer, goal=None) for peer in self.peers if "numba" not in peer.needs)
        plain = {"peers": peers, "seconds": None, "grows": ()}
        return replace(self, name=f"{self.name}{WITHOUT_NUMBA}", numba=False, why="", **(plain | changes))


def named(jobs: Sequence[Job], name: str) -> Job:
    """Return the job of this name."""
    return next(job for job in jobs if job.name == name)
