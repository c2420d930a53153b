"""Training penalties that are kernel sums over pairs of samples.

The maximum mean calibration error (MMCE) is a function of confidences and outcomes. The canonical calibration error and
the squared kernel calibration error (SKCE) are functions of the class probabilities and targets.
"""

from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_flag,
    check_positive,
    check_task,
    task_of,
    with_resolved_task,
)
from torchcalib.core.batch import Batch, columns_with_gradient
from torchcalib.core.events import Mode
from torchcalib.core.kernel_blocks import scale_of
from torchcalib.core.predictions import Predictions
from torchcalib.functional.kernel import DirichletSettings, KernelSettings
from torchcalib.losses.base import EventPenalty, Penalty, PenaltyLoss, evaluate, event_mode, value_dtype
from torchcalib.ops import penalties
from torchcalib.ops.batch import without_gradient
from torchcalib.ops.logs import root, wide_dtype
from torchcalib.ops.pairwise import Kernel


@dataclass(frozen=True)
class SimilarConfidences(EventPenalty):
    """Maximum mean calibration error as a `Penalty`; see `mmce`."""

    mode: Mode
    bandwidth: float
    weighted: bool

    def __post_init__(self) -> None:
        check_positive("bandwidth", self.bandwidth, at_least=1e-3)
        check_flag("weighted", self.weighted)

    @property
    def options(self) -> penalties.Embedding:
        """Options of the kernels of the error."""
        return penalties.Embedding(self.bandwidth, self.weighted)

    def formula(self, confidence: Tensor, outcome: Tensor, weights: Tensor) -> Tensor:
        """Return the error for each batch element; see `EventPenalty.formula`."""
        if self.weighted:
            residual = _terms_of_mean(1 - confidence, weights * outcome)
            residual = residual - _terms_of_mean(confidence, weights * (1 - outcome))
        else:
            residual = _terms_of_mean(outcome - confidence, weights)
        columns = torch.stack((confidence.expand_as(residual), residual))
        # The gradient for equal confidences depends on their order.
        # The mean over both orders gives |a - b| the gradient 0 where a = b.
        of_orders = _laplacian_form(torch.stack((columns, columns.flip(-1)), 1), self.bandwidth)
        error = root(of_orders.mean(0).clamp(min=0))
        return torch.where(weights.sum(-1) > 0, error, torch.nan)


def _terms_of_mean(x: Tensor, weights: Tensor) -> Tensor:
    """Return the terms x_i w_i / sum_j w_j of the weighted mean of x, `(..., N)`; 0 if all weights w are 0."""
    total = weights.sum(-1, keepdim=True)
    return x * weights / total.masked_fill(total == 0, 1)


def _laplacian_form(columns: Tensor, bandwidth: float) -> Tensor:
    """Return sum_ij d_i d_j exp(-|x_i - x_j| / bandwidth), `(...)`, for columns x in [0, 1] and d, `(2, ..., N)`.

    For ascending x and i < j, the kernel is exp(x_i / bandwidth) / exp(x_j / bandwidth). So a cumulative sum replaces
    the sum over N^2 pairs. No differences are computed, so there is no cancellation.
    """
    order = columns[0].detach().argsort(dim=-1, stable=True)
    x, d = columns.gather(-1, order.expand_as(columns)).unbind()
    rise = ((x - 0.5) / bandwidth).exp()
    upto = (d * rise).cumsum(-1) / rise  # sum over j <= i of d_j times the kernel
    return (d * (2 * upto - d)).sum(-1)


def mmce(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    bandwidth: float = 0.4,
    weighted: bool = False,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Maximum mean calibration error (MMCE), a training penalty without bins.

    MMCE = sqrt(sum_ij d_i d_j exp(-|c_i - c_j| / bandwidth)) / N, with confidences c and residuals
    d = outcome - confidence. The sum is over all pairs of samples, including i = j. MMCE is large if residuals for
    similar confidences have the same sign. For a calibrated model, it is about sqrt(mean d^2 / N), the contribution of
    the pairs i = j.

    Args:
        preds: Probabilities, or logits with `from_logits=True`; see `torchcalib.functional.ece`.
        target: Labels or soft targets.
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the data.
        bandwidth: Bandwidth of the Laplacian kernel, a probability of at least 0.001. The default is that of the
            authors' code, exp(-|c_i - c_j| / (2 * 0.2)).
        weighted: Average the residuals of correct and of wrong predictions separately, and weight both means equally
            (MMCE_w).
        mode: Event whose probability is the confidence; see `torchcalib.functional.ece`.
        average: `"macro"` averages class-wise and multi-label values over classes. None returns all.
        **options: Options of the input; see `torchcalib.functional.InputOptions`. Invalid values raise an error on the
            CPU, and make the result NaN elsewhere.

    Returns:
        The error `(...)`, in [0, 1], or in [0, 2] with `weighted=True`, in the dtype of `preds` (at least float32). NaN
        without data.

    Gradient:
        With respect to the confidences, finite everywhere; 0 where the value is 0. The derivative of |c_i - c_j| is 0
        where c_i = c_j. Outcomes are constants. Time is O(N log N), and memory is O(N).

    Reference:
        Kumar, Sarawagi, Jain: Trainable Calibration Measures for Neural Networks from Kernel Mean Embeddings (ICML
        2018): MMCE and, with `weighted=True`, MMCE_w. If all predictions are correct, or all are wrong, only one of the
        two means exists. MMCE_w is then computed from this mean; the authors' code returns 0.

    Example:
        >>> mmce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.1225)
    """
    task, options = with_resolved_task(task, options)
    mode = event_mode(task, options, mode)
    return evaluate(SimilarConfidences(mode, bandwidth, weighted), mode, preds, target, task, average, options)


class MMCELoss(PenaltyLoss):
    """Maximum mean calibration error (MMCE) as a training penalty; see `mmce` and `ECELoss`.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bandwidth: Bandwidth of the Laplacian kernel, a probability of at least 0.001.
        weighted: Average the residuals of correct and of wrong predictions separately (MMCE_w).
        mode: Event whose probability is the confidence; see `torchcalib.functional.ece`.
        **options: Options of `torchcalib.functional.InputOptions`, except `weights` and `batch_dims`.

    Example:
        >>> MMCELoss(task="binary")(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        tensor(0.1225)
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        bandwidth: float = 0.4,
        weighted: bool = False,
        mode: Mode | None = None,
        **options: Unpack[InputOptions],
    ) -> None:
        task = task_of(task, **options)
        penalty = SimilarConfidences(event_mode(task, options, mode), bandwidth, weighted)
        super().__init__(penalty, task=task, **options)


@dataclass(frozen=True)
class CanonicalError(Penalty):
    """Canonical calibration error as a `Penalty`; see `canonical_error`."""

    settings: DirichletSettings

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the error for each batch element; see `Penalty`. A single sample gets weight 2, the minimum."""
        weights = p.weights
        if weights is None:
            weights = torch.ones(p.samples, dtype=wide_dtype(p.input_preds.device), device=p.input_preds.device)
        is_single = weights.sum(-1, keepdim=True) == 1
        return self.settings.from_predictions(p.with_weights(torch.where(is_single, 2 * weights, weights)))

    def of_batch(self, batch: Batch) -> Tensor | None:
        """Return the error of a batch in few launches of Triton; see `Penalty.of_batch`."""
        bandwidth = self.settings.bandwidth
        is_checked = batch.weights is not None and batch.weights.is_floating_point()  # whether weights are whole
        if isinstance(bandwidth, str) or is_checked:
            return None
        return _mean_over_pairs(self, batch, penalties.Canonical(self.settings.p, bandwidth))


@dataclass(frozen=True)
class SquaredKernelError(Penalty):
    """Biased squared kernel calibration error as a `Penalty`; see `functional.skce`."""

    settings: KernelSettings

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the error for each batch element; see `Penalty.from_predictions`."""
        return self.settings.from_predictions(p)

    def of_batch(self, batch: Batch) -> Tensor | None:
        """Return the error of a batch in few launches of Triton; see `Penalty.of_batch`."""
        kernel, bandwidth = self.settings.kernel, self.settings.bandwidth
        if isinstance(bandwidth, str):
            return None
        return _mean_over_pairs(self, batch, penalties.Squared(kernel, scale_of(kernel, bandwidth)))


def _mean_over_pairs(penalty: Penalty, batch: Batch, options: penalties.Canonical | penalties.Squared) -> Tensor | None:
    """Return a mean over pairs of rows of a batch of labels by Triton; None for other batches and devices."""
    found = columns_with_gradient(batch, penalty.from_predictions)
    if found is None:
        return None
    (columns, formula), dtype = found, value_dtype(batch)
    values, n = columns.values, len(columns.values)
    if not options.has_kernel(n, values.numel() // n):
        return None
    others = without_gradient(columns)
    return penalties.error(values, others, options, dtype, lambda values: formula(values).to(dtype))


class CanonicalLoss(PenaltyLoss):
    """Canonical calibration error of a batch as a training penalty; see `functional.canonical_error` and `ECELoss`.

    It penalises the vector of class probabilities rather than the top label. In a batch of one sample, the prediction
    is compared with its own label. `weights` must be whole numbers. Time is O(N^2 C) for N samples.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        p: Exponent, 1 or 2.
        bandwidth: Bandwidth of the Dirichlet kernel, above 0. `"likelihood"` selects the most likely of 20 values for
            each batch, as in the paper. The default 0.02 is a choice of this package.
        **options: Options of `torchcalib.functional.InputOptions`, except `weights` and `batch_dims`.

    Example:
        >>> preds = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.7, 0.3]])
        >>> CanonicalLoss(task="multiclass", p=1, bandwidth=0.1)(preds, torch.tensor([0, 0, 1]))
        tensor(0.4667)
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        p: Literal[1, 2] = 2,
        bandwidth: float | Literal["likelihood"] = 0.02,
        **options: Unpack[InputOptions],
    ) -> None:
        super().__init__(CanonicalError(DirichletSettings(p, bandwidth)), task=task, whole_weights=True, **options)


class SKCELoss(PenaltyLoss):
    """Squared kernel calibration error (SKCE) of a batch as a training penalty; see `functional.skce` and `ECELoss`.

    It is the biased estimate over all pairs of samples, which is smooth and not negative. It is defined for any weights
    and for a single sample. Its bias, from the pairs i = j, adds a gradient towards the labels. For binary input and
    the Laplacian kernel, it is twice the squared MMCE of equal bandwidth. Time is O(N^2 C) for N samples.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        kernel: Kernel of the distance between predictions; see `torchcalib.functional.skce`.
        bandwidth: Bandwidth of the kernel; see `torchcalib.functional.skce`. The default 1 is a choice of this package.
            The paper uses the median distance between predictions, `bandwidth="median"`.
        **options: Options of `torchcalib.functional.InputOptions`, except `weights` and `batch_dims`.

    Example:
        >>> preds = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
        >>> SKCELoss(task="multiclass")(preds, torch.tensor([1, 1, 1]))
        tensor(0.4855)
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        kernel: Kernel = "laplacian",
        bandwidth: float | Literal["median"] = 1.0,
        **options: Unpack[InputOptions],
    ) -> None:
        task = task_of(task, **options)
        check_task(task)
        super().__init__(SquaredKernelError(KernelSettings("biased", kernel, bandwidth)), task=task, **options)
