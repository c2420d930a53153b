"""Test-based calibration error (TCE), and its general form: a norm over bins of a loss of each bin."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, get_args

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, is_number, task_read_as
from torchcalib.core.bins import TCETable
from torchcalib.core.documentation import documented
from torchcalib.core.events import Mode
from torchcalib.core.ranked import RankedSample
from torchcalib.core.ranked_bins import Binning, Bins, Norm, RankedBins, Test, norm_over_bins
from torchcalib.core.sums import BinStats, Sums
from torchcalib.metrics.binned import BinnedEstimator, BinnedMetric, binned
from torchcalib.metrics.estimator import functional
from torchcalib.ops.isotonic import Ties, Variant


def tce_from_bins(b: BinStats, alpha: float, test: Test, norm: Norm) -> Tensor:
    """Test-based calibration error: the norm over bins of the percentage of a bin's samples that the test rejects."""
    # Counts of decisions: without `detach` the value would require a gradient that is zero everywhere.
    return norm_over_bins(partial(_rejected_percent, alpha=alpha, test=test), b, norm).detach()


def _rejected_percent(b: BinStats, alpha: float, test: Test) -> Tensor:
    assert isinstance(b, RankedBins)  # that is what a sample is cut into, and `from_sample` asks for one
    return 100 * b.rejected(alpha, test) / b.n


def _tce(
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
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Test-based calibration error: the percentage of predictions that the outcomes of their bin refute.

    Every prediction is the hypothesis that the outcomes of its bin come true with that probability, and the exact
    two-sided binomial test (`torchcalib.special.binomial_test`) is made of it; every decision is that of scipy.
    Unlike a difference of probabilities this judges a prediction of 0.001 as strictly as one of 0.5.

    Args:
        target: integer labels.
        bins: `"pava_bc"`: isotonic blocks of bounded size; `"pava"`: isotonic blocks, neighbours of equal mean merged;
            `"equal_mass"`, as in `ace`; `"equal_width"`, as in `ece`; or edges that rise from 0 to 1.
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
        mode: what the confidence is of; see `ece`. None is `"classwise"` for a multi-class task.
        ties: `"pool"` takes samples of equal score together, so that the order of the samples does not matter;
            `"split"` takes them in the order given, as the published code does.

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
    return _tested(partial(tce_from_bins, alpha=alpha, test=test, norm=norm), binning, task, mode, average, options)


def _tested(
    formula: Callable[[BinStats], Tensor],
    binning: Binning,
    task: Task,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
) -> BinnedEstimator:
    if mode is None and task_read_as(task, options) == "multiclass":
        mode = "classwise"  # [TCE] Remark 2: each class against the rest, averaged
    return binned(formula, binning, task, mode, average, options, from_sample=True, hard_targets=True)


tce = functional(_tce)


def _check_test(alpha: float, test: Test) -> None:
    if not is_number(alpha):
        raise TypeError(f"`alpha` must be a number, got {alpha!r}.")
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must lie between 0 and 1, both excluded, got {alpha}. 0.05 is usual.")
    check_choice("test", test, get_args(Test))


class TCE(BinnedMetric):
    """Test-based calibration error in percent, streamed; see `tce`.

    Example:
        >>> import torch
        >>> metric = TCE(task="binary", bins="equal_width", n_bins=2)
        >>> metric.update(torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9]), torch.tensor([1, 1, 1, 1, 1, 1]))
        >>> metric.compute()
        tensor(50., dtype=torch.float64)
    """

    factory = staticmethod(_tce)
    reads_elements = True
    is_differentiable = False
    unit = "percent"
    plot_upper_bound = 100.0
    question = "which share of predictions do the outcomes of their bin refute"
    source = "Matsubara et al., TCE, UAI 2023, eq. 7"

    def table(self) -> TCETable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `tce_table`."""
        return _table(self.estimator, self._synced_statistic(), self.settings["alpha"], self.settings["test"])


def _table(estimator: BinnedEstimator, sample: Sums | RankedSample, alpha: float, test: Test) -> TCETable:
    assert isinstance(sample, RankedSample)  # `from_sample` accumulates one
    return estimator.binning.of(sample).test_table(alpha, test)


@documented
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
    mode: Mode | None = None,
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> TCETable:
    """Table of the bins that TCE is read from: edges, n, share, confidence, frequency, gap, how many are rejected.

    Args are those of `tce`.

    Returns:
        A `TCETable` of `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64. Its `tce` is that of
        `norm="l1"`, and `torchcalib.plots.tce_diagram` draws it. Its column `ecd` is NaN.

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
    estimator = _tested(
        partial(tce_from_bins, alpha=alpha, test=test, norm="l1"), binning, task, mode, "macro", options
    )
    sample = estimator.accumulator.of(estimator.input_format.read(preds, target, options.get("weights")))
    return _table(estimator, sample, alpha, test)


def gce_from_bins(b: BinStats, loss: Callable[[BinStats], Tensor], norm: Norm) -> Tensor:
    """Generalised calibration error: the norm over bins of a loss of each; raise unless it gives one for each."""

    def checked(bins: BinStats) -> Tensor:
        value = loss(bins)
        if not isinstance(value, Tensor) or value.shape != bins.n.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"`loss` must return a tensor with a loss for each bin, shape {tuple(bins.n.shape)}, got {found}. "
                "Do not sum over bins: `norm` does."
            )
        return value

    return norm_over_bins(checked, b, norm)


def _gce(
    *,
    task: Task,
    loss: Callable[[BinStats], Tensor],
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    norm: Norm = "l1",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Generalised calibration error: a loss of one's own in every bin, and a norm over the bins.

    ECE is `loss=lambda b: b.gap.abs()` over equal-width bins, ACE the same over equal-mass bins, MCE with `norm="max"`.

    Args:
        loss: from bins to a loss each, `(..., B)`. It is given what every bin holds: `n`, `share`, `confidence`,
            `frequency`, `gap`, all `(..., B)`. An empty bin does not count, whatever its loss.
        norm: `"l1"`: sum share loss; `"l2"`: sqrt(sum share loss^2); `"max"`: the greatest.

    Returns:
        What the loss is measured in, `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, as far as the loss has one; the bin a sample falls in is a constant.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), Definition 1.

    Example:
        >>> import torch
        >>> p, y = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1])
        >>> gce(p, y, task="binary", loss=lambda b: b.gap.abs(), bins="equal_mass", n_bins=2)
        tensor(0.1500)
    """
    if not callable(loss):
        raise TypeError(f"`loss` must be a function from bins to a loss each, got {loss!r}. Try lambda b: b.gap.abs().")
    check_choice("norm", norm, get_args(Norm))
    binning = Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    formula = partial(gce_from_bins, loss=loss, norm=norm)
    return binned(formula, binning, task, mode, average, options, from_sample=True)


gce = functional(_gce)


class GCE(BinnedMetric):
    """Generalised calibration error, streamed; see `gce`. A `loss` that is a lambda does not pickle."""

    factory = staticmethod(_gce)
    unit = "of the loss"
    plot_lower_bound = None
    plot_upper_bound = None
    question = "how large is a user-defined loss over the bins"
    source = "Matsubara et al., TCE, UAI 2023, Definition 1"
