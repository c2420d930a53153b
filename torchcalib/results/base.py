"""`Results`, the base class of `Report` and `Comparison`."""

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self, TypeVar

from torchcalib._bridges import NAMES
from torchcalib._version import __version__
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.display.tables import Tabular
from torchcalib.display.words import count
from torchcalib.io.errors import quoted, shown
from torchcalib.io.writing import write_all, write_whole
from torchcalib.results.history import History

V = TypeVar("V")

SCHEMA_VERSION = 1
"""Version of the format of `to_dict`, which increases with each change that can break a program that reads it."""


def above(place: str) -> Any:
    """Return the function or class at a place such as `"torchcalib.plots.reliability:reliability_diagram"`.

    Methods of results call packages that import results; such an import at module level would be circular.
    """
    return resolve_name(place)


def today() -> str:
    """Return the current date in UTC, as yyyy-mm-dd.

    `SOURCE_DATE_EPOCH` replaces the current time (https://reproducible-builds.org/specs/source-date-epoch).
    """
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)
    return now.date().isoformat()


class Exported(ABC):
    """Base class of results that can be converted to plain Python values."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the attributes as plain Python values."""

    def to_json(self) -> str:
        """Return `to_dict()` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        return str(self)

    def _save(self, path: str | Path, complete: bool) -> tuple[Path, ...]:
        """Write a page, all numbers or a table, by the ending of the file name, or else all files to a folder."""
        place, html = Path(path), "torchcalib.reporting.render.html"
        writers: dict[str, Callable[[], str]] = {".json": lambda: f"{self.to_json()}\n"}
        if isinstance(self, Tabular):
            tables = {".md": lambda: f"{self.to_markdown()}\n", ".tex": lambda: f"{self.to_latex()}\n"}
            writers = {".html": lambda: str(above(f"{html}:render")(self)), **writers, **tables}
        ending = place.suffix.lower()
        if place.is_dir() or (ending not in writers and not re.fullmatch(r"\.[a-z]\w*", ending)):
            try:  # create the folder first, because drawing diagrams takes time
                place.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise NotADirectoryError(
                    f"`path` must be a folder, got {str(place)!r}: it or one of its parents is a file. Choose another "
                    "folder."
                ) from error
            return write_all(place, above(f"{html}:files_of")(self, complete))
        if ending not in writers:
            raise ValueError(
                f"`path` must end in {', '.join(writers)}, or be a folder, got {str(path)!r}. "
                f"To use this name for a folder, create the folder first."
            )
        content = writers[ending]().encode()
        place.parent.mkdir(parents=True, exist_ok=True)
        return (write_whole(place, content),)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Results(Exported, Mapping[str, V], Tabular):
    """Base class of `Report` and `Comparison`: a mapping from keys such as `"nll"` to values, with metadata.

    An error key without a mode refers to the main mode: `"ece"` is `"ece/top_label"` for a multi-class task.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights over the samples; multi-label: over the labelled entries.
        num_classes: number of classes C or labels L; 2 for a binary task.
        lines: scores and calibration errors, in the order of the table.
        settings: options for the input and the bins.
        notes: sentences on limitations, such as omitted values.
        n_dropped: number of samples (multi-label: entries) dropped by `nan_policy="drop"`.
        version: version of torchcalib.
        created: date of creation in UTC, yyyy-mm-dd, or that of the environment variable `SOURCE_DATE_EPOCH`.
        class_names: names of the classes or labels, the negative class first if binary; empty if unknown.
        task_is_inferred: whether the task was inferred from the shapes.
    """

    file_name: ClassVar[str]
    """Name of the JSON file in the folder of `save`."""

    task: Task
    n: float
    num_classes: int
    lines: tuple[Any, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    n_dropped: int = 0
    version: str = __version__
    created: str = field(default_factory=today)
    class_names: tuple[str, ...] = ()
    task_is_inferred: bool = False

    @abstractmethod
    def _entry(self, line: Any) -> V:
        """Return the value of the mapping for the key of `line`."""

    @property
    def publications(self) -> tuple[str, ...]:
        """Publications cited by the lines, in the order of their citation numbers."""
        return tuple(dict.fromkeys(line.source for line in self.lines if line.source))

    @property
    def input_line(self) -> str:
        """Description of the input: task, number of samples, and classes; multi-label: rows and labels."""
        task = f"{self.task}{' (inferred from the shapes)' if self.task_is_inferred else ''}"
        dropped = f" ({self.n_dropped:,} dropped for NaN)" if self.n_dropped else ""
        if self.settings.get("kind") == "confidence":
            return f"confidence in predictions, n = {self._n_in_words()}{dropped}"
        if self.task == "multilabel":
            return f"{task}, {self._multilabel_size()}{dropped}"
        return f"{task}, n = {self._n_in_words()}{dropped}, {self.num_classes} classes"

    def _n_in_words(self) -> str:
        return count(self.n)

    def _multilabel_size(self) -> str:
        return f"{count(self.n)} labelled entries, {self.num_classes:,} labels"

    def __getitem__(self, key: str) -> V:
        line = self.line(key)
        if line is None:
            raise KeyError(f"`key` must be one of {quoted(self)}, got {shown(key)}.")
        return self._entry(line)

    def line(self, key: str) -> Any:
        """Return the `Line` or `ComparedLine` with a key, as for `self[key]`; None if there is none.

        The name in a key may also be that of the metric function, or of the score in scikit-learn: `"brier"`,
        `"brier_score"` and `"brier_score_loss"` are the same key.
        """
        wanted = _with_own_name(key)
        lines = {_with_own_name(line.key): line for line in self.lines}
        # Without an exact key, the first one with a mode: errors of the main mode precede those of other modes.
        return lines.get(wanted) or next((line for own, line in lines.items() if own.startswith(f"{wanted}/")), None)

    def __iter__(self) -> Iterator[str]:
        return (line.key for line in self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the attributes as plain Python values; a table is a dict of columns.

        NaN and infinite numbers are the strings "nan", "inf" and "-inf", because JSON has no such numbers.
        """
        values = {each.name: plain(getattr(self, each.name)) for each in fields(self)}
        return {"schema_version": SCHEMA_VERSION, **values}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a result from the JSON file or the folder that `save` wrote.

        The calibrator in `calibration` is not fitted. Everything else is equal to the saved object. A page or a table
        (`.html`, `.md`, `.tex`) contains rounded numbers only, and cannot be loaded. A state of
        `torchcalib report --save-state` is loaded by `torchcalib.ReportBuilder.load`.

        Args:
            path: a `.json` file, or a folder with `report.json` (for a comparison, `compare.json`). No code in it is
                executed.

        Returns:
            The report or comparison.

        Raises:
            OSError: if the file cannot be read.
            TypeError: if `path` is not a path.
            ValueError: if it is no such file, is damaged, or has another version of the format.

        Example:
            >>> import tempfile, torch, torchcalib
            >>> r = torchcalib.report(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), with_intervals=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = r.save(f"{folder}/r.json")
            ...     again = torchcalib.Report.load(f"{folder}/r.json")
            >>> again["ece"] == r["ece"]
            True
        """
        found: Self = above("torchcalib.results.loading:load")(cls, path, cls.file_name, SCHEMA_VERSION)
        return found

    def save(self, path: str | Path, *, diagrams: bool = False) -> tuple[Path, ...]:
        """Write one file, or a folder of files. Existing files are replaced, and never left incomplete.

        Args:
            path: a file name that ends in `.html` (page), `.json` (all numbers), `.md` or `.tex` (table of all lines).
                Any other path is a folder for the page and the JSON file. Missing folders are created.
            diagrams: add every diagram as PNG and SVG to the folder, which takes seconds.

        Returns:
            The paths of the written files.

        Raises:
            ImportError: if the extra `report` is not installed, for a page or a folder.
            ValueError: if the file name has another ending.
            NotADirectoryError: if the folder or one of its parents is a file.

        Example:
            >>> import tempfile, torch, torchcalib
            >>> r = torchcalib.report(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), with_intervals=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     [path.name for path in r.save(f"{folder}/report.json")]
            ['report.json']
        """
        return self._save(path, diagrams)


def _with_own_name(key: str) -> str:
    """Return a key with the name of the function instead of another name of the metric: `nll` for `log_loss`."""
    name, slash, mode = key.partition("/")
    return f"{NAMES.get(name, name)}{slash}{mode}"


def plain(value: Any) -> Any:
    """Convert data classes, tables and containers to values that strict JSON can represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BinTable):
        return {name: plain(column.tolist()) for name, column in value.to_dict().items()}
    if isinstance(value, History):
        return plain(value.to_dict())
    if isinstance(value, Calibrator):
        return f"{type(value).__name__}()"  # the fitted parameters are omitted
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
