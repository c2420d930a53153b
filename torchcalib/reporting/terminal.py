"""Draws a `Report`, and work in progress, on a terminal."""

import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

try:
    from rich import box
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("the command line needs rich. Run pip install 'torchcalib[report]'.") from error

from torchcalib.core.bins import BinTable
from torchcalib.inference.words import fixed, p_words
from torchcalib.io.errors import printable
from torchcalib.io.source import Source
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.comparison.data import DIFFERENCE_WORDS, Comparison
from torchcalib.reporting.data import EVIDENCE_WORDS, INTERVAL_WORDS, CalibrationStage, Report
from torchcalib.reporting.groups import GROUP_WORDS
from torchcalib.reporting.monitoring.history import History

MEANS = ("confidence", "frequency", "gap", "ecd")

_WIDTH = 120
_WHOLE_WIDTH = 110  # which a table of numbers with all its columns takes
_NAME_WIDTH = 24  # of a system, above a column of its numbers


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Stop quietly, with success, when the reader has seen enough: whatever was to be written is written."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def _console() -> Console:
    stream = sys.stdout or io.StringIO()  # a process may be started without
    width = None if stream.isatty() else _WIDTH
    return _Console(file=stream, width=width, highlight=False, emoji=False)  # a file may be called :bomb:


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, rows: int, description: str | None = None) -> None:
        """Advance it by a number of rows, and say anew what is being done, if that has changed."""


@contextmanager
def progress(total: int, description: str, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on stderr, if that is a terminal; yields a function that advances it by a number of rows."""
    shown = shown and sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True, emoji=False), transient=True, disable=not shown) as bar:
        task = bar.add_task(_shown(description), total=total)

        def advance(rows: int, description: str | None = None) -> None:
            bar.update(task, advance=rows, description=None if description is None else _shown(description))

        yield advance


def _shown(text: object) -> str:
    """Write what others have named: it is neither markup nor does it steer the terminal."""
    return escape(printable(str(text)))


def show(report: Report) -> None:
    """Print what was read, the sentence, the numbers and the main bin table."""
    console = _console()
    console.print()
    for name, value in report.source.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if shown:
            console.print(f"[dim]{name:12}[/dim] {_shown(shown)}", soft_wrap=True)
    bins = f"{report.settings['n_bins']} equal-width bins {'(a, b]' if report.settings['right'] else '[a, b)'}"
    outputs = f"{report.num_classes} {'labels' if report.task == 'multilabel' else 'classes'}"
    dropped = f" ({report.n_dropped:,} left out for NaN)" if report.n_dropped else ""
    console.print(f"[dim]{'read as':12}[/dim] {report.task}, n = {report.n:,.10g}{dropped}, {outputs}, {bins}")
    console.print()
    console.print(f"[bold]{escape(report.sentence)}[/bold]")
    console.print()
    console.print(_shown(report.main_line))
    console.print()

    console.print(_number_table(report, console.width))
    console.print("[dim]naive: what always predicting the class shares of this data gets[/dim]")
    console.print(f"[dim]{EVIDENCE_WORDS}[/dim]")
    if any(line.interval for line in report.lines):
        console.print(f"[dim]{INTERVAL_WORDS}[/dim]")
    for note in report.notes:
        console.print(f"[dim]{_shown(note)}[/dim]")
    if report.calibration is not None:
        console.print()
        console.print(f"[bold]{escape(report.calibration.recommendation.text)}[/bold]")
        console.print()
        console.print(_gain_table(report.calibration))
        for note in report.calibration.notes:
            console.print(f"[dim]{_shown(note)}[/dim]")
    console.print()
    console.print(_bin_table(report.main_table, f"bins: {next(iter(report.tables)).replace('_', ' ')}"))
    if report.groups is not None:
        console.print()
        console.print(_group_table(report.groups))
        console.print(f"[dim]{GROUP_WORDS}[/dim]")


def _number_table(report: Report, width: int) -> Table:
    """Every number; on a narrow terminal without what is perfect, and the unit."""
    has_intervals = any(line.interval for line in report.lines)
    whole = width >= _WHOLE_WIDTH
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=not whole)
    drawn.add_column("number", no_wrap=True)
    for header in ("value", "noise floor" if whole else "noise\nfloor"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for header in (*["95 % interval"] * has_intervals, "p"):
        drawn.add_column(header, no_wrap=True)
    for header in (*["perfect"] * whole, "naive"):
        drawn.add_column(header, justify="right", no_wrap=True)
    if whole:
        drawn.add_column("unit", no_wrap=True)
    group = ""
    for line in report.lines:
        if line.group != group:
            drawn.add_section()
            drawn.add_row(Text(printable(line.group), "bold"))
            group = line.group
        row = [line.name, fixed(line.value, 6)]
        row += ["" if line.noise_floor is None else fixed(line.noise_floor, 6)]
        row += [str(line.interval or "")] * has_intervals
        row += ["" if line.p_value is None else p_words(line.p_value)]
        row += [*[f"{line.perfect:.4g}"] * whole, f"{line.naive:.4g}", *[line.unit] * whole]
        drawn.add_row(*row)
    return drawn


def _bin_table(table: BinTable, title: str) -> Table:
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("bin", "n", "share", *MEANS):
        drawn.add_column(header, justify="right", no_wrap=True)
    columns = {name: column.tolist() for name, column in table.to_dict().items()}
    for k, n in enumerate(columns["n"]):
        row = {name: column[k] for name, column in columns.items()}
        means = (
            [f"{row[name]:+.4f}" if name == "gap" else f"{row[name]:.4f}" for name in MEANS]
            if n
            else ["-"] * len(MEANS)
        )
        edges = f"{row['lower']:.4f} - {row['upper']:.4f}"
        drawn.add_row(edges, f"{n:,.10g}", f"{row['share']:.4f}", *means, style="" if n else "dim")
    return drawn


def _group_table(table: GroupTable) -> Table:
    title = f"groups: the worst {len(table)} of {table.n_groups:,}"
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("group", max_width=_NAME_WIDTH, overflow="fold")
    for header in ("n", "ECE", "noise floor", "p", "shrunk"):
        drawn.add_column(header, justify="right", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    for name, row in zip(table.shown_names(3 * _NAME_WIDTH), table.rows(), strict=True):
        errors = [f"{row[name]:.4f}" for name in ("value", "noise_floor")]
        said = "within chance" if row["by_chance"] else ""
        numbers = [f"{row['n']:,.10g}", *errors, p_words(row["p_value"]), f"{row['shrunk']:.4f}", said]
        drawn.add_row(Text(name), *numbers, style="dim" if said else "")
    return drawn


def _gain_table(stage: CalibrationStage) -> Table:
    drawn = Table(
        title=f"what a calibration stage would gain, in {stage.n_folds} folds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for header in ("", "calibrator"):
        drawn.add_column(header, no_wrap=True)
    for header in ("score", "gain"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for score, raw in stage.raw.items():
        drawn.add_section()
        drawn.add_row(score, "none", f"{raw:.6f}", "")
        for gain in stage.gains:
            if gain.score == score:
                drawn.add_row("", gain.calibrator, f"{gain.value:.6f}", f"{round(gain.rcl, 2) + 0:.2f} %")
    return drawn


def show_comparison(comparison: Comparison) -> None:
    """Print what was read, what it says, and a table for each system but the first."""
    console = _console()
    console.print()
    for name, source in comparison.sources.items():
        files = ", ".join(source["files"])
        console.print(f"[dim]{_shown(name)}:[/dim] {_shown(files)}; {_shown(source['predictions'])}", soft_wrap=True)
    outputs = f"{comparison.num_classes} {'labels' if comparison.task == 'multilabel' else 'classes'}"
    bins = f"{comparison.settings['n_bins']} equal-width bins {'(a, b]' if comparison.settings['right'] else '[a, b)'}"
    console.print(f"[dim]{'read as':12}[/dim] {comparison.task}, n = {comparison.n:,.10g}, {outputs}, {bins}")
    for sentence in comparison.sentences.values():
        console.print(f"\n[bold]{_shown(sentence)}[/bold]")
    for name in comparison.systems[1:]:
        console.print()
        console.print(_difference_table(comparison, name))
    console.print(f"[dim]{DIFFERENCE_WORDS}[/dim]")
    for note in (comparison.caution, *comparison.notes):
        console.print(f"[dim]{_shown(note)}[/dim]")


def _difference_table(comparison: Comparison, name: str) -> Table:
    first = comparison.baseline
    title = Text(printable(f"{name} against {first}"), "bold")
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("", "number"):
        drawn.add_column(header, no_wrap=True)
    for header in (first, name):
        drawn.add_column(Text(printable(header)), justify="right", max_width=_NAME_WIDTH, overflow="fold")
    drawn.add_column("difference", justify="right", no_wrap=True)
    drawn.add_column("95 % interval", no_wrap=True)
    drawn.add_column("says", no_wrap=True)
    group = ""
    for line in comparison.lines:
        if line.group != group:
            drawn.add_section()
        found = line.differences[name]
        numbers = [fixed(x, 6) for x in (line.values[first], line.values[name])]
        verdict = "" if found.interval is None else found.verdict
        color = {"better": "bold", "worse": "bold"}.get(verdict, "dim")
        drawn.add_row(
            "" if line.group == group else line.group,
            line.name,
            *numbers,
            f"{round(found.value, 6) + 0:+.6f}",
            "" if found.interval is None else str(found.interval),
            Text(verdict, color),
        )
        group = line.group
    return drawn


def show_calibrator(path: Path, stage: CalibrationStage, from_logits: bool) -> None:
    """Print which calibrator was saved, why this one, and how it is used."""
    console = _console()
    why = "as recommended" if stage.recommendation.best else "though no calibrator is worth its trouble here"
    console.print(f"\n[bold]saved {stage.name}[/bold], {why}: [bold]{_shown(path)}[/bold]", soft_wrap=True)
    kind = "logits" if from_logits else "probabilities"
    call = f"torchcalib.load_calibrator({str(path)!r})"
    console.print(
        f"[dim]{_shown(call)} is a module that takes {kind} and returns calibrated {kind}[/dim]", soft_wrap=True
    )


def show_state(path: Path, source: Source | None) -> None:
    """Print that a part of a report was saved, of what, and how it is used."""
    console = _console()
    held = "" if source is None else f" of {source.shape[0]:,} rows"
    console.print(f"\n[bold]saved the state[/bold]{held}: [bold]{_shown(path)}[/bold]", soft_wrap=True)
    console.print("[dim]torchcalib merge takes it, and others like it, and makes one report of them[/dim]")


def show_paths(paths: Sequence[Path]) -> None:
    """Print what was written, if anything; the page first."""
    if not paths:
        return
    console = _console()
    page = next((path for path in paths if path.suffix == ".html"), paths[0])
    console.print(f"\n[bold]wrote {_shown(page)}[/bold]", soft_wrap=True)
    others = ", ".join(path.name for path in paths if path != page)
    console.print(f"[dim]and {_shown(others)}[/dim]", soft_wrap=True)


def show_warnings(history: History) -> None:
    """Print what a monitor has said."""
    console = _console()
    for row in history.warnings:
        console.print(f"\n[bold red]warning:[/bold red] {_shown(row.warning)}", soft_wrap=True)


def show_epochs(rows: Iterable[Mapping[str, float]], title: str) -> None:
    """Print a table row by row, as the rows come."""
    console = _console()
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    with Live(table, console=console, refresh_per_second=10, auto_refresh=console.is_terminal):
        for row in rows:
            if not table.columns:
                for name in row:
                    table.add_column(name, justify="right", no_wrap=True)
            table.add_row(*(f"{value}" if isinstance(value, int) else f"{value:.4f}" for value in row.values()))
