"""Jobs of the benchmarks: our call, the calls of other packages, and the goals."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REASONS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))
"""Why jobs miss their goals by family and name, and why kernels are far from the limits of a machine."""

Call = Callable[[], object]
OURS = "ours"
WITHOUT_NUMBA = ", without numba"
EVERYDAY = "everyday"
FAMILIES = (EVERYDAY, "one_pass", "ranks", "ranked", "canonical", "calibration", "reports", "vocabulary", "logs")
"""Modules with a list `JOBS`, in the order of the table."""


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Sides:
    """Calls to measure, with prepared data.

    Attributes:
        ours: our call.
        peers: calls of the peers on the same data, by name.
        shares: fraction of the work that a peer does, if less than 1. Its times are divided by it.
        error: function that returns the error of our result.
        states: function that returns the state size of a side in bytes after a number of updates.
        result_bytes: size of the result (a gradient), which does not count as additional memory.
        repeats: number of calls in a measurement, for short calls. Times are divided by it.
        tolerance: largest allowed difference of the values of the sides, relative to the largest value of the peer;
            None if they compute different things.
        values: functions that return the values to compare, by side. Without one, the result of the call is compared.
    """

    ours: Call
    peers: Mapping[str, Call] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    states: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    result_bytes: int = 0
    repeats: int = 1
    tolerance: float | None = None
    values: Mapping[str, Call] = field(default_factory=dict)

    def call(self, side: str) -> Call:
        return self.ours if side == OURS else self.peers[side]

    def value(self, side: str) -> object:
        return self.values.get(side, self.call(side))()


@dataclass(frozen=True)
class Peer:
    """Alternative call: its key in `Sides.peers`, the goal for our time divided by its time, and its packages."""

    name: str
    goal: float | None = None
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Required packages that are not installed."""
        return [package for package in self.needs if version_of(package) is None]


@dataclass(frozen=True)
class Job:
    """Calls to compare, and lines of the table.

    Attributes:
        name: computed quantity and its size.
        prepare: function that creates the data and returns the sides. Its keyword arguments are sizes; `n` is the
            number of rows.
        peers: alternatives to our call.
        seconds: goal for our time.
        extra_bytes: goal for our memory in addition to data and result; None to measure no memory.
        error: goal for `Sides.error`.
        updates: numbers of updates after which the state must have the same size.
        grows: further sizes for our call: arguments of `prepare`, including `n`.
        numba: whether our call may import numba.
        rounds: number of measurements.
        alone: whether the job gets a process of its own. Other jobs of a family share one, which saves their imports.
        on_device: whether `prepare` has an argument `device`, and all sides run there.
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
    alone: bool = True
    on_device: bool = False

    @property
    def process(self) -> tuple[bool, str]:
        """Key of the process in which the job runs."""
        return self.numba, self.name if self.alone else ""

    @property
    def sides(self) -> list[str]:
        """Names of our side and of the installed peers."""
        return [OURS, *(peer.name for peer in self.peers if not peer.missing)]

    def without_numba(self, **changes: Any) -> "Job":
        """Return this job in plain torch, without peers that require numba and without goals other than `changes`."""
        peers = tuple(replace(peer, goal=None) for peer in self.peers if "numba" not in peer.needs)
        plain = {"peers": peers, "seconds": None, "grows": ()}
        return replace(self, name=f"{self.name}{WITHOUT_NUMBA}", numba=False, **(plain | changes))


def jobs_of(family: str) -> list[Job]:
    jobs: list[Job] = import_module(f"benchmarks.{family}").JOBS
    return jobs


def named(jobs: Sequence[Job], name: str) -> Job:
    return next(job for job in jobs if job.name == name)
