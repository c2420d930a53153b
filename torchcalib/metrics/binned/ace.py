"""Adaptive calibration error."""

from typing import Any, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, task_read_as
from torchcalib.core.bins import ece_from_bins
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate
from torchcalib.ops.isotonic import Ties


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
        >>> import torch
        >>> ace(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        tensor(0.1500)
    """
    reading = BinReading(task_read_as(task, options), Binning("equal_mass", n_bins, ties=ties), reduction, average)
    return evaluate(ece_from_bins, reading, task, preds, target, options)


class ACE(BinnedMetric):
    """Adaptive calibration error, streamed; see `ace`. `resolution` keeps a sketch instead of every sample."""

    from_bins = staticmethod(ece_from_bins)
    question = "how far is frequency from confidence, on average, in bins of equally many samples"
    source = "Matsubara et al., TCE, UAI 2023, sec. 2"

    def __init__(self, *, n_bins: int = 15, ties: Ties = "pool", **options: Any) -> None:
        super().__init__(Binning("equal_mass", n_bins, ties=ties), **options)
