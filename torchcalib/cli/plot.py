"""The command `torchcalib plot FILE ... --out PATH`."""

import argparse
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from torchcalib.cli.files import check_place, print_json, read_builder
from torchcalib.cli.messages import output, working
from torchcalib.cli.ranks import on_first
from torchcalib.io.errors import printable
from torchcalib.io.saved import write_whole
from torchcalib.plots.canvas import to_png, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _to_pdf(ax: "Axes") -> bytes:
    content = BytesIO()
    ax.figure.canvas.figure.savefig(content, format="pdf", bbox_inches="tight", metadata={"CreationDate": None})
    return content.getvalue()


_WRITERS: dict[str, Callable[["Axes"], bytes]] = {
    ".svg": lambda ax: to_svg(ax).encode(),
    ".png": to_png,
    ".pdf": _to_pdf,
}
"""Functions that draw axes in a format, by suffix."""


@on_first
def plot(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Draw the reliability diagram of the predictions in files, and print the path and the calibration error."""
    place = check_place("--out", arguments.out, paths)
    suffix = place.suffix.lower()
    if suffix not in _WRITERS:
        raise ValueError(f"`--out` must end in {', '.join(_WRITERS)}, got {str(place)!r}. Name another file.")
    builder = read_builder(arguments, paths, with_calibration=False, with_intervals=False)
    with working("drawing the diagram"):
        report = builder.report()
        mode = arguments.mode or next(iter(report.tables))
        if mode not in report.tables:
            known = ", ".join(report.tables)
            raise ValueError(f"`--mode` must be one of {known} for task {report.task}, got {mode!r}. Choose one.")
        ax = report.plot(mode=mode, logit=arguments.logit, title=arguments.title)
        write_whole(place, _WRITERS[suffix](ax))
    line = report.line(f"ece/{mode}")
    if arguments.json:
        print_json({"path": str(place), "mode": mode, "line": line, "sentence": report.sentence})
    else:
        output("\n".join(map(printable, (f"wrote {place}", str(line), report.sentence))))
