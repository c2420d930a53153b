"""Root mean squared calibration error."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_flag, task_read_as
from torchcalib.core.bins import rmsce_from_bins
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning, Bins
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate


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
        >>> import torch
        >>> rmsce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    check_flag("debiased", debiased)
    reading = BinReading(
        task_read_as(task, options), Binning.given(bins, n_bins=n_bins, right=right), reduction, average
    )
    return evaluate(partial(rmsce_from_bins, debiased=debiased), reading, task, preds, target, options)


class RMSCE(BinnedMetric):
    """Root mean squared calibration error, streamed; see `rmsce`. `debiased`: subtract each bin's sampling variance."""

    tested_by = staticmethod(rmsce_from_bins)  # the debiased value is 0 for about every second calibrated model
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
        super().__init__(binning, partial(rmsce_from_bins, debiased=debiased), **options)
