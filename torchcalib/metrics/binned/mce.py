"""Maximum calibration error."""

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, task_read_as
from torchcalib.core.bins import mce_from_bins
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning, Bins
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate


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
        >>> import torch
        >>> mce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    reading = BinReading(
        task_read_as(task, options), Binning.given(bins, n_bins=n_bins, right=right), reduction, average
    )
    return evaluate(mce_from_bins, reading, task, preds, target, options)


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
        super().__init__(Binning.given(bins, n_bins=n_bins, right=right), **options)
