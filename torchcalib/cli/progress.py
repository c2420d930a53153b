"""Progress of work that takes longer than a second, shown on a terminal only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str, shown: bool = True) -> Iterator[None]:
    """Show what is done, with the time so far, on stderr if that is a terminal."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:  # the command itself names the extra
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as progress:
        progress.add_task(what, total=None)
        yield
