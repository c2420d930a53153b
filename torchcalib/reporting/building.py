"""Build a `Report` from predictions, piece by piece."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import uuid4

from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.arguments import Task, check_count, check_flag
from torchcalib.core.arrays import as_tensors
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.groups import check_groups
from torchcalib.core.inputs import InputFormat, check_option_names, input_format_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.state import SamplesKind, SumsKind
from torchcalib.core.tasks import check_name_count, checked_names
from torchcalib.io.saved import saved_value, write_whole
from torchcalib.io.source import Source
from torchcalib.metrics.proper_scores import NLL
from torchcalib.reporting.accumulators import MOST_BINS, MOST_COPIES, Accumulated, Accumulator, are_counts, check_size
from torchcalib.reporting.buffer import PredictionBuffer
from torchcalib.reporting.calibration import calibration_stage, fitted
from torchcalib.reporting.confidences import report_of_confidences
from torchcalib.reporting.data import Report
from torchcalib.reporting.groups import GroupBins
from torchcalib.reporting.lines import Statistics, bin_estimators, has_table, score_estimators
from torchcalib.reporting.sample_or_sketch import SampleOrSketch
from torchcalib.reporting.sentence import sentence_of
from torchcalib.reporting.testing import evidence_of, failure, with_evidence, with_intervals

BUFFER, GROUPS = "predictions", "groups"
"""Names of accumulators."""

_ARGUMENTS = ("task", "class_names", "n_bins", "right", "with_calibration", "with_intervals", "groups", "group_names")
_OPTIONS = ("from_logits", "ignore_index", "positive_classes", "class_axis", "validate_args", "nan_policy")
"""Arguments of a report, and its options of the input."""

T = TypeVar("T", bound=Calibrator)


class ReportBuilder:
    """Build a `Report` from predictions, piece by piece. Arguments are those of `report`, with an explicit task.

    `save` and `load` move a builder between processes, `gather` brings those of all ranks together, and `merge` adds
    the predictions of another one.

    Memory is bounded. Rank-based values are exact up to 2^24 samples and come from a sketch above that, see
    `SampleOrSketch`; `report.settings["order_based"]` names the case. For calibrators and bootstrap intervals, all
    predictions are kept up to `MOST_SAMPLES` and `MOST_VALUES` of `torchcalib.reporting.buffer`, and none above that.

    Args:
        source: origin of the predictions, for the report.

    Example:
        >>> import torch
        >>> builder = ReportBuilder(task="binary", class_names=["cat", "dog"])
        >>> for preds, target in (([0.2, 0.7], [0, 1]), ([0.9, 0.4], [1, 1])):
        ...     builder.update(torch.tensor(preds), torch.tensor(target))
        >>> builder.report().n
        4.0
    """

    def __init__(
        self,
        *,
        task: Task,
        class_names: Sequence[str] | None = None,
        n_bins: int = 15,
        right: bool = False,
        with_calibration: bool = True,
        with_intervals: bool = True,
        source: Source | None = None,
        **options: Any,
    ) -> None:
        binning = Binning("equal_width", n_bins, right)
        check_count("n_bins", n_bins, at_most=MOST_BINS)
        check_flag("with_calibration", with_calibration)
        check_flag("with_intervals", with_intervals)
        self._with_calibration, self._with_intervals = with_calibration, with_intervals
        self._settings: dict[str, Any] = {"n_bins": binning.n_bins, "right": binning.right}
        self.source = source
        self._class_names = checked_names(class_names or ())
        check_option_names(options, _ARGUMENTS, "a report")
        if options.get("batch_dims"):
            raise TypeError("`batch_dims` must be 0 for a report, got another number. Make a report for each entry.")
        if options.get("weights") is not None:
            raise TypeError("`weights` must be given to `update`, with the predictions that they are of.")
        self._format = input_format_of(task, options)
        if task == "binary":
            check_name_count(self._class_names, 2)
        self._task = self._format.read_as
        self._parts: frozenset[str] = frozenset()  # identifiers of the builders that were merged
        self._has_groups: bool | None = None  # not known before the first piece
        self._axis = -1  # class axis of the last piece, for calibrators
        self._accumulators: dict[str, Any] = {}  # the first piece determines the number of classes

    def update(
        self,
        preds: Tensor,
        target: Tensor,
        *,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
        group_names: Sequence[str] | None = None,
    ) -> None:
        """Add predictions, either always with groups or always without. Nothing is added if an error is raised.

        A group is identified by its name, whatever its number is in this piece; a number is named by its digits.
        """
        preds, target, weights = as_tensors(preds, target, weights)
        on_cpu = preds.device.type == "cpu"
        p = self._format.read(preds, target, weights, batch_shape=(), drop_invalid=not on_cpu)
        if self._has_groups not in (None, groups is not None):
            raise ValueError(
                "`groups` must be given with all predictions of a report, or with none, got some of each. "
                "Give rows that belong to no group the number -1."
            )
        input_format = replace(self._format, num_classes=self._classes_of(preds, target))
        check_name_count(self._class_names, input_format.num_classes or 2)
        empty = self._accumulators or self._empty(input_format)
        counts = are_counts(p.weights if p.weighted else None)
        batch = {
            name: each.of(p)
            for name, each in empty.items()
            if name != GROUPS and (counts or not isinstance(each, SampleOrSketch))
        }
        if groups is not None:
            check_groups(groups, preds.device, input_format.samples_of(preds))
            batch[GROUPS] = empty[GROUPS].of_rows(p, groups, group_names)
        self._accumulators = _sum(self._accumulators, batch) if self._accumulators else batch
        self._axis = self._format.resolved(preds, target).axis
        self._format, self._has_groups = input_format, groups is not None
        self._parts = self._parts or frozenset((uuid4().hex,))

    def report(self, source: Mapping[str, Any] | None = None) -> Report:
        """Return the report of all predictions so far.

        Args:
            source: origin of the predictions, by names of your own; by default the builder's own `source`.

        Raises:
            ValueError: if nothing was added.
        """
        s = self._statistics()
        p, why_not = self._buffered()
        evidence, notes_of_evidence = evidence_of(s, with_intervals=self._with_intervals)
        order_based, notes_of_order = self._order_notes(s)
        notes = [*notes_of_evidence, *notes_of_order]
        lines, tables = s.lines(), s.tables()
        main = next(line for line in with_evidence(lines, evidence) if line.key in evidence)
        are_confidences = self.source is not None and self.source.are_confidences
        task_in_words: Task = "multiclass" if are_confidences else self._task
        sentence = sentence_of(
            task_in_words, {line.key: line.value for line in lines}, next(iter(tables.values())), main
        )
        lines = with_evidence(lines, evidence, with_intervals=self._with_intervals)
        if self._with_intervals:
            lines, more = with_intervals(lines, p, why_not, list(s.samples) if s.has_labels else [])
            notes += more
        stage = None
        class_names = () if self._format.positive_classes is not None else self._class_names
        if self._with_calibration:
            if p is not None and not p.hard:
                p, why_not = None, "calibrators are fitted to labels, and targets are soft"
            stage, of_stage = calibration_stage(p, why_not, class_names)
            notes += of_stage
        n_dropped = self._accumulators[NLL.__name__].left_out[1]
        if n_dropped:
            what = "labels of samples" if self._task == "multilabel" else "samples"
            notes.append(
                f"{n_dropped:,} {what} with NaN, or with infinities that leave no distribution, are left out "
                "(nan_policy='drop'). Their effect on all values is unknown."
            )
        if self._task != "multilabel" and max(s.priors) == 1:
            notes.append(
                f"All targets are class {s.priors.index(1)}: values that compare with the class frequencies are "
                "undefined. Check that the targets are the right array."
            )
        options = {name: getattr(self._format, name) for name in ("from_logits", "ignore_index", "nan_policy")}
        report = Report(
            task=self._task,
            n=s.n,
            n_dropped=n_dropped,
            num_classes=s.num_classes,
            priors=s.priors,
            lines=tuple(lines),
            tables=tables,
            per_class=s.per_class,
            sentence=sentence,
            settings={**self._settings, **options, "order_based": order_based},
            source=dict(source or ({} if self.source is None else self.source.in_words())),
            tests=s.tests(),
            calibration=stage,
            notes=tuple(notes),
            groups=self._accumulators[GROUPS].table() if self._has_groups else None,
            class_names=class_names,
        )
        return report_of_confidences(report, bool(self._in_order)) if are_confidences else report

    def _statistics(self) -> Statistics:
        """Return the sums and samples of all predictions.

        Raises:
            ValueError: if nothing was added.
        """
        of_scores = self._accumulators.get(NLL.__name__)
        if of_scores is None or not bool((of_scores.statistic.total > 0).any()):
            raise ValueError("`preds` must hold at least one sample with a positive weight, got none. Add predictions.")
        self._raise_if_invalid()
        in_order = self._in_order if of_scores.statistic.total.sum() <= MOST_COPIES else {}
        return Statistics(
            task=self._task,
            n_bins=self._settings["n_bins"],
            sums={name: a.statistic for name, a in self._accumulators.items() if isinstance(a, Accumulated)},
            samples={mode: sample.statistic for mode, sample in in_order.items()},
            has_labels=all(sample.has_labels for sample in in_order.values()),
        )

    @property
    def _in_order(self) -> dict[NamedMode, SampleOrSketch]:
        """The ranked samples, as long as weights are counts."""
        names = {mode: sample_name(mode) for mode in modes_of(self._task)}
        return {r: self._accumulators[name] for r, name in names.items() if name in self._accumulators}

    @property
    def _buffer(self) -> PredictionBuffer:
        """The buffer of predictions, which is empty before any data."""
        found: PredictionBuffer = self._accumulators.get(BUFFER, PredictionBuffer(self._format))
        return found

    def _raise_if_invalid(self) -> None:
        """Raise if rows that came on CUDA were bad, for which `update` does not wait."""
        if n_invalid := self._accumulators[NLL.__name__].left_out[0]:
            raise ValueError(
                f"`update` must get valid rows, got {n_invalid} with NaN, values out of range or labels out of range; "
                "they were left out. Add that data on the CPU to see which rows and why."
            )

    def _buffered(self) -> tuple[Predictions | None, str]:
        """Return all predictions for intervals and calibrators, or None and the reason, a clause."""
        if self._buffer.why_not or not self._buffer.pieces:
            return None, self._buffer.why_not
        try:
            return self._buffer.predictions(), ""
        except RuntimeError as error:  # memory, above all
            return None, f"joining the predictions failed with {failure(error)}"

    def _order_notes(self, s: Statistics) -> tuple[str, list[str]]:
        """Return how rank-based values were computed, and notes on them."""
        if not s.samples:
            why = "they need weights that are counts of samples"
            return "left out", [f"ACE, TCE, KS, MCB, DSC and UNC are left out: {why}."]
        notes = [] if s.has_labels else ["TCE, MCB, DSC and UNC are left out: they need labels, and targets are soft."]
        resolution = next(iter(self._in_order.values())).resolution
        if resolution is None:
            return "exact", notes
        names = "ACE, TCE, KS, MCB, DSC and UNC" if s.has_labels else "ACE and KS"
        notes.append(
            f"{names} are computed from a sketch, because there are many samples. They are exact for data in which "
            f"every probability has moved by less than 1 / {resolution:,} in log-odds."
        )
        return f"sketch, {resolution:,} cells per unit of log-odds", notes

    def why_no_calibration(self) -> str:
        """Return why there are no samples for calibrators, a clause; empty if there are."""
        if not self._with_calibration:
            return "with_calibration is False"
        return self._buffer.why_not or ("targets are shares, and no labels" if self._buffer.has_shares else "")

    def fit(self, calibrator: T) -> T:
        """Return a copy of a calibrator, such as `report().calibration.calibrator`, fitted to all samples.

        Returns:
            The fitted copy, for predictions of the shape that was given to `update`.

        Raises:
            ValueError: if nothing was added, if samples were not kept, and if the calibrator is not for their task.

        Warns:
            UserWarning: see `Calibrator.fit`.
        """
        why_not = self.why_no_calibration() or ("" if self._buffer.pieces else "nothing was added")
        if why_not:
            raise ValueError(f"samples must have been added and kept to fit a calibrator, got none: {why_not}.")
        self._raise_if_invalid()
        fit = fitted(calibrator, self._buffer.predictions())
        fit.class_axis = self._axis if self._format.class_axis is None else self._format.axis
        fit.warn()
        return fit

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the builder as plain values, without the source."""
        options = {name: getattr(self._format, name) for name in _OPTIONS}
        wanted = {"with_calibration": self._with_calibration, "with_intervals": self._with_intervals}
        names = {"class_names": list(self._class_names) or None}
        return {"task": self._format.task, **names, **self._settings, **wanted, **options}

    def merge(self, other: "ReportBuilder") -> None:
        """Add the predictions of another builder, after those of this one.

        The report is then that of all predictions: counts are equal bit for bit, and other sums up to rounding. Samples
        that exceed a limit only together become a sketch, or are no longer kept.

        Args:
            other: a builder with the same arguments; it does not change.

        Raises:
            ValueError: if its arguments or the format of its files differ, or it holds predictions that are here
                already, as a copy of a part does. Nothing is added then.
        """
        source = self._joined_source(other)
        both = {self._has_groups, other._has_groups} - {None}
        if len(both) > 1:
            raise ValueError("`other` must have groups if this one has some, got one of each. Make parts alike.")
        if self._parts & other._parts:
            raise ValueError(
                "`other` must hold other predictions than those here, got some that are here already: the same part "
                "again, or a merged one that it is part of. Merge every part once."
            )
        if other._accumulators:
            self._axis = other._axis
        if not self._accumulators:
            self._accumulators = dict(other._accumulators)
        elif other._accumulators:
            self._accumulators = _sum(self._accumulators, other._accumulators)
        self._format = replace(self._format, num_classes=self._format.num_classes or other._format.num_classes)
        self._has_groups = next(iter(both), None)
        self._parts |= other._parts
        self.source = source

    def __add__(self, other: "ReportBuilder") -> "ReportBuilder":
        """Return a builder with the predictions of both; see `merge`."""
        both = ReportBuilder(**self.settings)
        both.merge(self)
        both.merge(other)
        return both

    def save(self, path: str | Path) -> None:
        """Write the state to a file, which is complete or absent.

        `ReportBuilder.load` restores the builder, to add predictions, to `merge` it with others, or to report. The
        command `torchcalib merge FILE ...` makes the report of several files. A file holds sums and, up to the limits
        of the builder, the predictions themselves, for rank-based values, intervals and calibrators. It is far smaller
        if both `with_calibration` and `with_intervals` are False.

        Args:
            path: the file; one of the same name is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        from torchcalib.reporting.saving import state_bytes

        write_whole(Path(path), state_bytes(self))

    @classmethod
    def load(cls, path: str | Path) -> "ReportBuilder":
        """Load a file of `save`, or of `torchcalib report --save-state`.

        The file need not be trusted: no code in it runs, it takes no more memory than its size, and its values are
        checked like predictions.

        Args:
            path: the file.

        Returns:
            The builder, on the CPU.

        Raises:
            OSError: the file cannot be read.
            ValueError: if it is no report state, damaged, or of another version.

        Example:
            >>> import tempfile, torch
            >>> parts = [ReportBuilder(task="binary"), ReportBuilder(task="binary")]
            >>> parts[0].update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
            >>> parts[1].update(torch.tensor([0.9, 0.4]), torch.tensor([1, 1]))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for k in range(2):
            ...         parts[k].save(f"{folder}/part{k}.pt")
            ...     whole = ReportBuilder.load(f"{folder}/part0.pt")
            ...     whole.merge(ReportBuilder.load(f"{folder}/part1.pt"))
            >>> whole.report().n
            4.0
        """
        from torchcalib.reporting.saving import load_builder

        return load_builder(path)

    def gather(self, process_group: Any = None) -> "ReportBuilder | None":
        """Merge the builders of all ranks on the first rank, in the order of ranks. Every rank must call it.

        The report of the result is that of all predictions, those of rank 0 first. All states are sent in one
        collective, after a few numbers from each rank. A builder changes only where samples are too many together:
        they become a sketch, or are no longer kept, as they would in one builder.

        Args:
            process_group: the ranks, by default all; Gloo or NCCL.

        Returns:
            The builder of all on the first rank of the group, None on the others.

        Raises:
            ValueError: on the first rank, if the builders cannot be merged; see `merge`.
        """
        from torchcalib.reporting.saving import parts_of_ranks

        parts = parts_of_ranks(self, process_group)
        return reduce(add, parts) if parts else None

    def _joined_source(self, other: "ReportBuilder") -> Source | None:
        """Return the files of both, after a check that their reports can be added."""
        mine, theirs = self.settings, other.settings
        if self._accumulators and other._accumulators:
            mine["classes"], theirs["classes"] = self._format.num_classes, other._format.num_classes
        differing = [n for n in mine if mine[n] != theirs.get(n, mine[n]) and n != "validate_args"]
        if differing:
            found = ", ".join(f"{name}={theirs[name]!r} beside {name}={mine[name]!r}" for name in differing)
            raise ValueError(
                f"`other` must be made with the same arguments, got {found}. Make parts of one report alike."
            )
        if not (self._accumulators and other._accumulators):
            return self.source or other.source
        return None if self.source is None or other.source is None else self.source + other.source

    @property
    def held(self) -> tuple[int, int, int]:
        """Number of samples and values in the buffer, and of exact ranked samples, which are all bounded."""
        n_in_order = max((sample.size for sample in self._in_order.values()), default=0)
        return self._buffer.n_samples, self._buffer.n_values, n_in_order

    def limit(self, n_samples: int, n_values: int, n_in_order: int) -> None:
        """Apply the limits to numbers as of `held`, those of all builders that will be merged with this one."""
        if BUFFER in self._accumulators:
            self._accumulators[BUFFER] = self._buffer.limited(n_samples, n_values)
        for mode, sample in self._in_order.items():
            self._accumulators[sample_name(mode)] = sample.limited(n_in_order)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `of_state`."""
        return {
            "settings": self.settings,
            "source": None if self.source is None else self.source.state(),
            "num_classes": self._format.num_classes,
            "parts": sorted(self._parts),
            "accumulators": {name: each.state() for name, each in self._accumulators.items()},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the saved builder, on the CPU. The state need not be trusted.

        Raises:
            Exception: of any kind, for a state that no builder has.
        """
        settings, source = saved_value(state, "settings", dict), state.get("source")
        builder = cls(**settings, source=None if source is None else Source.of_state(source))
        builder._parts = frozenset(map(str, saved_value(state, "parts", list)))
        saved = saved_value(state, "accumulators", dict)
        if not saved:
            return builder
        if builder._format.task != "binary":
            builder._format = replace(builder._format, num_classes=saved_value(state, "num_classes", int))
        empty = builder._empty(builder._format)
        optional = {GROUPS, *map(sample_name, modes_of(builder._task))}
        if not empty.keys() - optional <= saved.keys() <= empty.keys():
            raise ValueError(f"`accumulators` must be {', '.join(empty)}, got {', '.join(map(str, saved))}")
        builder._accumulators = {name: each.loaded(saved[name]) for name, each in empty.items() if name in saved}
        builder._has_groups = GROUPS in saved
        return builder

    def _classes_of(self, preds: Tensor, target: Tensor) -> int | None:
        """Return the number of classes or labels; None for a binary task."""
        if self._format.task == "binary" or not preds.dim():
            return None
        return preds.shape[self._format.resolved(preds, target).axis]

    def _empty(self, input_format: InputFormat) -> dict[str, Any]:
        """Return empty accumulators for predictions of this format, whose number of classes is known.

        Raises:
            ValueError: if the sums take too much memory.
        """
        task, num_classes = input_format.read_as, input_format.num_classes
        if num_classes is not None:
            check_size(task, num_classes, self._settings["n_bins"])
        bins = bin_estimators(task, **self._settings, with_noise=True)
        found: dict[str, Accumulator] = {}
        for key, accumulator, *_ in (*score_estimators(task), *bins):
            found[key] = Accumulated(SumsKind(accumulator, accumulator.shape(task, num_classes)))
        for mode in modes_of(task):
            if has_table(task, mode):
                sample = ExactSample(mode)
                kind = SamplesKind(sample, sample.lead(task, num_classes), input_format.from_logits)
                found[sample_name(mode)] = SampleOrSketch.empty(kind)
        if self._with_calibration or self._with_intervals:
            found[BUFFER] = PredictionBuffer(input_format)
        main = bins[0].accumulator
        return {**found, GROUPS: GroupBins.empty(main, main.shape(task, num_classes))}


def sample_name(mode: NamedMode) -> str:
    """Return the name of the ranked samples among the accumulators."""
    return f"sample of {mode}"


def _sum(mine: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Add accumulators. Ranked samples are dropped once they are missing, because weights were no counts."""
    return {name: each + others[name] for name, each in mine.items() if name in others}
