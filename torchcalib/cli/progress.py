"""Show progress on a terminal for work that takes longer than a second."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(description: str, shown: bool = True) -> Iterator[None]:
    """Show the description and the elapsed time on stderr, if stderr is a terminal."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:  # the command raises an error that names the missing extra
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as progress:
        progress.add_task(description, total=None)
        yield
