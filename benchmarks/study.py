"""One harness for the statistical studies: laws and sizes, a statistic of many data sets, and the tables of a page.

    python -m benchmarks.coverage                  measure all cells, and fill in benchmarks/results/coverage.md
    python -m benchmarks.coverage --resume         keep the cells that an interrupted run has measured
    python -m benchmarks.coverage --sets 50        another number of data sets for each cell; prints the tables only
    python -m benchmarks.coverage --only uniform   cells whose name contains a text; prints what they measure
    python -m benchmarks.coverage --processes 8    several cells at once

A page holds its text, and the heads of its tables. A study computes the rows of these tables in their order, and
sentences of the page that contain results. What the cells have measured is stored in results/<page>.json.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results"
TABLE = re.compile(r"(^\|.*\n\|[-:| ]+\n)((?:\|.*\n)*)", re.MULTILINE)

Cell = tuple[Any, ...]
"""Names, sizes and functions of a law. Its name consists of the texts and numbers."""
Row = Sequence[str | int | float | None]


class Found(NamedTuple):
    """What a cell has measured: the number of its data sets, and values that JSON can store."""

    sets: int
    values: Any


def rows(found: dict[Cell, Found], columns: Sequence[str] = ()) -> Iterator[Iterable[Row]]:
    """Yield one table with a row for each cell: its name, and its values in order or by the names of `columns`."""
    yield [(*cell, *(map(each.values.get, columns) if columns else each.values)) for cell, each in found.items()]


class Part(NamedTuple):
    """Cells that are measured in the same way.

    Attributes:
        measure: function of the entries of a cell and of the number `n_sets` of data sets.
        tables: function that yields tables as lists of rows, and sentences.
        share: function of a cell that returns its part of the data sets.
        name: beginning of the names of the cells, if another part has cells with the same names.
    """

    cells: Sequence[Cell]
    measure: Callable[..., Any]
    tables: Callable[[dict[Cell, Found]], Iterator[Iterable[Row] | str]] = rows
    share: Callable[[Cell], float] = lambda _: 1
    name: str = ""


class Study(NamedTuple):
    """Parts that fill in the tables of a page, and the number of data sets of each cell."""

    page: str
    sets: int
    parts: Sequence[Part]


class Task(NamedTuple):
    """A cell to be measured."""

    name: str
    part: Part
    cell: Cell
    sets: int


def batches(n_sets: int, at_once: int) -> Iterator[int]:
    """Yield the sizes of batches of data sets."""
    for start in range(0, n_sets, max(1, at_once)):
        yield min(max(1, at_once), n_sets - start)


def joined(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the statistics of all data sets `(..., D)` by name, from those of batches."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, x in part.items():
            found.setdefault(name, []).append(x)
    return {name: torch.cat(batches, -1) for name, batches in found.items()}


def percent(x: Tensor | float, digits: int = 1) -> str:
    """Return a fraction, or the fraction of true entries, in percent."""
    return f"{100 * (float(x.double().mean()) if isinstance(x, Tensor) else x):.{digits}f}"


def rejected(p: Tensor, *levels: float) -> str:
    """Return the fraction of p-values at or below each level, in percent."""
    return " / ".join(percent(p <= level + 1e-9) for level in levels)


def missed(low: Tensor, high: Tensor, target: float) -> tuple[float, float]:
    """Return the shares of intervals above and below a target, in percent."""
    above, below = (100 * float(x.double().mean()) for x in (low > target + 1e-12, high < target - 1e-12))
    return above, below


def tasks_of(study: Study, sets: int, only: str = "") -> list[Task]:
    """Return the cells whose names contain a text."""
    tasks = []
    for part in study.parts:
        for cell in part.cells:
            words = [str(x) for x in (part.name, *cell) if isinstance(x, str | int | float) and x != ""]
            tasks.append(Task(", ".join(words), part, cell, max(1, round(part.share(cell) * sets))))
    return [task for task in tasks if only in task.name]


_tasks: list[Task] = []  # of this process and of those that are forked from it


def _measured(k: int) -> Any:
    task = _tasks[k]
    return task.part.measure(*task.cell, n_sets=task.sets)


def measured(tasks: list[Task], processes: int) -> Iterator[tuple[Task, Any]]:
    """Yield each task with its values, in order."""
    _tasks[:] = tasks
    if processes == 1:
        yield from zip(tasks, map(_measured, range(len(tasks))), strict=True)
        return
    with get_context("fork").Pool(processes) as pool:
        yield from zip(tasks, pool.imap(_measured, range(len(tasks))), strict=True)


def with_results(page: str, found: Iterable[Iterable[Row] | str]) -> str:
    """Return a page with new rows in its tables, and with new numbers in sentences.

    Raises:
        ValueError: if the page does not have the tables and sentences.
    """
    tables = []
    for each in found:
        if not isinstance(each, str):
            tables.append("".join(f"| {' | '.join(map(text_of, row))} |\n" for row in each))
            continue
        page, n = re.subn(re.sub(r"\d[\d,]*", r"\\d[\\d,]*", re.escape(each)), each, page)
        if n != 1:
            raise ValueError(f"the page must have the sentence {each!r} once, got it {n} times.")
    matches = list(TABLE.finditer(page))
    if len(matches) != len(tables):
        raise ValueError(f"the page must have {len(tables)} tables, got {len(matches)}.")
    for match, rows in zip(matches, tables, strict=True):
        head = match[1].splitlines()[0]
        if any(row.count("|") != head.count("|") for row in rows.splitlines()):
            raise ValueError(f"rows must have the columns of {head!r}, got {rows!r}.")
    rest = iter(tables)
    page = TABLE.sub(lambda match: match[1] + next(rest), page)
    return re.sub(r"with torch \d[\w.+]*\w", f"with torch {torch.__version__}", page)


def text_of(entry: str | int | float | None) -> str:
    return "–" if entry is None else f"{entry:,}" if isinstance(entry, int) else str(entry)


def run(study: Study, sets: int, only: str = "", processes: int = 1, *, resume: bool = False) -> dict[str, Any]:
    """Measure cells, and print or write the page. Return the record: data sets and values by the name of the cell."""
    is_whole, path = sets == study.sets and not only, RESULTS / f"{study.page}.json"
    tasks, record = tasks_of(study, sets, only), {}
    if not tasks:
        raise SystemExit(f"no cell with {only!r} in its name, or no data")
    if is_whole and resume and path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        record = {task.name: stored[task.name] for task in tasks if task.name in stored}
    for task, values in measured([task for task in tasks if task.name not in record], processes):
        record[task.name] = {"sets": task.sets, "found": values}
        print(f"{task.name}: {json.dumps(values)}", flush=True)
        if is_whole:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not only:
        text = page_of(study, record)
        if is_whole:
            (RESULTS / f"{study.page}.md").write_text(text, encoding="utf-8")
        else:
            print(*("".join(match.groups()) for match in TABLE.finditer(text)), sep="\n")
    return record


def page_of(study: Study, record: dict[str, Any]) -> str:
    """Return the page of a study with the cells of a record."""
    results: list[Iterable[Row] | str] = []
    for part in study.parts:
        tasks = tasks_of(study._replace(parts=[part]), study.sets)
        found = {task.cell: Found(*record[task.name].values()) for task in tasks if task.name in record}
        results += part.tables(found)
    return with_results((RESULTS / f"{study.page}.md").read_text(encoding="utf-8"), results)


def main(study: Study, **others: Study) -> None:
    """Run a study from the command line, or another one of the module by the option of its name."""
    usage = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, help="data sets for each cell; prints the tables only")
    parser.add_argument("--only", default="", help="measure cells whose names contain this text; prints only")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are measured")
    parser.add_argument("--processes", type=int, default=1, help="cells that are measured at once (default 1)")
    for name in others:
        parser.add_argument(f"--{name}", action="store_true", help=f"write {others[name].page}.md")
    given = parser.parse_args()
    chosen = next((other for name, other in others.items() if getattr(given, name)), study)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    run(chosen, given.sets or chosen.sets, given.only, given.processes, resume=given.resume)
    print(f"{time.perf_counter() - start:.0f} s")
