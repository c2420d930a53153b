"""What is kept of a job in a results file, and the lines that it makes in a table."""

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from benchmarks.job import OURS, Job

Record = dict[str, Any]
NOT_YET = "not yet measured"
EXTRA_MEMORY = "extra memory"


def recorded(
    job: Job, times: dict[str, Any], extra_bytes: dict[str, int | None], growth: list[dict[str, Any]]
) -> Record:
    """Return what was measured of a job, held against its goals."""
    seconds = {side: summary(taken) for side, taken in times["seconds"].items()}
    ours = seconds[OURS]["median"]
    record = {
        "job": job.name,
        "numba": job.numba,
        "seconds": seconds[OURS],
        "peers": {
            peer.name: {
                "missing": peer.missing,
                "seconds": seconds.get(peer.name),
                "measured_on_share": times["shares"].get(peer.name, 1.0),
                "ratio": None if peer.missing else ours / seconds[peer.name]["median"],
            }
            for peer in job.peers
        },
        "extra_bytes": extra_bytes,
        "error": times["error"],
        "state_bytes": times["state_bytes"],
        "growth": [{**point, "seconds": summary(point["seconds"])} for point in growth],
    }
    return held_against(job, record)


def held_against(job: Job, record: Record) -> Record:
    """Return the record with the goals of the job as they are now, and why one is missed where one is."""
    held = list(goals_of(job, record))
    return record | {"goals": held, "why": job.why if missed(held) else ""}


def missed(goals: list[dict[str, Any]]) -> bool:
    """Whether one of them is missed."""
    return any(goal["met"] is False for goal in goals)


def goals_of(job: Job, record: Record) -> Iterator[dict[str, Any]]:
    """Each goal of a job beside what was measured; one that could not be measured is neither met nor missed."""
    pairs = [("seconds", record["seconds"]["median"], job.seconds)]
    pairs += [(f"share of {peer.name}", record["peers"][peer.name]["ratio"], peer.goal) for peer in job.peers]
    pairs += [("extra_bytes", record["extra_bytes"].get(OURS), job.extra_bytes), ("error", record["error"], job.error)]
    if sizes := record["state_bytes"].get(OURS, {}).values():
        pairs.append(("growth of the state", max(sizes) - min(sizes), 0))
    for what, value, goal in pairs:
        if goal is not None:
            met = None if value is None else value <= goal
            yield {"what": what, "value": value, "at_most": goal, "met": met}


def summary(taken: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": median(taken), "least": min(taken), "most": max(taken), "rounds": len(taken)}


class Line(NamedTuple):
    """One line of a table, in words.

    `ratio` is our time as a share of theirs; `verdict` says whether the goal is met, or by how much it is missed.
    """

    what: str
    ours: str = ""
    theirs: str = ""
    ratio: str = ""
    goal: str = ""
    verdict: str = ""


def lines(job: Job, record: Record | None, *, with_spread: bool = True) -> list[Line]:
    """Return the lines of a job: one for each peer, and one for each other thing that has a goal.

    Without a record they say that nothing has been measured.
    """
    if record is not None:
        return list(lines_of(record, spread if with_spread else middle))
    expected = [Line("time", goal=clock(job.seconds))] if job.seconds is not None or not job.peers else []
    expected += [Line(peer.name, goal=share(peer.goal)) for peer in job.peers]
    if job.extra_bytes is not None:
        expected.append(Line(EXTRA_MEMORY, goal=megabytes(job.extra_bytes)))
    if job.error is not None:
        expected.append(Line("error", goal=figure(job.error)))
    if job.updates:
        expected.append(Line(state_after(job.updates), goal="constant"))
    return [line._replace(verdict=NOT_YET) for line in expected]


def state_after(updates: Iterable[int | str]) -> str:
    """Name of the line on the size of the state; JSON has made words of the numbers."""
    return f"state after {' to '.join(f'{int(k):,}' for k in updates)} updates"


def lines_of(record: Record, in_words: Callable[[dict[str, float]], str]) -> Iterator[Line]:
    """What a record says, line by line, with times in these words."""
    goals = {goal["what"]: goal for goal in record["goals"]}
    at_most = {what: goal["at_most"] for what, goal in goals.items()}
    said = {what: verdict(goal) for what, goal in goals.items()}
    ours = in_words(record["seconds"])
    if "seconds" in goals or not record["peers"]:
        yield Line("time", ours, goal=clock(at_most.get("seconds")), verdict=said.get("seconds", ""))
    for name, peer in record["peers"].items():
        what = f"share of {name}"
        if peer["seconds"] is None:
            yield Line(name, ours, goal=share(at_most.get(what)), verdict=f"left out: {', '.join(peer['missing'])}")
            continue
        measured_on = peer["measured_on_share"]
        scaled = f", measured on {measured_on:.3g} of the work and scaled" if measured_on < 1 else ""
        theirs, ratio, goal = in_words(peer["seconds"]), share(peer["ratio"]), share(at_most.get(what))
        yield Line(f"{name}{scaled}", ours, theirs, ratio, goal, said.get(what, ""))
    if record["extra_bytes"]:
        taken = {side: megabytes(n) for side, n in record["extra_bytes"].items()}
        theirs = ", ".join(n for side, n in taken.items() if side != OURS)
        goal = megabytes(at_most.get("extra_bytes"))
        yield Line(EXTRA_MEMORY, taken[OURS], theirs, goal=goal, verdict=said.get("extra_bytes", ""))
    if record["error"] is not None:
        goal = figure(at_most.get("error"))
        yield Line("error", figure(record["error"]), goal=goal, verdict=said.get("error", ""))
    if record["state_bytes"]:
        sizes = {side: " to ".join(f"{n:,} B" for n in after.values()) for side, after in record["state_bytes"].items()}
        theirs = ", ".join(size for side, size in sizes.items() if side != OURS)
        kept = said.get("growth of the state", "")
        yield Line(state_after(record["state_bytes"][OURS]), sizes[OURS], theirs, goal="constant", verdict=kept)


def growth_lines(record: Record) -> Iterator[str]:
    """Time at every other size, and what a row and an entry of it cost."""
    for point in record["growth"]:
        sizes = {axis: size for axis, size in point.items() if axis != "seconds"}
        taken = point["seconds"]["median"]
        said = [f"{', '.join(f'{axis} {size:,}' for axis, size in sizes.items())}: {clock(taken)}"]
        said.append(figure(1e9 * taken / sizes["n"], " ns a row"))
        if "num_classes" in sizes:
            said.append(figure(1e9 * taken / sizes["n"] / sizes["num_classes"], " ns an entry"))
        yield ", ".join(said)


def verdict(goal: dict[str, Any]) -> str:
    """Met, or missed and by how much."""
    if goal["met"] is None:
        return "not measured here"
    if goal["met"]:
        return "met"
    if goal["at_most"] == 0:
        return "MISSED"
    over = 100 * (goal["value"] / goal["at_most"] - 1)
    return f"MISSED by {over:,.2g} %" if over < 100 else f"MISSED: {figure(1 + over / 100)} times the goal"


def spread(times: dict[str, float]) -> str:
    """Median [least, most]."""
    return f"{middle(times)} [{clock(times['least'])}, {clock(times['most'])}]"


def middle(times: dict[str, float]) -> str:
    """Median."""
    return clock(times["median"])


def clock(seconds: float | None) -> str:
    """Seconds or milliseconds, three digits."""
    if seconds is None:
        return ""
    return figure(seconds, " s") if seconds >= 1 else figure(1000 * seconds, " ms")


def share(ratio: float | None) -> str:
    """A ratio, three digits; a small one as one part in so many."""
    if ratio is None:
        return ""
    return f"1/{figure(1 / ratio)}" if ratio < 0.2 else figure(ratio)


def megabytes(n: float | None) -> str:
    """Bytes as millions of them."""
    return "" if n is None else figure(n / 1e6, " MB")


def figure(value: float | None, unit: str = "") -> str:
    """Three digits, and all those before the point."""
    if value is None:
        return ""
    return f"{round(value):,}{unit}" if abs(value) >= 1000 else f"{value:.3g}{unit}"
