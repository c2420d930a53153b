"""A comparison as data: the numbers of every system, and how far each lies from those of the first."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from torchcalib._version import __version__
from torchcalib.core.arguments import Task
from torchcalib.reporting.data import LineInterval, plain

Better = Literal["higher", "lower", "nearer to 0"]
Verdict = Literal["better", "worse", "not told apart"]

DIFFERENCE_WORDS = (
    "Difference: of a system to the first one; of a number that has a sign, of its size, for nearer to 0 is better. "
    "95 % interval: where the difference lies for other samples of this size (paired bootstrap: all systems get the "
    "same replicates). Better and worse are said where 0 lies outside, and would also if what chance gaps add to an "
    "error were taken off."
)


@dataclass(frozen=True)
class Difference:
    """A number of one system less that of the first.

    Attributes:
        value: the difference; of a number that has a sign, the difference of sizes.
        interval: 95 % paired bootstrap interval; None where it was left out.
        chance: how much of the difference may be what chance gaps add to an error, more to that of one system than to
            that of the other; None where the number has no such part, or no interval.
        verdict: `"better"` or `"worse"` where 0 lies outside of the interval, also with `chance` taken off; else
            `"not told apart"`.
    """

    value: float
    interval: LineInterval | None
    chance: float | None
    verdict: Verdict


@dataclass(frozen=True)
class ComparedLine:
    """One number, of every system.

    Attributes:
        key, name, group, unit, perfect, question, source: see `torchcalib.reporting.data.Line`.
        better: what is better in this number: `"higher"`, `"lower"` or `"nearer to 0"`.
        values: the number, by the name of the system.
        intervals: its 95 % interval, or None, by the name of the system.
        differences: to the first system, by the name of the others.
    """

    key: str
    name: str
    group: str
    unit: str
    perfect: float
    question: str
    source: str
    better: Better
    values: Mapping[str, float]
    intervals: Mapping[str, LineInterval | None]
    differences: Mapping[str, Difference]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Mapping[str, ComparedLine]):
    """What is known about several systems that predicted the same targets. Data only; index it by key, or print it.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights, the number of samples where all weights are 1 (multi-label: of labelled entries).
        n_dropped: rows that were left out of all systems because one of them had a value there that is no number.
        num_classes: C, or L labels; 2 for a binary task.
        systems: names, the baseline first.
        lines: every number.
        sentences: what the numbers say of each system but the first, in words.
        settings: how the input was read and binned, and what the intervals were drawn with.
        sources: what was read, from which files, by the name of the system.
        notes: what a reader must know of the numbers; sentences.
        version: of torchcalib.
    """

    task: Task
    n: float
    n_dropped: int
    num_classes: int
    systems: tuple[str, ...]
    lines: tuple[ComparedLine, ...]
    sentences: Mapping[str, str]
    settings: Mapping[str, Any]
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: str = __version__

    @property
    def baseline(self) -> str:
        """The system that the others are compared with."""
        return self.systems[0]

    @property
    def caution(self) -> str:
        """How many differences would be told by chance, for there are many."""
        n = sum(found.interval is not None for line in self.lines for found in line.differences.values())
        if not n:
            return "Without intervals no difference can be told from chance."
        told = max(1, round(0.05 * n))
        return (
            f"Every interval speaks for itself: if no system were better in anything, some {told} of these {n} "
            "differences might still be told. Choose beforehand which number decides."
        )

    @property
    def main_lines(self) -> tuple[ComparedLine, ...]:
        """The scores, and the errors of the confidence that is looked at first: what a picture shows."""
        groups = list(dict.fromkeys(line.group for line in self.lines))[:2]
        return tuple(line for line in self.lines if line.group in groups)

    def __getitem__(self, key: str) -> ComparedLine:
        """Return the line with this key: `comparison["nll"].differences["b"].value`."""
        for line in self.lines:
            if line.key == key:
                return line
        raise KeyError(f"{key!r} is not in the comparison; it has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return (line.key for line in self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values. Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf"."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        found: dict[str, Any] = plain({**values, "lines": [asdict(line) for line in self.lines]})
        return found

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        first = self.baseline
        rows = [" ".join(self.sentences.values()), ""]
        for name in self.systems[1:]:
            rows += [
                f"{first} (former) and {name} (latter)",
                f"{'':31}{'former':>12}{'latter':>12}{'difference':>12}  95 % interval",
            ]
            group = None
            for line in self.lines:
                found = line.differences[name]
                shown = "" if line.group == group else line.group
                numbers = "".join(f"{x + 0:12.6f}" for x in (line.values[first], line.values[name], found.value))
                verdict = "" if found.verdict == "not told apart" else found.verdict
                rows.append(f"{shown:16}{line.name:15}{numbers}  {found.interval or ''!s:24}{verdict}".rstrip())
                group = line.group
            rows.append("")
        return "\n".join([*rows, self.caution, *self.notes])
