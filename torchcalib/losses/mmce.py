"""Maximum mean calibration error: residuals of like confidences, weighed by a kernel."""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_average, check_flag, check_positive
from torchcalib.core.bins import root
from torchcalib.core.events import Reduction, n_events
from torchcalib.core.predictions import Predictions
from torchcalib.losses.engine import PenaltyLoss, averaged, claims, evaluate, reduction_of


@dataclass(frozen=True)
class LikeConfidences:
    """Pairs of claims of like confidence; see `mmce`."""

    reduction: Reduction
    average: Average | None
    bandwidth: float
    weighted: bool

    def __post_init__(self) -> None:
        check_average(self.average, self.reduction == "classwise")
        check_positive("bandwidth", self.bandwidth, at_least=1e-3)
        check_flag("weighted", self.weighted)

    def of(self, p: Predictions) -> Tensor:
        """Return the error."""
        confidence, outcome, weights = claims(p, self.reduction)
        weights = weights.expand(torch.broadcast_shapes(weights.shape, confidence.shape))  # type: ignore[no-untyped-call]
        if self.weighted:
            residual = _mean(1 - confidence, weights * outcome) - _mean(confidence, weights * (1 - outcome))
        else:
            residual = _mean(outcome - confidence, weights)
        confidence = confidence.expand_as(residual)
        # The order of ties would show in the gradient: with both orders it is that of |a - b|, 0 where they tie.
        one = laplacian_form(*_ascending(confidence, residual), self.bandwidth)
        other = laplacian_form(*_ascending(confidence.flip(-1), residual.flip(-1)), self.bandwidth)
        error = root(((one + other) / 2).clamp(min=0))
        return averaged(torch.where(weights.sum(-1) > 0, error, torch.nan), self.reduction, self.average)

    def n_events(self, p: Predictions) -> int:
        """Return the number of claims."""
        return n_events(p, self.reduction)


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    """Return what each sample adds to the weighted mean of x; 0 where nothing has weight."""
    total = weights.sum(-1, keepdim=True)
    return x * weights / total.masked_fill(total == 0, 1)


def _ascending(x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in ascending order of x, ties in the order in which they are."""
    order = x.detach().argsort(dim=-1, stable=True)
    return x.gather(-1, order), values.gather(-1, order)


def laplacian_form(x: Tensor, d: Tensor, bandwidth: float) -> Tensor:
    """Return sum_ij d_i d_j exp(-|x_i - x_j| / bandwidth) for ascending x in [0, 1], `(..., N)` to `(...)`.

    In one pass: the exponential of a difference is a product. Nothing cancels, for what stands before j is no larger.
    """
    rise = ((x - 0.5) / bandwidth).exp()
    until = (d * rise).cumsum(-1)
    before = torch.nn.functional.pad(until[..., :-1], (1, 0))
    return d.square().sum(-1) + 2 * (d * before / rise).sum(-1)


def mmce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bandwidth: float = 0.4,
    weighted: bool = False,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Maximum mean calibration error (MMCE), a penalty for training without bins.

    sqrt(sum_ij d_i d_j exp(-|c_i - c_j| / bandwidth)) / N over all pairs of samples, including i = j, with confidences
    c and residuals d = outcome - confidence. It is large where samples of similar confidence err in the same
    direction. For N samples of a calibrated model it is about sqrt(mean d^2 / N), the part of the pairs i = j.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bandwidth: of the Laplacian kernel, a probability of at least 0.001. The default is that of the authors' code,
            exp(-|c_i - c_j| / (2 * 0.2)).
        weighted: average the residuals of correct and of wrong predictions separately, so that the few mistakes of a
            good model weigh as much as its hits (MMCE_w).
        reduction: what the confidence is of, as for `torchcalib.ece`; None is the first that the task offers.
        average: `"macro"` averages class-wise and multi-label values; None returns `(..., C)`.
        **options: see `torchcalib.InputOptions`. Bad values are errors on the CPU, and elsewhere give NaN.

    Returns:
        In [0, 1], weighted [0, 2], `(...)`, in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; 0 where the value is 0, and for |c_i - c_j| where the two are equal.
        What came true is a constant. Exact in O(N log N) time and O(N) memory.

    Source:
        Kumar, Sarawagi, Jain: Trainable Calibration Measures for Neural Networks from Kernel Mean Embeddings (ICML
        2018): MMCE and, weighted, MMCE_w. A batch without mistakes, or without hits, has the MMCE_w of the outcome
        that it has; the authors' code returns 0 there.

    Example:
        >>> import torch
        >>> mmce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.1225)
    """
    penalty = LikeConfidences(reduction_of(task, options, reduction), average, bandwidth, weighted)
    return evaluate(penalty, task, preds, target, options)


class MMCELoss(PenaltyLoss):
    """Maximum mean calibration error as a module; see `mmce` for what it measures.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> penalty = MMCELoss(task="multiclass", from_logits=True, weighted=True)
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0]], requires_grad=True), torch.tensor([0, 2])
        >>> loss = cross_entropy(logits, target) + 0.5 * penalty(logits, target)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        task: Task,
        bandwidth: float = 0.4,
        weighted: bool = False,
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        penalty = LikeConfidences(reduction_of(task, options, reduction), "macro", bandwidth, weighted)
        super().__init__(penalty, task=task, **options)
