"""Print reports, comparisons and progress on a terminal. Without rich, the texts of the results are printed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

try:
    from rich import box
    from rich import table as rich_table
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape
    from rich.progress import Progress
    from rich.text import Text

    HAS_RICH = True
except ImportError:
    HAS_RICH = False
    Console: Any = object  # type: ignore[no-redef]

from torchcalib.display.tables import Table
from torchcalib.display.words import printable, printable_lines
from torchcalib.io.source import Source
from torchcalib.reporting.render.contents import (
    DIFFERENCE_WORDS,
    GROUP_WORDS,
    SLICE_WORDS,
    class_words,
    event_name,
    explanations,
    first_screen,
)
from torchcalib.results.audit import CONFIDENCES, Audit, AuditComparison, AuditGroups
from torchcalib.results.calibration import CalibrationStage, calibrator_table
from torchcalib.results.comparison import Comparison, difference_table, system_table
from torchcalib.results.history import History
from torchcalib.results.report import WORST_CLASSES, Report, class_table, line_table

_WIDTH = 120  # characters per line of output to a file or pipe, unless the variable COLUMNS is set
_WIDE_TABLE_WIDTH = 110  # minimum terminal width for the optional columns of tables
_NAME_WIDTH = 24  # maximum width of name columns in characters
_UNLIMITED = 1000  # characters per line to measure the width of a table
_N_CALIBRATORS = 2  # number of calibrators in the short output
_N_LABELS = 5  # number of labels in the short output
_BADGES = {
    "good": "black on green",
    "slight": "black on yellow",
    "clear": "black on dark_orange",
    "bad": "white on red",
    "unknown": "reverse",
}
"""Style of the verdict, by its colour."""
_STYLES = {"better": "bold", "worse": "bold", "quiet": "dim"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Exit with status 0 if the reader closes the pipe early, as `head` does. All files are already written."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def _print_plain(*lines: object) -> None:
    """Print lines without rich. A closed pipe ends the process as in `_Console`."""
    try:
        for line in "\n".join(map(str, lines)).split("\n"):
            print(printable(line), flush=True)  # noqa: T201
    except BrokenPipeError:
        _Console().on_broken_pipe()


def _console() -> Console:
    stream = sys.stdout or io.StringIO()  # stdout is None in a process without a console
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdecimal() else _WIDTH
    # emoji=False, because file names can contain codes such as ":x:".
    return _Console(file=stream, width=width, highlight=False, emoji=False)


@contextmanager
def progress(total: int | None, description: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar if stderr is a terminal, and yield a function that advances it.

    Its arguments are a number of rows and, optionally, a new description.
    """
    shown = sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True, emoji=False), transient=True, disable=not shown) as bar:
        task = bar.add_task(_escaped(description), total=total)

        def advance(rows: int, description: str | None = None) -> None:
            bar.update(task, advance=rows, description=None if description is None else _escaped(description))

        yield advance


def _escaped(text: object) -> str:
    """Escape rich markup and control characters in untrusted text."""
    return escape(printable(str(text)))


def show(results: Report | Comparison | Audit | AuditGroups | AuditComparison, everything: bool = False) -> None:
    """Print results: their first screen and main tables. With `everything`, print all tables, explanations and notes.

    An audit always has them. The short output of a report fits 40 lines of 120 characters.
    """
    if not HAS_RICH:
        _print_plain(results)
        return
    match results:
        case Report():
            _show_report(_console(), results, everything)
        case Comparison():
            _show_comparison(_console(), results, everything)
        case _:
            _show_audit(_console(), results)


def _show_report(console: Console, report: Report, everything: bool) -> None:
    """Print a report; without `everything`, the main errors, and the best calibrators or worst labels."""
    _show_first(console, report)
    if report.history:
        console.print(f"\n{_escaped(report.history.summary)}")
    if everything:
        _show_tables(console, report)
        return
    for warning in report.warnings:
        console.print(f"\n{_escaped(warning)}")
    _print_table(console, line_table(report, only_main=True))
    if report.task == "multilabel" and (labels := class_table(report, _N_LABELS)) is not None:
        _print_table(console, labels)
    elif report.calibration is not None:
        _print_table(console, calibrator_table(report.calibration, _N_CALIBRATORS))
    hidden = f"{len(report.notes)} {'note' if len(report.notes) == 1 else 'notes'} and " if report.notes else ""
    console.print(f"[dim]{hidden}more tables: --all[/dim]")


def _show_first(console: Console, results: Any) -> None:
    """Print the first screen of results."""
    first = first_screen(results)
    if isinstance(results, Comparison):  # its sentences and numbers follow
        first = first._replace(cause="", numbers=())
    console.print(f"\n[dim]{_escaped(first.title)}, {first.date}: {_escaped(first.input)}[/dim]\n", soft_wrap=True)
    style = _BADGES[first.colour]
    console.print(f"[{style}] {_escaped(first.verdict)} [/{style}] {_escaped(first.cause)}")
    if first.action:
        console.print(f"[bold]What to do:[/bold] {_escaped(first.action)}")
    if first.numbers:
        grid = rich_table.Table.grid(padding=(0, 2))
        for each in first.numbers:
            grid.add_row(printable(each.name), Text(printable(each.value), "bold"), Text(printable(each.detail), "dim"))
        console.print()
        console.print(grid)


def _show_tables(console: Console, report: Report) -> None:
    """Print the source, all tables, explanations and notes."""
    console.print()
    for name, value in report.source.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if text:
            console.print(f"[dim]{name:12}[/dim] {_escaped(text)}", soft_wrap=True)
    console.print()
    _print_table(console, line_table(report), [*explanations(report), *report.notes])
    if report.calibration is not None:
        console.print(f"\n[bold]{_escaped(report.calibration.recommendation.text)}[/bold]\n")
        _print_table(console, report.calibration.layout(), report.calibration.notes)
    console.print()
    _print_table(console, report.main_table.layout(f"Bins: {event_name(report, next(iter(report.tables)))}"))
    if (worst := class_table(report, WORST_CLASSES)) is not None:
        console.print()
        _print_table(console, worst, [class_words(report)])
    if report.groups is not None:
        console.print()
        _print_table(console, report.groups.layout(3 * _NAME_WIDTH, "ECE"), [GROUP_WORDS])
    if report.slices is not None:
        console.print()
        _print_table(console, report.slices.layout(3 * _NAME_WIDTH), [SLICE_WORDS])


def _show_comparison(console: Console, comparison: Comparison, everything: bool) -> None:
    """Print a comparison. `everything` adds the files, a table for each further system, explanations and notes."""
    _show_compared(console, comparison)
    if not everything:
        console.print("[dim]tables of all metrics: --all[/dim]")
        return
    console.print()
    for name, source in comparison.sources.items():
        files = ", ".join(source["files"])
        console.print(
            f"[dim]{_escaped(name)}:[/dim] {_escaped(files)}; {_escaped(source['predictions'])}", soft_wrap=True
        )
    for name in comparison.systems[1:]:
        console.print()
        _print_table(console, difference_table(comparison, name))
    _print_notes(console, [DIFFERENCE_WORDS, comparison.caution, *comparison.notes])


def _show_compared(console: Console, comparison: Comparison) -> None:
    """Print the verdict, the table of systems and the main findings."""
    _show_first(console, comparison)
    _print_table(console, system_table(comparison))
    for sentence in comparison.sentences.values():
        console.print(_escaped(sentence))


def _show_audit(console: Console, found: Audit | AuditGroups | AuditComparison) -> None:
    """Print an audit: its first screen, the table of all definitions, remarks and definitions."""
    if isinstance(found, AuditComparison):
        for name, audit in found.audits.items():
            console.print(f"[dim]{_escaped(name)}: {_escaped(audit.input_line)}[/dim]", soft_wrap=True)
        for key, compared in found.items():
            console.print(f"\n[bold]{_escaped(CONFIDENCES[key].name)}[/bold]: {found.n_paired[key]:,} answers in pairs")
            _show_compared(console, compared)
        _print_notes(console, found.notes)
        return
    _show_first(console, found)
    if len(found):
        _print_table(console, found.layout())
    for remark in found.remarks:
        console.print(_escaped(remark))
    if isinstance(found, Audit):
        if found.tasks is not None:
            _print_table(console, found.tasks.layout())
        console.print()
        _print_notes(console, found.explanations)


def _print_table(console: Console, table: Table, notes: Sequence[str] = ()) -> None:
    """Print a table and notes below it. Columns with `shown="wide"` are omitted on a terminal where they do not fit."""
    is_wide = console.width >= _WIDE_TABLE_WIDTH
    for has_wide, wraps_names in product([True, False] if is_wide else [False], [False, True]):
        drawn = _drawn(table.shown_on("always", *["wide"] * has_wide), is_wide, wraps_names)
        if console.measure(drawn, options=console.options.update(width=_UNLIMITED)).maximum <= console.width:
            break
    console.print(drawn)
    _print_notes(console, notes)


def _drawn(table: Table, is_wide: bool, wraps_names: bool) -> rich_table.Table:
    """Return a table for rich, with headers in several lines unless `is_wide`, and names if `wraps_names`."""
    table = table if is_wide and not wraps_names else table.folded(wraps_names)
    title = Text(table.title, "bold") if table.title else None
    drawn = rich_table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.collapse_padding = not is_wide
    for column in table.columns:
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        width = _NAME_WIDTH if column.wraps else None
        header, no_wrap = Text(column.header), not column.wraps
        drawn.add_column(header, justify=justify, no_wrap=no_wrap, max_width=width, overflow="fold")
    for section in table.sections:
        drawn.add_section()
        if section.heading:
            drawn.add_row(Text(printable(section.heading), "bold"))
        for row in section.rows:
            texts = [(printable_lines if wraps_names else printable)(cell.text) for cell in row.cells]
            cells = [Text(text, _STYLES.get(cell.style, "")) for text, cell in zip(texts, row.cells, strict=True)]
            drawn.add_row(*cells, style="dim" if row.is_quiet else "")
    return drawn


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"[dim]{_escaped(note)}[/dim]")


def show_calibrator(path: Path, stage: CalibrationStage, from_logits: bool) -> None:
    """Print the path of the saved calibrator, and how to load it."""
    kind = "logits" if from_logits else "probabilities"
    _print_lines(
        f"saved {stage.name}, as advised: {path}",
        f"torchcalib.calibration.load_calibrator({str(path)!r}) returns a module that converts {kind} to calibrated "
        f"{kind}",
    )


def show_state(path: Path, source: Source | None) -> None:
    """Print the path of the saved report state, and the command that merges it with other states."""
    size = "" if source is None else f" of {source.shape[0]:,} rows"
    _print_lines(f"saved the state{size}: {path}", "torchcalib merge writes one report on this state and others")


def show_paths(paths: Sequence[Path]) -> None:
    """Print the written files, the HTML page first, and the others as paths in its folder."""
    if not paths:
        return
    page = next((path for path in paths if path.suffix == ".html"), paths[0])
    folder, others = page.parent, [path for path in paths if path != page]
    names = ", ".join(str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name for path in others)
    _print_lines(f"wrote {page}", f"and {names}" if names else "")


def show_warnings(history: History) -> None:
    """Print the warnings about over-confidence in a training history."""
    for sentence in history.findings:
        _print_lines(f"warning: {sentence}", style="bold red")


def _print_lines(main: str, detail: str = "", style: str = "bold") -> None:
    """Print an empty line, a line in a style, and a quiet line unless it is empty."""
    if not HAS_RICH:
        _print_plain("", main, *filter(None, [detail]))
        return
    console = _console()
    console.print()
    for text, look in filter(itemgetter(0), ((main, style), (detail, "dim"))):
        console.print(Text(printable(text), look), soft_wrap=True)


def show_epochs(rows: Iterable[Mapping[str, float]], title: str) -> None:
    """Print a table row by row, as the iterator yields the values of each validation."""
    if not HAS_RICH:
        for row in rows:
            _print_plain(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
        return
    console = _console()
    table = rich_table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    with Live(table, console=console, refresh_per_second=10, auto_refresh=console.is_terminal):
        for row in rows:
            if not table.columns:
                for name in row:
                    table.add_column(name, justify="right", no_wrap=True)
            table.add_row(*(f"{value}" if isinstance(value, int) else f"{value:.4f}" for value in row.values()))
