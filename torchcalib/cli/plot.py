"""The command `torchcalib plot FILE ... --out PATH`."""

import argparse
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcalib.cli.files import mode_of, print_json, read_builder
from torchcalib.cli.messages import output, working
from torchcalib.cli.metric import streamed
from torchcalib.core.events import NamedMode, TopK
from torchcalib.display.words import printable
from torchcalib.functional.binned import ece
from torchcalib.io.writing import write_whole
from torchcalib.plots.canvas import to_png, to_svg
from torchcalib.plots.reliability import reliability_diagram

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


def plot(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Draw the reliability diagram of the predictions in files, and print the path and the calibration error."""
    place = Path(arguments.out)
    mode = None if arguments.mode is None else mode_of(arguments.mode)
    if isinstance(mode, TopK):
        ax, described = _of_ranks(arguments, paths, mode)
    else:
        ax, described = _of_report(arguments, paths, mode)
    with working("drawing the diagram"):
        write_whole(place, _WRITERS[place.suffix.lower()](ax))
    if arguments.json:
        print_json({"path": str(place), **described})
    else:
        lines = (f"wrote {place}", str(described["line"]), described["sentence"])
        output("\n".join(map(printable, filter(None, lines))))


def _of_report(
    arguments: argparse.Namespace, paths: Sequence[Path], mode: NamedMode | None
) -> tuple["Axes", dict[str, Any]]:
    """Return the diagram of a report for a mode, and the mode, the line of the error and the sentence."""
    builder = read_builder(arguments, paths, with_calibration=False, with_intervals=False)
    report = builder.report()
    mode = mode or next(iter(report.tables))
    if mode not in report.tables:
        known = ", ".join(report.tables)
        raise ValueError(f"`--mode` must be one of {known} for task {report.task}, got {mode!r}. Choose one.")
    ax = report.plot(mode=mode, logit=arguments.logit, title=arguments.title)
    return ax, {"mode": mode, "line": report.line(f"ece/{mode}"), "sentence": report.sentence}


def _of_ranks(arguments: argparse.Namespace, paths: Sequence[Path], mode: TopK) -> tuple["Axes", dict[str, Any]]:
    """Return the diagram of the most probable classes, as `_of_report`: reports contain no such line."""
    if arguments.clusters is not None:
        raise ValueError("`--clusters` must be omitted for --mode top5 and other ranks, got a name. Omit it.")
    stream, _, _ = streamed(ece, arguments, paths)
    estimator: Any = stream.estimator
    ax = reliability_diagram(estimator.table(stream.statistic()), logit=arguments.logit, title=arguments.title)
    line = f"ECE, {mode.k} most probable classes: {float(stream.compute()):.3g}"
    return ax, {"mode": arguments.mode, "line": line, "sentence": ""}
