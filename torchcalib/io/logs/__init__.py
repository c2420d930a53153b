"""Readers of logs of evaluations of language models, recognised by their content."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchcalib.io.errors import InputError, quoted, reading
from torchcalib.io.logs.answer_lines import Decisions, Judged, Responses
from torchcalib.io.logs.answers import Answer, Log
from torchcalib.io.logs.helm import Helm
from torchcalib.io.logs.inspect_ai import Inspect
from torchcalib.io.logs.lm_eval import LmEval
from torchcalib.io.logs.objects import RowGroup, Rows, lines_of, members_of, whole_file

LOGS: tuple[type[Log], ...] = (LmEval, Inspect, Helm, Judged, Responses, Decisions)
"""Readers in the order in which they are tried."""

_TABLES = (".csv", ".tsv", ".parquet")

__all__ = ["LOGS", "Answer", "Log", "open_log"]


def open_log(source: Any, chosen: str | None = None, words: Mapping[str, float] | None = None) -> Log:
    """Open a log: a file, a folder with the samples of one task of lm-eval or a run of HELM, or rows in memory.

    Args:
        source: `.jsonl`, `.jsonl.gz`, `.eval`, `.json`, `.csv`, `.tsv` or `.parquet` file, a folder, a DataFrame, or a
            list of dicts or other collection of them that can be read twice.
        chosen: the filter (lm-eval) or scorer (Inspect) whose answers are read; None for the first in the file.
        words: confidences in [0, 1] for words such as "high".

    Returns:
        The log. Only its first object was read.

    Raises:
        InputError: if the file is missing, damaged or of another kind.
    """
    if not isinstance(source, str | Path):
        if isinstance(source, Iterator) or not hasattr(source, "__iter__"):
            raise InputError(
                f"`log` must be a path, a DataFrame or a list of dicts, got {type(source).__name__}. Pass one."
            )
        given = Rows(source)
        return _recognised(Path(given.kind), given, chosen, words)
    file = _file_in(Path(source)) if Path(source).is_dir() else Path(source)
    with reading(str(file), "log"):
        if not file.is_file():
            raise InputError(f"`{file}` must be a file, got a path that does not exist. Check the path.")
        rows = Rows(file) if any(suffix in file.name.lower() for suffix in _TABLES) else None
        return _recognised(file, rows, chosen, words)


def _recognised(path: Path, rows: Rows | None, chosen: str | None, words: Mapping[str, float] | None) -> Log:
    """Return the log of the kind that its first object has."""
    with reading(str(path), "log"):
        start = _start_of(path) if rows is None else _first_of(rows.groups(1))
    for kind in LOGS:
        if kind.recognises(start):
            return kind(path, chosen, rows, words)
    names = ", ".join(kind.kind for kind in LOGS)
    raise InputError(
        f"`{path}` must be a log of one of these kinds: {names}; got an object with the keys {quoted(start)}. "
        "Read tables of predictions with `report`."
    )


def _file_in(folder: Path) -> Path:
    """Return the log in a folder."""
    state = folder / "scenario_state.json"
    found = [state] if state.is_file() else sorted(folder.rglob("samples_*.jsonl"))
    if len(found) != 1:
        raise InputError(
            f"`{folder}` must contain `scenario_state.json` or one file `samples_*.jsonl`, got "
            f"{quoted([path.name for path in found])}. Name a file."
        )
    return found[0]


def _start_of(path: Path) -> Mapping[str, Any]:
    """Return the first object of a file: a line, the header of an archive, or the whole file."""
    suffix = path.suffix.lower()
    if suffix == ".eval":
        return next((header for _, header in members_of(path, "header.json".__eq__)), {})
    if suffix == ".json":
        found = whole_file(path)
        return found if isinstance(found, dict) else {}
    return _first_of(lines_of(path, 1))


def _first_of(groups: Iterator[RowGroup]) -> Mapping[str, Any]:
    return next((row for group in groups for _, row, _ in group.numbered()), {})
