"""Calibration errors over bins of the confidence: ECE, ACE, ESCE, MCE, RMSCE, and the table of the bins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_average, check_flag, task_read_as
from torchcalib.core.bins import BinTable, equal_width_edges, root
from torchcalib.core.documentation import documented
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import Mode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.ranked import ExactSample, RankedSample, by_pieces
from torchcalib.core.ranked_bins import Binning, Bins
from torchcalib.core.sums import BinStats
from torchcalib.inference.testing import CalibrationTest, ErrorTest, evidence_of
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.estimator import Estimator, functional
from torchcalib.ops.isotonic import Ties


@dataclass(frozen=True, eq=False)
class BinnedEstimator(Estimator[BinStats | RankedSample]):
    """A function of bins.

    Attributes:
        binning: which bins.
    """

    binning: Binning

    @property
    def is_additive(self) -> bool:
        """Whether sums over bins are accumulated, rather than samples."""
        return isinstance(self.accumulator, EqualWidthBins)

    def values(self, statistic: BinStats | RankedSample, formula: Callable[[BinStats], Tensor] | None = None) -> Tensor:
        """Return the value of every batch element, by another formula if one is given."""
        from_bins = formula or self.formula
        if isinstance(statistic, RankedSample):
            return by_pieces(lambda sample: from_bins(self.binning.of(sample)), statistic)
        return from_bins(statistic)

    def table(self, statistic: BinStats | RankedSample) -> BinTable:
        """Return the table of the bins."""
        if isinstance(statistic, RankedSample):
            return self.binning.of(statistic).table()
        return BinTable.of(statistic, equal_width_edges(self.binning.n_bins, statistic.n))

    def streamed(self, num_classes: int | None, *, resolution: int | None = None, with_ecd: bool = False) -> Self:
        """Return the estimator of a stream; see `BinnedMetric`."""
        check_flag("with_ecd", with_ecd)
        made = super().streamed(num_classes, resolution=resolution)
        if not isinstance(made.accumulator, EqualWidthBins):
            if with_ecd:
                raise ValueError("`with_ecd` must be False for bins that depend on the sample, got True.")
            return made
        if resolution is not None:
            raise ValueError(
                f"`resolution` must be None for bins='equal_width', got {resolution!r}. Their state is constant."
            )
        return replace(made, accumulator=replace(made.accumulator, with_ecd=with_ecd, with_noise=True))


def binned(
    formula: Callable[[BinStats], Tensor],
    binning: Binning,
    task: Task,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
    *,
    from_sample: bool = False,
    hard_targets: bool = False,
) -> BinnedEstimator:
    """Return the estimator of a calibration error over bins.

    Args:
        formula: bins to the value `(...)` of every batch element.
        binning: which bins.
        task: the task of the input.
        mode: the event whose probability is the confidence.
        average: "macro", or None for a value for each class.
        options: those of `InputOptions`.
        from_sample: accumulate samples for equal-width bins, too.
        hard_targets: the formula counts labels.
    """
    mode = resolve_mode(task_read_as(task, options), mode)
    is_classwise = mode == "classwise"
    check_average(average, is_classwise)
    is_additive = binning.bins == "equal_width" and not from_sample
    demands = {"hard_targets": hard_targets or binning.is_isotonic, "whole_weights": not is_additive}
    accumulator = EqualWidthBins(mode, binning.n_bins, binning.right) if is_additive else ExactSample(mode)
    averages = is_classwise and average is not None
    return BinnedEstimator(input_format_of(task, options, **demands), accumulator, formula, averages, binning)


class BinnedMetric(CalibrationMetric[BinStats | RankedSample]):
    """A function of bins over a stream.

    The state of equal-width bins is 5 sums for each bin (6 with ECD) and class: weight, confidence, outcome, and two
    that give the sampling noise (`BinStats.spread`, `BinStats.noise`); and a number that tells labels from soft
    targets. Bins that depend on the sample keep it: 5 bytes for a sample of float32 (13 with weights), or with
    `resolution` a sketch of constant size.
    """

    stream_options = ("with_ecd", "resolution")
    estimator: BinnedEstimator

    from_bins: Callable[[BinStats], Tensor]
    """The formula with its default options."""
    tested_by: Callable[[BinStats], Tensor] | None = None
    """Formula of the test, if it is not that of the value. Larger values are less calibrated."""

    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    reads_elements = False
    """Whether the formula depends on every element of a bin, not on its sums alone."""

    def bin_table(self) -> BinTable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `calibration_curve`."""
        return self.estimator.table(self._synced_statistic())

    def test_from(
        self, statistic: BinStats | RankedSample, *, with_interval: bool = True, **how: Any
    ) -> CalibrationTest:
        """Return the evidence of a statistic such as this metric's, which may have further axes in front."""
        estimator = self.estimator
        depends_on_outcomes = estimator.binning.is_isotonic or self.reads_elements
        if isinstance(statistic, RankedSample) and not depends_on_outcomes and statistic.poisoned is None:
            statistic = estimator.binning.of(statistic).with_noise()
        test = ErrorTest(
            estimator.values,
            None if self.tested_by is None else partial(estimator.values, formula=self.tested_by),
            without_noise=None if depends_on_outcomes else "tested_by",
            signed=self.is_signed,
            with_interval=with_interval,
        )
        cancels = self.input_format.read_as == "multiclass"
        return evidence_of(test, statistic, average=estimator.averages, cancels=cancels, **how)


def ece_from_bins(b: BinStats) -> Tensor:
    """Expected calibration error: sum share |gap|."""
    return (b.share * b.gap.abs()).sum(-1)


def _ece(
    *,
    task: Task,
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Expected calibration error (ECE): the weighted mean of |frequency - confidence| over equal-width bins.

    sum_b share_b |gap_b|, with gap = frequency - confidence. It is positive for a finite sample of a calibrated model,
    and it depends on the number of bins.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; the bin of a sample is a constant.

    Source:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2.

    Example:
        >>> import torch
        >>> ece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    return binned(ece_from_bins, Binning("equal_width", n_bins, right), task, mode, average, options)


ece = functional(_ece)


class ECE(BinnedMetric):
    """Expected calibration error (ECE), streamed; see `ece`.

    Example:
        >>> import torch
        >>> metric = ECE(task="multiclass", num_classes=3, n_bins=5)
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0]]), torch.tensor([0, 2]))
        >>> metric.compute()
        tensor(0.6000, dtype=torch.float64)
    """

    factory = staticmethod(_ece)
    from_bins = staticmethod(ece_from_bins)
    question = "how far is frequency from confidence, on average"
    source = "Naeini et al., Bayesian Binning, AAAI 2015, sec. 2"


def _ace(
    *,
    task: Task,
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Adaptive calibration error (ACE): ECE over bins that hold equally many samples.

    The samples are sorted by their confidences; cut i of N of them is at `i * N // n_bins`. `weights` must be whole
    numbers: bins count copies.

    Args:
        ties: `"pool"` keeps samples of equal confidence in one bin, that of the first of them, so that the order of
            the samples does not matter; a bin may then hold more than its share, or nothing. `"split"` cuts through
            them in the given order, as the published code does.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype
        of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; the bin of a sample is a constant.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), sec. 2. (The
        adaptive error of Nixon et al., Measuring Calibration in Deep Learning, is class-wise: `mode="classwise"`.)

    Example:
        >>> import torch
        >>> ace(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        tensor(0.1500)
    """
    return binned(ece_from_bins, Binning("equal_mass", n_bins, ties=ties), task, mode, average, options)


ace = functional(_ace)


class ACE(BinnedMetric):
    """Adaptive calibration error (ACE), streamed; see `ace`. `resolution` keeps a sketch instead of every sample."""

    factory = staticmethod(_ace)
    from_bins = staticmethod(ece_from_bins)
    question = "how far is frequency from confidence, on average, in bins of equally many samples"
    source = "Matsubara et al., TCE, UAI 2023, sec. 2"


def esce_from_bins(b: BinStats) -> Tensor:
    """Expected signed calibration error: sum share gap."""
    return (b.share * b.gap).sum(-1)


def _esce(
    *,
    task: Task,
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Expected signed calibration error (ESCE): mean outcome less mean confidence.

    sum_b share_b gap_b, which is mean(outcome) - mean(confidence) for any bins. Its sign means under- (+) or
    over-confidence (-) only where confidence is above 0.5, as for the top label.

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
        >>> import torch
        >>> esce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.0667)
    """
    return binned(esce_from_bins, Binning("equal_width", n_bins, right), task, mode, average, options)


esce = functional(_esce)


class ESCE(BinnedMetric):
    """Expected signed calibration error (ESCE), streamed; see `esce`."""

    factory = staticmethod(_esce)
    from_bins = staticmethod(esce_from_bins)
    is_signed = True
    higher_is_better = None  # 0 is calibrated
    plot_lower_bound = -1.0
    question = "is frequency above (+) or below (-) confidence, on average"
    source = "Sumler et al., An Entropic Metric, sec. II"


def mce_from_bins(b: BinStats) -> Tensor:
    """Maximum calibration error: max |gap| over bins that hold data."""
    return b.gap.abs().amax(-1)


def _mce(
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Maximum calibration error (MCE): the largest |gap| of any bin that holds data.

    A bin of few samples counts as much as any other, so small samples have large values.

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
        >>> import torch
        >>> mce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    binning = Binning.given(bins, n_bins=n_bins, right=right)
    return binned(mce_from_bins, binning, task, mode, average, options)


mce = functional(_mce)


class MCE(BinnedMetric):
    """Maximum calibration error (MCE), streamed; see `mce`."""

    factory = staticmethod(_mce)
    from_bins = staticmethod(mce_from_bins)
    question = "how far is frequency from confidence in the worst bin"
    source = "Naeini et al., Bayesian Binning, AAAI 2015, sec. 2"


def rmsce_from_bins(b: BinStats, debiased: bool = False) -> Tensor:
    """Root mean squared calibration error: sqrt(sum share gap^2); see `rmsce` for `debiased`."""
    square = b.gap.square()
    if debiased:
        few = b.n < 2
        variance = b.frequency * (1 - b.frequency) / (b.n - 1).masked_fill(few, 1)
        square = square - variance.masked_fill(few, 0)
    return root((b.share * square).sum(-1).clamp(min=0))


def _rmsce(
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    debiased: bool = False,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Root mean squared calibration error (RMSCE): sqrt(sum_b share_b gap_b^2).

    The plug-in value is biased upwards, because every bin's frequency is noisy.

    Args:
        debiased: Subtract the estimated variance f (1 - f) / (n - 1) of each bin from its squared gap (nothing for bins
            with n < 2), and clamp the total at 0.

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
        >>> import torch
        >>> rmsce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    check_flag("debiased", debiased)
    binning = Binning.given(bins, n_bins=n_bins, right=right)
    return binned(partial(rmsce_from_bins, debiased=debiased), binning, task, mode, average, options)


rmsce = functional(_rmsce)


class RMSCE(BinnedMetric):
    """Root mean squared calibration error (RMSCE), streamed; see `rmsce`."""

    factory = staticmethod(_rmsce)
    from_bins = staticmethod(rmsce_from_bins)
    tested_by = staticmethod(rmsce_from_bins)  # the debiased value is 0 for about every second calibrated model
    question = "how far is frequency from confidence, large gaps counting more"
    source = "Kumar et al., Verified Uncertainty Calibration, NeurIPS 2019, sec. 2"


@documented
def calibration_curve(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    mode: Mode | None = None,
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinTable:
    """Table of the bins of a calibration error: n, share, confidence, frequency, gap, mean ECD, edges, and the band
    in which the frequencies of a calibrated model lie.

    Returns:
        A `BinTable` of `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, Tables I-II.

    Example:
        >>> import torch
        >>> table = calibration_curve(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        >>> print(table.to_dict()["gap"].round(4), table.to_dict()["ecd"].round(4))
        [-0.2  0.2] [-0.2773 -0.237 ]
        >>> preds, target = torch.full((100,), 0.8), torch.tensor([0, 1, 1, 1]).repeat(25)
        >>> table = calibration_curve(preds, target, task="binary", n_bins=2)
        >>> print(table)
              lower      upper          n      share confidence  frequency        gap        ecd   band_low  band_high
             0.0000     0.5000          0     0.0000          -          -          -          -          -          -
             0.5000     1.0000        100     1.0000     0.8000     0.7500    -0.0500     0.0693     0.7200     0.8800
    """
    estimator = binned(ece_from_bins, Binning.given(bins, n_bins=n_bins, right=right), task, mode, "macro", options)
    return estimator.table(table_statistic(estimator, preds, target, options))


def table_statistic(
    estimator: BinnedEstimator, preds: Tensor, target: Tensor, options: Mapping[str, Any]
) -> BinStats | RankedSample:
    """Return the statistic of a table: for equal-width bins with the sums of noise and ECD."""
    accumulator: Any = estimator.accumulator
    if estimator.is_additive:
        accumulator = replace(accumulator, with_ecd=True, with_noise=True)
    statistic: BinStats | RankedSample = accumulator.of(
        estimator.input_format.read(preds, target, options.get("weights"))
    )
    return statistic
