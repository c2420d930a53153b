"""Test-based calibration error: the percentage of predictions that the outcomes of their bin refute."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack, get_args

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, is_number, task_read_as
from torchcalib.core.bins import TCETable
from torchcalib.core.events import Reduction
from torchcalib.core.ranked import RankedSample
from torchcalib.core.ranked_bins import Binning, Bins, Norm, RankedBins, Test, norm_over_bins
from torchcalib.core.sums import BinStats
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate, statistic_of
from torchcalib.ops.isotonic import Ties, Variant


def tce_from_bins(b: BinStats, alpha: float, test: Test, norm: Norm) -> Tensor:
    """Test-based calibration error: the norm over bins of the percentage of a bin's samples that the test rejects."""
    # Counts of decisions: without `detach` the value would require a gradient that is zero everywhere.
    return norm_over_bins(partial(_rejected_percent, alpha=alpha, test=test), b, norm).detach()


def _rejected_percent(b: BinStats, alpha: float, test: Test) -> Tensor:
    assert isinstance(b, RankedBins)  # that is what a sample is cut into, and `from_sample` asks for one
    return 100 * b.rejected(alpha, test) / b.n


def tce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "pava_bc",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    alpha: float = 0.05,
    test: Test = "binomial",
    norm: Norm = "l1",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Test-based calibration error: the percentage of predictions that the outcomes of their bin refute.

    Every prediction is the hypothesis that the outcomes of its bin come true with that probability, and the exact
    two-sided binomial test (`torchcalib.binomial_test`) is made of it; every decision is that of scipy.
    Unlike a difference of probabilities this judges a prediction of 0.001 as strictly as one of 0.5.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: integer labels.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bins: `"pava_bc"`: isotonic blocks of bounded size; `"pava"`: isotonic blocks, neighbours of equal mean merged;
            `"equal_mass"`, as in `ace`; `"equal_width"`, as in `ece`; or edges that rise from 0 to 1.
        n_bins: number of equal-mass or equal-width bins.
        n_min: least size of a PAVA-BC block. Default: N // 20, at least 1.
        n_max: greatest size of a PAVA-BC block. Default: N // 5, at least 1. A block breaks the two bounds only where
            ties or the variant force it: a group of equal scores is never split (`ties="pool"`); the final block of
            "code" may hold up to `n_max + n_min`; "paper" merges neighbours of equal mean; and where 2 n_min > n_max,
            the block before the final one may be short.
        variant: `"code"` follows the authors' code, which made the tables of the paper; `"paper"` follows Algorithm 2
            and 3 to the letter.
        alpha: level of the test; a prediction is rejected if its p-value is at most this.
        test: `"binomial"`, or `"t"` for Student's t-test of the bin's labels against the prediction, which is only
            approximate. (The authors' code offers a t-test too, but divides by the variance, not its root.)
        norm: over bins: `"l1"` is the share of all samples that are rejected; `"l2"` is the root of the weighted mean
            square of the bins' shares; `"max"` is the share of the worst bin.
        reduction: what the confidence is of; see `ece`. None is `"classwise"` for a multi-class task.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: equal-width bins, and those of given edges, are `(a, b]` instead of `[a, b)`.
        ties: `"pool"` takes samples of equal score together, so that the order of the samples does not matter;
            `"split"` takes them in the order given, as the published code does.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers. `positive_classes` is the K-vs-rest
            of the paper.

    Returns:
        Percent in [0, 100], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input, such as `n_min` above `n_max` or not below the number of samples; the
            message says what must hold.

    Gradient:
        None: a count of decisions.

    Source:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), eq. 7,
        Algorithms 2 and 3, Remark 2.

    Example:
        >>> import torch
        >>> p = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])
        >>> tce(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2)
        tensor(50.)
    """
    _check_test(alpha, test)
    check_choice("norm", norm, get_args(Norm))
    binning = Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    reading = _reading(task, options, binning, reduction, average)
    return evaluate(partial(tce_from_bins, alpha=alpha, test=test, norm=norm), reading, task, preds, target, options)


def tce_table(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "pava_bc",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    alpha: float = 0.05,
    test: Test = "binomial",
    reduction: Reduction | None = None,
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> TCETable:
    """Table of the bins that TCE is read from: edges, n, share, confidence, frequency, gap, how many are rejected.

    Args are those of `tce`.

    Returns:
        A `TCETable` of `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64. Its `tce` is that of
        `norm="l1"`, and `torchcalib.tce_diagram` draws it. Its column `ecd` is NaN.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), fig. 1.

    Example:
        >>> import torch
        >>> p = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])
        >>> table = tce_table(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2)
        >>> table.rejected
        tensor([3., 0.], dtype=torch.float64)
    """
    _check_test(alpha, test)
    binning = Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    reading = _reading(task, options, binning, reduction)
    return _table(reading, statistic_of(reading, task, preds, target, options), alpha, test)


def _check_test(alpha: float, test: Test) -> None:
    if not is_number(alpha):
        raise TypeError(f"`alpha` must be a number, got {alpha!r}.")
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must lie between 0 and 1, both excluded, got {alpha}. 0.05 is usual.")
    check_choice("test", test, get_args(Test))


def _one_against_rest(task: Task, reduction: Reduction | None) -> Reduction | None:
    """Each class against the rest, averaged, is how [TCE] Remark 2 extends it to several classes."""
    return "classwise" if task == "multiclass" and reduction is None else reduction


def _reading(
    task: Task, options: InputOptions, binning: Binning, reduction: Reduction | None, average: Average | None = "macro"
) -> BinReading:
    read_as = task_read_as(task, options)
    reduction = _one_against_rest(read_as, reduction)
    return BinReading(read_as, binning, reduction, average, from_sample=True, hard_targets=True)


def _table(reading: BinReading, sample: BinStats | RankedSample, alpha: float, test: Test) -> TCETable:
    assert isinstance(sample, RankedSample)  # that is what `from_sample` asks for
    return reading.binning.of(sample).test_table(alpha, test)


class TCE(BinnedMetric):
    """Test-based calibration error in percent, streamed; see `tce`.

    Example:
        >>> import torch
        >>> metric = TCE(task="binary", bins="equal_width", n_bins=2)
        >>> metric.update(torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9]), torch.tensor([1, 1, 1, 1, 1, 1]))
        >>> metric.compute()
        tensor(50., dtype=torch.float64)
    """

    from_sample = True
    reads_elements = True
    hard_targets = True
    is_differentiable = False
    unit = "percent"
    plot_upper_bound = 100.0
    question = "which share of predictions do the outcomes of their bin refute"
    source = "Matsubara et al., TCE, UAI 2023, eq. 7"

    def __init__(
        self,
        *,
        task: Task,
        bins: Bins | Sequence[float] | Tensor = "pava_bc",
        n_bins: int = 15,
        n_min: int | None = None,
        n_max: int | None = None,
        variant: Variant = "code",
        alpha: float = 0.05,
        test: Test = "binomial",
        norm: Norm = "l1",
        reduction: Reduction | None = None,
        right: bool = False,
        ties: Ties = "pool",
        **options: Any,
    ) -> None:
        _check_test(alpha, test)
        check_choice("norm", norm, get_args(Norm))
        super().__init__(
            Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties),
            partial(tce_from_bins, alpha=alpha, test=test, norm=norm),
            task=task,
            reduction=_one_against_rest(task_read_as(task, options), reduction),
            **options,
        )
        self.alpha, self.test = alpha, test

    def table(self) -> TCETable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `tce_table`."""
        return _table(self.reading, self._synced_statistic(), self.alpha, self.test)
