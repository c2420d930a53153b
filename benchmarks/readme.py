"""Write the tables of performance from the files in `benchmarks/results`: `python -m benchmarks.readme`.

The README gets four lines, chosen by a rule: the best, median and worst everyday job, and the worst one without numba.
Sentences on each GPU follow: the range of ratios to torchmetrics, and the goals that were missed.
`benchmarks/results/README.md` gets all results with their goals. Goals, and reasons for missed goals, are defined by
the jobs. Jobs without results are "not yet measured".
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.job import DEVICE, EVERYDAY, FAMILIES, REASONS, WITHOUT_NUMBA, Job, jobs_of
from benchmarks.record import MISSED, NOT_YET, Compared, Record, clock, compared, figure, lines, missed
from benchmarks.run import RESULTS, is_gpu

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- benchmarks: begin -->"
END = "<!-- benchmarks: end -->"
SHORT_HEAD = """\
| | job | torchcalib | alternative | |
|---|---|---|---|---|"""
ALL = RESULTS / "README.md"
ALL_HEAD = """\
# Results of the benchmarks

Written by `python -m benchmarks.readme`. Times are medians. Both sides run in turn in one process. The ratio is our
time divided by the time of the alternative. Extra memory is the peak during one call, beside the data and the result.
Goals are set by the jobs in `benchmarks/`. The JSON files have ranges, versions, and the growth with the number of
samples, classes, bins, groups and ranks. Alternatives of everyday jobs, the first ones, are in `benchmarks/by_hand.py`,
and their values agree to the tolerance of the job. Without numba, a chunk of rows is read and written about ten times:
softmax, maximum, differences, products and sums. Python and small tensors take half of the time for a batch of 256
rows."""
HEAD = """\
| job | against | ours | theirs | ratio | goal | | without numba |
|---|---|---|---|---|---|---|---|"""


def results() -> list[dict[str, Any]]:
    """Return the contents of all files with times, in alphabetical order."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return [content for content in files if "families" in content]


def short(content: dict[str, Any]) -> str:
    """Return the section of the README: the best, median and worst everyday job, and the worst one without numba."""
    records = content["families"].get(EVERYDAY, [])
    fast, plain = (compared(records, numba=numba) for numba in (True, False))
    if not (fast and plain):
        return f"Everyday jobs: {NOT_YET}."
    chosen = {"best": fast[0], "median": fast[len(fast) // 2], "worst": fast[-1], "worst without numba": plain[-1]}
    machine = content["machine"]
    versions = ", ".join(
        f"{package} {machine[package]}" for package in ("torch", "numba", "torchmetrics", "scikit-learn")
    )
    counts = " and ".join(
        f"{sum(found.ratio <= 1 for found in some)} of {len(some)} {how} numba"
        for some, how in ((fast, "with"), (plain, "without"))
    )
    note = (
        f"Median times of everyday jobs against ten lines of torch, numpy, scikit-learn or torchmetrics. torchcalib is "
        f"at least as fast in {counts}. Measured on {machine['cpu']}, {machine['cores']} cores, with {versions}."
    )
    return "\n".join((table(SHORT_HEAD, starmap(short_row, chosen.items())), "", *wrap(note, 120)))


def on_gpu(content: dict[str, Any]) -> str:
    """Return sentences on a GPU: the range of ratios to torchmetrics, and the goals that were missed."""
    records = content["families"][DEVICE]
    ratios = [found.ratio for found in compared(records, numba=True) if found.peer.startswith("torchmetrics")]
    by_name = {record["job"]: record["peers"] for record in records}
    goals = [
        (found["ratio"] / peer.goal, job.name, f"{figure(found['ratio'])} times as long as {peer.name}", peer.goal)
        for job in jobs_of(DEVICE)
        for peer in job.peers
        if peer.goal and (found := by_name.get(job.name, {}).get(peer.name)) and found["ratio"] is not None
    ]
    n_missed, (_, job, ratio, goal) = sum(excess > 1 for excess, *_ in goals), max(goals)
    text = (
        f"On {name(content['machine'])}, ECE takes {figure(ratios[0])} to {figure(ratios[-1])} times as long as the "
        f"calibration error of torchmetrics. {n_missed} of {len(goals)} goals in the results are missed. The worst job "
        f"({job}) takes {ratio}, with a goal of {goal:g}."
    )
    return "\n".join(wrap(text, 120))


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join((head, *(f"| {' | '.join(row)} |" for row in rows)))


def short_row(rank: str, found: Compared) -> tuple[str, ...]:
    faster = found.ratio <= 1
    ratio = f"{figure(1 / found.ratio if faster else found.ratio)} times {'faster' if faster else 'slower'}"
    name = found.job.removesuffix(WITHOUT_NUMBA)
    return rank, name, clock(found.ours), f"{found.peer}: {clock(found.theirs)}", ratio


def section(files: Sequence[dict[str, Any]]) -> str:
    """Return all results with their goals: a table for each machine."""
    return "\n\n".join(map(machine_tables, files))


def name(machine: dict[str, Any]) -> str:
    """Return a machine and its main versions."""
    if not machine:
        return "no machine yet"
    versions = ", ".join(f"{package} {machine[package]}" for package in ("torch", "numba") if machine.get(package))
    title = machine.get("device") or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{title}, {versions}"


def machine_tables(content: dict[str, Any]) -> str:
    """Return the table of a machine: of a CPU with all jobs; of a GPU with measured families."""
    measured = content["families"]
    families = [each for each in FAMILIES if (each in measured if is_gpu(content["machine"]) else each != DEVICE)]
    rows = [row for family in families for row in rows_of(family, measured.get(family, []))]
    checks = content.get("checks")
    found = f" ({checks['n']:,} checks of `cuda_check.py`, {len(checks['failed'])} failed)" if checks else ""
    return table(f"On {name(content['machine'])}{found}:\n\n{HEAD}", rows)


def rows_of(family: str, records: list[Record]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a family. The last column has the results of the same job in plain torch."""
    jobs = {job.name: job for job in jobs_of(family)}
    by_name = {record["job"]: record for record in records}
    for name, job in jobs.items():
        if not job.numba:
            continue
        record, plain = by_name.get(name), f"{name}{WITHOUT_NUMBA}"
        beside = in_plain_torch(family, jobs[plain], by_name.get(plain)) if plain in jobs else {}
        shown = f"{name}{reason(family, job, record)}"
        for line in lines(job, record, with_spread=False):
            cells = (line.ours, line.theirs, line.ratio, line.goal, line.verdict)
            yield (shown, line.what, *cells, beside.get(line.what, ""))
            shown = ""


def reason(family: str, job: Job, record: Record | None) -> str:
    """Return why a job misses a goal, in parentheses; an empty text if it does not, or for an unknown reason."""
    why = REASONS.get(family, {}).get(job.name)
    return f" ({why})" if why and record and missed(job, record) else ""


def in_plain_torch(family: str, job: Job, record: Record | None) -> dict[str, str]:
    """Return a cell for each line of a job without numba: the ratio or our result, and the goal if any."""
    cells, why = {}, reason(family, job, record)
    for line in lines(job, record, with_spread=False):
        missed_because = why if line.verdict.startswith(MISSED) else ""
        goal = f", goal {line.goal}: {line.verdict}{missed_because}" if line.goal and line.verdict != NOT_YET else ""
        cells[line.what] = f"{line.ratio or line.ours}{goal}" if record else NOT_YET
    return cells


def all_results(files: Sequence[dict[str, Any]]) -> str:
    """Return the text of `benchmarks/results/README.md`."""
    return f"{ALL_HEAD}\n\n{section(files)}\n"


def with_section(text: str, files: Sequence[dict[str, Any]]) -> str:
    """Return the README with the section for the first of these files with times of a CPU.

    Raises:
        ValueError: if the markers of the section are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"`{README.name}` must have the lines {BEGIN!r} and {END!r}, got one without. Put them back.")
    content = next(content for content in files if not is_gpu(content["machine"]))
    parts = [
        short(content),
        *(on_gpu(each) for each in files if DEVICE in each["families"] and is_gpu(each["machine"])),
    ]
    return "\n\n".join((f"{before}{BEGIN}", *parts, f"{END}{after}"))


def main() -> int:
    files = results()
    ALL.write_text(all_results(files), encoding="utf-8")
    README.write_text(with_section(README.read_text(encoding="utf-8"), files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
