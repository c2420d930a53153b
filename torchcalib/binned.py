"""Readings of equal-width bins: ECE, ESCE, MCE, RMSCE, and the table of the bins themselves.

A binned error is one line over `BinStats`; class-wise, batched and weighted values come out of the same line.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.predictions import (
    Average,
    InputFormat,
    InputOptions,
    Task,
    check_average,
    check_count,
    count_of_outputs,
)
from torchcalib.reductions import Reduction, resolve_reduction
from torchcalib.statistics import BinStats, EqualWidthBins
from torchcalib.streaming import StreamingMetric


class BinOptions(InputOptions, total=False):
    """How events are taken and binned; every binned error takes these as keywords, beside those of `InputOptions`.

    - `n_bins` (default 15): number of equal-width bins B over [0, 1].
    - `right` (default False): bins are `(a, b]` instead of `[a, b)`; 0 and 1 belong to the outer bins either way.
    - `reduction` (default None: the first that the task offers): what the confidence is of.
      `"positive_class"` (binary): P(y=1), and y. `"top_label"` (multi-class, binary): the largest probability, and
      whether that class is the true one; the first on ties. `"classwise"` (multi-class, multi-label): every class or
      label against the rest.
    - `average` (default "macro"): class-wise and multi-label values are averaged over classes; None returns `(..., C)`.
    """

    n_bins: int
    right: bool
    reduction: Reduction | None
    average: Average | None


def ece_from_bins(b: BinStats) -> Tensor:
    """Expected calibration error: sum share |gap|."""
    return (b.share * b.gap.abs()).sum(-1)


def esce_from_bins(b: BinStats) -> Tensor:
    """Expected signed calibration error: sum share gap."""
    return (b.share * b.gap).sum(-1)


def mce_from_bins(b: BinStats) -> Tensor:
    """Maximum calibration error: max |gap| over bins that hold data."""
    return b.gap.abs().amax(-1)


def rmsce_from_bins(b: BinStats, debiased: bool = False) -> Tensor:
    """Root mean squared calibration error: sqrt(sum share gap^2); see `rmsce` for `debiased`."""
    square = b.gap.square()
    if debiased:
        few = b.n < 2
        variance = b.frequency * (1 - b.frequency) / (b.n - 1).masked_fill(few, 1)
        square = square - variance.masked_fill(few, 0)
    total = (b.share * square).sum(-1).clamp(min=0)
    zero = total == 0  # where the slope of the root is infinite, and of no use
    return total.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


@dataclass(frozen=True)
class BinTable:
    """What every bin holds. All fields have shape `(..., B)`; an empty bin has n = 0, gap 0 and NaN means.

    Attributes:
        lower, upper: edges of the bin.
        n: sum of weights: the number of samples where all weights are 1.
        share: n / N.
        confidence: mean confidence.
        frequency: mean outcome.
        gap: frequency - confidence; positive is under-confident, for confidences above 0.5.
        ecd: mean entropic calibration difference, in nats.
    """

    lower: Tensor
    upper: Tensor
    n: Tensor
    share: Tensor
    confidence: Tensor
    frequency: Tensor
    gap: Tensor
    ecd: Tensor

    @classmethod
    def of(cls, b: BinStats) -> Self:
        """Read the table of equal-width bins."""
        n_bins = b.n.shape[-1]
        edges = torch.arange(n_bins + 1, dtype=b.n.dtype, device=b.n.device) / n_bins
        lower, upper = edges[:-1].expand(b.n.shape), edges[1:].expand(b.n.shape)
        return cls(lower, upper, b.n, b.share, b.confidence, b.frequency, b.gap, b.ecd)

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `table[k]` is the table of class k."""
        if self.n.dim() < 2:
            raise IndexError("a table of one series has no batch axis to index")
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def to_dict(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns as numpy arrays `(..., B)`."""
        return {field.name: getattr(self, field.name).detach().cpu().numpy() for field in fields(self)}

    def __str__(self) -> str:
        if self.n.dim() > 1:
            return "\n\n".join(f"[{index}]\n{self[index]}" for index in range(self.n.shape[0]))
        names = [field.name for field in fields(self)]
        lines = ["".join(f"{name:>12}" for name in names)]
        for row in zip(*(getattr(self, name).tolist() for name in names), strict=True):
            cells = dict(zip(names, row, strict=True))
            empty = cells["n"] == 0
            lines.append("".join(f"{_cell(name, cells[name], empty):>12}" for name in names))
        return "\n".join(lines)


def _cell(name: str, value: float, empty: bool) -> str:
    if empty and name not in ("lower", "upper", "n", "share"):
        return "-"
    return f"{value:.10g}" if name == "n" else f"{value:.4f}"


def bin_table(preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[BinOptions]) -> BinTable:
    """Table of the bins that a binned error is read from: n, share, confidence, frequency, gap, mean ECD, edges.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        **options: see `torchcalib.BinOptions` and `torchcalib.InputOptions`; `average` has no meaning here.

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
    return BinTable.of(_bins(preds, target, task=task, with_ecd=True, **options)[0])


def _bins(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    right: bool = False,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    with_ecd: bool = False,
    weights: Tensor | None = None,
    **options: Any,
) -> tuple[BinStats, bool, torch.dtype]:
    """Return the bins, whether values are to be averaged over classes, and the dtype of results."""
    check_count("n_bins", n_bins)
    input_format = InputFormat(task, **options)
    reduction = resolve_reduction(task, reduction)
    check_average(average, reduction == "classwise")
    p = input_format.read(preds, target, weights)
    bins = EqualWidthBins(reduction, n_bins, right, with_ecd).of(p)
    return bins, reduction == "classwise" and average is not None, p.dtype


def _evaluate(
    value: Callable[[BinStats], Tensor], preds: Tensor, target: Tensor, task: Task, options: BinOptions
) -> Tensor:
    bins, averaged, dtype = _bins(preds, target, task=task, **options)
    values = value(bins)
    return (values.mean(-1) if averaged else values).to(dtype)


def ece(preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[BinOptions]) -> Tensor:
    """Expected calibration error: how far, on average, frequency is from confidence.

    sum over bins of share |gap|, with gap = frequency - confidence. A mean of absolute values: it is
    above 0 for a finite sample of a calibrated model, and depends on the number of bins.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        **options: see `torchcalib.BinOptions` and `torchcalib.InputOptions`.

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
    return _evaluate(ece_from_bins, preds, target, task, options)


def esce(preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[BinOptions]) -> Tensor:
    """Expected signed calibration error: whether frequency is above (+) or below (-) confidence.

    sum over bins of share gap, which is mean(outcome) - mean(confidence) whatever the bins. Its sign means under- (+)
    or over-confidence (-) only where confidence is above 0.5, as for the top label.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        **options: see `torchcalib.BinOptions` and `torchcalib.InputOptions`.

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
    return _evaluate(esce_from_bins, preds, target, task, options)


def mce(preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[BinOptions]) -> Tensor:
    """Maximum calibration error: the largest |gap| of any bin that holds data.

    A bin of few samples counts as much as any other, so expect large values from small samples.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        **options: see `torchcalib.BinOptions` and `torchcalib.InputOptions`.

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
    return _evaluate(mce_from_bins, preds, target, task, options)


def rmsce(
    preds: Tensor, target: Tensor, *, task: Task, debiased: bool = False, **options: Unpack[BinOptions]
) -> Tensor:
    """Root mean squared calibration error: sqrt(sum share gap^2).

    The plug-in value is biased upwards, as every bin's frequency is noisy. `debiased` subtracts the estimated variance
    f (1 - f) / (n - 1) of each bin from its squared gap (bins with n < 2: nothing) and clamps the total at 0.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        debiased: subtract each bin's sampling variance.
        **options: see `torchcalib.BinOptions` and `torchcalib.InputOptions`.

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
    return _evaluate(partial(rmsce_from_bins, debiased=debiased), preds, target, task, options)


class BinnedMetric(StreamingMetric[BinStats]):
    """A reading of equal-width bins over a stream. The state is 4 sums a bin, for each class if class-wise.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `reduction="classwise"`, else only checked.
        num_labels: L of a multi-label task; needed.
        from_logits, ignore_index, class_axis, validate_args: see `torchcalib.InputOptions`.
        n_bins, right, reduction, average: see `torchcalib.BinOptions`.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
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
        **kwargs: Any,
    ) -> None:
        check_count("n_bins", n_bins)
        input_format = InputFormat(
            task,
            from_logits=from_logits,
            ignore_index=ignore_index,
            class_axis=class_axis,
            num_classes=count_of_outputs(task, num_classes, num_labels),
            validate_args=validate_args,
        )
        reduction = resolve_reduction(task, reduction)
        check_average(average, reduction == "classwise")
        super().__init__(input_format, EqualWidthBins(reduction, n_bins, right, with_ecd=True), batch_shape, **kwargs)
        self.averaged = reduction == "classwise" and average is not None

    def bin_table(self) -> BinTable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `bin_table`."""
        return BinTable.of(self._synced_statistic())

    def _value(self, statistic: BinStats) -> Tensor:
        values = self.from_bins(statistic)
        return values.mean(-1) if self.averaged else values


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
        super().__init__(**options)
        self.from_bins = partial(rmsce_from_bins, debiased=debiased)
