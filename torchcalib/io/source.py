"""Origin of predictions: files, array names, shape and dtype."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, get_args, get_origin, get_type_hints

from torchcalib.display.words import printable
from torchcalib.io.errors import InputError
from torchcalib.io.names import Task

_MAX_SHOWN = 20  # largest number of class names in a description


@dataclass(frozen=True)
class Source:
    """Origin of predictions in one or more files. The sum of two sources describes all their files."""

    files: tuple[str, ...]  # paths, in the order of the rows; empty for a DataFrame
    format: str  # a value of `torchcalib.io.paths.FORMATS`
    preds: str  # array name: key, column, numbered columns (`prob_0..prob_9`) or stem of a `.npy` file
    target: str
    weights: str | None
    from_logits: bool  # True also for log-probabilities
    shape: tuple[int, ...]  # binary (N, ...), else (N, ..., C); a binary column (N, 1) is stored as (N,)
    dtype: str  # dtype of the predictions, such as "float32"
    rows: tuple[str, ...]  # dtype and row shape of every array in use
    ignored: tuple[str, ...]  # unused arrays in the first file
    groups: str | None = None
    clusters: str | None = None
    class_names: tuple[str, ...] = ()  # in class order; empty for classes without names
    are_confidences: bool = False  # predictions are confidences, and targets are 1 for correct predictions
    pred: str | None = None  # predicted labels; targets are then 1 if they equal the true labels
    are_percentages: bool = False  # predictions are percentages in the file, which are divided by 100
    ids: str | None = None

    def __add__(self, other: Self) -> Self:
        """Return the source of all files; raise `InputError` if names, dtypes or row shapes differ."""
        arrays = ("preds", "target", "weights", "groups", "clusters", "pred", "ids")
        kinds = ("class_names", "are_confidences", "are_percentages")
        for name in ("format", *arrays, "from_logits", "dtype", "rows", *kinds):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                of_parts = {"dtype": "dtype of predictions", "rows": "dtypes and shapes of columns"}.get(name, name)
                rule = f"All parts must have the same {of_parts}"
                if self.files and other.files:
                    rule = f"`{other.files[0]}` must have the same {name} as `{self.files[0]}`"
                raise InputError(
                    f"{rule}, got {theirs!r} and {mine!r}. Read the parts separately, or write them in the same way."
                )
        shape = (self.shape[0] + other.shape[0], *self.shape[1:])
        return replace(self, files=self.files + other.files, shape=shape)

    def in_words(self) -> dict[str, Any]:
        """Return a description for reports, with headings as keys. Control characters are replaced."""
        n = len(self.class_names)
        more = [f"... ({n:,} in all)"] if n > _MAX_SHOWN else []
        kind = "logits" if self.from_logits else "probabilities"
        if self.are_confidences:
            kind = "logits of confidences" if self.from_logits else "confidences"
        if self.are_percentages:
            kind += ", percentages divided by 100"
        return {
            **({"files": [printable(file) for file in self.files]} if self.files else {}),
            "format": printable(self.format),
            "predictions": printable(f"{self.preds}, read as {kind}"),
            "targets": printable(self.target),
            "weights": printable(self.weights or "none"),
            **({} if self.groups is None else {"groups": printable(self.groups)}),
            **({} if self.pred is None else {"predicted labels": printable(self.pred)}),
            **({} if self.clusters is None else {"clusters": printable(self.clusters)}),
            **({} if self.ids is None else {"ids": printable(self.ids)}),
            **({"classes": [*map(printable, self.class_names[:_MAX_SHOWN]), *more]} if self.class_names else {}),
            "shape": list(self.shape),
            "dtype": printable(self.dtype),
            "not used": [printable(name) for name in self.ignored],
        }

    def state(self) -> dict[str, Any]:
        """Return all fields as plain values, for `of_state`."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Create a source from the result of `state`, loaded from a file. Raise ValueError for a wrong type."""
        kinds = get_type_hints(cls)
        values: dict[str, Any] = {field.name: state.get(field.name) for field in fields(cls)}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for name, value in values.items():
            if not _has_type(value, kinds[name]):
                raise ValueError(f"`{name}` must be {kinds[name]}, got {type(value).__name__}")
        source = cls(**values)
        if not source.shape:
            raise ValueError("`shape` must not be empty, got an empty tuple")
        return source


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Conversion of the rows of files to tensors; see `torchcalib.io.rows.rows_of`."""

    source: Source
    task: Task
    allow_missing: bool = False  # set predictions to NaN in rows with missing values, instead of raising an error
    normalize: bool = False  # divide probabilities by their sum over classes
    classes: tuple[str, ...] = ()  # of which labels are names or positions; see `io.columns.positions`
    ignored_label: int | None = None  # label of ignored rows in the files
    # texts in the targets, such as annulled resolutions, whose rows are left out
    left_out: frozenset[str] = frozenset()


def _has_type(value: object, kind: Any) -> bool:
    """Return True if a value has exactly a type such as `tuple[int, ...]`: a bool is not an int."""
    if get_origin(kind) is tuple:
        return type(value) is tuple and all(type(item) is get_args(kind)[0] for item in value)
    return type(value) in (get_args(kind) or (kind,))
