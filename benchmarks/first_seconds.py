"""Seconds of first calls, each in a new process and in turn with another one: `python -m benchmarks.first_seconds`.

The other process is `import torch` or, for "nothing compiled", the same call with compiled code in its folder. Errors,
which need no torch, are timed alone. A call before the first round compiles the code of Python and numba. Run it on an
idle machine. Times of first calls depend on the disk, and their ratios much less.
"""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.logs import lm_eval_line, log_of
from benchmarks.record import clock
from benchmarks.samples import csv_file, folder
from benchmarks.study import Cell, Found, Part, Row, Study, main

_ECE = "import torch, torchcalib; torchcalib.ece(torch.rand(50_000, 1_000).softmax(-1), torch.arange(50_000) % 1_000)"
TORCH, REPORT = "import torch", "`torchcalib report FILE --out DIR`, 1,000 x 4"


class Case(NamedTuple):
    """A call in a new process, and its goal.

    Attributes:
        call: arguments of Python; names of `files` are replaced by their paths.
        goal: largest time, in multiples of the time of `import torch`; in seconds for calls without torch, or above the
            time of the same call that finds compiled code.
        without_torch: whether the goal is in seconds.
        compiled: False for an empty folder of compiled code.
        modules: largest number of modules of torchcalib.
        code: expected exit code.
    """

    call: tuple[str, ...]
    goal: float | None = None
    without_torch: bool = False
    compiled: bool = True
    modules: int | None = None
    code: int = 0


def command(*arguments: str, goal: float) -> Case:
    return Case(("-m", "torchcalib", *arguments), goal)


def mistake(*arguments: str) -> Case:
    return command(*arguments, goal=0.5)._replace(without_torch=True, code=2)


CASES = {
    TORCH: Case(("-c", TORCH)),
    "`ece` of a list": Case(("-c", "import torchcalib as tc; tc.ece([0.1, 0.9], [0, 1])"), 1.3, modules=30),
    "import of the class `ECE`, with torchmetrics": Case(("-c", "import torchcalib; torchcalib.ECE")),
    "`torchcalib metric ece FILE`, 1,000 x 4": command("metric", "ece", "FILE", goal=1.6),
    "`torchcalib watch FILE`, 1,000 x 4": command("watch", "FILE", goal=1.6)._replace(code=1),
    "`torchcalib check FILE`, 1,000 x 4": command("check", "FILE", "--fail-if", "ece > 1", goal=1.8),
    REPORT: command("report", "FILE", "--out", "DIR", goal=2.2),
    "`torchcalib audit LOG --out DIR`, 300 questions": command("audit", "LOG", "--out", "DIR", goal=3),
    "unknown command": mistake("reprot", "FILE"),
    "unknown option": mistake("report", "FILE", "--fail-if", "ece > 1"),
    "missing file": mistake("report", "MISSING"),
    "file without known columns": mistake("report", "UNKNOWN"),
    "`ece`, 50,000 x 1,000": Case(("-c", _ECE)),
    "`ece`, 50,000 x 1,000, nothing compiled": Case(("-c", _ECE), 3, compiled=False),
    "report, nothing compiled": command("report", "FILE", "--out", "DIR", goal=4)._replace(compiled=False),
}


@cache
def files() -> dict[str, str]:
    """Write the files of the calls, and return their paths by name."""
    place = folder()
    (place / "unknown.csv").write_text("colour,size\nred,3\n")
    (table,), (log,) = csv_file(1000, 4), log_of(300, lm_eval_line)
    paths = {"FILE": table, "LOG": log, "DIR": place / "out", "COMPILED": place / "compiled"}
    paths |= {"UNKNOWN": place / "unknown.csv", "MISSING": place / "missing.csv"}
    return {name: str(path) for name, path in paths.items()}


def run(case: Case, *options: str) -> str:
    """Run a call with options of Python, and return what it writes to stderr."""
    call = [sys.executable, *options, *(files().get(word, word) for word in case.call)]
    with TemporaryDirectory() as empty:
        folders = files()["COMPILED"], files()["COMPILED"] if case.compiled else empty
        environment = {**os.environ, **dict(zip(("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR"), folders, strict=True))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(call, env=environment, capture_output=True, text=True)
    if done.returncode != case.code:
        raise RuntimeError(f"`{' '.join(case.call)}` must return {case.code}, got {done.returncode}. {done.stderr}")
    return done.stderr


def seconds_of(case: Case) -> float:
    start = time.perf_counter()
    run(case)
    return round(time.perf_counter() - start, 4)


def measured(name: str, n_sets: int) -> dict[str, Any]:
    """Return the seconds of all rounds and of the other process, those of imports by package, and our modules."""
    case = CASES[name]
    sides = {"seconds": case}
    if not case.without_torch:
        sides["other"] = CASES[TORCH] if case.compiled else case._replace(compiled=True)
    for side in sides.values():
        run(side)  # compiles
    imports, n_own = Counter[str](), 0
    for line in re.finditer(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)", run(case, "-X", "importtime")):
        package = line[2].partition(".")[0]
        imports[package] += int(line[1])
        n_own += package == "torchcalib"
    found: dict[str, Any] = {side: [] for side in sides}
    for _ in range(n_sets):
        for side, each in sides.items():
            found[side].append(seconds_of(each))
    return found | {"imports": {key: us / 1e6 for key, us in imports.most_common(5)}, "modules": n_own}


def table(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    """Yield the rows: time, ratio, goal and verdict, modules, and imports by package."""
    yield [row(name, each.values) for (name,), each in found.items()]


def row(name: str, found: dict[str, Any]) -> Row:
    case, taken = CASES[name], median(found["seconds"])
    value, unit = taken, " s"
    if not case.without_torch:
        other = median(found["other"])
        value, unit = (taken / other, "") if case.compiled else (taken - other, " s more")
    spread = f"{clock(taken)} [{clock(min(found['seconds']))}, {clock(max(found['seconds']))}]"
    goal, verdict = "", ""
    if case.goal is not None:
        goal = f"{case.goal:g}{unit}" + (f", {case.modules} modules" if case.modules else "")
        is_met = value <= case.goal and found["modules"] <= (case.modules or found["modules"])
        verdict = "met" if is_met else "MISSED"
    parts = ", ".join(f"{package} {seconds:.2f}" for package, seconds in found["imports"].items())
    return name, spread, f"{value:.2f}{unit}", goal, verdict, found["modules"], parts or "–"


STUDY = Study("first_seconds", 5, [Part([(name,) for name in CASES], measured, table)])

if __name__ == "__main__":
    # `--sets` is the number of rounds.
    main(STUDY)
