"""Seconds of first calls: each in a new process, in turn with `import torch`.

    python -m benchmarks.first_seconds              five rounds, which fill in benchmarks/results/first_seconds.md
    python -m benchmarks.first_seconds --rounds 1   another number of rounds; prints the table only
    python -m benchmarks.first_seconds --only audit calls whose name contains a text; prints the table only

A call before the first round compiles the code of Python and numba. "Nothing compiled" is an empty folder for numba.
Run it on an idle machine. Times of first calls depend on the disk, and their ratios much less.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.logs import lm_eval_line, log_of
from benchmarks.record import clock
from benchmarks.samples import csv_file, folder
from benchmarks.study import RESULTS, TABLE, Row, with_results

ROUNDS = 5
TORCH = "import torch"
_ECE = "import torch, torchcalib; torchcalib.ece(torch.rand(50_000, 1_000).softmax(-1), torch.arange(50_000) % 1_000)"


class Case(NamedTuple):
    """A call in a new process, and its goal.

    Attributes:
        call: arguments of Python.
        goal: largest time, in multiples of the time of `import torch`; in seconds for calls without torch, or above the
            time of the case `above`.
        in_seconds: whether the goal is in seconds.
        above: name of the same call with compiled code in its folder. This one finds the folder empty.
        modules: largest number of modules of torchcalib.
        code: expected exit code.
    """

    call: tuple[str, ...]
    goal: float | None = None
    in_seconds: bool = False
    above: str = ""
    modules: int | None = None
    code: int = 0


def cases() -> dict[str, Case]:
    """Write the files of the calls, and return the calls by name."""
    place, command = folder(), ("-m", "torchcalib")
    (table,), (log,) = csv_file(1000, 4), log_of(300, lm_eval_line)
    file, unknown = str(table), place / "unknown.csv"
    unknown.write_text("colour,size\nred,3\n")
    report = (*command, "report", file, "--out", str(place / "report"))
    wrong = {"in_seconds": True, "goal": 0.5, "code": 2}
    return {
        TORCH: Case(("-c", TORCH)),
        "`ece` of a list": Case(("-c", "import torchcalib as tc; tc.ece([0.1, 0.9], [0, 1])"), 1.3, modules=30),
        "`torchcalib metric ece FILE`, 1,000 x 4": Case((*command, "metric", "ece", file), 1.6),
        "`torchcalib check FILE`, 1,000 x 4": Case((*command, "check", file, "--fail-if", "ece > 1"), 1.8),
        "`torchcalib report FILE --out DIR`, 1,000 x 4": Case(report, 2.2),
        "`torchcalib audit LOG --out DIR`, 300 questions": Case(
            (*command, "audit", str(log), "--out", str(place / "audit")), 3
        ),
        "unknown command": Case((*command, "reprot", file), **wrong),
        "unknown option": Case((*command, "report", file, "--fail-if", "ece > 1"), **wrong),
        "missing file": Case((*command, "report", str(place / "missing.csv")), **wrong),
        "file without known columns": Case((*command, "report", str(unknown)), **wrong),
        "`ece`, 50,000 x 1,000": Case(("-c", _ECE)),
        "`ece`, 50,000 x 1,000, nothing compiled": Case(("-c", _ECE), 3, True, "`ece`, 50,000 x 1,000"),
        "report, nothing compiled": Case(report, 4, True, "`torchcalib report FILE --out DIR`, 1,000 x 4"),
    }


def seconds_of(case: Case, compiled: str) -> float:
    """Return the seconds of a process that finds compiled code in a folder."""
    with TemporaryDirectory() as empty:
        start = time.perf_counter()
        run(case, compiled, numba=empty if case.above else compiled)
        return time.perf_counter() - start


def run(case: Case, compiled: str, *options: str, numba: str = "") -> str:
    """Run a call with options of Python, and return what it writes to stderr. Folders are those of compiled code."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "NUMBA_CACHE_DIR": numba or compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, *options, *case.call], env=environment, capture_output=True, text=True)
    if done.returncode != case.code:
        raise RuntimeError(f"`{' '.join(case.call)}` must return {case.code}, got {done.returncode}. {done.stderr}")
    return done.stderr


def imports_of(case: Case, compiled: str) -> tuple[Counter[str], int]:
    """Return the microseconds of imports by package, and the number of modules of torchcalib."""
    taken, n_own = Counter[str](), 0
    for line in re.finditer(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)", run(case, compiled, "-X", "importtime")):
        package = line[2].partition(".")[0]
        taken[package] += int(line[1])
        n_own += package == "torchcalib"
    return taken, n_own


def measured(chosen: Mapping[str, Case], rounds: int) -> dict[str, Any]:
    """Return the record of each case: seconds of all rounds, those of its imports, and its modules."""
    record: dict[str, Any] = {name: {"seconds": []} for name in chosen}
    with TemporaryDirectory() as compiled:
        for name, case in chosen.items():
            run(case, compiled)  # compiles
            imports, n_own = imports_of(case, compiled)
            record[name] |= {"imports": {key: us / 1e6 for key, us in imports.most_common(5)}, "modules": n_own}
        for _ in range(rounds):
            for name, case in chosen.items():
                record[name]["seconds"].append(round(seconds_of(case, compiled), 4))
    return record


def rows(chosen: Mapping[str, Case], record: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of measured cases: time, ratio, goal and verdict, modules, and imports by package."""
    for name, found in record.items():
        case, torch_time = chosen[name], median(record[TORCH]["seconds"])
        taken = median(found["seconds"])
        spread = f"{clock(taken)} [{clock(min(found['seconds']))}, {clock(max(found['seconds']))}]"
        value = taken - median(record[case.above]["seconds"]) if case.above else taken
        ratio = value if case.in_seconds else taken / torch_time
        unit = " s more" if case.above else " s" if case.in_seconds else ""
        is_met = case.goal is None or (ratio <= case.goal and found["modules"] <= (case.modules or found["modules"]))
        goal = "" if case.goal is None else f"{case.goal:g}{unit}"
        goal += f", {case.modules} modules" if case.modules else ""
        verdict = "" if case.goal is None else "met" if is_met else "MISSED"
        imports = sorted(found["imports"].items(), key=lambda each: -each[1])
        parts = ", ".join(f"{package} {s:.2f}" for package, s in imports)
        yield name, spread, f"{ratio:.2f}{unit}", goal, verdict, found["modules"], parts or "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"times of each call (default {ROUNDS})")
    parser.add_argument("--only", default="", help="calls whose names contain this text")
    given = parser.parse_args()
    known = cases()
    used = {name for name in known if given.only in name}
    used |= {TORCH, *(known[name].above for name in used)}
    chosen = {name: case for name, case in known.items() if name in used}
    record, path = measured(chosen, given.rounds), RESULTS / "first_seconds.md"
    page = with_results(path.read_text(encoding="utf-8"), [rows(chosen, record)])
    print(*("".join(match.groups()) for match in TABLE.finditer(page)), sep="\n")
    if given.rounds == ROUNDS and not given.only:
        path.write_text(page, encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
