"""Progress display for long steps of a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(description: str, shown: bool = True) -> Iterator[None]:
    """Show the description and the elapsed time on stderr during the `with` block, if stderr is a terminal."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:  # the command itself raises an error for the missing extra
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as progress:
        progress.add_task(description, total=None)
        yield
