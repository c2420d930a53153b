"""Measurements of a job in a results file, and its lines in a table."""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from benchmarks.job import OURS, Job

Record = dict[str, Any]
NOT_YET = "not yet measured"
MISSED = "MISSED"
WORSE = 1.2
"""A ratio of times is worse if it exceeds the stored one by this factor."""


def recorded(
    job: Job, times: dict[str, Any], extra_bytes: dict[str, int | None], growth: list[dict[str, Any]]
) -> Record:
    seconds = {side: summary(taken) for side, taken in times["seconds"].items()}
    ratios = {
        side: summary([ours / theirs for ours, theirs in zip(times["seconds"][OURS], taken, strict=True)])
        for side, taken in times["seconds"].items()
    }
    ours = seconds[OURS]["median"]
    return {
        "job": job.name,
        "numba": job.numba,
        "seconds": seconds[OURS],
        "peers": {
            peer.name: {
                "missing": peer.missing,
                "seconds": seconds.get(peer.name),
                "measured_on_share": times["shares"].get(peer.name, 1.0),
                "difference": times["differences"].get(peer.name),
                "ratio": None if peer.missing else ours / seconds[peer.name]["median"],
                "ratios": None if peer.missing else ratios[peer.name],
            }
            for peer in job.peers
        },
        "extra_bytes": extra_bytes,
        "state_bytes": times["state_bytes"],
        "growth": [{**point, "seconds": summary(point["seconds"])} for point in growth],
    }


def summary(taken: list[float]) -> dict[str, float]:
    """Return the median and the range."""
    return {"median": median(taken), "least": min(taken), "most": max(taken), "rounds": len(taken)}


class Compared(NamedTuple):
    """Job and alternative, with median times in seconds. `ratio` is our time divided by theirs."""

    job: str
    peer: str
    ours: float
    theirs: float
    ratio: float


def compared(records: Iterable[Record], *, numba: bool) -> list[Compared]:
    """Return all comparisons with numba or without it, in the order of their ratios."""
    found = [
        Compared(record["job"], name, record["seconds"]["median"], peer["seconds"]["median"], peer["ratio"])
        for record in records
        if record["numba"] == numba
        for name, peer in record["peers"].items()
        if peer["ratio"] is not None
    ]
    return sorted(found, key=lambda each: each.ratio)


class Line(NamedTuple):
    """One line of a table. `ratio` is our time divided by theirs; `verdict` compares it with the goal."""

    what: str
    ours: str = ""
    theirs: str = ""
    ratio: str = ""
    goal: str = ""
    verdict: str = ""


def lines(job: Job, record: Record | None, *, with_spread: bool = True) -> list[Line]:
    """Return the lines of a job: its time, if it has a goal or no peers, its peers, and its other goals."""
    found = list(_lines(job, record or {}, with_spread))
    return found if record else [line._replace(verdict=NOT_YET) for line in found]


def missed(job: Job, record: Record) -> bool:
    return any(line.verdict.startswith(MISSED) for line in lines(job, record, with_spread=False))


def worse(records: Iterable[Record], stored: Iterable[Record]) -> list[str]:
    """Return a line for each ratio that exceeds the largest stored one by more than the factor `WORSE`."""
    most: dict[tuple[str, str], float] = {}
    for before in stored:
        for peer, found in before["peers"].items():
            most[before["job"], peer] = max(most.get((before["job"], peer), 0), found["ratio"] or 0)
    return [
        f"worse: {record['job']}, {peer}: {share(found['ratio'])}, stored {share(largest)}"
        for record in records
        for peer, found in record["peers"].items()
        if (largest := most.get((record["job"], peer))) and (found["ratio"] or 0) > WORSE * largest
    ]


def _lines(job: Job, record: Record, with_spread: bool) -> Iterator[Line]:
    """Yield the lines of a job; without measurements if the record is empty."""
    taken = record.get("seconds", {})
    ours = times_of(taken, with_spread) if taken else ""
    if job.seconds is not None or not job.peers:
        yield Line("time", ours, goal=clock(job.seconds), verdict=verdict(taken.get("median"), job.seconds))
    for peer in job.peers:
        line, found = Line(peer.name, ours, goal=share(peer.goal)), record.get("peers", {}).get(peer.name)
        if found is None:
            yield line._replace(verdict=NOT_YET)
        elif found["seconds"] is None:
            yield line._replace(verdict=f"left out: {', '.join(found['missing'])}")
        else:
            part = found["measured_on_share"]
            scaled = f", measured on {part:.3g} of the work and scaled" if part < 1 else ""
            theirs, ratio = times_of(found["seconds"], with_spread), found["ratio"]
            line = line._replace(what=f"{peer.name}{scaled}", theirs=theirs, ratio=share(ratio))
            yield line._replace(verdict=verdict(ratio, peer.goal))
    if job.extra_bytes is not None:
        n_bytes = record.get("extra_bytes", {})
        sizes = {side: megabytes(n) for side, n in n_bytes.items()}
        judged = verdict(n_bytes.get(OURS), job.extra_bytes)
        yield of_sides("extra memory", sizes, megabytes(job.extra_bytes), judged)
    if job.updates:
        states = record.get("state_bytes", {})
        sizes = {side: " to ".join(f"{n:,} B" for n in after.values()) for side, after in states.items()}
        of_ours = states.get(OURS, {0: 0}).values()
        what = f"state after {' to '.join(f'{k:,}' for k in job.updates)} updates"
        yield of_sides(what, sizes, "constant", verdict(max(of_ours) - min(of_ours), 0))


def of_sides(what: str, values: dict[str, str], goal: str, judged: str) -> Line:
    """Return a line with our value and those of all peers."""
    theirs = ", ".join(value for side, value in values.items() if side != OURS)
    return Line(what, values.get(OURS, ""), theirs, goal=goal, verdict=judged)


def growth_lines(record: Record) -> Iterator[str]:
    """Yield the time at every other size, in total, per row and per entry."""
    for point in record["growth"]:
        sizes = {axis: size for axis, size in point.items() if axis != "seconds"}
        taken = point["seconds"]["median"]
        parts = [f"{', '.join(f'{axis} {size:,}' for axis, size in sizes.items())}: {clock(taken)}"]
        parts.append(figure(1e9 * taken / sizes["n"], " ns a row"))
        if "num_classes" in sizes:
            parts.append(figure(1e9 * taken / sizes["n"] / sizes["num_classes"], " ns an entry"))
        yield ", ".join(parts)


def verdict(value: float | None, goal: float | None) -> str:
    """Return whether a goal is met, or by how much it is missed; an empty text without a goal."""
    if goal is None:
        return ""
    if value is None:
        return "not measured here"
    if value <= goal:
        return "met"
    if goal == 0:
        return MISSED
    over = 100 * (value / goal - 1)
    return f"{MISSED} by {over:,.2g} %" if over < 100 else f"{MISSED}: {figure(value / goal)} times the goal"


def times_of(times: dict[str, float], with_spread: bool) -> str:
    """Format the median, and the range [least, most]."""
    spread = f" [{clock(times['least'])}, {clock(times['most'])}]" if with_spread else ""
    return f"{clock(times['median'])}{spread}"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return figure(seconds, " s") if seconds >= 1 else figure(1000 * seconds, " ms")


def share(ratio: float | None) -> str:
    """Format a ratio; a small ratio as a fraction with numerator 1."""
    if ratio is None:
        return ""
    return f"1/{figure(1 / ratio)}" if ratio < 0.2 else figure(ratio)


def megabytes(n: float | None) -> str:
    return "" if n is None else figure(n / 1e6, " MB")


def figure(value: float | None, unit: str = "") -> str:
    """Format a number with three significant digits, or with all digits before the decimal point."""
    if value is None:
        return ""
    return f"{round(value):,}{unit}" if abs(value) >= 1000 else f"{value:.3g}{unit}"
