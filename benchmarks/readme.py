"""Write the tables of performance from the files in `benchmarks/results`: `python -m benchmarks.readme`.

The README gets four lines, chosen by a rule: the best, median and worst everyday job, and the worst one without numba.
`benchmarks/results/README.md` gets all results with their goals. Goals, and reasons for missed goals, are defined by
the jobs. Jobs without results, and a GPU without results of `cuda_check.py`, are "not yet measured".
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.job import EVERYDAY, FAMILIES, REASONS, WITHOUT_NUMBA, Job, jobs_of
from benchmarks.limits import ENOUGH, UNEXPLAINED
from benchmarks.record import MISSED, NOT_YET, Compared, Record, clock, compared, figure, lines, missed, share
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
samples, classes, bins, groups and ranks. Without numba, a chunk of rows is read and written about ten times: softmax,
maximum, differences, products and sums. Python and small tensors take half of the time for a batch of 256 rows."""
HEAD = """\
| job | against | ours | theirs | ratio | goal | | without numba |
|---|---|---|---|---|---|---|---|"""
EVERYDAY_HEAD = """\
Everyday jobs: median time of torchcalib / median time of the alternative in `benchmarks/by_hand.py` = ratio, and the
range of ratios of single rounds. The values of both sides agree to the tolerance of the job. Goals of ratios without
numba are at least 1."""
LIMITS_HEAD = """\
| kernel | time | limited by | share of this limit | reason below 40% |
|---|---|---|---|---|"""
GPU_HEAD = """\
| job | dtype | shape | time | share of a copy's speed | goal | |
|---|---|---|---|---|---|---|"""


def results() -> list[dict[str, Any]]:
    """Return the contents of all files, in alphabetical order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]


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
    machines = [content for content in files if "families" in content] or [{"machine": {}, "families": {}}]
    gpus = [content for content in files if "device" in content]
    parts = [everyday_table(machines), *(cpu_table(content) for content in machines if not is_gpu(content["machine"]))]
    parts += [gpu_table(content) for content in gpus] or [f"On a GPU (`cuda_check.py`): {NOT_YET}."]
    return "\n\n".join(parts)


def everyday_table(machines: Sequence[dict[str, Any]]) -> str:
    """Return the ratios of everyday jobs: a column for each machine, and for a CPU one without numba."""
    jobs = {job.name: job for job in jobs_of(EVERYDAY)}
    measured = [content for content in machines if EVERYDAY in content["families"]] or machines[:1]
    columns = [
        (
            f"{name(content['machine'])}{variant}",
            {each["job"]: each for each in content["families"].get(EVERYDAY, [])},
            variant,
        )
        for content in measured
        for variant in (("",) if is_gpu(content["machine"]) else ("", WITHOUT_NUMBA))
    ]
    rows = [("job", "against", "goal", *(title for title, _, _ in columns)), ("---",) * (3 + len(columns))]
    for job in jobs.values():
        if job.numba:
            goals = [line.goal for line in lines(job, None)]
            cells = (
                everyday_cell(jobs[f"{job.name}{how}"], found.get(f"{job.name}{how}")) for _, found, how in columns
            )
            rows.append((job.name, job.peers[0].name, ", ".join(filter(None, goals)), *cells))
    return table(f"{EVERYDAY_HEAD}\n", rows)


def everyday_cell(job: Job, record: Record | None) -> str:
    """Return both times, their ratio with its range, missed goals, and the reason."""
    if record is None:
        return NOT_YET
    found = lines(job, record, with_spread=False)
    spread = next(iter(record["peers"].values()))["ratios"]
    times = f"{found[-1].ours} / {found[-1].theirs} = {found[-1].ratio}"
    cell = f"{times} [{share(spread['least'])}, {share(spread['most'])}]" if spread else found[-1].verdict
    misses = [line.verdict for line in found if line.verdict.startswith(MISSED)]
    why = REASONS[EVERYDAY].get(job.name)
    return ", ".join((cell, *misses, *([why] if misses and why else ())))


def name(machine: dict[str, Any]) -> str:
    """Return a machine and its main versions."""
    if not machine:
        return "no machine yet"
    versions = ", ".join(f"{package} {machine[package]}" for package in ("torch", "numba") if machine.get(package))
    title = machine.get("device") or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{title}, {versions}"


def cpu_table(content: dict[str, Any]) -> str:
    others = [family for family in FAMILIES if family != EVERYDAY]
    rows = [row for family in others for row in rows_of(family, content["families"].get(family, []))]
    parts = [table(f"On {name(content['machine'])}:\n\n{HEAD}", rows)]
    return "\n\n".join([*parts, *([limits(content["limits"])] if "limits" in content else [])])


def limits(found: dict[str, Any]) -> str:
    """Return the table that compares kernels with the limits of a machine; see `benchmarks.limits`."""
    bandwidth, rate = figure(found["bytes_per_second"] / 1e9), figure(found["exps_per_second"] / 1e9)
    head = f"Limits of this machine: {bandwidth} GB/s read from memory, and {rate} billion exponentials per second."
    rows = []
    for kernel in found["kernels"]:
        why = REASONS["kernels"].get(kernel["kernel"], UNEXPLAINED) if kernel["share"] < ENOUGH else ""
        rows.append((kernel["kernel"], clock(kernel["seconds"]), kernel["limit"], f"{kernel['share']:.0%}", why))
    return table(f"{head}\n\n{LIMITS_HEAD}", rows)


def rows_of(family: str, records: list[Record]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a family. The last column has the results of the same job in plain torch."""
    jobs = {job.name: job for job in jobs_of(family)}
    by_name = {record["job"]: record for record in records}
    for name, job in jobs.items():
        if not job.numba:
            continue
        record, plain = by_name.get(name), f"{name}{WITHOUT_NUMBA}"
        beside = in_plain_torch(jobs[plain], by_name.get(plain)) if plain in jobs else {}
        why = REASONS.get(family, {}).get(name)
        shown = f"{name} ({why})" if why and record and missed(job, record) else name
        for line in lines(job, record, with_spread=False):
            cells = (line.ours, line.theirs, line.ratio, line.goal, line.verdict)
            yield (shown, line.what, *cells, beside.get(line.what, ""))
            shown = ""


def in_plain_torch(job: Job, record: Record | None) -> dict[str, str]:
    """Return a cell for each line of a job without numba: the ratio or our result, and the goal if any."""
    cells = {}
    for line in lines(job, record, with_spread=False):
        goal = f", goal {line.goal}: {line.verdict}" if line.goal and line.verdict != NOT_YET else ""
        cells[line.what] = f"{line.ratio or line.ours}{goal}" if record else NOT_YET
    return cells


def gpu_table(content: dict[str, Any]) -> str:
    """Return the speed of every operation on one GPU, and whether all checks passed."""
    found = f"{content['n_checks']:,} checks, {len(content['failed'])} failed"
    head = f"On {content['device']}, torch {content['torch']}: {found}"
    if not content["speed"]:
        return f"{head}; speed {NOT_YET}."
    return table(f"{head}:\n\n{GPU_HEAD}", map(gpu_row, content["speed"]))


def gpu_row(speed: dict[str, Any]) -> tuple[str, ...]:
    of_copy, ratio, goal = speed["share"], speed["ratio"], speed["goal"]
    found = f"{figure(ratio)} of the row op's time" if ratio is not None else figure(of_copy)
    # The time of a graph excludes the host.
    time = speed["how"] if speed["seconds"] is None else f"{1e6 * speed['seconds']:,.0f} us"
    job = f"{speed['job']}, eager" if speed["how"] == "eager" else speed["job"]
    off = abs((of_copy if ratio is None else ratio) - goal) if speed["met"] is False else 0
    verdict = {None: "", True: "met", False: f"{MISSED} by {off:.2g}"}[speed["met"]]
    return job, speed["dtype"], speed["shape"], time, found, figure(goal), verdict


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
    content = next(content for content in files if "families" in content and not is_gpu(content["machine"]))
    return f"{before}{BEGIN}\n\n{short(content)}\n\n{END}{after}"


def main() -> int:
    files = results()
    ALL.write_text(all_results(files), encoding="utf-8")
    README.write_text(with_section(README.read_text(encoding="utf-8"), files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
