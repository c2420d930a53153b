"""Training penalties over bins: expected calibration error (ECE) with hard or soft bin membership."""

from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_choice,
    check_count,
    check_flag,
    check_positive,
    task_of,
    with_resolved_task,
)
from torchcalib.core.batch import Batch, error_of_batch
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import Mode
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import SumState
from torchcalib.core.sums import BinStats
from torchcalib.functional.binned import ece_from_bins, error_of_bins, rmsce_from_bins
from torchcalib.losses.base import EventPenalty, Penalty, PenaltyLoss, evaluate, event_mode
from torchcalib.ops import penalties

Norm = Literal["l1", "l2"]
_MAX_BINS = 2**20


@dataclass(frozen=True)
class HardBins(Penalty):
    """Expected calibration error over equal-width bins as a `Penalty`; see `torchcalib.functional.ece`."""

    bins: EqualWidthBins

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the error for each batch element; see `Penalty.from_predictions`."""
        return error_of_bins(ece_from_bins, self.bins.from_predictions(p))

    def of_batch(self, batch: Batch) -> Tensor | None:
        """Return the error of a batch in few launches of Triton; see `Penalty.of_batch`."""
        kind = SumState(self.bins, (self.bins.n_quantities, self.bins.n_cells))  # of labels of one event
        how, preds, target, weights, backend = batch

        def formula(how: InputFormat, *given: Any) -> Tensor:
            p = how.read(*given, batch_shape=(), wait=False)
            return self.from_predictions(p).to(p.dtype)

        found = error_of_batch(how, kind, "l1", None, preds, target, weights, formula, backend)
        return None if found is None else found[0]


@dataclass(frozen=True)
class SoftBins(EventPenalty):
    """Calibration error over bins with soft membership as a `Penalty`; see `soft_binned_ece`."""

    mode: Mode
    n_bins: int
    temperature: float
    norm: Norm

    def __post_init__(self) -> None:
        check_count("n_bins", self.n_bins, at_most=_MAX_BINS)
        check_positive("temperature", self.temperature)
        check_choice("norm", self.norm, get_args(Norm))

    @property
    def options(self) -> penalties.SoftBinning:
        """Options of the kernels of the error."""
        return penalties.SoftBinning(self.n_bins, self.temperature, self.norm)

    def formula(self, confidence: Tensor, outcome: Tensor, weights: Tensor) -> Tensor:
        """Return the error for each batch element; see `EventPenalty.formula`."""
        centers = (torch.arange(self.n_bins, dtype=confidence.dtype, device=confidence.device) + 0.5) / self.n_bins
        member = ((confidence.unsqueeze(-1) - centers).square() / -self.temperature).softmax(-1)
        bins = BinStats(torch.stack((weights, weights * confidence, weights * outcome), -2) @ member)
        return error_of_bins(ece_from_bins if self.norm == "l1" else rmsce_from_bins, bins)


class ECELoss(PenaltyLoss):
    """Expected calibration error (ECE) of a batch as a training penalty; see `torchcalib.functional.ece`.

    The gradient moves all confidences in a bin towards the observed frequency of the bin. In a small batch, most bins
    contain few samples, and this frequency is noisy. `SoftBinnedECELoss` and `MMCELoss` are smoother.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: Number B of equal-width bins.
        mode: Event whose probability is the confidence; see `torchcalib.functional.ece`.
        right: Bins are `(a, b]` instead of `[a, b)`.
        **options: Options of `torchcalib.functional.InputOptions`, except `weights` and `batch_dims`.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> penalty = ECELoss(task="multiclass", from_logits=True)
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0]], requires_grad=True), torch.tensor([0, 2])
        >>> loss = cross_entropy(logits, target) + 0.5 * penalty(logits, target)
        >>> loss.backward()
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        n_bins: int = 15,
        mode: Mode | None = None,
        right: bool = False,
        **options: Unpack[InputOptions],
    ) -> None:
        task = task_of(task, **options)
        check_count("n_bins", n_bins, at_most=_MAX_BINS)
        check_flag("right", right)
        bins = EqualWidthBins(event_mode(task, options, mode), n_bins, right)
        super().__init__(HardBins(bins), task=task, **options)


def soft_binned_ece(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    n_bins: int = 15,
    temperature: float = 0.01,
    norm: Norm = "l2",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Soft-binned expected calibration error (SB-ECE), a training penalty with smooth bin membership.

    Each sample belongs to every bin with weight softmax(-(confidence - centre)^2 / temperature) over the bins. The
    error is sum_b share_b |gap_b| (l1) or sqrt(sum_b share_b gap_b^2) (l2). Here share_b is the fraction of samples in
    bin b, and gap_b is frequency minus mean confidence. For temperature -> 0 the error approaches
    `torchcalib.functional.ece` (l1) or `rmsce` (l2). Its gradient includes changes of the bin membership.

    Args:
        preds: Probabilities, or logits with `from_logits=True`; see `torchcalib.functional.ece`.
        target: Labels or soft targets.
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the data.
        n_bins: Number of equal-width bins over [0, 1], represented by their centres.
        temperature: Softness of the bins, in squared probability. The default 0.01 is a choice of this package.
        norm: `"l1"` or `"l2"`; `"l2"` is equation (11) in the paper.
        mode: Event whose probability is the confidence; see `torchcalib.functional.ece`.
        average: `"macro"` averages class-wise and multi-label values over classes. None returns all.
        **options: Options of the input; see `torchcalib.functional.InputOptions`. Invalid values raise an error on the
            CPU, and make the result NaN elsewhere.

    Returns:
        The error in [0, 1], `(...)`, in the dtype of `preds` (at least float32). NaN without data.

    Gradient:
        With respect to the confidences, finite everywhere; 0 where the value is 0. Outcomes are constants. Time and
        memory are O(N n_bins).

    Reference:
        Karandikar et al.: Soft Calibration Objectives for Neural Networks (NeurIPS 2021), sec. 4 (SB-ECE), eq. 11.

    Example:
        >>> soft_binned_ece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.2123)
    """
    task, options = with_resolved_task(task, options)
    mode = event_mode(task, options, mode)
    penalty = SoftBins(mode, n_bins, temperature, norm)
    return evaluate(penalty, mode, preds, target, task, average, options, per_event=n_bins)


class SoftBinnedECELoss(PenaltyLoss):
    """Soft-binned expected calibration error (SB-ECE) as a training penalty; see `soft_binned_ece` and `ECELoss`.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: Number B of equal-width bins.
        temperature: Softness of the bins, in squared probability.
        norm: `"l1"` or `"l2"`.
        mode: Event whose probability is the confidence; see `torchcalib.functional.ece`.
        **options: Options of `torchcalib.functional.InputOptions`, except `weights` and `batch_dims`.

    Example:
        >>> SoftBinnedECELoss(task="binary")(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        tensor(0.2123)
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        n_bins: int = 15,
        temperature: float = 0.01,
        norm: Norm = "l2",
        mode: Mode | None = None,
        **options: Unpack[InputOptions],
    ) -> None:
        task = task_of(task, **options)
        penalty = SoftBins(event_mode(task, options, mode), n_bins, temperature, norm)
        super().__init__(penalty, task=task, **options)
