"""Truthful calibration measure: averaged two-bin calibration error (ATB)."""

from typing import Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.core.ranked import RankedSample
from torchcalib.functional.estimator import Estimator, metric_function
from torchcalib.functional.ranked import rank_based, ranked


def atb_from_sample(sample: RankedSample) -> Tensor:
    """Return the averaged two-bin calibration error `(...)` from a `RankedSample`; see `atb`."""
    s = sample.sorted()
    # The integrand is constant between adjacent confidences. The interval between tied confidences has width 0, so
    # that their order has no effect.
    zero = torch.zeros_like(s.drift[..., :1])
    lower = torch.cat((zero, s.drift), -1)
    upper = lower[..., -1:] - lower
    edges = torch.cat((zero, s.confidence.masked_fill(~s.counted, 1), torch.ones_like(zero)), -1)
    return (edges.diff(dim=-1) * (lower.square() + upper.square())).sum(-1)


@metric_function(
    rank_based(
        name="ATB",
        question="squared error over two bins, averaged over their boundary",
        source="Hartline, Hu & Wu, A Perfectly Truthful Calibration Measure, COLT 2026, arXiv 2508.13100",
        unit="squared probability",
    )
)
def atb(
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Averaged two-bin calibration error (ATB): squared error over two bins, averaged over their boundary.

    ATB = integral from 0 to 1 of (L(q)^2 + U(q)^2) dq, where L(q) is the sum of (p_i - y_i) / N over all samples with
    p_i < q, and U(q) is the sum over all others.

    ATB is truthful: if outcomes are independent, the true probabilities minimize its expected value. Other calibration
    errors, such as ECE and smECE, can be smaller on average for predictions that differ from the true probabilities.
    Report ATB if a person or a model is rewarded for a small calibration error.

    For true probabilities t, the expected value is ATB with y = t, plus mean(t (1 - t)) / N. The second term does not
    depend on the predictions, unless they select the event: for "top_label" and `TopK`, ATB is not truthful. Use
    "classwise" for multi-class tasks.

    ATB does not measure discrimination: always predicting mean(t) has the same expected value as predicting t. The
    square root of ATB has the unit of a probability. It is usually smaller than ECE, because residuals of both signs
    cancel in the two bins.

    Returns:
        A squared probability in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        With respect to the confidences. ATB is continuous, and differentiable if no confidences are equal. For equal
        confidences, the gradient is that for one order of the samples.

    Reference:
        Hartline, Hu, Wu: A Perfectly Truthful Calibration Measure (COLT 2026, PMLR 336, arXiv 2508.13100).

    Example:
        >>> atb(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0129)
    """
    return ranked(atb_from_sample, task, mode, average, options)
