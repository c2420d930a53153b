"""Write the performance tables of the README from the files in `benchmarks/results`: `python -m benchmarks.readme`.

Nothing is measured. Goals, and the reasons why one is missed, are brought up to date in the files with what the jobs
say now. A job that no file has is "not yet measured"; so is a GPU, until `cuda_check.py` has written its results beside
the others.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.families import FAMILIES, jobs_of
from benchmarks.job import WITHOUT_NUMBA, Job
from benchmarks.record import NOT_YET, Record, figure, held_against, lines
from benchmarks.run import RESULTS

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- made by `python -m benchmarks.readme` from benchmarks/results -->"
END = "<!-- end of what is made -->"
HEAD = """\
| job | against | ours | theirs | ratio | goal | | without numba |
|---|---|---|---|---|---|---|---|"""
GPU_HEAD = """\
| job | dtype | shape | share of a copy's speed | goal | |
|---|---|---|---|---|---|"""


def results() -> dict[Path, dict[str, Any]]:
    """Contents of all files, in the order of their names."""
    return {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def up_to_date(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file with the goals as they are now; jobs that are no more go."""
    families = {}
    for family, records in content.get("families", {}).items():
        by_name = {record["job"]: record for record in records}
        families[family] = [held_against(job, by_name[job.name]) for job in jobs_of(family) if job.name in by_name]
    return content | {"families": families} if families else content


def section(files: Sequence[dict[str, Any]]) -> str:
    """Return all that stands between the marks: a table for each machine."""
    cpus = [content for content in files if "families" in content] or [{"machine": {}, "families": {}}]
    gpus = [content for content in files if "device" in content]
    parts = [cpu_table(content) for content in cpus]
    parts += [gpu_table(content) for content in gpus] or [f"On a GPU (`cuda_check.py`): {NOT_YET}."]
    return "\n\n".join(parts)


def cpu_table(content: dict[str, Any]) -> str:
    """One table of all jobs on one machine."""
    rows = [row for family in FAMILIES for row in rows_of(family, content["families"].get(family, []))]
    return "\n".join((f"{said_of(content['machine'])}:\n", HEAD, *(f"| {' | '.join(row)} |" for row in rows)))


def said_of(machine: dict[str, Any]) -> str:
    """The machine and the versions, in words."""
    if not machine:
        return "On no machine yet"
    versions = ", ".join(f"{package} {machine[package]}" for package in ("torch", "numba") if machine.get(package))
    return f"On {machine['cpu']}, {machine['cores']} cores, {versions}"


def rows_of(family: str, records: list[Record]) -> Iterator[tuple[str, ...]]:
    """Rows of a family. What a job costs in plain torch stands in the last column of its rows."""
    jobs = jobs_of(family)
    by_name = {record["job"]: record for record in records}
    plain = {job.name: job for job in jobs if not job.numba}
    for job in jobs:
        if not job.numba:
            continue
        record, twin = by_name.get(job.name), plain.get(f"{job.name}{WITHOUT_NUMBA}")
        beside = in_plain_torch(twin, by_name.get(twin.name)) if twin else {}
        name = f"{job.name} ({record['why']})" if record and record["why"] else job.name
        for line in lines(job, record, with_spread=False):
            cells = (line.ours, line.theirs, line.ratio, line.goal, line.verdict)
            yield (name, line.what, *cells, beside.get(line.what, ""))
            name = ""


def in_plain_torch(job: Job, record: Record | None) -> dict[str, str]:
    """What the lines of a job without numba come to: the ratio, or else our figure; with the goal where it has one."""
    said = {}
    for line in lines(job, record, with_spread=False):
        figures = line.ratio or line.ours
        goal = f", goal {line.goal}: {line.verdict}" if line.goal and line.verdict != NOT_YET else ""
        said[line.what] = f"{figures}{goal}" if record else NOT_YET
    return said


def gpu_table(content: dict[str, Any]) -> str:
    """What `cuda_check.py` measured on one GPU: how fast every op is, and whether all checks passed."""
    checks = content["checks"]
    failed = sum(not check["passed"] for check in checks)
    head = f"On {content['device']}, torch {content['torch']}: {len(checks):,} checks, {failed} failed"
    if not content["speed"]:
        return f"{head}; speed {NOT_YET}."
    return "\n".join((f"{head}:\n", GPU_HEAD, *(gpu_row(speed) for speed in content["speed"])))


def gpu_row(speed: dict[str, Any]) -> str:
    """One op on one shape, as `benchmarks.cuda.speed.Speed` has it."""
    of_copy, ratio, goal = speed["share"], speed["ratio"], speed["goal"]
    found = f"{figure(ratio)} of the row op" if ratio is not None else figure(of_copy) or speed["how"]
    off = abs((of_copy if ratio is None else ratio) - goal) if speed["met"] is False else 0
    said = {None: "", True: "met", False: f"MISSED by {off:.2g}"}[speed["met"]]
    cells = (speed["job"], speed["dtype"], speed["shape"], found, figure(goal), said)
    return f"| {' | '.join(cells)} |"


def written(text: str, files: Sequence[dict[str, Any]]) -> str:
    """Return the README with the section as these files have it.

    Raises:
        ValueError: the marks are not there, in this order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"`{README.name}` must have the lines {BEGIN!r} and {END!r}, got one without. Put them back.")
    return f"{before}{BEGIN}\n\n{section(files)}\n\n{END}{after}"


def main() -> int:
    """Bring the files up to date, and write the section."""
    files = {path: up_to_date(content) for path, content in results().items()}
    for path, content in files.items():
        path.write_text(json.dumps(content, indent=1) + "\n")
    README.write_text(written(README.read_text(), list(files.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
