"""Estimation error of bins, and the optimal bins with the smallest error.

[TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice
from torchcalib.core.bins import Distance, Norm, check_distance, estimation_errors, norm_over_bins
from torchcalib.core.events import Mode
from torchcalib.core.ranked_bins import Binning, Bins
from torchcalib.core.sums import BinStats
from torchcalib.core.tasks import infers_task
from torchcalib.functional.binned import BinnedEstimator, binned, ece_from_bins, error_over_bins
from torchcalib.functional.estimator import metric_function
from torchcalib.functional.test_based import mode_of_outcomes
from torchcalib.ops.host_values import largest
from torchcalib.ops.isotonic import Ties, Variant


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
        needs_whole_weights=True,
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
        n_min: Minimum size of a PAVA-BC block; see `tce`.
        n_max: Maximum size of a PAVA-BC block; see `tce`.
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
        n_min: Minimum size of a bin; see `tce`.
        n_max: Maximum size of a bin; see `tce`.
        variant: `"code"` follows the authors' code. `"paper"` follows Algorithms 2 and 3 exactly; see `tce`.
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
