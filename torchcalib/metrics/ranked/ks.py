"""Kolmogorov-Smirnov calibration error."""

from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, task_read_as
from torchcalib.core.events import Reduction
from torchcalib.core.ranked import RankedSample
from torchcalib.metrics.ranked.reading import RankedReading, TestedRankedMetric, evaluate

DriftNorm = Literal["max", "range"]


def ks_from_sample(sample: RankedSample, norm: DriftNorm = "max") -> Tensor:
    """Kolmogorov-Smirnov calibration error `(...)`: max |cumulative difference of outcomes and probabilities|.

    It is looked at where the score changes. Kuiper's is the largest difference less the least, of which one, before the
    first sample, is 0.
    """
    s = sample.sorted()
    gap = s.positives - s.confidence * (1 if s.n is None else s.n)
    total = s.total.unsqueeze(-1)
    cumulative = gap.masked_fill(~s.counted, 0).cumsum(-1) / total
    is_last = torch.cat((s.begins[..., 1:], torch.ones_like(s.begins[..., :1])), -1)
    # Without data nothing is masked: every sum is 0 / 0, and the value NaN.
    drift = cumulative.masked_fill(~is_last & (total > 0), 0)
    if norm == "max":
        return drift.abs().amax(-1)
    return drift.amax(-1).clamp(min=0) - drift.amin(-1).clamp(max=0)


def ks(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    norm: DriftNorm = "max",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Kolmogorov-Smirnov calibration error: how far outcomes and probabilities drift apart, summed by score.

    max over j of |sum_{i <= j} (y_i - p_i)| / N, samples in ascending order of p. It needs no bins. Samples of equal
    score carry no order, so the sums are looked at only behind the last of them.

    Kuiper's statistic is the range of the same sums, 0 among them: it also sees a drift up that another one ends.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        norm: of the sums: `"max"`, the largest |sum|, or `"range"`, the largest less the least (Kuiper), which is at
            least that and at most twice.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data. At least |ESCE|.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences up to the one where the maximum (and the minimum) is reached (shared evenly on ties).

    Source:
        Gupta et al.: Calibration of Neural Networks using Splines (ICLR 2021), sec. 3; ties are pooled here. Range:
        Arrieta-Ibarra et al.: Metrics of Calibration for Probabilistic Predictions (JMLR 2022), as ECCE-R.

    Example:
        >>> ks(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0667)
    """
    reading = RankedReading(task_read_as(task, options), reduction, average)
    check_choice("norm", norm, get_args(DriftNorm))
    return evaluate(partial(ks_from_sample, norm=norm), reading, task, preds, target, options)


class KS(TestedRankedMetric):
    """Kolmogorov-Smirnov calibration error, streamed; see `ks`. `resolution` keeps a sketch instead of every sample.

    Args:
        norm: `"max"`, or `"range"` for Kuiper's statistic.
        **options: those of `RankedMetric`.
    """

    question = "how far do outcomes and probabilities drift apart, summed by score"
    source = "Gupta et al., Calibration using Splines, ICLR 2021, sec. 3"

    def __init__(self, *, norm: DriftNorm = "max", **options: Any) -> None:
        check_choice("norm", norm, get_args(DriftNorm))
        super().__init__(**options)
        self.norm = norm

    def from_sample(self, sample: RankedSample) -> Tensor:
        """Read the value of one series."""
        return ks_from_sample(sample, self.norm)
