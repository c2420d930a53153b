"""Errors over bins of equal width or mass, ECE, ACE, ESCE, MCE, RMSCE, as functions and as streaming classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from torchcalib.binnings import Binning, Bins
from torchcalib.bins import (
    BinTable,
    ece_from_bins,
    equal_width_edges,
    esce_from_bins,
    mce_from_bins,
    rmsce_from_bins,
)
from torchcalib.kernels.isotonic import Ties
from torchcalib.predictions import (
    Average,
    InputFormat,
    InputOptions,
    Task,
    check_average,
    check_flag,
    check_task,
    count_of_outputs,
    read_input,
    task_read_as,
)
from torchcalib.reductions import Reduction, resolve_reduction
from torchcalib.samples import ExactSample, LogitCells, RankedSample, by_pieces, sample_recipe
from torchcalib.statistics import BinStats, EqualWidthBins
from torchcalib.streaming import StreamingMetric


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

    def recipe(self, with_ecd: bool = False) -> EqualWidthBins | ExactSample | LogitCells:
        """The statistic that is read."""
        reduction = resolve_reduction(self.task, self.reduction)
        if self.adds:
            return EqualWidthBins(reduction, self.binning.n_bins, self.binning.right, with_ecd)
        return sample_recipe(reduction, self.resolution)

    def read(self, from_bins: Callable[[BinStats], Tensor], statistic: BinStats | RankedSample) -> Tensor:
        """Read the value, `(...)`, or `(..., C)` for classes that are not averaged."""
        if isinstance(statistic, RankedSample):
            values = by_pieces(lambda sample: from_bins(self.binning.of(sample)), statistic)
        else:
            values = from_bins(statistic)
        return values.mean(-1) if self.classwise and self.average is not None else values

    def table(self, statistic: BinStats | RankedSample) -> BinTable:
        """Read the table of the bins."""
        if isinstance(statistic, RankedSample):
            return self.binning.of(statistic).table()
        return BinTable.of(statistic, equal_width_edges(self.binning.n_bins, statistic.n))


def bin_table(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    reduction: Reduction | None = None,
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinTable:
    """Table of the bins that a binned error is read from: n, share, confidence, frequency, gap, mean ECD, edges.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bins: `"equal_width"` over [0, 1], `"equal_mass"` as in `ace`, or any other that `tce` takes. All but
            equal-width ones take whole `weights`, and PAVA and PAVA-BC take labels.
        n_bins: number of equal-width or equal-mass bins B.
        reduction: what the confidence is of; see `ece`.
        right: bins are `(a, b]` instead of `[a, b)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A `BinTable` of `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, Tables I-II.

    Example:
        >>> table = bin_table(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        >>> print(table)
               lower       upper           n       share  confidence   frequency         gap         ecd
              0.0000      0.5000           1      0.3333      0.2000      0.0000     -0.2000     -0.2773
              0.5000      1.0000           2      0.6667      0.8000      1.0000      0.2000     -0.2370
    """
    reading = BinReading(task_read_as(task, options), Binning.given(bins, n_bins=n_bins, right=right), reduction)
    statistic, _ = statistic_of(reading, task, preds, target, options, with_ecd=True)
    return reading.table(statistic)


def statistic_of(
    reading: BinReading,
    task: Task,
    preds: Tensor,
    target: Tensor,
    options: InputOptions,
    *,
    with_ecd: bool = False,
) -> tuple[BinStats | RankedSample, torch.dtype]:
    """Return what is read, and the dtype of results."""
    p = read_input(task, preds, target, options, **reading.demands)
    return reading.recipe(with_ecd).of(p), p.dtype


def evaluate(
    from_bins: Callable[[BinStats], Tensor],
    reading: BinReading,
    task: Task,
    preds: Tensor,
    target: Tensor,
    options: InputOptions,
) -> Tensor:
    """Read the input, put it into bins, and read the value."""
    statistic, dtype = statistic_of(reading, task, preds, target, options)
    return reading.read(from_bins, statistic).to(dtype)


def ece(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Expected calibration error: how far, on average, frequency is from confidence.

    sum over bins of share |gap|, with gap = frequency - confidence. A mean of absolute values: it is
    above 0 for a finite sample of a calibrated model, and depends on the number of bins.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins B over [0, 1].
        reduction: what the confidence is of; None is the first that the task offers. `"positive_class"` (binary):
            P(y=1), and y. `"top_label"` (multi-class, binary): the largest probability, and whether that class is the
            true one; the first on ties. `"classwise"` (multi-class, multi-label): each class or label against the rest.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: bins are `(a, b]` instead of `[a, b)`; 0 and 1 belong to the outer bins either way.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; the bin a sample falls in is a constant.

    Source:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2.

    Example:
        >>> ece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    reading = BinReading(task_read_as(task, options), Binning("equal_width", n_bins, right), reduction, average)
    return evaluate(ece_from_bins, reading, task, preds, target, options)


def ace(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Adaptive calibration error: ECE over bins that hold equally many samples.

    The samples are put in the order of their confidences; cut i of N of them is at `i * N // n_bins`.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of bins B.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        ties: `"pool"` keeps samples of equal confidence in one bin, that of the first of them, so that the order of
            the samples does not matter; a bin may then hold more than its share, or nothing. `"split"` cuts through
            them in the order given, as the published code does.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers: bins count copies.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; the bin a sample falls in is a constant.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), sec. 2. (The
        adaptive error of Nixon et al., Measuring Calibration in Deep Learning, is class-wise: `reduction="classwise"`.)

    Example:
        >>> ace(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        tensor(0.1500)
    """
    reading = BinReading(task_read_as(task, options), Binning("equal_mass", n_bins, ties=ties), reduction, average)
    return evaluate(ece_from_bins, reading, task, preds, target, options)


def esce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Expected signed calibration error: whether frequency is above (+) or below (-) confidence.

    sum over bins of share gap, which is mean(outcome) - mean(confidence) whatever the bins. Its sign means under- (+)
    or over-confidence (-) only where confidence is above 0.5, as for the top label.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins B over [0, 1].
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: bins are `(a, b]` instead of `[a, b)`; 0 and 1 belong to the outer bins either way.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A difference of probabilities in [-1, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, sec. II.

    Example:
        >>> esce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.0667)
    """
    reading = BinReading(task_read_as(task, options), Binning("equal_width", n_bins, right), reduction, average)
    return evaluate(esce_from_bins, reading, task, preds, target, options)


def mce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Maximum calibration error: the largest |gap| of any bin that holds data.

    A bin of few samples counts as much as any other, so expect large values from small samples.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bins: see `bin_table`.
        n_bins: number of equal-width or equal-mass bins B.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: bins are `(a, b]` instead of `[a, b)`; 0 and 1 belong to the outer bins either way.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences of the worst bin (shared evenly on ties); finite.

    Source:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2.

    Example:
        >>> mce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    reading = BinReading(
        task_read_as(task, options), Binning.given(bins, n_bins=n_bins, right=right), reduction, average
    )
    return evaluate(mce_from_bins, reading, task, preds, target, options)


def rmsce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    debiased: bool = False,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Root mean squared calibration error: sqrt(sum share gap^2).

    The plug-in value is biased upwards, as every bin's frequency is noisy. `debiased` subtracts the estimated variance
    f (1 - f) / (n - 1) of each bin from its squared gap (bins with n < 2: nothing) and clamps the total at 0.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bins: see `bin_table`.
        n_bins: number of equal-width or equal-mass bins B.
        debiased: subtract each bin's sampling variance.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: bins are `(a, b]` instead of `[a, b)`; 0 and 1 belong to the outer bins either way.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; 0 where the value is 0.

    Source:
        Kumar, Liang, Ma: Verified Uncertainty Calibration (NeurIPS 2019), sec. 2 and 4 (debiased).

    Example:
        >>> rmsce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    check_flag("debiased", debiased)
    reading = BinReading(
        task_read_as(task, options), Binning.given(bins, n_bins=n_bins, right=right), reduction, average
    )
    return evaluate(partial(rmsce_from_bins, debiased=debiased), reading, task, preds, target, options)


class BinnedMetric(StreamingMetric[BinStats | RankedSample]):
    """A reading of bins over a stream.

    The state of equal-width bins is 3 sums a bin (4 with ECD), for each class. Bins that follow from the sample keep
    it: 5 bytes for a sample of float32 (13 with weights), or with `resolution` a sketch of constant size.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `reduction="classwise"`, else only checked.
        num_labels: L of a multi-label task; needed.
        from_logits, ignore_index, positive_classes, class_axis, validate_args: see `torchcalib.InputOptions`.
        n_bins, right, reduction, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        with_ecd: sum the ECD too, for the `ecd` column of `bin_table()`, which is NaN without. Equal-width bins only.
        resolution: None keeps every sample. A number of cells for each unit of log-odds keeps their sums instead: see
            `LogitCells` for what is exact then; 24 bytes a cell, 141 cells for each unit of `resolution`.
        from_bins: another reading of the bins than the class's own.
        binning: other bins than `n_bins` of equal width, and instead of `right`; checked.
        **kwargs: those of `torchmetrics.Metric`.
    """

    from_bins: Callable[[BinStats], Tensor]
    """The value of one series, read off its bins."""

    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    from_sample: ClassVar[bool] = False
    """Whether the reading needs the sample, and not the bins alone."""
    hard_targets: ClassVar[bool] = False
    """Whether the reading counts labels, whatever the bins."""

    def __init__(
        self,
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
        with_ecd: bool = False,
        resolution: int | None = None,
        from_bins: Callable[[BinStats], Tensor] | None = None,
        binning: Binning | None = None,
        **kwargs: Any,
    ) -> None:
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
                **reading.demands,
            ),
            reading.recipe(with_ecd),
            batch_shape,
            **kwargs,
        )
        self.reading = reading
        if from_bins is not None:
            self.from_bins = from_bins

    def bin_table(self) -> BinTable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `bin_table`."""
        return self.reading.table(self._synced_statistic())

    def _value(self, statistic: BinStats | RankedSample) -> Tensor:
        return self.reading.read(self.from_bins, statistic)


class ECE(BinnedMetric):
    """Expected calibration error, streamed; see `ece`.

    Example:
        >>> metric = ECE(task="multiclass", num_classes=3, n_bins=5)
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0]]), torch.tensor([0, 2]))
        >>> metric.compute()
        tensor(0.6000, dtype=torch.float64)
    """

    from_bins = staticmethod(ece_from_bins)
    question = "how far is frequency from confidence, on average"
    source = "Naeini et al., Bayesian Binning, AAAI 2015, sec. 2"


class ESCE(BinnedMetric):
    """Expected signed calibration error, streamed; see `esce`."""

    from_bins = staticmethod(esce_from_bins)
    higher_is_better = None  # 0 is calibrated
    plot_lower_bound = -1.0
    question = "is frequency above (+) or below (-) confidence, on average"
    source = "Sumler et al., An Entropic Metric, sec. II"


class ACE(BinnedMetric):
    """Adaptive calibration error, streamed; see `ace`. `resolution` keeps a sketch instead of every sample."""

    from_bins = staticmethod(ece_from_bins)
    question = "how far is frequency from confidence, on average, in bins of equally many samples"
    source = "Matsubara et al., TCE, UAI 2023, sec. 2"

    def __init__(self, *, n_bins: int = 15, ties: Ties = "pool", **options: Any) -> None:
        super().__init__(binning=Binning("equal_mass", n_bins, ties=ties), **options)


class MCE(BinnedMetric):
    """Maximum calibration error, streamed; see `mce`."""

    from_bins = staticmethod(mce_from_bins)
    question = "how far is frequency from confidence in the worst bin"
    source = "Naeini et al., Bayesian Binning, AAAI 2015, sec. 2"

    def __init__(
        self,
        *,
        bins: Bins | Sequence[float] | Tensor = "equal_width",
        n_bins: int = 15,
        right: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(binning=Binning.given(bins, n_bins=n_bins, right=right), **options)


class RMSCE(BinnedMetric):
    """Root mean squared calibration error, streamed; see `rmsce`. `debiased`: subtract each bin's sampling variance."""

    from_bins = staticmethod(rmsce_from_bins)
    question = "how far is frequency from confidence, large gaps counting more"
    source = "Kumar et al., Verified Uncertainty Calibration, NeurIPS 2019, sec. 2"

    def __init__(
        self,
        *,
        debiased: bool = False,
        bins: Bins | Sequence[float] | Tensor = "equal_width",
        n_bins: int = 15,
        right: bool = False,
        **options: Any,
    ) -> None:
        check_flag("debiased", debiased)
        binning = Binning.given(bins, n_bins=n_bins, right=right)
        super().__init__(from_bins=partial(rmsce_from_bins, debiased=debiased), binning=binning, **options)
