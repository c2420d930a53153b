"""Everything that is known about a set of predictions, as data: `report(preds, target, task=...)` gives a `Report`.

A report is built from sums, so `ReportBuilder` takes predictions piece by piece, of any number, in constant memory.
Drawing, pages and files are made further up, from the finished `Report`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from torchcalib._version import __version__
from torchcalib.binned import ECE, ESCE, MCE, RMSCE, BinnedMetric, BinTable, rmsce_from_bins
from torchcalib.predictions import InputFormat, InputOptions, Task, check_count
from torchcalib.reductions import Reduction
from torchcalib.scores import ACCURACY, ECD, NLL, Brier, ScoreMetric, ScoreReading
from torchcalib.statistics import BinStats, EqualWidthBins, Recipe, ScoreSum, Sums

_GROUPS: dict[Reduction, str] = {
    "positive_class": "positive class",
    "top_label": "top label",
    "classwise": "class-wise",
}
_REPORTED: dict[Task, tuple[Reduction, ...]] = {
    "binary": ("positive_class", "top_label"),
    "multiclass": ("top_label", "classwise"),
    "multilabel": ("classwise",),
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


@dataclass(frozen=True)
class Report:
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
        raise KeyError(f"{key!r} is not in the report; it has {', '.join(line.key for line in self.lines)}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values. Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf"."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("lines", "tables")}
        values["lines"] = [asdict(line) for line in self.lines]
        values["tables"] = {
            name: {column: array.tolist() for column, array in table.to_dict().items()}
            for name, table in self.tables.items()
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
        >>> r = report(torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        >>> round(r["ece/positive_class"], 6)
        0.2
    """
    weights = options.pop("weights", None)
    builder = ReportBuilder(task, n_bins=n_bins, right=right, **options)
    builder.update(preds, target, weights)
    return builder.report()


class ReportBuilder:
    """Takes predictions piece by piece and makes a `Report` of all of them. Arguments are those of `report`."""

    def __init__(self, task: Task, *, n_bins: int = 15, right: bool = False, **options: Any) -> None:
        check_count("n_bins", n_bins)
        self._format = InputFormat(task, **options)
        self._settings = {"n_bins": n_bins, "right": right}
        self._recipes: dict[str, Recipe[Any]] = {
            "nll": NLL.score.recipe(by_class=True),
            "brier": Brier.score.recipe(by_class=True),
            "ecd": ECD.score.recipe(by_class=True),
            "accuracy": ACCURACY.recipe(by_class=True),
        }
        for reduction in _REPORTED[task]:
            # The table needs the ECD; class-wise multi-class bins make no table, and C of them would be costly.
            tabled = reduction != "classwise" or task == "multilabel"
            self._recipes[reduction] = EqualWidthBins(reduction, n_bins, right, with_ecd=tabled)
        self._sums: dict[str, Sums] = {}
        self._num_classes = 0

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add predictions. If they are bad an error is raised and nothing is added."""
        p = self._format.read(preds, target, weights, batch_shape=())
        num_classes = p.values.shape[-2] if p.task == "multilabel" else p.num_classes
        if self._sums and num_classes != self._num_classes:
            raise ValueError(f"`preds` must have {self._num_classes} classes as before, got {num_classes}.")
        with torch.no_grad():
            new = {name: recipe.of(p) for name, recipe in self._recipes.items()}
        self._num_classes = num_classes
        self._sums = {name: self._sums[name] + sums if self._sums else sums for name, sums in new.items()}

    def report(self, source: Mapping[str, Any] | None = None) -> Report:
        """Read everything off the sums.

        Raises:
            ValueError: if nothing was added.
        """
        if not self._sums or not bool((self._sums["nll"].total > 0).any()):
            raise ValueError("`preds` must hold at least one sample that counts, got none. Nothing can be reported.")
        task = self._format.task
        scores = {name: s for name, s in self._sums.items() if isinstance(s, ScoreSum)}
        bins = {name: s for name, s in self._sums.items() if isinstance(s, BinStats)}
        lines = _score_lines(scores, task)
        tables: dict[Reduction, BinTable] = {}
        per_class: tuple[float, ...] = ()
        for reduction in _REPORTED[task]:
            lines += _error_lines(bins[reduction], reduction)
            if reduction == "classwise":
                per_class = tuple(ECE.from_bins(bins[reduction]).tolist())
            if reduction != "classwise" or task == "multilabel":
                pooled = BinStats(bins[reduction].sums.sum(0)) if task == "multilabel" else bins[reduction]
                tables[reduction] = BinTable.of(pooled)
        n = scores["nll"]
        priors = n.share[..., 1] if task == "multilabel" else n.share
        values = {line.key: line.value for line in lines}
        return Report(
            task=task,
            n=float(n.total.sum()),
            num_classes=self._num_classes,
            priors=tuple(priors.tolist()),
            lines=tuple(lines),
            tables=tables,
            per_class=per_class,
            sentence=_sentence(task, values, next(iter(tables.values()))),
            settings={
                **self._settings,
                "from_logits": self._format.from_logits,
                "ignore_index": self._format.ignore_index,
            },
            source=dict(source or {}),
        )


def _score_lines(sums: Mapping[str, ScoreSum], task: Task) -> list[Line]:
    """Accuracy, NLL, Brier and ECD, and the first two as a share of what the class shares alone would get."""
    reading, s = ScoreReading(ACCURACY, task), sums["accuracy"]
    lines = [
        Line(
            key="accuracy",
            name="accuracy",
            group="scores",
            value=float(reading.read(s)),
            unit="share of " + ("labels" if task == "multilabel" else "samples"),
            perfect=1.0,
            naive=float(reading.of_prior(s)),
            question="how often is the most probable class the true one",
            source="",
        )
    ]
    for metric, normalised in ((NLL, "NCE"), (Brier, "NBS"), (ECD, None)):
        reading, s = ScoreReading(metric.score, task), sums[metric.__name__.lower()]
        lines.append(_line(metric, "scores", metric.__name__.lower(), reading.read(s), float(reading.of_prior(s))))
        if normalised is not None:
            value = ScoreReading(metric.score, task, normalize="prior").read(s)
            line = _line(metric, "scores", normalised.lower(), value, 1.0)
            question = f"{metric.__name__} as a share of what always predicting the class shares gets"
            lines.append(replace(line, name=normalised, unit="share of naive", question=question))
    return lines


def _error_lines(b: BinStats, reduction: Reduction) -> list[Line]:
    """Every binned error; class-wise the mean over classes. Always predicting the class shares gets 0."""
    lines = []
    for metric in (ECE, ESCE, MCE, RMSCE):
        key = f"{metric.__name__.lower()}/{reduction}"
        lines.append(_line(metric, _GROUPS[reduction], key, metric.from_bins(b).mean(), 0.0))
    debiased = _line(
        RMSCE, _GROUPS[reduction], f"rmsce_debiased/{reduction}", rmsce_from_bins(b, debiased=True).mean(), 0.0
    )
    question = "the same, less what the noise of the bins adds"
    return [*lines, replace(debiased, name="RMSCE debiased", question=question)]


def _line(metric: type[ScoreMetric | BinnedMetric], group: str, key: str, value: Tensor, naive: float) -> Line:
    """One line, from a metric's identity card."""
    return Line(
        key, metric.__name__, group, float(value), metric.unit, metric.perfect, naive, metric.question, metric.source
    )


def _sentence(task: Task, values: Mapping[str, float], table: BinTable) -> str:
    """What the numbers say, in one plain sentence."""
    n, share, gap = table.n, table.share, table.gap
    ece = float((share * gap.abs()).sum())
    # What a calibrated model of this size would show: E|mean of n Bernoullis - c| is sqrt(2/pi) of its deviation.
    deviation = (table.confidence * (1 - table.confidence) / n).sqrt()
    by_chance = float((share * deviation).nan_to_num().sum()) * math.sqrt(2 / math.pi)
    claimed = float((share * table.confidence).nan_to_num().sum())
    came_true = float((share * table.frequency).nan_to_num().sum())

    claim = {
        "binary": f"it gives P(y=1) = {claimed:.1%} on average and y = 1 in {came_true:.1%} of samples",
        "multiclass": f"it claims to be right with {claimed:.1%} on average and is right in {came_true:.1%} of samples",
        "multilabel": f"it gives its labels {claimed:.1%} on average and {came_true:.1%} of them hold",
    }[task]
    if ece <= 1.5 * by_chance:
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
        f"{by_chance:.4f}){worth}."
    )


def _plain(value: Any) -> Any:
    """Turn nested values into what strict JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
