"""Jobs of the benchmarks: our call, the calls of other packages, and the goals."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

REASONS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))
"""Why jobs miss their goals by family and name, and why kernels are far from the limits of a machine."""

Call = Callable[[], object]
Function = TypeVar("Function", bound=Callable[..., Any])
OURS = "ours"
WITHOUT_NUMBA = ", without numba"
EVERYDAY = "everyday"
DEVICE = "device"  # jobs for a GPU only
FAMILIES = (EVERYDAY, "one_pass", "ranks", "metrics", "reports", "vocabulary", "logs", DEVICE)
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
        graph: whether all sides are captured in a CUDA graph, whose replays are timed.
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
    graph: bool = False

    @property
    def process(self) -> tuple[bool, str]:
        """Key of the process in which the job runs."""
        return self.numba, self.name if self.alone else ""

    @property
    def sides(self) -> list[str]:
        """Names of our side and of the installed peers."""
        return [OURS, *(peer.name for peer in self.peers if not peer.missing)]

    def without_numba(self, goals: Mapping[str, float], **changes: Any) -> "Job":
        """Return this job in plain torch, with the goals of ratios by peer, and without peers that require numba."""
        peers = [replace(peer, goal=goals.get(peer.name)) for peer in self.peers if "numba" not in peer.needs]
        plain = {"numba": False, "peers": tuple(peers), "seconds": None, "grows": (), **changes}
        return replace(self, name=f"{self.name}{WITHOUT_NUMBA}", **plain)


def alternative(*needs: str, title: str = "") -> Callable[[Function], Function]:
    """Declare the packages that a function requires, and its name in tables if it is not that of the function."""

    def declared(function: Function) -> Function:
        vars(function).update(needs=needs, title=title)
        return function

    return declared


def peer_of(function: Callable[..., Any], goal: float | None = None) -> Peer:
    """Return an alternative with its declared name and packages."""
    while isinstance(function, partial):
        function = function.func
    known = vars(function)
    return Peer(known.get("title") or function.__name__.replace("_", " "), goal, known.get("needs", ()))


def gradient(loss: Callable[..., Tensor], *given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of a loss in all arguments that require them."""
    return torch.autograd.grad(loss(*given), [x for x in given if isinstance(x, Tensor) and x.requires_grad])


def job(
    name: str,
    data: Callable[..., Sequence[Any]],
    ours: Callable[..., Any],
    against: Mapping[Callable[..., Any], float | None] | None = None,
    *,
    options: Sequence[str] = ("n_bins",),
    exact: Callable[..., float] | None = None,
    shares: Mapping[str, float] | None = None,
    repeats: int = 1,
    tolerance: float | None = None,
    **goals: Any,
) -> Job:
    """Return a job of functions that get the result of `data(**sizes)`.

    `against` has the goals for our time divided by that of each alternative. Our function also gets sizes named in
    `options`. `exact` returns our value without rounding errors. For `shares`, `repeats` and `tolerance` see `Sides`;
    `goals` are other fields of `Job`.
    """
    peers = {peer_of(call, goal): call for call, goal in (against or {}).items()}

    def prepare(device: str = "cpu", **sizes: Any) -> Sides:
        chosen = {name: sizes.pop(name) for name in options if name in sizes}
        given = [on_device(each, device) for each in data(**sizes)]
        return Sides(
            partial(ours, *given, **chosen),
            {peer.name: partial(call, *given) for peer, call in peers.items()},
            shares or {},
            None if exact is None else lambda: abs(float(ours(*given)) - exact(*given)),
            result_bytes=sum(x.nbytes for x in given if isinstance(x, Tensor) and x.requires_grad),
            repeats=repeats,
            tolerance=tolerance,
        )

    return Job(name, prepare, tuple(peers), **goals)


def on_device(x: Any, device: str) -> Any:
    """Return a tensor on a device, where a leaf stays a leaf; other data are unchanged."""
    return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def jobs_of(family: str) -> list[Job]:
    jobs: list[Job] = import_module(f"benchmarks.{family}").JOBS
    return jobs


def named(jobs: Sequence[Job], name: str) -> Job:
    return next(job for job in jobs if job.name == name)
