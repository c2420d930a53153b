"""From predictions, piece by piece, to a `Report`: what a builder holds, and how it adds."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, Transform
from torchcalib.core.arguments import InputOptions, Task, check_count, check_flag
from torchcalib.core.events import NamedReduction, reductions_of
from torchcalib.core.inputs import InputFormat, check_option_names
from torchcalib.core.ranked_bins import Binning
from torchcalib.io.saved import saved_value
from torchcalib.io.source import Source
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.rollback import unchanged_on_error
from torchcalib.reporting.bounded import BoundedSample
from torchcalib.reporting.data import Report
from torchcalib.reporting.findings import Findings
from torchcalib.reporting.groups import GroupBins
from torchcalib.reporting.kept import KeptSamples
from torchcalib.reporting.lines import SCORES
from torchcalib.reporting.metrics import (
    MOST_BINS,
    MOST_COPIES,
    are_counts,
    check_saved_size,
    has_table,
    metrics_of,
    sample_name,
    with_samples,
)

T = TypeVar("T", bound=Transform)


class ReportBuilder:
    """Takes predictions piece by piece and makes a `Report` of all of them. Arguments are those of `report`.

    What order-based numbers are read from is every sample, up to 2^24 of them, and a sketch from there on; see
    `BoundedSample`. `report.settings["order_based"]` says which. To try calibrators, and for intervals, all predictions
    are kept as they came, up to `MOST_SAMPLES` and `MOST_VALUES` of `torchcalib.reporting.kept`, and none from there
    on.

    Args:
        source: what the predictions are read from; only for the report to say.
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
        self._metrics: CalibrationCollection | None = None  # made when the first piece tells how many classes there are
        self._num_classes: int | None = None
        self._parts: frozenset[str] = frozenset()  # marks of the builders whose predictions are here
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
        """Add predictions, with groups or all without. If they are bad an error is raised and nothing is added.

        Groups are told apart by their names, whatever their numbers are in this piece; a number is its digits.
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
        """The bins of groups with those of more rows."""
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
        """Read everything off what was kept.

        Args:
            source: what was read, by names of your own; by default what the builder's own `source` tells.

        Raises:
            ValueError: if nothing was added.
        """
        metrics = self._metrics
        shares = None if metrics is None else metrics["NLL"].statistic()
        if metrics is None or shares is None or not bool((shares.total > 0).any()):
            raise ValueError("`preds` must hold at least one sample that counts, got none. Nothing can be reported.")
        is_multilabel = self._task == "multilabel"
        priors = tuple((shares.share[..., 1] if is_multilabel else shares.share).tolist())
        in_order = self._samples if shares.total.sum() <= MOST_COPIES else {}
        has_labels = all(sample.has_labels(metrics[sample_name(r)]) for r, sample in in_order.items())
        found = self._read_off(metrics, in_order, has_labels, priors)
        resolution = next((sample.resolution for sample in in_order.values()), None)
        order_based = found.say_order(resolution, bool(in_order), has_labels)
        lines = found.finished_lines(self._kept, list(in_order) if has_labels else [])
        tries = self._kept if self._with_calibration else None
        calibration = None if tries is None else found.calibration(tries)
        n_dropped = int(metrics["NLL"].kind.left_out(metrics["NLL"].state)[1])
        found.say_dropped(n_dropped)
        read_by = {name: getattr(self._format, name) for name in ("from_logits", "ignore_index", "nan_policy")}
        return Report(
            task=self._task,
            n=float(shares.total.sum()),
            n_dropped=n_dropped,
            num_classes=shares.n.shape[0 if is_multilabel else -1],
            priors=priors,
            lines=lines,
            tables=found.tables,
            per_class=found.per_class,
            sentence=found.sentence(),
            settings={**self._settings, **read_by, "order_based": order_based},
            source=dict(source or ({} if self.source is None else self.source.in_words())),
            tests=found.tests,
            calibration=calibration,
            notes=found.notes,
            groups=None if self._groups is None else self._groups.table(),
        )

    def _read_off(
        self,
        metrics: CalibrationCollection,
        in_order: Mapping[NamedReduction, BoundedSample],
        has_labels: bool,
        priors: tuple[float, ...],
    ) -> Findings:
        """Read off what was streamed."""
        found = Findings(self._task, self._settings["n_bins"], self._with_intervals)
        found.read_scores({m.__name__: metrics[m.__name__].statistic() for m in SCORES})
        for reduction in reductions_of(self._task):
            found.read_bins(metrics[reduction].statistic(), reduction)
            if reduction in in_order:
                sample = in_order[reduction].with_those_of(metrics[sample_name(reduction)])
                found.read_order(sample, has_labels, reduction, priors)
        return found

    def why_no_calibration(self) -> str:
        """Say, in a clause, why the samples so far were not kept for calibrators; empty if they were."""
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
        """The arguments that it was made with, plain values all of them, but for the source."""
        options = {name: getattr(self._format, name) for name in InputOptions.__annotations__ if name != "weights"}
        wanted = {"with_calibration": self._with_calibration, "with_intervals": self._with_intervals}
        return {"task": self._format.task, **self._settings, **wanted, **options}

    def merge(self, other: "ReportBuilder") -> None:
        """Add what another builder holds, as if its predictions had been added to this one, after those already here.

        The report is then that of all of them: counts are equal, bit for bit, and other sums up to rounding. If some
        samples are too many only together, this is where they become a sketch, or are no longer kept.

        Args:
            other: a builder of the same arguments; it stays as it is.

        Raises:
            ValueError: it was made with others, read files that could not be read with these, or holds predictions that
                are here already, as a copy of a part does; nothing is added then.
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
        """Return a builder of what both hold; see `merge`."""
        both = ReportBuilder(**self.settings)
        both.merge(self)
        both.merge(other)
        return both

    def _joined_source(self, other: "ReportBuilder") -> Source | None:
        """The files of both, after a check that their reports can be added."""
        mine, theirs = self.settings, other.settings
        if self._num_classes and other._num_classes:
            mine["classes"], theirs["classes"] = self._num_classes, other._num_classes
        differing = [n for n in mine if mine[n] != theirs.get(n, mine[n]) and n != "validate_args"]
        if differing:
            found = ", ".join(f"{name}={theirs[name]!r} beside {name}={mine[name]!r}" for name in differing)
            raise ValueError(
                f"`other` must be made with the same arguments, got {found}. Make parts of one report alike."
            )
        if self._metrics is None or other._metrics is None:  # one of them has seen nothing
            return self.source or other.source
        return None if self.source is None or other.source is None else self.source + other.source

    @property
    def held(self) -> tuple[int, int, int]:
        """How much there is of what is bounded: samples and values that are kept, and samples in order."""
        metrics, kept = self._metrics, self._kept
        in_order = [] if metrics is None else [s.n_whole(metrics[sample_name(r)]) for r, s in self._samples.items()]
        return (*((0, 0) if kept is None else (kept.n_samples, kept.n_values)), max(in_order, default=0))

    def relieve(self, elsewhere: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Let go of what is too much together with what other builders hold, which are to be merged with this one."""
        if self._kept is not None:
            self._kept.relieve(*elsewhere[:2])
        if self._metrics is not None:
            for reduction, sample in self._samples.items():
                sample.relieve(self._metrics[sample_name(reduction)], elsewhere[2])

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, of which `of_state` makes the same again."""
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
        """Return the builder that was saved, on the CPU. What was saved need not be trusted.

        Raises:
            Exception: of any kind, where it is no such thing.
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
        """Take from what was saved all that is there only once predictions were added."""
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
        """How many classes or labels predictions have, where they have any."""
        return None if self._format.task == "binary" or not preds.dim() else preds.shape[self._format.class_axis]

    def _ece_of_groups(self, num_classes: int | None) -> ECE:
        """The error that groups are put in order by: that of the main reduction."""
        return ECE(**self._given(num_classes), **self._settings, reduction=reductions_of(self._task)[0])

    def _given(self, num_classes: int | None) -> dict[str, Any]:
        """Arguments that all metrics have in common."""
        given: dict[str, Any] = {"task": self._format.task, **self._options}
        if num_classes is not None:
            given["num_labels" if self._format.task == "multilabel" else "num_classes"] = num_classes
        return given

    def _made_for(self, num_classes: int | None, device: torch.device | str = "cpu") -> CalibrationCollection:
        """The metrics, once it is known how many classes or labels there are."""
        return metrics_of(self._task, self._given(num_classes), self._settings, self._samples, device)
