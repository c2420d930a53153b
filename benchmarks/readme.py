"""Write the performance tables of the README from the files in `benchmarks/results`: `python -m benchmarks.readme`.

Goals, and reasons for missed goals, are defined by the jobs. Jobs without results, and a GPU without results of
`cuda_check.py`, are "not yet measured".
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.job import FAMILIES, WITHOUT_NUMBA, Job, jobs_of
from benchmarks.record import MISSED, NOT_YET, Record, figure, lines, missed
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


def results() -> list[dict[str, Any]]:
    """Return the contents of all files, in alphabetical order."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def section(files: Sequence[dict[str, Any]]) -> str:
    """Return the section of the README: a table for each machine."""
    cpus = [content for content in files if "families" in content] or [{"machine": {}, "families": {}}]
    gpus = [content for content in files if "device" in content]
    parts = [cpu_table(content) for content in cpus]
    parts += [gpu_table(content) for content in gpus] or [f"On a GPU (`cuda_check.py`): {NOT_YET}."]
    return "\n\n".join(parts)


def cpu_table(content: dict[str, Any]) -> str:
    machine = content["machine"]
    versions = ", ".join(f"{package} {machine[package]}" for package in ("torch", "numba") if machine.get(package))
    title = f"On {machine['cpu']}, {machine['cores']} cores, {versions}" if machine else "On no machine yet"
    rows = [row for family in FAMILIES for row in rows_of(family, content["families"].get(family, []))]
    return "\n".join((f"{title}:\n", HEAD, *(f"| {' | '.join(row)} |" for row in rows)))


def rows_of(family: str, records: list[Record]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a family. The last column has the results of the same job in plain torch."""
    jobs = {job.name: job for job in jobs_of(family)}
    by_name = {record["job"]: record for record in records}
    for name, job in jobs.items():
        if not job.numba:
            continue
        record, plain = by_name.get(name), f"{name}{WITHOUT_NUMBA}"
        beside = in_plain_torch(jobs[plain], by_name.get(plain)) if plain in jobs else {}
        shown = f"{name} ({job.why})" if job.why and record and missed(job, record) else name
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
    checks = content["checks"]
    failed = sum(not check["passed"] for check in checks)
    head = f"On {content['device']}, torch {content['torch']}: {len(checks):,} checks, {failed} failed"
    if not content["speed"]:
        return f"{head}; speed {NOT_YET}."
    return "\n".join((f"{head}:\n", GPU_HEAD, *(gpu_row(speed) for speed in content["speed"])))


def gpu_row(speed: dict[str, Any]) -> str:
    of_copy, ratio, goal = speed["share"], speed["ratio"], speed["goal"]
    found = f"{figure(ratio)} of the row op" if ratio is not None else figure(of_copy) or speed["how"]
    off = abs((of_copy if ratio is None else ratio) - goal) if speed["met"] is False else 0
    verdict = {None: "", True: "met", False: f"{MISSED} by {off:.2g}"}[speed["met"]]
    cells = (speed["job"], speed["dtype"], speed["shape"], found, figure(goal), verdict)
    return f"| {' | '.join(cells)} |"


def with_section(text: str, files: Sequence[dict[str, Any]]) -> str:
    """Return the README with the section for these files.

    Raises:
        ValueError: if the markers of the section are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"`{README.name}` must have the lines {BEGIN!r} and {END!r}, got one without. Put them back.")
    return f"{before}{BEGIN}\n\n{section(files)}\n\n{END}{after}"


def main() -> int:
    README.write_text(with_section(README.read_text(), results()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
