"""From predictions to a `Report`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack
from uuid import uuid4

import torch
from torch import Tensor

from torchcalib.binned import ECE
from torchcalib.binnings import Binning
from torchcalib.bins import BinTable, TCETable, ece_from_bins, equal_width_edges
from torchcalib.bounded import BoundedSample
from torchcalib.calibrators import Calibrator, Transform
from torchcalib.consistency import Evidence
from torchcalib.files import Source
from torchcalib.predictions import InputFormat, InputOptions, Task, check_count, check_flag
from torchcalib.ranked import KS
from torchcalib.reductions import NamedReduction, reductions_of
from torchcalib.report.calibration import calibration_stage
from torchcalib.report.data import Line, Report
from torchcalib.report.evidence import evidence_in_order, evidence_of_bins, with_evidence
from torchcalib.report.groups import GroupBins
from torchcalib.report.intervals import label_readings, score_readings, with_intervals
from torchcalib.report.kept import KeptSamples
from torchcalib.report.lines import SCORES, error_lines, order_lines, score_lines
from torchcalib.report.sentence import sentence_of
from torchcalib.streaming import CalibrationCollection, StreamingMetric
from torchcalib.streaming.faults import unchanged_on_error

T = TypeVar("T", bound=Transform)

MOST_BINS = 1000  # more can neither be drawn nor read
_MOST_SUMS = 2**27  # 1 GiB
MOST_COPIES = 2**53  # every whole number up to here is one of float64


def check_size(task: Task, num_outputs: int, n_bins: int) -> None:
    """Raise where the sums of a report of so many classes or labels would take more than a gigabyte."""
    per_output = 3 * len(SCORES) * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MOST_SUMS:
        what = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MOST_SUMS // per_output:,} {what} with {n_bins} bins, got {num_outputs:,}: "
            f"sums of each are kept. Check that {what} are the axis they are taken for, or compute single metrics."
        )


def report(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    right: bool = False,
    with_calibration: bool = True,
    with_intervals: bool = True,
    groups: Tensor | None = None,
    group_names: Sequence[str] | None = None,
    **options: Unpack[InputOptions],
) -> Report:
    """Compute every score and calibration error of a set of predictions.

    Scores (accuracy, NLL, Brier, ECD), and of every reduction errors over equal-width bins (ECE, ESCE, MCE, RMSCE).
    Where one series of confidences is looked at, and for labels one by one, also what is read from the sample in order:
    ACE with the same number of bins, TCE by default as `torchcalib.tce` has it (a table of what it rejects is in
    `tests`), KS, and the parts of the Brier score of the event, MCB - DSC + UNC. For every class of a multi-class task
    these would cost too much; `torchcalib.ace` and the others compute them.

    TCE and the parts count labels: they are left out for soft targets. All that is read from the order counts copies of
    samples: it is left out where weights are not whole numbers. `notes` says so. Above 2^24 samples (for labels:
    samples times labels) they are read from a sketch: exact for data in which every probability has moved by less than
    1 / 2,048 in log-odds, and for float16 and bfloat16 probabilities as they are; `torchcalib.samples.LogitCells` says
    how far off each number can be. (Labels have coarser cells if they are more than 16; `settings` says how coarse.)

    `calibration` says what a calibration stage would gain: NLL and Brier score under temperature scaling, DP
    calibration and, where there is one probability for a sample or label, histogram binning and isotonic calibration,
    in 5 stratified folds. It is left out above 2^20 samples (for labels: samples times labels) or 2^26 values of
    `preds`, for soft targets, and where a class, or either outcome of a label, has too few samples to be in two folds;
    `notes` says so. DP calibration is not tried where samples times squared classes are more than 2^31.

    Every calibration error has a noise floor (what it would be on average if the model were perfectly calibrated), a
    p-value and a 95 % interval of its value without noise, of TCE that of its expected value; see
    `torchcalib.Evidence`. They follow from what was streamed, at any number of samples. Errors over more than 2^15
    bins of classes go without the interval, and what is read from samples in order of many labels without all of it;
    `notes` says so. `sentence` follows from those of the main ECE.

    Scores, DSC and UNC have a 95 % percentile bootstrap interval of 199 replicates, up to 2^18
    events (samples, or samples times classes), and 2^13 where samples are put in order; `notes` says which have none.
    `torchcalib.bootstrap` computes intervals of anything else, among them those of calibration losses.

    Args:
        preds: probabilities (or logits): binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`; further axes are
            samples too.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins, and for ACE of equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        with_calibration: whether to try calibrators, which takes longer than all the rest and keeps a copy of `preds`.
        with_intervals: whether to compute intervals, and the evidence of what is read from samples in order; this takes
            some seconds at most, and keeps that copy too. Noise floors and p-values of errors over equal-width bins,
            and with them the sentence, are there in any case.
        groups: integers from 0 on of the shape of samples, -1 for a row of no group: the report lists the groups whose
            ECE is furthest above what chance explains (`Report.groups`). At most 10,000.
        group_names: of the groups by their numbers; None where the numbers are the names.
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
    builder = ReportBuilder(
        task=task,
        n_bins=n_bins,
        right=right,
        with_calibration=with_calibration,
        with_intervals=with_intervals,
        **options,
    )
    builder.update(preds, target, weights=weights, groups=groups, group_names=group_names)
    return builder.report()


class ReportBuilder:
    """Takes predictions piece by piece and makes a `Report` of all of them. Arguments are those of `report`.

    What order-based numbers are read from is every sample, up to 2^24 of them, and a sketch from there on; see
    `BoundedSample`. `report.settings["order_based"]` says which. To try calibrators, and for intervals, all predictions
    are kept as they came, up to `MOST_SAMPLES` and `MOST_VALUES` of `torchcalib.report.kept`, and none from there on.

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
        self._options: dict[str, Any] = {"from_logits": False, "ignore_index": None, **options}
        self._format = InputFormat(task, **self._options)
        self._task = self._format.read_as
        self._metrics: CalibrationCollection | None = None  # made when the first piece tells how many classes there are
        self._num_classes: int | None = None
        self._parts: frozenset[str] = frozenset()  # marks of the builders whose predictions are here
        self._samples = {r: BoundedSample(r) for r in reductions_of(self._task) if _has_table(self._task, r)}
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
        n = None if metrics is None else metrics["NLL"].statistic()
        if metrics is None or n is None or not bool((n.total > 0).any()):
            raise ValueError("`preds` must hold at least one sample that counts, got none. Nothing can be reported.")
        priors = tuple((n.share[..., 1] if self._task == "multilabel" else n.share).tolist())
        lines = [line for m in SCORES for line in score_lines(m, metrics[m.__name__].statistic(), self._task)]
        tables: dict[NamedReduction, BinTable] = {}
        tests: dict[NamedReduction, TCETable] = {}
        per_class: tuple[float, ...] = ()
        evidence: dict[str, Evidence] = {}
        given = {"task": self._task} | ({"num_labels": len(n.n)} if self._task == "multilabel" else {})
        notes: tuple[str, ...] = ()
        in_order = self._samples if n.total.sum() <= MOST_COPIES else {}
        has_labels = all(sample.has_labels(metrics[sample_name(r)]) for r, sample in in_order.items())
        for reduction in reductions_of(self._task):
            bins = metrics[reduction].statistic()
            lines += error_lines(bins, reduction)
            found, remarks = evidence_of_bins(
                bins, reduction, with_intervals=self._with_intervals, exclusive=self._task == "multiclass"
            )
            evidence, notes = evidence | found, notes + remarks
            if reduction == "classwise":
                per_class = tuple(ece_from_bins(bins).tolist())
            if _has_table(self._task, reduction):
                pooled = replace(bins, sums=bins.sums.sum(0)) if self._task == "multilabel" else bins
                tables[reduction] = BinTable.of(pooled, equal_width_edges(self._settings["n_bins"], pooled.n))
            if reduction in in_order:
                sample = in_order[reduction].with_those_of(metrics[sample_name(reduction)])
                more, tested = order_lines(sample, has_labels, reduction, self._settings["n_bins"], max(priors))
                lines += more
                if self._with_intervals:
                    found, remarks = evidence_in_order(sample, has_labels, reduction, self._settings["n_bins"], given)
                    evidence, notes = evidence | found, notes + remarks
                if tested is not None:
                    tests[reduction] = tested
        resolutions = {sample.resolution for sample in in_order.values()}
        how, remarks = _how_ordered(next(iter(resolutions), None), bool(in_order), has_labels)
        notes += remarks
        lines = with_evidence(lines, evidence)
        main_line = next(line for line in lines if line.key in evidence)
        calibration = None
        if self._kept is not None and self._with_intervals:
            lines, remarks = self._with_their_intervals(lines, self._kept, list(in_order) if has_labels else [])
            notes += remarks
        if not self._with_intervals:
            lines = [replace(line, interval=None) for line in lines]
        if self._kept is not None and self._with_calibration:
            calibration, remarks = calibration_stage(self._kept)
            notes += remarks
        n_dropped = int(metrics["NLL"].kind.left_out(metrics["NLL"].state)[1])
        if n_dropped:
            notes += (_dropped(n_dropped, self._task),)
        return Report(
            task=self._task,
            n=float(n.total.sum()),
            n_dropped=n_dropped,
            num_classes=n.n.shape[0] if self._task == "multilabel" else n.n.shape[-1],
            priors=priors,
            lines=tuple(lines),
            tables=tables,
            per_class=per_class,
            sentence=sentence_of(
                self._task,
                {line.key: line.value for line in lines},
                next(iter(tables.values())),
                main_line,
            ),
            settings={
                **self._settings,
                **{name: getattr(self._format, name) for name in ("from_logits", "ignore_index", "nan_policy")},
                "order_based": how,
            },
            source=dict(source or ({} if self.source is None else self.source.in_words())),
            tests=tests,
            calibration=calibration,
            notes=notes,
            groups=None if self._groups is None else self._groups.table(),
        )

    def _with_their_intervals(
        self, lines: list[Line], kept: KeptSamples, ordered: list[NamedReduction]
    ) -> tuple[list[Line], tuple[str, ...]]:
        """Return the lines with the intervals that need samples, and notes of which have none."""
        if kept.why_not:
            return lines, (f"Bootstrap intervals are left out: {kept.why_not}.",)
        try:
            p = kept.read()
            return with_intervals(lines, p, [*score_readings(p), *label_readings(ordered)])
        except (RuntimeError, ValueError) as error:  # no memory, or more copies in a replicate than can be counted
            why_not = f"computing them failed with {type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
            return lines, (f"Bootstrap intervals are left out: {why_not}.",)

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
        """The metrics that a report is read from: every score by class, bins of every reduction, and samples."""
        given = self._given(num_classes)
        if num_classes is not None:
            check_size(self._task, num_classes, self._settings["n_bins"])
        members: dict[str, StreamingMetric[Any]] = {m.__name__: m(**given, keep_classes=True) for m in SCORES}
        for reduction in reductions_of(self._task):
            tabled = _has_table(self._task, reduction)
            members[reduction] = ECE(**given, **self._settings, reduction=reduction, with_ecd=tabled)
        for reduction in self._samples:
            members[sample_name(reduction)] = KS(**given, reduction=reduction)
        collection = CalibrationCollection(members).to(device)
        collection.persistent()  # for `state`
        return collection


def _has_table(task: Task, reduction: NamedReduction) -> bool:
    """Class-wise bins of a multi-class task make no table, which would be one for each of C classes."""
    return reduction != "classwise" or task == "multilabel"


def sample_name(reduction: NamedReduction) -> str:
    """Name of the metric that holds every sample."""
    return f"sample of {reduction}"


def with_samples(metrics: CalibrationCollection, reductions: Iterable[NamedReduction]) -> CalibrationCollection:
    """Return the metrics without those that hold samples of other reductions."""
    names = {sample_name(reduction) for reduction in reductions}
    left = {name: m for name, m in metrics.items() if name in names or not isinstance(m, KS)}
    return metrics if len(left) == len(metrics) else CalibrationCollection(left)


def are_counts(weights: Tensor | None) -> bool:
    """Whether every weight is a number of copies, as far as it is a weight at all."""
    if weights is None:
        return True
    w = weights.detach().double()
    return bool(((w == w.round()) & (w <= MOST_COPIES)).all())


def _dropped(n: int, task: Task) -> str:
    """What a reader must know of rows that are missing."""
    what = "labels of samples" if task == "multilabel" else "samples"
    return (
        f"{n:,} {what} hold NaN, or infinities that leave no distribution, and are left out (nan_policy='drop'). "
        "What they would have been is not known: look for where they come from."
    )


def _how_ordered(resolution: int | None, any_at_all: bool, has_labels: bool) -> tuple[str, tuple[str, ...]]:
    """What order-based numbers were read from, and what a reader must know of it."""
    if not any_at_all:
        return "left out", (
            "ACE, TCE, KS, MCB, DSC and UNC are left out: they count copies of a sample, and weights are no counts.",
        )
    notes = []
    if not has_labels:
        notes.append("TCE, MCB, DSC and UNC are left out: they count labels, and targets are shares.")
    if resolution is None:
        return "exact", tuple(notes)
    names = "ACE, TCE, KS, MCB, DSC and UNC" if has_labels else "ACE and KS"
    notes.append(
        f"{names} are read from a sketch, as samples are many: they are exact for data in which every probability "
        f"has moved by less than 1 / {resolution:,} in log-odds."
    )
    return f"sketch, {resolution:,} cells per unit of log-odds", tuple(notes)
