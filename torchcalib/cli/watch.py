"""The command `torchcalib watch FILE ...`."""

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from torchcalib.cli.files import check_logits
from torchcalib.cli.inputs import opening
from torchcalib.cli.messages import output
from torchcalib.core.saved import content_of, loading, saved_bytes, saved_count
from torchcalib.display.words import printable
from torchcalib.functional.estimator import factory_of
from torchcalib.functional.sequential import SequentialEstimator, SequentialEvidence, check_alarm_level, sequential_test
from torchcalib.functional.stream import Stream
from torchcalib.io.errors import InputError
from torchcalib.io.opening import PIECE_BYTES, PredictionFiles, open_predictions
from torchcalib.io.paths import expanded, format_of
from torchcalib.io.source import Source
from torchcalib.io.tables import TextLayout, text_layout
from torchcalib.io.writing import write_whole

_KIND = "watch state"
_GROWING = (".csv", ".tsv", ".jsonl")
"""Suffixes of files that grow by lines. Other files are read once, as a whole."""

_MOST_BYTES = 2**26  # largest part of a file that is read at once
_SAME = ("preds", "target", "weights", "pred", "from_logits", "class_names", "are_confidences", "are_percentages")
"""Fields of a source that all parts have in common."""


def watch(arguments: argparse.Namespace, paths: Sequence[Path]) -> int:  # noqa: ARG001 - folders may get new files
    """Add new rows to the evidence against calibration, print it, and return 1 for an alarm."""
    check_alarm_level(arguments.level)
    watched = _Watched(arguments)
    while True:
        n_parts = 0
        for path in _files(arguments.files, arguments.state):
            while watched.has_read_part(path):
                n_parts += 1
        alarm = watched.has_alarm()
        if alarm or not arguments.follow:
            if n_parts == 0:
                watched.show(None)
            return int(alarm)
        time.sleep(arguments.interval)


def _files(names: Sequence[str], state: str | None) -> list[Path]:
    """Return the files of names, patterns and folders, in the order of names. The state may be in a folder."""
    found: list[Path] = []
    for name in names:
        if Path(name).is_dir():
            files = (path for path in sorted(Path(name).iterdir()) if path.is_file() and path.name[0] != ".")
            found += [path for path in files if format_of(path) is not None]
        else:
            found += expanded([name])
    return [path for path in found if state is None or path.resolve() != Path(state).resolve()]


class _Watched:
    """Evidence so far, and the positions in the files up to which rows have been read."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.positions: dict[str, int] = {}  # in bytes, by file
        self.task: Any = None  # task, source and stream are those of the first part
        self.source: Source | None = None
        self.stream: Stream[Any] | None = None
        if arguments.state is not None and Path(arguments.state).exists():
            self._load(Path(arguments.state))

    def _load(self, path: Path) -> None:
        """Restore the evidence from a file of `--state`. Raise ValueError if it has other options."""
        with loading(_KIND, str(path), "torchcalib watch --state"):
            saved = content_of(path, _KIND)
            self.positions = {name: saved_count(saved["positions"], name) for name in saved["positions"]}
            self.task, self.source = saved["task"], Source.of_state(saved["source"])
            self.stream = self._new_stream(float(saved["level"]), saved["restart"] is True, saved["ignore_index"])
            self.stream.load(saved["parts"])
        how = self._estimator.accumulator
        for name, value, given in (
            ("level", how.level, self.arguments.level),
            ("restart", how.restart, self.arguments.restart),
        ):
            if value != given:
                advice = "Begin a new test with another --state."
                raise ValueError(f"`--{name}` must be that of the state, {value}, got {given}. {advice}")

    def _new_stream(self, level: float, restart: bool, ignore_index: int | None) -> Stream[Any]:
        """Return an empty stream of the test, for the task and the source of the first part."""
        assert self.source is not None
        task = "binary" if self.task == "confidence" else self.task
        estimator = factory_of(sequential_test)(
            task=task,
            from_logits=self.source.from_logits,
            mode="positive" if self.source.are_confidences else None,
            class_axis=None if task == "binary" else -1,
            nan_policy=self.arguments.nan_policy,
            ignore_index=ignore_index,
            level=level,
            restart=restart,
        )
        return Stream(estimator.streamed(None if task == "binary" else self.source.shape[-1]))

    @property
    def _estimator(self) -> SequentialEstimator:
        estimator = None if self.stream is None else self.stream.estimator
        assert isinstance(estimator, SequentialEstimator)
        return estimator

    def has_read_part(self, path: Path) -> bool:
        """Add the next new rows of a file, and write and print the evidence. Return whether there are new rows."""
        start, size = self.positions.get(str(path.resolve()), 0), path.stat().st_size
        grows = path.suffix.lower() in _GROWING
        if size < start or (0 < start < size and not grows):
            rule = "only grow" if grows else "not change after it has been read"
            raise InputError(
                f"`{path}` must {rule}, got {size:,} bytes after {start:,} were read. Write new rows to a new file, or "
                "begin a new test with another --state."
            )
        if size == start:
            return False
        if not grows:
            self._read(path)
        else:
            with TemporaryDirectory() as folder, _named(path, folder, start):
                part = Path(folder, path.name)
                size = _write_lines(path, start, part)
                if size == start:
                    return False
                self._read(part)
        self.positions[str(path.resolve())] = size
        self._write()
        self.show(str(path))
        return True

    def _read(self, path: Path) -> None:
        """Add the rows of a file."""
        known: dict[str, Any] = {"is_part": True}
        if self.source is not None:
            known |= {"earlier": self.source, "task": self.task, "from_logits": self.source.from_logits}
            known |= {"class_names": self.source.class_names or None}
        files: PredictionFiles = open_predictions([path], **{**opening(self.arguments), **known})
        if self.source is None:
            self.task, self.source = files.task_of_report, files.source
            self.stream = self._new_stream(self.arguments.level, self.arguments.restart, files.ignore_index)
        assert self.stream is not None
        for name in _SAME:
            before, now = (getattr(source, name) for source in (self.source, files.source))
            if before != now:
                raise InputError(
                    f"`{path}` must have the {name} of earlier rows, {before!r}, got {now!r}. Begin a new test with "
                    "another --state."
                )
        for rows in files.chunks(PIECE_BYTES):
            check_logits(self.arguments, files, rows.preds, f"in `{path}`")
            for start in range(0, len(rows), self.arguments.batch):
                some = rows[start : start + self.arguments.batch]
                self.stream.update(some.preds, some.target, some.weights)

    def _write(self) -> None:
        """Write the state, and the numbers for Prometheus."""
        assert self.source is not None
        assert self.stream is not None
        how = self._estimator
        if self.arguments.state is not None:
            content = {
                "level": how.accumulator.level,
                "restart": how.accumulator.restart,
                "task": self.task,
                "ignore_index": how.input_format.ignore_index,
                "source": self.source.state(),
                "positions": self.positions,
                "parts": self.stream.parts(),
            }
            write_whole(Path(self.arguments.state), saved_bytes(_KIND, content))
        if self.arguments.prometheus is not None:
            write_whole(Path(self.arguments.prometheus), self.evidence.prometheus().encode())

    @property
    def evidence(self) -> SequentialEvidence:
        """Evidence after all rows that have been read."""
        assert self.stream is not None
        return SequentialEvidence(*self._estimator.fields(self.stream.statistic()).unbind(-1))

    def has_alarm(self) -> bool:
        """Return whether the evidence has reached the level at any look."""
        return self.stream is not None and bool(self.evidence.since > 0)

    def show(self, file: str | None) -> None:
        """Print the evidence as a line of text or JSON, after the new rows of a `file`; None without new rows."""
        found = None if self.stream is None else self.evidence
        if self.arguments.json:
            from torchcalib.results.base import plain  # here, because it imports calibrators

            values = {} if found is None else {**found.flat(), "direction": found.direction}
            output(json.dumps(plain({"file": file, **values, "alarm": self.has_alarm()}), allow_nan=False))
        else:
            output(printable(": ".join(map(str, filter(None, (file or "no new rows", found))))))


def _write_lines(path: Path, start: int, part: Path) -> int:
    """Copy the header and the complete rows after byte `start` of a table to the file `part`.

    Return the position of the next row in bytes, or `start` without new rows. Raise InputError for a longer row.
    """
    layout = None if path.suffix.lower() == ".jsonl" else text_layout(path)
    with path.open("rb") as file:
        header = b"" if layout is None else _header_of(file, path, layout)
        if layout is not None and not header.endswith(b"\n"):
            return start
        begin = max(start, len(header))
        file.seek(begin)
        block = file.read(_MOST_BYTES)
    end = block.rfind(b"\n") + 1 if layout is None else _end_of_rows(block, layout.separator.encode())
    if end == 0 and len(block) == _MOST_BYTES:
        raise InputError(
            f"`{path}` must have rows of at most {_MOST_BYTES:,} bytes, got a longer one. Check the file for a quote "
            "without its end."
        )
    if not block[:end].strip():
        return start
    part.write_bytes(header + block[:end])
    return begin + end


def _header_of(file: BinaryIO, path: Path, layout: TextLayout) -> bytes:
    """Read the lines up to the column names of a table. A line break within quotes does not end the names."""
    header = b"".join(file.readline() for _ in range(layout.skipped))
    is_open, is_first = False, True
    while is_open or is_first:
        line, is_first = file.readline(_MOST_BYTES), False
        if b"\r" in line.rstrip(b"\r\n"):
            raise InputError(f"`{path}` must have lines that end with LF, got lines that end with CR. Write LF.")
        is_open = bool(line) and _ends_in_quotes(line, layout.separator.encode(), is_open)
        header += line
    return header


def _end_of_rows(block: bytes, separator: bytes) -> int:
    """Return the number of bytes of the complete rows at the begin of a block.

    A line break within quotes does not end a row. Quotes begin at the begin of a cell only.
    """
    end = place = 0
    is_quoted = False
    for line in block.split(b"\n")[:-1]:
        place += len(line) + 1
        if is_quoted or b'"' in line:
            is_quoted = _ends_in_quotes(line, separator, is_quoted)
        end = end if is_quoted else place
    return end


def _ends_in_quotes(line: bytes, separator: bytes, is_quoted: bool) -> bool:
    """Return whether a quoted cell continues after a line; `is_quoted` is whether it continues from the line before."""
    at = 0
    while at <= len(line):
        if not is_quoted and line[at : at + 1] == b'"':
            is_quoted, at = True, at + 1
        if is_quoted:
            at = line.find(b'"', at)
            if at < 0:
                return True
            if line[at + 1 : at + 2] == b'"':  # a quote within quotes
                at += 2
                continue
            is_quoted = False
        following = line.find(separator, at)
        if following < 0:
            return False
        at = following + 1
    return is_quoted


@contextmanager
def _named(path: Path, folder: str, start: int) -> Iterator[None]:
    """Replace the name of the copy of new rows in `folder` by that of their file in errors and warnings."""
    copy = str(Path(folder, path.name))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            yield
        except ValueError as error:
            where = f"after {start:,} bytes: " if start else ""
            raise InputError(where + str(error).replace(copy, str(path))) from error
    for each in given:
        warnings.warn(str(each.message).replace(copy, str(path)), each.category, stacklevel=2)
