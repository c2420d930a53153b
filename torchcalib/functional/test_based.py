"""Test-based (TCE) and generalised calibration error (GCE), the estimation error of bins, and optimal bins.

[TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_choice,
    check_choice_or_function,
    check_result,
    is_number,
    task_read_as,
)
from torchcalib.core.bins import Distance, Norm, TCETable, check_distance, estimation_errors, norm_over_bins
from torchcalib.core.events import Mode
from torchcalib.core.ranked_bins import Binning, Bins, RankedBins, Test, TestName, Ties, Variant
from torchcalib.core.sums import BinStats
from torchcalib.core.tasks import infers_task
from torchcalib.functional.binned import BinnedEstimator, binned, ece_from_bins, error_over_bins
from torchcalib.functional.estimator import metric_function
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import largest


def tce_from_bins(b: BinStats, alpha: float, test: Test, norm: Norm) -> Tensor:
    """Compute the test-based calibration error `(...)`: norm over bins of the percentage of rejected predictions."""
    # The number of rejections is piecewise constant and has no gradient.
    assert isinstance(b, RankedBins)  # `_tested` passes from_sample=True
    return norm_over_bins(100 * b.rejected(alpha, test) / b.n, b.n, norm).detach()


@metric_function(
    error_over_bins(
        name="TCE",
        question="percentage of predictions rejected by a test with the outcomes in their bin",
        source="Matsubara et al., TCE, UAI 2023, eq. 7, arXiv 2306.14343",
        unit="percent",
        value_range=(0.0, 100.0),
        needs_labels=True,
        diagram="torchcalib.plots.tce:tce_diagram",
    )
)
def tce(
    task: Task | None = None,
    *,
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
    """Test-based calibration error (TCE): percentage of predictions rejected by a test with the outcomes in their bin.

    TCE = 100 sum_b share_b r_b. Here share_b is the fraction of all samples in bin b, and r_b the fraction of the
    predictions in bin b that are rejected. For each prediction p, the null hypothesis is that outcomes in its bin have
    probability p. The test is the exact two-sided binomial test (`torchcalib.special.binomial_test`), with the same
    decisions as SciPy. Unlike a difference of probabilities, the test is equally strict for predictions of 0.001 and
    0.5.

    The levels of the tests hold for one look at the data: repeated looks at growing data give more false alarms. Use
    `sequential_test` for repeated looks.

    Args:
        target: Labels. Soft targets are not supported.
        bins: `"pava_bc"`: isotonic blocks of bounded size (pool-adjacent-violators algorithm with block constraints).
            `"pava"`: isotonic blocks. `"equal_mass"`: as in `ace`. `"equal_width"`: as in `ece`. Alternatively,
            increasing edges from 0 to 1.
        n_min: Minimum size of a PAVA-BC block. None means N // 20, at least 1, for N samples.
        n_max: Maximum size of a PAVA-BC block. None means N // 5, at least 1. There are exceptions to both limits.
            With `ties="pool"`, equal scores are not split. With "code", the final block may have up to `n_max + n_min`
            samples. With "paper", adjacent blocks with equal means are merged. If 2 n_min > n_max, the second to last
            block may have fewer than `n_min` samples.
        variant: `"code"` follows the authors' code, which produced the tables in the paper. `"paper"` follows
            Algorithms 2 and 3 exactly.
        alpha: Level of the test. A prediction is rejected if its p-value is at most `alpha`.
        test: Two-sided test. `"binomial"` is exact. `"t"` is the approximate Student's t-test of the labels in the bin
            against the prediction. (The t-test in the authors' code divides by the variance instead of the standard
            deviation.) Alternatively, a function `(successes, n, probability) -> p-values`. Its arguments are the
            number of events and of samples in the bin of each prediction, and the prediction: float64 tensors of one
            shape. It returns p-values in [0, 1] of this shape.
        norm: Norm over bins. `"l1"`: the percentage over all samples. `"l2"`: the root mean square of the percentages,
            weighted by bin size. `"max"`: the largest percentage. `"mean"`: the mean of the percentages of non-empty
            bins.
        mode: Event whose probability is the confidence; see `ece`. None is `"classwise"` for a multi-class task.
        ties: `"pool"` assigns samples with equal scores to the same bin, so the value is independent of their order.
            `"split"` assigns them in the given order, as the published code does.

    Returns:
        Percentage in [0, 100], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Raises:
        TypeError, ValueError: for invalid input, such as `n_min` above `n_max` or not below the number of samples. Also
            if `test` returns other than p-values.

    Gradient:
        None, because the value is piecewise constant in the predictions.

    Reference:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023),
        Definition 2, eq. 7, Algorithms 2 and 3, Remark 2.

    Example:
        >>> import torch
        >>> p = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])
        >>> tce(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2)
        tensor(50.)
        >>> def z_test(successes, n, probability):
        ...     z = (successes - n * probability) / (n * probability * (1 - probability)).sqrt()
        ...     return torch.erfc(z.abs() / 2**0.5)
        >>> tce(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2, test=z_test)
        tensor(50.)
    """
    binning = Binning.from_bins(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    return _tested(binning, alpha, test, norm, task, mode, average, options)


def _tested(
    binning: Binning,
    alpha: float,
    test: Test,
    norm: Norm,
    task: Task | None,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
) -> BinnedEstimator:
    if not is_number(alpha):
        raise TypeError(f"`alpha` must be a number, got {shown(alpha)}. The usual level is 0.05.")
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must be above 0 and below 1, got {alpha}. The usual level is 0.05.")
    check_choice_or_function("test", test, get_args(TestName), "(successes, n, probability) -> p-values")
    check_choice("norm", norm, get_args(Norm))
    formula, mode = partial(tce_from_bins, alpha=alpha, test=test, norm=norm), mode_of_outcomes(task, mode, options)
    how = {"from_sample": True, "hard_targets": True, "depends_on_samples": True}
    return binned(formula, binning, task, mode, average, options, **how)


def mode_of_outcomes(task: Task | None, mode: Mode | None, options: Mapping[str, Any]) -> Mode | None:
    """Return the mode, by default "classwise" for a multi-class task: [TCE] Remark 2."""
    return "classwise" if mode is None and task_read_as(task, options) == "multiclass" else mode


@infers_task
def tce_table(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
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
    """Compute a table of the bins of the test-based calibration error (TCE).

    The columns are bin edges, number of samples, fraction of all samples (`share`), mean confidence, frequency and gap.
    The last column is the number of rejected predictions. The method `estimation_error` gives the error of the
    frequencies as estimates of the outcomes; see `estimation_error`. `torchcalib.plots.tce_diagram` draws the
    test-based reliability diagram.

    Args:
        alpha: Level of the test. A prediction is rejected if its p-value is at most `alpha`.
        test: `"binomial"`, `"t"`, or a function; see `tce`.

    Returns:
        A `TCETable` with columns `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64. The property `tce`
        is the TCE with `norm="l1"`.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), fig. 1.

    Example:
        >>> import torch
        >>> p = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])
        >>> table = tce_table(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2)
        >>> table.rejected
        tensor([3., 0.], dtype=torch.float64)
    """
    binning = Binning.from_bins(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    estimator = _tested(binning, alpha, test, "l1", task, mode, "macro", options).with_ecd()
    sample = estimator.statistic(preds, target, options.get("weights"))
    return estimator.ranked_bins(sample).test_table(alpha, test)


def gce_from_bins(b: BinStats, loss: Callable[[BinStats], Tensor], norm: Norm) -> Tensor:
    """Compute the generalised calibration error `(...)`. Raise ValueError unless the loss is a tensor `(..., B)`."""
    advice = "Do not sum over bins; `norm` does this."
    return norm_over_bins(check_result("loss", loss(b), b.n.shape, "a loss for each bin", advice), b.n, norm)


@metric_function(
    error_over_bins(
        name="GCE",
        question="norm over bins of a user-defined loss",
        source="Matsubara et al., TCE, UAI 2023, Definition 1, arXiv 2306.14343",
        unit="unit of the loss",
        value_range=(-math.inf, math.inf),
    )
)
def gce(
    task: Task | None = None,
    *,
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
    """Generalised calibration error (GCE): norm over bins of a user-defined loss per bin.

    For `norm="l1"` it is sum_b share_b loss_b, where share_b is the fraction of samples in bin b. Special cases with
    `loss=lambda b: b.gap.abs()` are the expected calibration error (`ece`) for equal-width bins, and the adaptive
    calibration error (`ace`) for equal-mass bins. With `norm="max"` it is the maximum calibration error (`mce`).

    Args:
        loss: Function from bins to a loss per bin `(..., B)`. Its argument has the attributes `n`, `share`,
            `confidence`, `frequency` and `gap`, all `(..., B)`. Losses of empty bins are ignored.
        norm: `"l1"`: sum_b share_b loss_b. `"l2"`: sqrt(sum_b share_b loss_b^2). `"max"`: the largest loss. `"mean"`:
            the mean loss of non-empty bins, which have equal weight.

    Returns:
        `(...)`, or `(..., C)` with `average=None`, in the unit of the loss, in the dtype of `preds` (at least float32).
        NaN without data.

    Gradient:
        With respect to the confidences, for constant bins, if the loss is differentiable.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), Definition 1.

    Example:
        >>> import torch
        >>> p, y = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1])
        >>> gce(p, y, task="binary", loss=lambda b: b.gap.abs(), bins="equal_mass", n_bins=2)
        tensor(0.1500)
    """
    if not callable(loss):
        raise TypeError(
            f"`loss` must be a function from bins to a loss for each bin, got {shown(loss)}. "
            "Use lambda b: b.gap.abs(), for "
            "example."
        )
    check_choice("norm", norm, get_args(Norm))
    binning = Binning.from_bins(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    formula = partial(gce_from_bins, loss=loss, norm=norm)
    return binned(formula, binning, task, mode, average, options, from_sample=True)


def estimation_error_from_bins(b: BinStats, distance: Distance, delta: float, norm: Norm) -> Tensor:
    """Compute the norm over bins of the estimation error `(...)`; see `estimation_error`."""
    # The bins and their frequencies are piecewise constant in the predictions.
    return norm_over_bins(estimation_errors(b.frequency.detach(), distance, delta), b.n.detach(), norm)


@metric_function(
    error_over_bins(
        name="EstimationError",
        question="distance of the outcomes in bins to their frequency",
        source="Matsubara et al., TCE, UAI 2023, eq. 8, arXiv 2306.14343",
        unit="unit of the distance",
        value_range=(-math.inf, math.inf),
        noise_increases=False,
        has_test=False,
        needs_labels=True,
    )
)
def estimation_error(
    task: Task | None = None,
    *,
    bins: Bins | Sequence[float] | Tensor = "pava_bc",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    distance: Distance = "squared",
    delta: float = 0.5,
    norm: Norm = "l1",
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Estimation error of bins: distance of the outcomes in each bin to their frequency.

    The total error is sum_b W_b D_b. Here W_b is the fraction of the samples in bin b. D_b is the mean distance
    d(y, P_b) of the outcomes y in bin b to their frequency P_b, the estimate of the empirical probability. The error
    compares kinds of bins for the same predictions: a small one separates the outcomes well. It does not measure
    calibration, because it depends on the predictions only through the bins.

    Args:
        distance: Distance d(y, P). `"squared"`: (y - P)^2, for which D_b is the variance P_b (1 - P_b).
            `"absolute"`: |y - P|. `"huber"`: (y - P)^2 / 2 up to |y - P| = `delta`, and delta (|y - P| - delta / 2)
            above. Alternatively, a function `(outcome, probability) -> distances`. Its arguments are tensors of one
            shape with outcomes 0 or 1 and the frequencies of bins. It returns a tensor of this shape.
        delta: Threshold of the Huber loss, above 0. Other distances ignore it.
        norm: Norm over bins. `"l1"`: the total error. `"mean"`: the averaged error within bins, in which non-empty bins
            have equal weight. `"l2"`: the root mean square, weighted by bin size. `"max"`: the largest error.
        mode: Event whose probability is the confidence; see `ece`. None is `"classwise"` for a multi-class task.

    Returns:
        `(...)`, or `(..., C)` with `average=None`, in the unit of the distance, in the dtype of `preds` (at least
        float32): in [0, 1/4] for the squared distance, [0, 1/2] for the absolute one. NaN without data.

    Raises:
        TypeError, ValueError: for invalid input, or if `distance` does not return one distance for each bin.

    Gradient:
        None, because the value is piecewise constant in the predictions.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), eq. 8 and 9, and
        Table 1 for `norm="l1"` and `norm="mean"`.

    Example:
        >>> import torch
        >>> p, y = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.8, 0.9]), torch.tensor([0, 0, 1, 0, 1, 1])
        >>> estimation_error(p, y, task="binary", bins=[0, 0.5, 1])
        tensor(0.1250)
        >>> estimation_error(p, y, task="binary", bins=[0, 0.5, 1], norm="mean")
        tensor(0.0938)
    """
    check_distance(distance, delta)
    check_choice("norm", norm, get_args(Norm))
    binning = Binning.from_bins(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    formula = partial(estimation_error_from_bins, distance=distance, delta=delta, norm=norm)
    return binned(formula, binning, task, mode_of_outcomes(task, mode, options), average, options)


@infers_task
def optimal_bins(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Optimal bins: edges of the bins with the smallest estimation error among bins with increasing frequencies.

    The pool-adjacent-violators algorithm (PAVA) finds the bins that minimise the total squared `estimation_error`, if
    the frequencies of the bins must not decrease with the predictions. They are the bins of `bins="pava"`. Their edges
    can be used for other data: `bins=edges` in `tce`, `mce` and other functions.

    Args:
        mode: Event whose probability is the confidence; see `ece`. None is `"classwise"` for a multi-class task.

    Returns:
        Edges `(B + 1,)` of B bins `[a, b)` in float64, which increase from 0 to 1. The last bin contains 1. Inner edges
        are midpoints between adjacent predictions. With batch axes or classes, `(..., B + 1)`: those with fewer than B
        bins have NaN at the end, which `bins=edges[k]` ignores. All are NaN without data.

    Gradient:
        None.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), Definition 3.

    Example:
        >>> import torch
        >>> p, y = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.8, 0.9]), torch.tensor([0, 0, 1, 0, 1, 1])
        >>> edges = optimal_bins(p, y, task="binary")
        >>> edges
        tensor([0.0000, 0.2500, 0.6000, 1.0000], dtype=torch.float64)
        >>> from torchcalib.functional import mce
        >>> mce(torch.tensor([0.3, 0.7]), torch.tensor([0, 1]), task="binary", bins=edges)
        tensor(0.3000)
    """
    return _edges(Binning("pava"), preds, target, task, mode, options)


@infers_task
def near_optimal_bins(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Near-optimal bins: edges of isotonic bins of bounded size.

    They approximate `optimal_bins` by the pool-adjacent-violators algorithm with block constraints (PAVA-BC), and are
    the default bins of `tce`. `optimal_bins` describes the use of the edges for other data.

    Args:
        mode: Event whose probability is the confidence; see `ece`. None is `"classwise"` for a multi-class task.

    Returns:
        Edges `(B + 1,)`, or `(..., B + 1)`, in float64; see `optimal_bins`.

    Gradient:
        None.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), Algorithms 2
        and 3.

    Example:
        >>> import torch
        >>> p, y = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.8, 0.9]), torch.tensor([0, 0, 1, 0, 1, 1])
        >>> near_optimal_bins(p, y, task="binary", n_min=2, n_max=3)
        tensor([0.0000, 0.2500, 0.6000, 1.0000], dtype=torch.float64)
    """
    binning = Binning("pava_bc", n_min=n_min, n_max=n_max, variant=variant)
    return _edges(binning, preds, target, task, mode, options)


def _edges(
    binning: Binning, preds: Tensor, target: Tensor, task: Task | None, mode: Mode | None, options: Mapping[str, Any]
) -> Tensor:
    """Return the distinct edges `(..., B + 1)` of isotonic bins, with NaN at the end."""
    mode = mode_of_outcomes(task, mode, options)
    estimator = binned(ece_from_bins, binning, task, mode, "macro", options)
    bins = binning.from_sample(estimator.statistic(preds, target, options.get("weights")))
    edges = bins.edges.detach()
    # A bin without samples at the end has two edges of 1. Distinct logits may have equal probabilities, too.
    is_new = torch.cat((torch.ones_like(edges[..., :1], dtype=torch.bool), edges.diff(dim=-1) > 0), -1)
    is_new = is_new & (bins.total > 0).unsqueeze(-1)
    edges = edges.masked_fill(~is_new, torch.inf).sort(-1).values
    count = max(2, largest(is_new.sum(-1), edges.shape[-1]))
    return edges[..., :count].masked_fill(edges[..., :count] == torch.inf, torch.nan)
