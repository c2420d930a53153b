"""L_p canonical calibration error, by the Dirichlet kernel."""

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
from torchcalib.core.documentation import documented
from torchcalib.core.inputs import input_format_of
from torchcalib.core.kernel_blocks import vectors
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.metrics.kernel import check_bandwidth
from torchcalib.ops.leave_one_out import others_mean
from torchcalib.ops.logs import safe_log, wide_dtype

_GRID = (*(10 ** (-5 + 4 * k / 14) for k in range(15)), *(0.2 * k for k in range(1, 6)))
"""Bandwidths that "likelihood" chooses from: those of the authors."""

_OUT_OF_REACH = -1e20  # log density of a prediction that no other one's kernel reaches, whatever its bandwidth


def _log_distributions(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, probabilities and targets `(..., N, C)` in the dtype of sums.

    They are harmless in rows that are left out. A log-probability of -inf is a constant.
    """
    values, target = vectors(p)
    if p.weights is not None:
        absent = in_all_replicates(p.weights == 0, len(p.samples)).unsqueeze(-1)
        values = values.masked_fill(absent, 0 if p.from_logits else 1 / values.shape[-1])
        target = target if p.hard else target.masked_fill(absent, 0)
    wide = values.to(wide_dtype(values.device))
    if p.from_logits:
        top = wide.amax(-1, keepdim=True) == torch.inf  # all mass on what is +inf
        wide = torch.where(top, torch.where(wide == torch.inf, 0.0, -torch.inf), wide)
        log_q = wide.log_softmax(-1)
        log_q = log_q.masked_fill(log_q == -torch.inf, -torch.inf)
        q = log_q.exp()
    else:
        log_q, q = safe_log(wide), wide
    if p.hard:
        target = target.unsqueeze(-1) == torch.arange(wide.shape[-1], device=wide.device)
    return log_q, q, target.to(wide.dtype)


def _log_normaliser(q: Tensor, bandwidth: Tensor) -> Tensor:
    """Log of the constant in front of the Dirichlet density of parameters q / bandwidth + 1, `(..., N)`."""
    alpha = q / bandwidth[..., None, None] + 1
    return alpha.sum(-1).lgamma() - alpha.lgamma().sum(-1)


def _most_likely_bandwidth(log_q: Tensor, q: Tensor, copies: Tensor, chunk: int | None) -> Tensor:
    """The bandwidth of the grid under which the others of each prediction make it likeliest, `(...)`."""
    log_q, q = log_q.detach(), q.detach()
    best = torch.full_like(copies.sum(-1), -torch.inf)
    chosen = torch.ones_like(best)
    for bandwidth in _GRID:
        h = torch.full_like(best, bandwidth)
        log_density = others_mean(log_q / bandwidth, q, _log_normaliser(q, h), q[..., :0], copies, chunk).log_total
        reached = (log_density > _OUT_OF_REACH) & (copies > 0)
        likelihood = (copies * log_density).masked_fill(~reached, 0).sum(-1)
        is_better = likelihood > best
        best, chosen = torch.where(is_better, likelihood, best), torch.where(is_better, h, chosen)
    return chosen


@dataclass(frozen=True)
class DirichletReading:
    """From predictions to the error, and the checks of what it is read with; see `canonical_error`."""

    p: Literal[1, 2]
    bandwidth: float | Literal["likelihood"]
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_choice("p", self.p, (1, 2))
        check_bandwidth(self.bandwidth, "likelihood")
        if self.chunk is not None:
            check_count("chunk", self.chunk)

    def of(self, p: Predictions) -> Tensor:
        """Read the error of each series, to the power p."""
        return _error(p, self.p, self.bandwidth, self.chunk)


def _error(p: Predictions, power: int, bandwidth: float | str, chunk: int | None) -> Tensor:
    """The error of each series, to the power p."""
    log_q, q, target = _log_distributions(p)
    copies = torch.ones_like(q[..., 0])
    if p.weights is not None:
        copies = p.weights.expand(*p.replicates, *p.samples).to(q.dtype)
        log_q, q, target = (x.expand(*p.replicates, *x.shape) for x in (log_q, q, target))
    counted = copies.nan_to_num()
    if bandwidth == "likelihood":
        h = _most_likely_bandwidth(log_q, q, counted, chunk)
    else:
        h = torch.full(q.shape[:-2], float(bandwidth), dtype=q.dtype, device=q.device)
    expected = others_mean(log_q / h[..., None, None], q, _log_normaliser(q, h), target, counted, chunk).mean
    gap = expected - q
    distance = (gap.abs() if power == 1 else gap.square()).sum(-1)
    return (copies * distance.masked_fill(copies == 0, 0)).sum(-1) / copies.sum(-1)


@documented
def canonical_error(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    p: Literal[1, 2] = 1,
    bandwidth: float | Literal["likelihood"] = "likelihood",
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Canonical calibration error to the power p: how far are frequencies of all classes from the whole prediction.

    The mean over samples of sum_k |E[y_k | q] - q_k|^p, where the conditional expectation is the mean outcome of the
    other samples, each by the Dirichlet density k(q_i; q_j) of parameters q_j / bandwidth + 1 at q_i:
    sum_{j != i} k(q_i; q_j) y_j / sum_{j != i} k(q_i; q_j). It is the p-th power, and no root of it, as the authors
    have it. It is consistent, and too large for few samples: like any error that is a mean of absolute values, chance
    alone makes it positive. It is not debiased; `skce` has an estimate that is unbiased.

    Binary predictions are taken for those of two classes, both of which count: sum_k |.|^p is twice that of y = 1.

    Args:
        target: labels; or soft targets, of which the expectation is taken.
        p: 1 or 2.
        bandwidth: a number above 0, the same for all samples; a kernel's variance is about q (1 - q) bandwidth. Or
            "likelihood": of 20 numbers from 1e-5 to 1 the one under which the leave-one-out density estimate makes the
            predictions likeliest (predictions that it gives density 0 aside). It costs about 20 times as much.

    Returns:
        In [0, 2], `(...)`, in the dtype of `preds` (at least float32). NaN with fewer than two samples. Where a
        probability q_ik is 0 it is the limit from above: only those others count whose own mass on such classes is the
        least, which is 0 wherever the kernel of any of them is not.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the predictions, also as places of kernels, once, in reverse mode; a bandwidth that was chosen and the log
        of 0 are constants. Time O(N^2 C); memory some copies of the input, and tiles.

    Source:
        Popordanoska, Sayer, Blaschko: A Consistent and Differentiable Lp Canonical Calibration Error Estimator (NeurIPS
        2022), sec. 3, eq. 9-10. Their code adds log(bandwidth) to each log-likelihood, which no density has.

    Example:
        >>> preds = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.7, 0.3]])
        >>> canonical_error(preds, torch.tensor([0, 0, 1]), task="multiclass", bandwidth=0.1)
        tensor(0.4667)
    """
    is_multilabel = task_read_as(task, options) == "multilabel"
    reading = DirichletReading(p, bandwidth, chunk)
    check_average(average, is_multilabel)
    given = input_format_of(task, options, whole_weights=True).read(preds, target, options.get("weights"))
    value = by_replicates(reading.of, given, given.samples.numel() * given.num_classes)
    return (value.mean(-1) if is_multilabel and average is not None else value).to(given.dtype)
