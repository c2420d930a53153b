"""Calibration error over bins to which samples belong softly."""

from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_choice,
    check_count,
    check_positive,
)
from torchcalib.core.events import Reduction, n_events
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats
from torchcalib.losses.engine import PenaltyLoss, averaged, claims, evaluate, reduction_of
from torchcalib.metrics.binned import ece_from_bins, rmsce_from_bins

Norm = Literal["l1", "l2"]


@dataclass(frozen=True)
class SoftBins:
    """Soft bins and the error that is read from them; see `soft_binned_ece`."""

    reduction: Reduction
    average: Average | None
    n_bins: int
    temperature: float
    norm: Norm

    def __post_init__(self) -> None:
        check_average(self.average, self.reduction == "classwise")
        check_count("n_bins", self.n_bins, at_most=2**20)
        check_positive("temperature", self.temperature)
        check_choice("norm", self.norm, get_args(Norm))

    def of(self, p: Predictions) -> Tensor:
        """Return the error."""
        bins = self.stats(p)
        value = ece_from_bins(bins) if self.norm == "l1" else rmsce_from_bins(bins)
        return averaged(value, self.reduction, self.average)

    def stats(self, p: Predictions) -> BinStats:
        """Sum over bins, each sample in every bin by its share."""
        confidence, outcome, weights = claims(p, self.reduction)
        centers = (torch.arange(self.n_bins, dtype=confidence.dtype, device=confidence.device) + 0.5) / self.n_bins
        member = ((confidence.unsqueeze(-1) - centers).square() / -self.temperature).softmax(-1)
        n = weights.expand(torch.broadcast_shapes(weights.shape, confidence.shape))  # type: ignore[no-untyped-call]
        columns = torch.stack((n, n * confidence, n * outcome), -2)
        return BinStats(columns @ member)

    def n_events(self, p: Predictions) -> int:
        """Return the number of memberships."""
        return n_events(p, self.reduction) * self.n_bins


def soft_binned_ece(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    temperature: float = 0.01,
    norm: Norm = "l2",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Soft-binned calibration error, for training: bins that a confidence moves between smoothly.

    Each sample belongs to all bins, by softmax over them of -(confidence - centre)^2 / temperature. Of these bins it is
    the calibration error, sum share |gap|, or sqrt(sum share gap^2). As the temperature falls it becomes
    `torchcalib.ece` (or `rmsce`); unlike theirs its gradient knows that a confidence can leave its bin.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins over [0, 1]; their centres are used.
        temperature: softness of the bins, in squared probability. The source has no default; 0.01 is our choice.
        norm: `"l1"` or `"l2"`; `"l2"` is equation (11) of the source.
        reduction: what the confidence is of, as for `torchcalib.ece`; None is the first that the task offers.
        average: `"macro"` averages class-wise and multi-label values; None returns `(..., C)`.
        **options: see `torchcalib.InputOptions`. Bad values are errors on the CPU, and elsewhere give NaN.

    Returns:
        A probability in [0, 1], `(...)`, in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, everywhere and finite; 0 where the value is 0. What came true is a constant. O(N n_bins)
        time and memory.

    Source:
        Karandikar et al.: Soft Calibration Objectives for Neural Networks (NeurIPS 2021), sec. 4 (SB-ECE), eq. 11.

    Example:
        >>> import torch
        >>> soft_binned_ece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.2123)
    """
    penalty = SoftBins(reduction_of(task, options, reduction), average, n_bins, temperature, norm)
    return evaluate(penalty, task, preds, target, options)


class SoftBinnedECELoss(PenaltyLoss):
    """Soft-binned calibration error as a module; see `soft_binned_ece` for what it measures.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> penalty = SoftBinnedECELoss(task="multiclass", from_logits=True)
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0]], requires_grad=True), torch.tensor([0, 2])
        >>> loss = cross_entropy(logits, target) + 0.5 * penalty(logits, target)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        task: Task,
        n_bins: int = 15,
        temperature: float = 0.01,
        norm: Norm = "l2",
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        penalty = SoftBins(reduction_of(task, options, reduction), "macro", n_bins, temperature, norm)
        super().__init__(penalty, task=task, **options)
