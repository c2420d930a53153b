"""From predictions to bins, and from bins to a value: what all binned errors have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    NanPolicy,
    Task,
    check_average,
    check_flag,
    check_internal,
    check_task,
    count_of_outputs,
    task_read_as,
)
from torchcalib.core.bins import BinTable, equal_width_edges
from torchcalib.core.events import Reduction, resolve_reduction
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import by_replicates
from torchcalib.core.ranked import ExactSample, LogitCells, RankedSample, by_pieces, sample_recipe
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats, EqualWidthBins
from torchcalib.inference.evidence import ErrorTest, Evidence, evidence_of
from torchcalib.metrics.tested import TestedMetric


@dataclass(frozen=True)
class BinReading:
    """From predictions to bins, and from bins to a value: the only place where these options are checked.

    Attributes:
        task: that predictions are one of once they are read.
        binning: which bins.
        reduction: what the confidence is of.
        average: `"macro"`, or None for a value for each class.
        resolution: of the sketch that stands for the sample; None keeps every sample.
        from_sample: whether the sample itself must be at hand, whatever the bins.
        hard_targets: whether labels are counted, whatever the bins.
    """

    task: Task
    binning: Binning
    reduction: Reduction | None = None
    average: Average | None = "macro"
    resolution: int | None = None
    from_sample: bool = False
    hard_targets: bool = False

    def __post_init__(self) -> None:
        check_task(self.task)
        check_average(self.average, self.classwise)
        if self.adds and self.resolution is not None:
            raise ValueError(
                f"`resolution` must be None for bins='equal_width', got {self.resolution!r}. Their state is constant."
            )

    @property
    def classwise(self) -> bool:
        """Whether there is a value for each class or label."""
        return resolve_reduction(self.task, self.reduction) == "classwise"

    @property
    def adds(self) -> bool:
        """Whether the bins do not depend on the sample, so that sums over them are enough."""
        return self.binning.bins == "equal_width" and not self.from_sample

    @property
    def demands(self) -> dict[str, bool]:
        """What the reading demands of input; arguments of `InputFormat`."""
        return {"hard_targets": self.hard_targets or self.binning.is_isotonic, "whole_weights": not self.adds}

    def recipe(
        self, with_ecd: bool = False, with_noise: bool = False, from_logits: bool = False
    ) -> EqualWidthBins | ExactSample | LogitCells:
        """Return the accumulator specification, for log-odds or for probabilities."""
        reduction = resolve_reduction(self.task, self.reduction)
        if self.adds:
            return EqualWidthBins(reduction, self.binning.n_bins, self.binning.right, with_ecd, with_noise)
        return sample_recipe(reduction, self.resolution, from_logits)

    @property
    def averages(self) -> bool:
        """Whether the values of classes are averaged."""
        return self.classwise and self.average is not None

    def read(self, from_bins: Callable[[BinStats], Tensor], statistic: BinStats | RankedSample) -> Tensor:
        """Read the value, `(...)`, or `(..., C)` for classes that are not averaged."""
        values = self.read_each(from_bins, statistic)
        return values.mean(-1) if self.averages else values

    def read_each(self, from_bins: Callable[[BinStats], Tensor], statistic: BinStats | RankedSample) -> Tensor:
        """Read the value of every series."""
        if isinstance(statistic, RankedSample):
            return by_pieces(lambda sample: from_bins(self.binning.of(sample)), statistic)
        return from_bins(statistic)

    def table(self, statistic: BinStats | RankedSample) -> BinTable:
        """Read the table of the bins."""
        if isinstance(statistic, RankedSample):
            return self.binning.of(statistic).table()
        return BinTable.of(statistic, equal_width_edges(self.binning.n_bins, statistic.n))


def statistic_of(
    reading: BinReading,
    task: Task,
    preds: Tensor,
    target: Tensor,
    options: InputOptions,
    *,
    with_ecd: bool = False,
) -> BinStats | RankedSample:
    """Read the input, and return what a table is read from."""
    return reading.recipe(with_ecd, with_noise=True).of(read_input(task, preds, target, options, **reading.demands))


def evaluate(
    from_bins: Callable[[BinStats], Tensor],
    reading: BinReading,
    task: Task,
    preds: Tensor,
    target: Tensor,
    options: InputOptions,
) -> Tensor:
    """Read the input, put it into bins, and read the value."""
    p = read_input(task, preds, target, options, **reading.demands)
    recipe = reading.recipe()
    return by_replicates(lambda p: reading.read(from_bins, recipe.of(p)), p, recipe.n_events(p)).to(p.dtype)


class BinnedMetric(TestedMetric[BinStats | RankedSample]):
    """A reading of bins over a stream.

    The state of equal-width bins is 5 sums a bin (6 with ECD), for each class: weight, confidence, outcome, and two of
    what chance may make of these (`BinStats.spread`, `BinStats.noise`); and a number that tells labels from soft
    targets. Bins that follow from the sample keep it: 5 bytes for a sample of float32 (13 with weights), or with
    `resolution` a sketch of constant size.

    Args:
        binning: replaces `n_bins` bins of equal width and `right`. Passed by subclasses, which check it.
        from_bins: replaces the class's own function of the bins. Passed by subclasses.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `reduction="classwise"`, else only checked.
        num_labels: L of a multi-label task; needed.
        from_logits, ignore_index, positive_classes, class_axis, validate_args, nan_policy: see
            `torchcalib.InputOptions`.
        n_bins, right, reduction, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        with_ecd: sum the ECD too, for the `ecd` column of `bin_table()`, which is NaN without. Equal-width bins only.
        resolution: None keeps every sample. A number of cells for each unit of log-odds keeps their sums instead: see
            `LogitCells` for what is exact then; 24 bytes a cell, 141 cells for each unit of `resolution`.
        **kwargs: those of `torchmetrics.Metric`.
    """

    from_bins: Callable[[BinStats], Tensor]
    """The value of one series, read off its bins."""

    tested_by: Callable[[BinStats], Tensor] | None = None
    """What `evidence` tests by, where it is another reading than the value; the larger, the less calibrated."""

    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    from_sample: ClassVar[bool] = False
    """Whether the reading needs the sample, and not the bins alone."""
    reads_elements: ClassVar[bool] = False
    """Whether the reading looks into the bins, at every element."""
    hard_targets: ClassVar[bool] = False
    """Whether the reading counts labels, whatever the bins."""

    def __init__(
        self,
        binning: Binning | None = None,
        from_bins: Callable[[BinStats], Tensor] | None = None,
        /,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        n_bins: int = 15,
        from_logits: bool = False,
        reduction: Reduction | None = None,
        average: Average | None = "macro",
        right: bool = False,
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        nan_policy: NanPolicy = "raise",
        with_ecd: bool = False,
        resolution: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_internal(binning, Binning)
        read_as = task_read_as(task, {"positive_classes": positive_classes})
        binning = Binning("equal_width", n_bins, right) if binning is None else binning
        reading = BinReading(read_as, binning, reduction, average, resolution, self.from_sample, self.hard_targets)
        check_flag("with_ecd", with_ecd)
        if with_ecd and not reading.adds:
            raise ValueError("`with_ecd` must be False for bins that follow from the sample, got True.")
        super().__init__(
            InputFormat(
                task,
                from_logits=from_logits,
                ignore_index=ignore_index,
                positive_classes=positive_classes,
                class_axis=class_axis,
                num_classes=count_of_outputs(task, num_classes, num_labels),
                validate_args=validate_args,
                nan_policy=nan_policy,
                **reading.demands,
            ),
            reading.recipe(with_ecd, with_noise=True, from_logits=from_logits),
            batch_shape,
            **kwargs,
        )
        self.reading = reading
        if from_bins is not None:
            self.from_bins = from_bins

    def bin_table(self) -> BinTable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `bin_table`."""
        return self.reading.table(self._synced_statistic())

    def evidence_from(self, statistic: BinStats | RankedSample, *, with_interval: bool = True, **how: Any) -> Evidence:
        """Return the evidence of a statistic such as this metric's, which may have further axes in front."""
        bins_follow = self.reading.binning.is_isotonic or self.reads_elements
        if isinstance(statistic, RankedSample) and not bins_follow and statistic.poisoned is None:
            statistic = self.reading.binning.of(statistic).with_noise()
        test = ErrorTest(
            partial(self.reading.read_each, self.from_bins),
            None if self.tested_by is None else partial(self.reading.read_each, self.tested_by),
            without_noise=None if bins_follow else "tested_by",
            signed=self.is_signed,
            with_interval=with_interval,
        )
        cancels = self.reading.task == "multiclass"
        return evidence_of(test, statistic, average=self.reading.averages, cancels=cancels, **how)

    def _value(self, statistic: BinStats | RankedSample) -> Tensor:
        return self.reading.read(self.from_bins, statistic)
