"""Jobs of the benchmarks: our call, the calls of other packages, and the goals."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

REASONS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))
"""Why jobs miss their goals, by family and name."""

Call = Callable[[], object]
Function = Callable[..., Any]
OURS = "ours"
WITHOUT_NUMBA = ", without numba"
EVERYDAY = "everyday"
DEVICE = "device"  # jobs for a GPU only
FAMILIES = (EVERYDAY, "one_pass", "ranks", "metrics", "vocabulary", "logs", "kernels", DEVICE)
"""Modules with a list `JOBS`, in the order of the table."""


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Peer(NamedTuple):
    """Name of an alternative, the goal for our time divided by its time, and required packages."""

    name: str
    goal: float | None = None
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Required packages that are not installed."""
        return [package for package in self.needs if version_of(package) is None]


@dataclass(frozen=True)
class Job:
    """Our function and alternatives, which get the same data, with goals.

    Attributes:
        name: computed quantity and its size.
        data: function that returns the arguments. Its keyword arguments are sizes; `n` is the number of rows.
        ours: our function.
        against: alternatives with the goals for our time divided by theirs.
        options: names of sizes that our function gets instead of `data`.
        seconds: goal for our time.
        extra_bytes: goal for our memory in addition to data and result; None to measure no memory.
        updates: numbers of updates after which the state must have the same size. The functions return metrics, and
            get the number of updates as their last argument.
        grows: further sizes for our function, including `n`.
        numba: whether our function may import numba.
        rounds: number of measurements.
        alone: whether the job gets a process of its own. Other jobs of a family share one, which saves their imports.
        on_device: whether all sides can run on a GPU.
        graph: whether all sides are captured in a CUDA graph, whose replays are timed.
        shares: fraction of the work that an alternative does, if less than 1. Its times are divided by it.
        repeats: number of calls in a measurement, for short calls. Times are divided by it.
        tolerance: largest allowed difference of the results, relative to the largest value of the alternative; None if
            they are different things. The result of a metric is its value.
    """

    name: str
    data: Callable[..., Sequence[Any]]
    ours: Function
    against: Mapping[Function, float | None] = field(default_factory=dict)
    options: Sequence[str] = ("n_bins",)
    seconds: float | None = None
    extra_bytes: int | None = None
    updates: tuple[int, ...] = ()
    grows: tuple[Mapping[str, Any], ...] = ()
    numba: bool = True
    rounds: int = 9
    alone: bool = True
    on_device: bool = False
    graph: bool = False
    shares: Mapping[str, float] = field(default_factory=dict)
    repeats: int = 1
    tolerance: float | None = None

    @property
    def process(self) -> tuple[bool, str]:
        """Key of the process in which the job runs."""
        return self.numba, self.name if self.alone else ""

    @property
    def peers(self) -> list[Peer]:
        return [peer_of(function, goal) for function, goal in self.against.items()]

    @property
    def sides(self) -> list[str]:
        """Names of our side and of the installed peers."""
        return [OURS, *(peer.name for peer in self.peers if not peer.missing)]

    def calls(self, device: str = "cpu", **sizes: Any) -> dict[str, partial[Any]]:
        """Return the calls of all sides, with prepared data."""
        chosen = {name: sizes.pop(name) for name in self.options if name in sizes}
        given = [on_device(each, device) for each in self.data(**sizes)]
        peers = {peer_of(function).name: partial(function, *given) for function in self.against}
        return {OURS: partial(self.ours, *given, **chosen)} | {side: peers[side] for side in self.sides[1:]}

    def without_numba(self, goals: Mapping[str, float], **changes: Any) -> "Job":
        """Return this job in plain torch, with the goals of ratios by peer, and without peers that require numba."""
        names = {function: peer_of(function) for function in self.against}
        against = {function: goals.get(peer.name) for function, peer in names.items() if "numba" not in peer.needs}
        plain = {"numba": False, "against": against, "seconds": None, "grows": (), **changes}
        return replace(self, name=f"{self.name}{WITHOUT_NUMBA}", **plain)


def peer_of(function: Function, goal: float | None = None) -> Peer:
    """Return an alternative with its declared name and packages."""
    while isinstance(function, partial):
        function = function.func
    known = vars(function)
    return Peer(known.get("title") or function.__name__.replace("_", " "), goal, known.get("needs", ()))


def alternative(*needs: str, title: str = "") -> Callable[[Function], Function]:
    """Declare the packages that a function requires, and its name in tables if it is not that of the function."""

    def declared(function: Function) -> Function:
        vars(function).update(needs=needs, title=title)
        return function

    return declared


def gradient(loss: Callable[..., Tensor], *given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of a loss in all arguments that require them."""
    return torch.autograd.grad(loss(*given), [x for x in given if isinstance(x, Tensor) and x.requires_grad])


def on_device(x: Any, device: str) -> Any:
    """Return a tensor on a device, where a leaf stays a leaf, or a metric; other data are unchanged."""
    if isinstance(x, Tensor):
        return x.detach().to(device).requires_grad_(x.requires_grad)
    return x.to(device) if isinstance(x, Metric) else x


def jobs_of(family: str) -> list[Job]:
    jobs: list[Job] = import_module(f"benchmarks.{family}").JOBS
    return jobs


def named(jobs: Sequence[Job], name: str) -> Job:
    return next(job for job in jobs if job.name == name)
