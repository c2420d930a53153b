"""Calibration error over bins, as a module; its function is `torchcalib.ece`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.events import Reduction
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import EqualWidthBins
from torchcalib.losses.engine import PenaltyLoss, averaged, reduction_of
from torchcalib.metrics.binned import ece_from_bins


@dataclass(frozen=True)
class HardBins:
    """Bins of equal width, in which a sample is a constant; see `torchcalib.ece`."""

    bins: EqualWidthBins

    def of(self, p: Predictions) -> Tensor:
        """Return the error."""
        return averaged(ece_from_bins(self.bins.of(p)), self.bins.reduction, "macro")

    def n_events(self, p: Predictions) -> int:
        """Return the number of events."""
        return self.bins.n_events(p)


class ECELoss(PenaltyLoss):
    """Expected calibration error of a batch as a module; see `torchcalib.ece` for what it measures.

    Its gradient moves the confidences of a bin together, towards the frequency there, and knows nothing of the bins
    beside it: of a small batch most bins hold few samples. `SoftBinnedECELoss` and `MMCELoss` are smoother.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins, reduction, right: see `torchcalib.ece`.
        **options: those of `PenaltyLoss`.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> penalty = ECELoss(task="multiclass", from_logits=True)
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0]], requires_grad=True), torch.tensor([0, 2])
        >>> loss = cross_entropy(logits, target) + 0.5 * penalty(logits, target)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        task: Task,
        n_bins: int = 15,
        reduction: Reduction | None = None,
        right: bool = False,
        **options: Any,
    ) -> None:
        reduction = reduction_of(task, options, reduction)
        binning = Binning("equal_width", n_bins, right)
        super().__init__(HardBins(EqualWidthBins(reduction, binning.n_bins, binning.right)), task=task, **options)
