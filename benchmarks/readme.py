"""Write the tables of performance from the files in `benchmarks/results`: `python -m benchmarks.readme`.

The README gets four lines. `benchmarks/results/README.md` gets all results with their goals. Goals, and reasons for
missed goals, are defined by the jobs. Jobs without results, and a GPU without results of `cuda_check.py`, are "not yet
measured".
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.job import FAMILIES, OURS, WITHOUT_NUMBA, Job, jobs_of
from benchmarks.record import MISSED, NOT_YET, Record, clock, figure, lines, megabytes, missed
from benchmarks.run import RESULTS

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- benchmarks: begin -->"
END = "<!-- benchmarks: end -->"
SHORT_HEAD = """\
| job | torchcalib | alternative | ratio |
|---|---|---|---|"""
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
LIMITS_HEAD = """\
| kernel | time | limited by | share of this limit |
|---|---|---|---|"""
GPU_HEAD = """\
| job | dtype | shape | share of a copy's speed | goal | |
|---|---|---|---|---|---|"""


def results() -> list[dict[str, Any]]:
    """Return the contents of all files, in alphabetical order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]


def short(content: dict[str, Any]) -> str:
    """Return the section of the README: four lines from the results of one machine."""
    by_name = {record["job"]: record for records in content["families"].values() for record in records}
    rows = [
        _faster(
            by_name["ECE, 50,000 x 1,000"],
            "torchmetrics",
            "ECE of 50,000 predictions of 1,000 classes",
            "torchmetrics",
        ),
        _faster(
            by_name["NLL, Brier, ECD, accuracy, ECE, ESCE, MCE and RMSCE, 50,000 x 1,000"],
            "probmetrics",
            "eight metrics of the same predictions in one pass",
            "probmetrics, four metrics",
        ),
        _faster(
            by_name["TCE, 50,000"],
            "scipy",
            "test-based calibration error (TCE) of 50,000 binary predictions",
            "one SciPy test per prediction",
        ),
        _states(by_name["ECE in batches of 256, 50,000 x 1,000"], "state of the streaming ECE after 50,000 samples"),
    ]
    machine = content["machine"]
    packages = ("torch", "numba", "torchmetrics", "probmetrics", "scipy")
    versions = ", ".join(f"{package} {machine[package]}" for package in packages)
    note = f"Median times and peak extra memory on {machine['cpu']}, {machine['cores']} cores, with {versions}."
    return "\n".join((SHORT_HEAD, *(f"| {' | '.join(row)} |" for row in rows), "", *wrap(note, 120)))


def _faster(record: Record, package: str, title: str, alternative: str) -> tuple[str, ...]:
    """Return a line with times, memory, and the ratio to the peer whose name contains `package`."""
    name, peer = next((name, peer) for name, peer in record["peers"].items() if package in name)

    def cell(seconds: float, side: str) -> str:
        extra = record["extra_bytes"].get(side)
        return clock(seconds) + ("" if extra is None else f", {megabytes(extra)}")

    ours = cell(record["seconds"]["median"], OURS)
    theirs = cell(peer["seconds"]["median"], name)
    if peer["measured_on_share"] < 1:
        theirs += f", extrapolated from {peer['measured_on_share']:.0%} of the predictions"
    return title, ours, f"{alternative}: {theirs}", f"{figure(1 / peer['ratio'])} times faster"


def _states(record: Record, title: str) -> tuple[str, ...]:
    """Return a line with the sizes of the states after the last update."""
    sizes = {side: list(after.values()) for side, after in record["state_bytes"].items()}
    ours, theirs = sizes[OURS], next(sizes[side] for side in sizes if side != OURS)

    def cell(sizes: list[int]) -> str:
        return f"{sizes[-1]:,} bytes, {'constant' if sizes[0] == sizes[-1] else 'growing'}"

    cells = cell(ours), f"torchmetrics: {cell(theirs)}"
    return title, *cells, f"{figure(theirs[-1] / ours[-1])} times smaller"


def section(files: Sequence[dict[str, Any]]) -> str:
    """Return all results with their goals: a table for each machine."""
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
    return "\n".join((f"{title}:\n", HEAD, *(f"| {' | '.join(row)} |" for row in rows), *limits(content)))


def limits(content: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table that compares kernels with the limits of a machine; see `benchmarks.limits`."""
    if "limits" not in content:
        return
    found = content["limits"]
    bandwidth, rate = figure(found["bytes_per_second"] / 1e9), figure(found["exps_per_second"] / 1e9)
    yield f"\nLimits of this machine: {bandwidth} GB/s read from memory, and {rate} billion exponentials per second.\n"
    yield LIMITS_HEAD
    for kernel in found["kernels"]:
        yield f"| {kernel['kernel']} | {clock(kernel['seconds'])} | {kernel['limit']} | {kernel['share']:.0%} |"


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
    content = next(content for content in files if "families" in content)
    return f"{before}{BEGIN}\n\n{short(content)}\n\n{END}{after}"


def main() -> int:
    files = results()
    ALL.write_text(all_results(files), encoding="utf-8")
    README.write_text(with_section(README.read_text(encoding="utf-8"), files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
