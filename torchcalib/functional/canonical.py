"""L_p canonical calibration error, estimated with a Dirichlet kernel."""

from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_choice,
    check_count,
    task_read_as,
)
from torchcalib.core.inputs import input_format_of
from torchcalib.core.kernel_blocks import vectors
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.core.tasks import infers_task
from torchcalib.functional.kernel import check_bandwidth
from torchcalib.ops.leave_one_out import leave_one_out_mean
from torchcalib.ops.logs import safe_log, wide_dtype

_GRID = (*(10 ** (-5 + 4 * k / 14) for k in range(15)), *(0.2 * k for k in range(1, 6)))
"""Candidates for `bandwidth="likelihood"`, as in the authors' code."""

_MIN_LOG_DENSITY = -1e20  # smaller log densities represent a density of 0


def _log_distributions(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, probabilities and targets `(..., N, C)`, in float64 if the device supports it.

    Predictions with weight 0 are replaced by uniform probabilities, because they may be NaN and NaN times 0 is NaN. The
    gradient of a log-probability of -inf is 0.
    """
    values, target = vectors(p)
    if p.weights is not None:
        absent = in_all_replicates(p.weights == 0, len(p.samples)).unsqueeze(-1)
        values = values.masked_fill(absent, 0 if p.from_logits else 1 / values.shape[-1])
        target = target if p.has_labels else target.masked_fill(absent, 0)
    wide = values.to(wide_dtype(values.device))
    if p.from_logits:
        top = wide.amax(-1, keepdim=True) == torch.inf  # classes with logit +inf share the total probability equally
        wide = torch.where(top, torch.where(wide == torch.inf, 0.0, -torch.inf), wide)
        log_q = wide.log_softmax(-1)
        log_q = log_q.masked_fill(log_q == -torch.inf, -torch.inf)
        q = log_q.exp()
    else:
        log_q, q = safe_log(wide), wide
    if p.has_labels:
        target = target.unsqueeze(-1) == torch.arange(wide.shape[-1], device=wide.device)
    return log_q, q, target.to(wide.dtype)


def _log_normaliser(q: Tensor, bandwidth: Tensor) -> Tensor:
    """Return the log normalising constant of Dirichlet densities with parameters q / bandwidth + 1, `(..., N)`."""
    alpha = q / bandwidth[..., None, None] + 1
    return alpha.sum(-1).lgamma() - alpha.lgamma().sum(-1)


def _most_likely_bandwidth(log_q: Tensor, q: Tensor, copies: Tensor, chunk: int | None) -> Tensor:
    """Return the bandwidth in `_GRID` with the largest leave-one-out log-likelihood, `(...)`, weighted by `copies`."""
    log_q, q = log_q.detach(), q.detach()
    best = torch.full_like(copies.sum(-1), -torch.inf)
    chosen = torch.ones_like(best)
    for bandwidth in _GRID:
        h = torch.full_like(best, bandwidth)
        log_density = leave_one_out_mean(
            log_q / bandwidth, q, _log_normaliser(q, h), q[..., :0], copies, chunk
        ).log_total
        is_positive = (log_density > _MIN_LOG_DENSITY) & (copies > 0)
        likelihood = (copies * log_density).masked_fill(~is_positive, 0).sum(-1)
        is_better = likelihood > best
        best, chosen = torch.where(is_better, likelihood, best), torch.where(is_better, h, chosen)
    return chosen


@dataclass(frozen=True)
class DirichletSettings:
    """Validated options of the canonical calibration error; see `canonical_error`."""

    p: Literal[1, 2]
    bandwidth: float | Literal["likelihood"]
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_choice("p", self.p, (1, 2))
        check_bandwidth(self.bandwidth, "likelihood")
        if self.chunk is not None:
            check_count("chunk", self.chunk)

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the canonical calibration error per batch element, `(...)`, without the p-th root."""
        log_q, q, target = _log_distributions(p)
        copies = torch.ones_like(q[..., 0])
        if p.weights is not None:
            copies = p.weights.expand(*p.replicates, *p.samples).to(q.dtype)
            log_q, q, target = (x.expand(*p.replicates, *x.shape) for x in (log_q, q, target))
        counted = copies.nan_to_num()
        if self.bandwidth == "likelihood":
            h = _most_likely_bandwidth(log_q, q, counted, self.chunk)
        else:
            h = torch.full(q.shape[:-2], float(self.bandwidth), dtype=q.dtype, device=q.device)
        scaled, normaliser = log_q / h[..., None, None], _log_normaliser(q, h)
        gap = leave_one_out_mean(scaled, q, normaliser, target, counted, self.chunk).mean - q
        distance = (gap.abs() if self.p == 1 else gap.square()).sum(-1)
        return (copies * distance.masked_fill(copies == 0, 0)).sum(-1) / copies.sum(-1)


@infers_task
def canonical_error(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    p: Literal[1, 2] = 1,
    bandwidth: float | Literal["likelihood"] = "likelihood",
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Canonical calibration error: mean distance between probability vectors and conditional class frequencies.

    It is the mean over samples i of sum_k |E[y_k | q_i] - q_ik|^p, for predicted probabilities q and outcomes y. The
    conditional expectation is estimated from all other samples as
    sum_{j != i} k(q_i; q_j) y_j / sum_{j != i} k(q_i; q_j). The kernel k(.; q_j) is the Dirichlet density with
    parameters q_j / bandwidth + 1. As in the reference, the p-th root is omitted.

    The population value is 0 only if the model is calibrated for all classes jointly. The estimate is consistent, but
    biased upwards for few samples; `skce` has an unbiased estimator. For a binary task the sum over both classes is
    twice the term for y = 1.

    Args:
        target: Labels or soft targets.
        p: Exponent, 1 or 2.
        bandwidth: A positive number or `"likelihood"`. The variance of the kernel is about q (1 - q) bandwidth.
            `"likelihood"` selects one of 20 candidates from 1e-5 to 1 by the leave-one-out log-likelihood of the
            predictions. Predictions with an estimated density of 0 are excluded from this likelihood.

    Returns:
        `(...)`, or `(..., L)` for multi-label with `average=None`, in [0, 2], in the dtype of `preds` (at least
        float32). NaN with fewer than two samples. If all kernels are 0 because a probability q_ik is 0, the estimate
        is its limit for q_ik -> 0. Only the samples j with the smallest q_jk contribute to this limit.

    Gradient:
        With respect to the predictions, including the kernels; reverse mode, first order. A bandwidth selected by
        `"likelihood"` and log 0 are constants. Time: O(N^2 C). Memory: a few copies of the input.

    Reference:
        Popordanoska, Sayer, Blaschko: A Consistent and Differentiable Lp Canonical Calibration Error Estimator (NeurIPS
        2022), sec. 3, eq. 9-10. Unlike the authors' code, this function does not add log(bandwidth) to each
        log-likelihood, because the Dirichlet density does not contain this factor.

    Example:
        >>> preds = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.7, 0.3]])
        >>> canonical_error(preds, torch.tensor([0, 0, 1]), task="multiclass", bandwidth=0.1)
        tensor(0.4667)
    """
    settings = DirichletSettings(p, bandwidth, chunk)
    averages = check_average(average, task_read_as(task, options) == "multilabel")
    given = input_format_of(task, options, whole_weights=True).read(preds, target, options.get("weights"))
    value = by_replicates(settings.from_predictions, given, given.samples.numel() * given.num_classes)
    return (value.mean(-1) if averages else value).to(given.dtype)
