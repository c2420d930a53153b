"""Expected calibration error."""

from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, task_read_as
from torchcalib.core.bins import ece_from_bins
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate


def ece(
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
    """Expected calibration error: how far, on average, frequency is from confidence.

    sum over bins of share |gap|, with gap = frequency - confidence. A mean of absolute values: it is
    above 0 for a finite sample of a calibrated model, and depends on the number of bins.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins B over [0, 1].
        reduction: what the confidence is of; None is the first that the task offers. `"positive_class"` (binary):
            P(y=1), and y. `"top_label"` (multi-class, binary): the largest probability, and whether that class is the
            true one; the first on ties. `"classwise"` (multi-class, multi-label): each class or label against the rest.
            `TopK(k)` (multi-class): the k most probable classes together, and whether the true one is among them.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: bins are `(a, b]` instead of `[a, b)`; 0 and 1 belong to the outer bins either way.
        **options: see `torchcalib.InputOptions`.

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
        >>> import torch
        >>> ece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    reading = BinReading(task_read_as(task, options), Binning("equal_width", n_bins, right), reduction, average)
    return evaluate(ece_from_bins, reading, task, preds, target, options)


class ECE(BinnedMetric):
    """Expected calibration error, streamed; see `ece`.

    Example:
        >>> import torch
        >>> metric = ECE(task="multiclass", num_classes=3, n_bins=5)
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0]]), torch.tensor([0, 2]))
        >>> metric.compute()
        tensor(0.6000, dtype=torch.float64)
    """

    from_bins = staticmethod(ece_from_bins)
    question = "how far is frequency from confidence, on average"
    source = "Naeini et al., Bayesian Binning, AAAI 2015, sec. 2"
