"""Penalties of the whole vector of probabilities; as functions they are `torchcalib.canonical_error` and `skce`."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchcalib.core.arguments import Task, check_task, task_read_as
from torchcalib.core.predictions import Predictions
from torchcalib.losses.engine import PenaltyLoss
from torchcalib.metrics.canonical import DirichletReading
from torchcalib.metrics.kernel import KernelReading
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.pairwise import Kernel


@dataclass(frozen=True)
class OthersNearby:
    """What came true of the others of each prediction, by a kernel; see `torchcalib.canonical_error`."""

    reading: DirichletReading

    def of(self, p: Predictions) -> Tensor:
        """Return the error; a sample that is alone in its batch counts as an other of itself."""
        weights = p.weights
        if weights is None:
            weights = torch.ones(p.samples, dtype=wide_dtype(p.given.device), device=p.given.device)
        alone = weights.sum(-1, keepdim=True) == 1
        value = self.reading.of(p.weighed(torch.where(alone, 2 * weights, weights)))
        return value.mean(-1) if p.task == "multilabel" else value

    def n_events(self, p: Predictions) -> int:
        """Return the number of probabilities."""
        return p.given.numel()


@dataclass(frozen=True)
class AllPairs:
    """Residuals of like predictions, over all pairs of samples; see `torchcalib.skce`."""

    reading: KernelReading

    def of(self, p: Predictions) -> Tensor:
        """Return the squared error."""
        return self.reading.averaged(self.reading.of(p))

    def n_events(self, p: Predictions) -> int:
        """Return the number of probabilities."""
        return p.given.numel()


class CanonicalLoss(PenaltyLoss):
    """Canonical calibration error of a batch as a module; see `torchcalib.canonical_error` for what it measures.

    Of the whole vector of probabilities, where other penalties look at the top label. A sample that is alone in its
    batch is held against its own label, as the other penalties have it. Time O(N^2 C) for a batch of N.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        p: 1 or 2.
        bandwidth: a number above 0; or "likelihood", which chooses one for each batch, as the source does, and costs
            about 20 times as much. The default 0.02 is our choice.
        **options: those of `PenaltyLoss`. `weights` must be whole numbers.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> penalty = CanonicalLoss(task="multiclass", from_logits=True)
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0]], requires_grad=True), torch.tensor([0, 2])
        >>> loss = cross_entropy(logits, target) + 0.5 * penalty(logits, target)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        task: Task,
        p: Literal[1, 2] = 2,
        bandwidth: float | Literal["likelihood"] = 0.02,
        **options: Any,
    ) -> None:
        super().__init__(OthersNearby(DirichletReading(p, bandwidth)), task=task, whole_weights=True, **options)


class SKCELoss(PenaltyLoss):
    """Squared kernel calibration error of a batch as a module; see `torchcalib.skce` for what it measures.

    The biased estimate over all pairs, which is smooth, never negative, takes any weights and knows batches of one
    sample: in its gradient the mean of h(x, x) / N, by which it is too large, pulls towards the labels. Of one
    probability it is the square of `MMCELoss`, but for the kernel. Time O(N^2 C) for a batch of N.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        kernel, bandwidth: see `torchcalib.skce`. The default bandwidth 1 is our choice; the source of `skce` uses the
            median distance of the predictions, `bandwidth="median"`.
        **options: those of `PenaltyLoss`.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> penalty = SKCELoss(task="multiclass", from_logits=True)
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0]], requires_grad=True), torch.tensor([0, 2])
        >>> loss = cross_entropy(logits, target) + 0.5 * penalty(logits, target)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        task: Task,
        kernel: Kernel = "laplacian",
        bandwidth: float | Literal["median"] = 1.0,
        **options: Any,
    ) -> None:
        check_task(task)
        reading = KernelReading(task_read_as(task, options), "biased", kernel, bandwidth, 2, "macro", None)
        super().__init__(AllPairs(reading), task=task, **options)
