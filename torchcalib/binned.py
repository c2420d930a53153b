"""Errors over equal-width bins, ECE, ESCE, MCE, RMSCE, as functions and as streaming classes; and the bins' table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from torchcalib.bins import (
    BinTable,
    ece_from_bins,
    equal_width_edges,
    esce_from_bins,
    mce_from_bins,
    rmsce_from_bins,
)
from torchcalib.predictions import (
    Average,
    InputFormat,
    InputOptions,
    Task,
    check_average,
    check_count,
    check_flag,
    check_task,
    count_of_outputs,
    read_input,
)
from torchcalib.reductions import Reduction, resolve_reduction
from torchcalib.statistics import BinStats, EqualWidthBins
from torchcalib.streaming import StreamingMetric


@dataclass(frozen=True)
class BinReading:
    """From predictions to bins, and from bins to a value: the only place where these options are checked."""

    task: Task
    n_bins: int = 15
    right: bool = False
    reduction: Reduction | None = None
    average: Average | None = "macro"

    def __post_init__(self) -> None:
        check_task(self.task)
        check_count("n_bins", self.n_bins, at_most=2**20)  # edges are exact to the last digit up to here
        check_flag("right", self.right)
        check_average(self.average, resolve_reduction(self.task, self.reduction) == "classwise")

    def recipe(self, with_ecd: bool) -> EqualWidthBins:
        """The sums that are read."""
        return EqualWidthBins(resolve_reduction(self.task, self.reduction), self.n_bins, self.right, with_ecd)

    def read(self, from_bins: Callable[[BinStats], Tensor], b: BinStats) -> Tensor:
        """Read the value, `(...)`, or `(..., C)` for classes that are not averaged."""
        values = from_bins(b)
        classwise = resolve_reduction(self.task, self.reduction) == "classwise"
        return values.mean(-1) if classwise and self.average is not None else values


def bin_table(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
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
        n_bins: number of equal-width bins B over [0, 1].
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
    bins, _ = _binned(BinReading(task, n_bins, right, reduction), preds, target, options, with_ecd=True)
    return BinTable.of(bins, equal_width_edges(n_bins, bins.n))


def _binned(
    reading: BinReading, preds: Tensor, target: Tensor, options: InputOptions, with_ecd: bool = False
) -> tuple[BinStats, torch.dtype]:
    """Return the bins and the dtype of results."""
    p = read_input(reading.task, preds, target, options)
    return reading.recipe(with_ecd).of(p), p.dtype


def _evaluate(
    from_bins: Callable[[BinStats], Tensor], reading: BinReading, preds: Tensor, target: Tensor, options: InputOptions
) -> Tensor:
    bins, dtype = _binned(reading, preds, target, options)
    return reading.read(from_bins, bins).to(dtype)


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
    return _evaluate(ece_from_bins, BinReading(task, n_bins, right, reduction, average), preds, target, options)


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
        reduction: what the confidence is of; None is the first that the task offers. `"positive_class"` (binary):
            P(y=1), and y. `"top_label"` (multi-class, binary): the largest probability, and whether that class is the
            true one; the first on ties. `"classwise"` (multi-class, multi-label): each class or label against the rest.
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
    return _evaluate(esce_from_bins, BinReading(task, n_bins, right, reduction, average), preds, target, options)


def mce(
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
    """Maximum calibration error: the largest |gap| of any bin that holds data.

    A bin of few samples counts as much as any other, so expect large values from small samples.

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
        In the confidences of the worst bin (shared evenly on ties); finite.

    Source:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2.

    Example:
        >>> mce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    return _evaluate(mce_from_bins, BinReading(task, n_bins, right, reduction, average), preds, target, options)


def rmsce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
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
        n_bins: number of equal-width bins B over [0, 1].
        debiased: subtract each bin's sampling variance.
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
        In the confidences, everywhere and finite; 0 where the value is 0.

    Source:
        Kumar, Liang, Ma: Verified Uncertainty Calibration (NeurIPS 2019), sec. 2 and 4 (debiased).

    Example:
        >>> rmsce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    check_flag("debiased", debiased)
    reading = BinReading(task, n_bins, right, reduction, average)
    return _evaluate(partial(rmsce_from_bins, debiased=debiased), reading, preds, target, options)


class BinnedMetric(StreamingMetric[BinStats]):
    """A reading of equal-width bins over a stream. The state is 3 sums a bin (4 with ECD), for each class.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `reduction="classwise"`, else only checked.
        num_labels: L of a multi-label task; needed.
        from_logits, ignore_index, class_axis, validate_args: see `torchcalib.InputOptions`.
        n_bins, right, reduction, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        with_ecd: sum the ECD too, for the `ecd` column of `bin_table()`, which is NaN without.
        from_bins: another reading of the bins than the class's own.
        **kwargs: those of `torchmetrics.Metric`.
    """

    from_bins: Callable[[BinStats], Tensor]
    """The value of one series, read off its bins."""

    perfect = 0.0
    unit = "probability"
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

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
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        with_ecd: bool = False,
        from_bins: Callable[[BinStats], Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        reading = BinReading(task, n_bins, right, reduction, average)
        super().__init__(
            InputFormat(
                task,
                from_logits=from_logits,
                ignore_index=ignore_index,
                class_axis=class_axis,
                num_classes=count_of_outputs(task, num_classes, num_labels),
                validate_args=validate_args,
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
        statistic = self._synced_statistic()
        return BinTable.of(statistic, equal_width_edges(self.reading.n_bins, statistic.n))

    def _value(self, statistic: BinStats) -> Tensor:
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


class MCE(BinnedMetric):
    """Maximum calibration error, streamed; see `mce`."""

    from_bins = staticmethod(mce_from_bins)
    question = "how far is frequency from confidence in the worst bin"
    source = "Naeini et al., Bayesian Binning, AAAI 2015, sec. 2"


class RMSCE(BinnedMetric):
    """Root mean squared calibration error, streamed; see `rmsce`. `debiased`: subtract each bin's sampling variance."""

    from_bins = staticmethod(rmsce_from_bins)
    question = "how far is frequency from confidence, large gaps counting more"
    source = "Kumar et al., Verified Uncertainty Calibration, NeurIPS 2019, sec. 2"

    def __init__(self, *, debiased: bool = False, **options: Any) -> None:
        check_flag("debiased", debiased)
        super().__init__(from_bins=partial(rmsce_from_bins, debiased=debiased), **options)
