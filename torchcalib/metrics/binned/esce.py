"""Expected signed calibration error."""

from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, task_read_as
from torchcalib.core.bins import esce_from_bins
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate


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
        reduction: what the confidence is of; see `ece`.
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
        >>> import torch
        >>> esce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.0667)
    """
    reading = BinReading(task_read_as(task, options), Binning("equal_width", n_bins, right), reduction, average)
    return evaluate(esce_from_bins, reading, task, preds, target, options)


class ESCE(BinnedMetric):
    """Expected signed calibration error, streamed; see `esce`."""

    from_bins = staticmethod(esce_from_bins)
    is_signed = True
    higher_is_better = None  # 0 is calibrated
    plot_lower_bound = -1.0
    question = "is frequency above (+) or below (-) confidence, on average"
    source = "Sumler et al., An Entropic Metric, sec. II"
