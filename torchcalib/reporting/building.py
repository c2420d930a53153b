"""Build a `Report` from predictions, piece by piece."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, Transform
from torchcalib.core.arguments import InputOptions, Task, check_count, check_flag
from torchcalib.core.events import reductions_of
from torchcalib.core.inputs import InputFormat, check_option_names
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked_bins import Binning
from torchcalib.io.saved import saved_value
from torchcalib.io.source import Source
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.proper_scores import NLL
from torchcalib.metrics.rollback import unchanged_on_error
from torchcalib.reporting.bounded import BoundedSample
from torchcalib.reporting.calibration import calibration_stage
from torchcalib.reporting.data import Report
from torchcalib.reporting.evidence import evidence_of, with_evidence
from torchcalib.reporting.groups import GroupBins
from torchcalib.reporting.intervals import failure, with_intervals
from torchcalib.reporting.kept import KeptSamples
from torchcalib.reporting.lines import SCORES, Statistics, has_table
from torchcalib.reporting.metrics import (
    MOST_BINS,
    MOST_COPIES,
    are_counts,
    check_saved_size,
    metrics_of,
    sample_name,
    with_samples,
)
from torchcalib.reporting.sentence import sentence_of

T = TypeVar("T", bound=Transform)


class ReportBuilder:
    """Build a `Report` from predictions, piece by piece. Arguments are those of `report`.

    Memory is bounded. Rank-based values are exact up to 2^24 samples and come from a sketch above that, see
    `BoundedSample`; `report.settings["order_based"]` names the case. For calibrators and bootstrap intervals, all
    predictions are kept up to `MOST_SAMPLES` and `MOST_VALUES` of `torchcalib.reporting.kept`, and none above that.

    Args:
        source: origin of the predictions, for the report.
    """

    def __init__(
        self,
        *,
        task: Task,
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
        check_option_names(options)
        self._options: dict[str, Any] = {"from_logits": False, "ignore_index": None, **options}
        self._format = InputFormat(task, **self._options)
        self._task = self._format.read_as
        self._metrics: CalibrationCollection | None = None  # the first piece determines the number of classes
        self._num_classes: int | None = None
        self._parts: frozenset[str] = frozenset()  # identifiers of the builders that were merged
        self._samples = {r: BoundedSample(r) for r in reductions_of(self._task) if has_table(self._task, r)}
        self._kept = KeptSamples(self._format) if with_calibration or with_intervals else None
        self._groups: GroupBins | None = None

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
        self._format.check(preds, target, weights)
        preds, target, counted = self._format.with_missing_marked(preds, target, weights)
        num_classes = self._classes_of(preds) if self._metrics is None else self._num_classes
        metrics = self._metrics or self._made_for(num_classes, preds.device)
        samples = self._samples if are_counts(counted) else {}
        metrics = with_samples(metrics, samples)
        of_groups = self._groups_with(num_classes, preds, target, weights, groups, group_names)
        metrics.update(preds, target, weights=weights)
        self._groups = of_groups
        self._metrics, self._samples, self._num_classes = metrics, samples, num_classes
        self._parts = self._parts or frozenset((uuid4().hex,))
        if self._kept is not None:
            voted = self._format.counts_votes(preds, target)
            self._kept.add(preds, self._format.votes_in(target)[0] if voted else target, weights)
        for reduction, sample in samples.items():
            sample.relieve(metrics[sample_name(reduction)])

    def _groups_with(
        self,
        num_classes: int | None,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None,
        groups: Tensor | None,
        names: Sequence[str] | None,
    ) -> GroupBins | None:
        """Return the bins of groups with more rows."""
        if self._metrics is not None and (groups is None) != (self._groups is None):
            raise ValueError(
                "`groups` must be given with all predictions of a report, or with none, got some of each. "
                "Give rows that belong to no group the number -1."
            )
        if groups is None:
            return None
        bins = self._groups or GroupBins(self._ece_of_groups(num_classes))
        return bins.with_rows(preds, target, weights, groups, names)

    def report(self, source: Mapping[str, Any] | None = None) -> Report:
        """Return the report of all predictions so far.

        Args:
            source: origin of the predictions, by names of your own; by default the builder's own `source`.

        Raises:
            ValueError: if nothing was added.
        """
        s = self._statistics()
        p, why_not = self._kept_predictions()
        evidence, notes = evidence_of(s, with_intervals=self._with_intervals)
        lines, tables = s.lines(), s.tables()
        (main,) = with_evidence([next(line for line in lines if line.key in evidence)], evidence)
        sentence = sentence_of(self._task, {line.key: line.value for line in lines}, next(iter(tables.values())), main)
        order_based, order_notes = self._order_notes(s)
        notes += order_notes
        lines = with_evidence(lines, evidence, with_intervals=self._with_intervals)
        if self._with_intervals:
            lines, interval_notes = with_intervals(lines, p, why_not, list(s.samples) if s.has_labels else [])
            notes += interval_notes
        stage = None
        if self._with_calibration and self._kept is not None:
            if self._kept.has_shares:
                p, why_not = None, "calibrators are fitted to labels, and targets are soft"
            stage, stage_notes = calibration_stage(p, why_not)
            notes += stage_notes
        n_dropped = self._n_dropped()
        if n_dropped:
            what = "labels of samples" if self._task == "multilabel" else "samples"
            notes += (
                f"{n_dropped:,} {what} with NaN, or with infinities that leave no distribution, are left out "
                "(nan_policy='drop'). Their effect on all values is unknown.",
            )
        options = {name: getattr(self._format, name) for name in ("from_logits", "ignore_index", "nan_policy")}
        return Report(
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
            notes=notes,
            groups=None if self._groups is None else self._groups.table(),
        )

    def _statistics(self) -> Statistics:
        """Return the sums and samples of all predictions.

        Raises:
            ValueError: if nothing was added.
        """
        metrics = self._metrics
        scores = {} if metrics is None else {m: metrics[m.__name__].statistic() for m in SCORES}
        if metrics is None or not bool((scores[NLL].total > 0).any()):
            raise ValueError("`preds` must hold at least one sample with a positive weight, got none. Add predictions.")
        is_countable = scores[NLL].total.sum() <= MOST_COPIES
        in_order = self._samples if is_countable else {}
        return Statistics(
            task=self._task,
            n_bins=self._settings["n_bins"],
            scores=scores,
            bins={r: metrics[r].statistic() for r in reductions_of(self._task)},
            samples={r: sample.with_those_of(metrics[sample_name(r)]) for r, sample in in_order.items()},
            has_labels=all(sample.has_labels(metrics[sample_name(r)]) for r, sample in in_order.items()),
        )

    def _kept_predictions(self) -> tuple[Predictions | None, str]:
        """Return the kept predictions for intervals and calibrators, or None and the reason, a clause."""
        if self._kept is None or self._kept.why_not:
            return None, "" if self._kept is None else self._kept.why_not
        try:
            return self._kept.read(), ""
        except RuntimeError as error:  # memory, above all
            return None, f"joining the predictions failed with {failure(error)}"

    def _order_notes(self, s: Statistics) -> tuple[str, tuple[str, ...]]:
        """Return how rank-based values were computed, and notes on them."""
        if not s.samples:
            return "left out", (
                "ACE, TCE, KS, MCB, DSC and UNC are left out: they need weights that are counts of samples.",
            )
        notes: tuple[str, ...] = ()
        if not s.has_labels:
            notes = ("TCE, MCB, DSC and UNC are left out: they need labels, and targets are soft.",)
        resolution = next(sample.resolution for sample in self._samples.values())
        if resolution is None:
            return "exact", notes
        names = "ACE, TCE, KS, MCB, DSC and UNC" if s.has_labels else "ACE and KS"
        note = (
            f"{names} are computed from a sketch, because there are many samples. They are exact for data in which "
            f"every probability has moved by less than 1 / {resolution:,} in log-odds."
        )
        return f"sketch, {resolution:,} cells per unit of log-odds", (*notes, note)

    def _n_dropped(self) -> int:
        """Return the number of rows that `nan_policy="drop"` left out."""
        return 0 if self._metrics is None else int(self._metrics["NLL"].kind.left_out(self._metrics["NLL"].state)[1])

    def why_no_calibration(self) -> str:
        """Return why there are no samples for calibrators, a clause; empty if there are."""
        if self._kept is None or not self._with_calibration:
            return "with_calibration is False"
        return self._kept.why_not or ("targets are shares, and no labels" if self._kept.has_shares else "")

    def fit(self, calibrator: Calibrator[T]) -> T:
        """Fit a calibrator to all samples, such as `report().calibration.calibrator`.

        Returns:
            The transform, for predictions of the shape that was given to `update`.

        Raises:
            ValueError: if nothing was added, if samples were not kept, and if the calibrator is not for their task.

        Warns:
            UserWarning: see `Calibrator.fit`.
        """
        if self._kept is None or self._metrics is None or self.why_no_calibration() or not self._kept.has_samples:
            raise ValueError(
                "samples must have been added and kept to fit a calibrator, got none: "
                f"{self.why_no_calibration() or 'nothing was added'}."
            )
        self._metrics["NLL"].statistic()  # raises if rows that came on CUDA were bad
        preds, target, options = self._kept.given()
        transform = calibrator.fit(preds, target, task=self._format.task, **options)
        transform.class_axis = self._format.class_axis
        return transform

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the builder as plain values, without the source."""
        options = {name: getattr(self._format, name) for name in InputOptions.__annotations__ if name != "weights"}
        wanted = {"with_calibration": self._with_calibration, "with_intervals": self._with_intervals}
        return {"task": self._format.task, **self._settings, **wanted, **options}

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
        if None not in (self._metrics, other._metrics) and (self._groups is None) != (other._groups is None):
            raise ValueError("`other` must have groups if this one has some, got one of each. Make parts alike.")
        if self._parts & other._parts:
            raise ValueError(
                "`other` must hold other predictions than those here, got some that are here already: the same part "
                "again, or a merged one that it is part of. Merge every part once."
            )
        samples = {r: sample + other._samples[r] for r, sample in self._samples.items() if r in other._samples}
        kept = None if self._kept is None or other._kept is None else self._kept + other._kept
        groups = self._groups + other._groups if self._groups and other._groups else self._groups or other._groups
        metrics = self._metrics
        if other._metrics is not None:
            metrics = with_samples(metrics or self._made_for(other._num_classes), samples)
            pairs = [(metrics[name], other._metrics[name]) for name in map(str, metrics)]
            with unchanged_on_error(*(mine for mine, _ in pairs)):
                for mine, theirs in pairs:
                    mine.merge_state(theirs)
            self._num_classes = other._num_classes
        self._metrics, self._samples, self._kept, self.source = metrics, samples, kept, source
        self._groups = groups
        self._parts |= other._parts
        self.relieve()

    def __add__(self, other: "ReportBuilder") -> "ReportBuilder":
        """Return a builder with the predictions of both; see `merge`."""
        both = ReportBuilder(**self.settings)
        both.merge(self)
        both.merge(other)
        return both

    def _joined_source(self, other: "ReportBuilder") -> Source | None:
        """Return the files of both, after a check that their reports can be added."""
        mine, theirs = self.settings, other.settings
        if self._num_classes and other._num_classes:
            mine["classes"], theirs["classes"] = self._num_classes, other._num_classes
        differing = [n for n in mine if mine[n] != theirs.get(n, mine[n]) and n != "validate_args"]
        if differing:
            found = ", ".join(f"{name}={theirs[name]!r} beside {name}={mine[name]!r}" for name in differing)
            raise ValueError(
                f"`other` must be made with the same arguments, got {found}. Make parts of one report alike."
            )
        if self._metrics is None or other._metrics is None:  # one of them is empty
            return self.source or other.source
        return None if self.source is None or other.source is None else self.source + other.source

    @property
    def held(self) -> tuple[int, int, int]:
        """Number of kept samples, of kept values, and of exact ranked samples, which are all bounded."""
        metrics, kept = self._metrics, self._kept
        in_order = [] if metrics is None else [s.n_whole(metrics[sample_name(r)]) for r, s in self._samples.items()]
        return (*((0, 0) if kept is None else (kept.n_samples, kept.n_values)), max(in_order, default=0))

    def relieve(self, elsewhere: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Apply the limits to the samples together with those elsewhere, which will be merged with these."""
        if self._kept is not None:
            self._kept.relieve(*elsewhere[:2])
        if self._metrics is not None:
            for reduction, sample in self._samples.items():
                sample.relieve(self._metrics[sample_name(reduction)], elsewhere[2])

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `of_state`."""
        return {
            "settings": self.settings,
            "source": None if self.source is None else self.source.state(),
            "num_classes": self._num_classes,
            "parts": sorted(self._parts),
            "metrics": None if self._metrics is None else dict(self._metrics.state_dict()),
            "samples": {reduction: sample.state() for reduction, sample in self._samples.items()},
            "kept": None if self._kept is None else self._kept.state(),
            "groups": None if self._groups is None else self._groups.state(),
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
        samples = saved_value(state, "samples", dict)
        builder._samples = {reduction: held for reduction, held in builder._samples.items() if reduction in samples}
        if state.get("metrics") is not None:
            builder._take_metrics(state, samples)
        if builder._kept is not None:
            kept = saved_value(state, "kept", dict)
            builder._kept = KeptSamples.of_state(kept, builder._format, builder._num_classes)
        return builder

    def _take_metrics(self, state: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
        """Load the part of a state that depends on the number of classes."""
        sums = saved_value(state, "metrics", dict)
        if self._format.task != "binary":
            self._num_classes = saved_value(state, "num_classes", int)
        check_saved_size(self._task, self._num_classes, self._settings, sums)
        metrics = with_samples(self._made_for(self._num_classes), self._samples)
        metrics.load_state_dict(sums)
        for reduction in self._samples:
            self._samples[reduction] = BoundedSample.of_state(
                samples[reduction], reduction, metrics[sample_name(reduction)]
            )
        self._metrics = metrics
        if state.get("groups") is not None:
            groups = saved_value(state, "groups", dict)
            self._groups = GroupBins.of_state(groups, self._ece_of_groups(self._num_classes))

    def _classes_of(self, preds: Tensor) -> int | None:
        """Return the number of classes or labels; None for a binary task."""
        return None if self._format.task == "binary" or not preds.dim() else preds.shape[self._format.class_axis]

    def _ece_of_groups(self, num_classes: int | None) -> ECE:
        """Return the error of groups: that of the main reduction."""
        return ECE(**self._given(num_classes), **self._settings, reduction=reductions_of(self._task)[0])

    def _given(self, num_classes: int | None) -> dict[str, Any]:
        """Return the common arguments of all metrics."""
        given: dict[str, Any] = {"task": self._format.task, **self._options}
        if num_classes is not None:
            given["num_labels" if self._format.task == "multilabel" else "num_classes"] = num_classes
        return given

    def _made_for(self, num_classes: int | None, device: torch.device | str = "cpu") -> CalibrationCollection:
        """Return empty metrics for a number of classes or labels."""
        return metrics_of(self._task, self._given(num_classes), self._settings, self._samples, device)
