"""Everything that is known about a set of predictions, as data: `report(preds, target, task=...)` gives a `Report`.

A report is built from sums, so `ReportBuilder` takes predictions piece by piece, of any number, in constant memory.
Drawing, pages and files are made further up, from the finished `Report`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from torchcalib._version import __version__
from torchcalib.binned import ECE, ESCE, MCE, RMSCE, BinnedMetric
from torchcalib.binnings import Binning
from torchcalib.bins import BinTable, TCETable, ece_from_bins, equal_width_edges, rmsce_from_bins
from torchcalib.predictions import InputFormat, InputOptions, Task, check_count
from torchcalib.reductions import Reduction, reductions_of
from torchcalib.scores import ECD, NLL, Accuracy, Brier, ScoreMetric, ScoreReading
from torchcalib.statistics import BinStats, ScoreSum
from torchcalib.streaming import CalibrationCollection, StreamingMetric

SCORES: tuple[type[ScoreMetric], ...] = (Accuracy, NLL, Brier, ECD)
ERRORS: tuple[type[BinnedMetric], ...] = (ECE, ESCE, MCE, RMSCE)
"""What a report holds, in its order. A line is made of a metric's identity card."""

_MOST_BINS = 1000  # more can neither be drawn nor read

GROUPS: dict[Reduction, str] = {
    "positive_class": "positive class",
    "top_label": "top label",
    "classwise": "class-wise",
}


@dataclass(frozen=True)
class Line:
    """One number of a report.

    Attributes:
        key: unique name, for files: `"nll"`, `"ece/top_label"`.
        name: short name, for people: `"ECE"`.
        group: `"scores"`, or what the confidence is of: `"positive class"`, `"top label"`, `"class-wise"`.
        value: the number.
        unit: what it is measured in.
        perfect: what a predictor gets that is right and sure every time.
        naive: what always predicting the class shares of this data gets.
        question: what the number answers.
        source: publication and equation.
    """

    key: str
    name: str
    group: str
    value: float
    unit: str
    perfect: float
    naive: float
    question: str
    source: str


@dataclass(frozen=True, eq=False, repr=False)
class Report(Mapping[str, float]):
    """What is known about a set of predictions. Data only; `torchcalib.save_report` makes files of it.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights, the number of samples where all weights are 1 (multi-label: of labelled entries).
        num_classes: C, or L labels; 2 for a binary task.
        priors: share of every class (multi-label: of 1s for every label).
        lines: every number.
        tables: bin tables by what the confidence is of; multi-label: all labels pooled.
        per_class: class-wise ECE of every class or label; empty for a binary task.
        sentence: what the numbers say, in words.
        settings: how the input was read and binned.
        source: what was read, from which files.
        tests: tables of bins with what a test says of their predictions, by what the confidence is of; may be empty.
        version: of torchcalib.
    """

    task: Task
    n: float
    num_classes: int
    priors: tuple[float, ...]
    lines: tuple[Line, ...]
    tables: Mapping[Reduction, BinTable]
    per_class: tuple[float, ...]
    sentence: str
    settings: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=dict)
    tests: Mapping[Reduction, TCETable] = field(default_factory=dict)
    version: str = __version__

    @property
    def main_table(self) -> BinTable:
        """The table that the sentence and the first diagram are about."""
        return next(iter(self.tables.values()))

    def __getitem__(self, key: str) -> float:
        """Return the value of the line with this key: `report["nll"]`."""
        for line in self.lines:
            if line.key == key:
                return line.value
        raise KeyError(f"{key!r} is not in the report; it has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return (line.key for line in self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, tables as columns (without quantiles, which are there to be drawn).

        Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".
        """
        nested = ("lines", "tables", "tests")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in nested}
        values["lines"] = [asdict(line) for line in self.lines]
        for tables in ("tables", "tests"):
            values[tables] = {
                name: {column: array.tolist() for column, array in table.to_dict().items() if column != "quantiles"}
                for name, table in getattr(self, tables).items()
            }
        return {name: _plain(value) for name, value in values.items()}

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        rows = [f"{'':16}{'':14}{'value':>12}{'perfect':>10}{'naive':>10}  unit"]
        group = None
        for line in self.lines:
            shown = "" if line.group == group else line.group
            rows.append(
                f"{shown:16}{line.name:14}{line.value:12.6f}{line.perfect:10.4g}{line.naive:10.4g}  {line.unit}"
            )
            group = line.group
        return "\n".join([self.sentence, "", *rows, "", str(self.main_table)])


def report(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    right: bool = False,
    **options: Unpack[InputOptions],
) -> Report:
    """Compute every score and calibration error of a set of predictions.

    Args:
        preds: probabilities (or logits): binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`; further axes are
            samples too.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A `Report`. Print it, index it (`report["ece/top_label"]`), or make files of it with `torchcalib.save_report`.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Example:
        >>> import torch
        >>> r = report(torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        >>> round(r["ece/positive_class"], 6)
        0.2
    """
    weights = options.pop("weights", None)
    builder = ReportBuilder(task=task, n_bins=n_bins, right=right, **options)
    builder.update(preds, target, weights=weights)
    return builder.report()


class ReportBuilder:
    """Takes predictions piece by piece and makes a `Report` of all of them. Arguments are those of `report`."""

    def __init__(self, *, task: Task, n_bins: int = 15, right: bool = False, **options: Any) -> None:
        binning = Binning("equal_width", n_bins, right)
        check_count("n_bins", n_bins, at_most=_MOST_BINS)
        self._settings: dict[str, Any] = {"n_bins": binning.n_bins, "right": binning.right}
        self._options: dict[str, Any] = {"from_logits": False, "ignore_index": None, **options}
        self._format = InputFormat(task, **self._options)
        self._task = self._format.read_as
        self._weight = self._weight_square = torch.zeros((), dtype=torch.float64)
        self._metrics: CalibrationCollection | None = None  # made when the first piece tells how many classes there are

    def update(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> None:
        """Add predictions. If they are bad an error is raised and nothing is added."""
        self._format.check(preds, target, weights)
        metrics = self._metrics or self._made_for(preds)
        metrics.update(preds, target, weights=weights)
        self._metrics = metrics
        # Floating weights are taken for importance, by which a sample counts for less than one; integers for counts.
        w = weights.detach().double() if weights is not None and weights.is_floating_point() else torch.ones(1)
        self._weight, self._weight_square = self._weight + w.sum().cpu(), self._weight_square + w.square().sum().cpu()

    def report(self, source: Mapping[str, Any] | None = None) -> Report:
        """Read everything off the sums.

        Raises:
            ValueError: if nothing was added.
        """
        n = None if self._metrics is None else self._metrics["NLL"].statistic()
        if self._metrics is None or n is None or not bool((n.total > 0).any()):
            raise ValueError("`preds` must hold at least one sample that counts, got none. Nothing can be reported.")
        lines = [
            line
            for metric in SCORES
            for line in _score_lines(metric, self._metrics[metric.__name__].statistic(), self._task)
        ]
        tables: dict[Reduction, BinTable] = {}
        per_class: tuple[float, ...] = ()
        for reduction in reductions_of(self._task):
            bins = self._metrics[reduction].statistic()
            lines += _error_lines(bins, reduction)
            if reduction == "classwise":
                per_class = tuple(ece_from_bins(bins).tolist())
            if _has_table(self._task, reduction):
                pooled = BinStats(bins.sums.sum(0)) if self._task == "multilabel" else bins
                tables[reduction] = BinTable.of(pooled, equal_width_edges(self._settings["n_bins"], pooled.n))
        priors = n.share[..., 1] if self._task == "multilabel" else n.share
        return Report(
            task=self._task,
            n=float(n.total.sum()),
            num_classes=n.n.shape[0] if self._task == "multilabel" else n.n.shape[-1],
            priors=tuple(priors.tolist()),
            lines=tuple(lines),
            tables=tables,
            per_class=per_class,
            sentence=_sentence(
                self._task,
                {line.key: line.value for line in lines},
                next(iter(tables.values())),
                samples_per_weight=float(self._weight / self._weight_square),
            ),
            settings={**self._settings, **{name: self._options[name] for name in ("from_logits", "ignore_index")}},
            source=dict(source or {}),
        )

    def _made_for(self, preds: Tensor) -> CalibrationCollection:
        """The metrics that a report is read from: every score by class, and bins of every reduction."""
        task = self._format.task
        given: dict[str, Any] = {"task": task, **self._options}
        if task != "binary" and preds.dim():
            name = "num_labels" if task == "multilabel" else "num_classes"
            given[name] = preds.shape[given.get("class_axis", -1)]
        members: dict[str, StreamingMetric[Any]] = {m.__name__: m(**given, keep_classes=True) for m in SCORES}
        for reduction in reductions_of(self._task):
            tabled = _has_table(self._task, reduction)
            members[reduction] = ECE(**given, **self._settings, reduction=reduction, with_ecd=tabled)
        return CalibrationCollection(members).to(preds.device)


def _has_table(task: Task, reduction: Reduction) -> bool:
    """Class-wise bins of a multi-class task make no table, which would be one for each of C classes."""
    return reduction != "classwise" or task == "multilabel"


def _score_lines(metric: type[ScoreMetric], s: ScoreSum, task: Task) -> list[Line]:
    """A score, with what the class shares alone would get, and as a share of that where this means something."""
    reading = ScoreReading(metric.score, task)
    lines = [_line(metric, "scores", metric.__name__.lower(), reading.read(s), float(reading.of_prior(s)))]
    if metric.score.normalizable:
        name = {"NLL": "NCE", "Brier": "NBS"}[metric.__name__]
        value = ScoreReading(metric.score, task, normalize="prior").read(s)
        question = f"{metric.__name__} as a share of what always predicting the class shares gets"
        line = _line(metric, "scores", name.lower(), value, 1.0)
        lines.append(replace(line, name=name, unit="share of naive", question=question))
    return lines


def _error_lines(b: BinStats, reduction: Reduction) -> list[Line]:
    """Every binned error; class-wise the mean over classes. Always predicting the class shares gets 0."""
    lines = []
    for metric in ERRORS:
        key = f"{metric.__name__.lower()}/{reduction}"
        lines.append(_line(metric, GROUPS[reduction], key, metric.from_bins(b).mean(), 0.0))
    value = rmsce_from_bins(b, debiased=True).mean()
    debiased = _line(RMSCE, GROUPS[reduction], f"rmsce_debiased/{reduction}", value, 0.0)
    return [*lines, replace(debiased, name="RMSCE debiased", question="the same, less what the noise of the bins adds")]


def _line(metric: type[ScoreMetric | BinnedMetric], group: str, key: str, value: Tensor, naive: float) -> Line:
    """One line, from a metric's identity card."""
    return Line(
        key, metric.__name__, group, float(value), metric.unit, metric.perfect, naive, metric.question, metric.source
    )


def _sentence(task: Task, values: Mapping[str, float], table: BinTable, samples_per_weight: float) -> str:
    """What the numbers say, in one plain sentence."""
    ece = float((table.share * table.gap.abs()).sum())
    expected, spread = _ece_by_chance(table, samples_per_weight)
    claimed, came_true = float(table.mean("confidence")), float(table.mean("frequency"))
    claim = {
        "binary": f"it gives P(y=1) = {claimed:.1%} on average and y = 1 in {came_true:.1%} of samples",
        "multiclass": f"it claims to be right with {claimed:.1%} on average and is right in {came_true:.1%} of samples",
        "multilabel": f"it gives its labels {claimed:.1%} on average and {came_true:.1%} of them hold",
    }[task]
    if ece <= expected + 2 * spread:
        verdict = "As far as this sample can tell the probabilities can be trusted"
    else:
        degree = "slightly" if ece < 0.02 else "clearly" if ece < 0.1 else "badly"
        if abs(came_true - claimed) < ece / 2:
            direction = "off, too high in some ranges and too low in others"
        elif task == "multiclass":
            direction = "over-confident" if claimed > came_true else "under-confident"
        else:
            direction = "too high" if claimed > came_true else "too low"
        verdict = f"The {'model is' if task == 'multiclass' else 'probabilities are'} {degree} {direction}"
    nce = values["nce"]
    if math.isfinite(nce):
        worth = f"; its NLL is {nce:.0%} of what always predicting the class shares gets"
    else:  # a single class in the data, or a probability of 0 for something that happened
        worth = "; its NLL is infinite, for it gave probability 0 to something that happened" * math.isinf(
            values["nll"]
        )
    return (
        f"{verdict}: {claim}, with frequency and probability {ece:.4f} apart (ECE; chance alone would show about "
        f"{expected:.4f}){worth}."
    )


def _ece_by_chance(table: BinTable, samples_per_weight: float) -> tuple[float, float]:
    """Mean and standard deviation of the ECE that a calibrated model of this size would show.

    A bin's gap is then about normal with variance c (1 - c) / n, and bins are independent; |gap| has sqrt(2 / pi) of
    that deviation as its mean and 1 - 2 / pi of that variance. With weights n is Kish's effective number of samples.
    """
    n = table.n * samples_per_weight
    deviation = (table.share * (table.confidence * (1 - table.confidence) / n).sqrt()).nan_to_num()
    spread = (1 - 2 / math.pi) * float(deviation.square().sum())
    return math.sqrt(2 / math.pi) * float(deviation.sum()), math.sqrt(spread)


def _plain(value: Any) -> Any:
    """Turn nested values into what strict JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
