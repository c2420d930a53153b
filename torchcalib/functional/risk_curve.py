"""Bayes risk curve for two classes, and cost at the optimal threshold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_count,
    task_read_as,
)
from torchcalib.core.checks import read_priors
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.sums import weighted
from torchcalib.core.tasks import infers_task
from torchcalib.functional.cost_matrix import CostMatrix, Costs, read_costs
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype, xmul
from torchcalib.ops.sorting import order_bits, stable_sort


@dataclass(frozen=True, eq=False)
class BayesRiskCurve:
    """Bayes risk as a function of the operating point; see `bayes_risk_curve`.

    Attributes:
        operating_point: Thresholds c in (0, 1), float64 `(K,)`. The decision is class 1 if its probability is above c.
            A false alarm costs 1/(1-c), a miss 1/c.
        risk: Mean cost of the decisions, float64 `(..., K)`; multi-label `(..., L, K)`.
        cheapest: Mean cost of the better constant decision, with the shape of `risk`.

    Example:
        >>> curve = bayes_risk_curve(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 0]), task="binary", points=1)
        >>> curve.operating_point, curve.normalized
        (tensor([0.5000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    operating_point: Tensor
    risk: Tensor
    cheapest: Tensor

    @property
    def normalized(self) -> Tensor:
        """Risk divided by `cheapest`. Above 1, the decisions cost more than the better constant decision."""
        return self.risk / self.cheapest


@infers_task
def bayes_risk_curve(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    points: int | Tensor | Sequence[float] = 99,
    priors: Tensor | Sequence[float] | None = None,
    **options: Unpack[InputOptions],
) -> BayesRiskCurve:
    """Compute the Bayes risk for two classes as a function of the operating point c.

    The decision is class 1 for probabilities above c, otherwise class 0. A false alarm costs 1/(1-c) and a miss 1/c.
    The threshold c is optimal for these costs. Up to a factor, every cost matrix for two classes is equivalent to the
    costs for one c. The curve therefore shows for which costs the predictions are useful. The area under the curve is
    the cross entropy. With weight 2 c (1-c) it is the Brier score; see `bayes_risk_area`.

    Args:
        task: `"binary"`, `"multilabel"`, or `"multiclass"` with `positive_classes`.
        points: Number of equally spaced operating points i / (points + 1), or the operating points `(K,)` in (0, 1).
        priors: Class priors `(2,)` that replace the class frequencies in the data.

    Returns:
        A `BayesRiskCurve` with tensors `(..., K)`, multi-label `(..., L, K)`. NaN without data.

    Gradient:
        None, because the decisions are piecewise constant in the predictions.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.4, eq. 34.

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0])
        >>> bayes_risk_curve(preds, target, task="binary", points=[0.5, 0.65, 0.8]).risk
        tensor([0.5000, 0.0000, 0.3125], dtype=torch.float64)
    """
    s = _sorted_predictions(_read_two_classes(preds, target, task, options, priors), priors)
    c = _operating_points(points, s.values.device)
    probs = (s.values.sigmoid() if s.from_logits else s.values).detach().contiguous()
    at_most = torch.searchsorted(probs, c.to(probs.dtype).expand(*probs.shape[:-1], -1).contiguous(), right=True)
    risk = s.missed.gather(-1, at_most) / c + s.accepted.gather(-1, at_most) / (1 - c)
    cheapest = torch.minimum(s.missed[..., -1:] / c, s.accepted[..., :1] / (1 - c))
    return BayesRiskCurve(c, risk, cheapest)


@infers_task
def optimal_threshold_cost(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    cost: CostMatrix | Costs | None = None,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Smallest mean cost over all decision thresholds for two classes, on the same data.

    The Bayes risk minus this value is the loss due to miscalibration for these costs. The value is optimistic, because
    the threshold is fitted and evaluated on the same data. Samples with equal predictions get the same decision.

    Args:
        task: `"binary"`, `"multilabel"`, or `"multiclass"` with `positive_classes`.
        cost: Cost matrix `(2, 2)`: rows y = 0 and y = 1, columns below and above the threshold. None means zero-one
            costs.
        normalize: `"prior"` divides by the cost of the better constant decision.
        priors: Class priors `(2,)` that replace the class frequencies in the data. They also affect the threshold.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in the unit of `cost`, in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        None.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1, minimised over thresholds.

    Example:
        >>> preds, target = torch.tensor([0.1, 0.2, 0.3, 0.25]), torch.tensor([0, 1, 1, 0])
        >>> optimal_threshold_cost(preds, target, task="binary")
        tensor(0.2500)
    """
    matrix = CostMatrix.zero_one(2) if cost is None else read_costs(cost, 2)
    if matrix.num_decisions != 2:
        raise ValueError(
            f"`cost` must have 2 columns, below and above the threshold, got {matrix.num_decisions}. "
            "For other decisions use bayes_risk."
        )
    if normalize not in (None, "prior"):
        raise ValueError(f"`normalize` must be None or 'prior', got {shown(normalize)}. Omit it for the mean cost.")
    averages = check_average(average, task_read_as(task, options) == "multilabel")
    p = _read_two_classes(preds, target, task, options, priors)
    least = by_replicates(
        lambda p: _least_cost(_sorted_predictions(p, priors), matrix, normalize is not None), p, p.samples.numel()
    )
    return (least.mean(-1) if averages else least).to(p.dtype)


def _least_cost(s: "_SortedPredictions", matrix: CostMatrix, normalize: bool) -> Tensor:
    (below_0, above_0), (below_1, above_1) = matrix.costs
    costs = below_1 * s.missed + above_1 * (s.missed[..., -1:] - s.missed)
    costs = costs + above_0 * s.accepted + below_0 * (s.accepted[..., :1] - s.accepted)
    differs = s.values[..., 1:] != s.values[..., :-1]
    ends = torch.ones_like(s.values[..., :1], dtype=torch.bool)
    costs = costs.masked_fill(~torch.cat((ends, differs, ends), -1), torch.inf)
    least = costs.amin(-1)
    return least / torch.minimum(costs[..., 0], costs[..., -1]) if normalize else least


def _read_two_classes(
    preds: Tensor, target: Tensor, task: Task | None, options: InputOptions, priors: Tensor | Sequence[float] | None
) -> Predictions:
    if task_read_as(task, options) == "multiclass":
        raise ValueError(
            "`task` must be 'binary' or 'multilabel' for a metric with one threshold, got 'multiclass'. "
            "Pass positive_classes=[...] to compare a set of classes with the rest."
        )
    return read_input(task, preds, target, options, hard_targets=priors is not None)


def _operating_points(points: int | Tensor | Sequence[float], device: torch.device) -> Tensor:
    wide = wide_dtype(device)
    if isinstance(points, int):
        check_count("points", points)
        return torch.arange(1, points + 1, dtype=wide, device=device) / (points + 1)
    c = torch.as_tensor(points, dtype=wide, device=device)
    if c.dim() != 1:
        raise ValueError(f"`points` must be an int or have the shape (K,), got shape {tuple(c.shape)}. Flatten it.")
    if value_if_available(((c > 0) & (c < 1)).all()) is False:
        raise ValueError(
            f"`points` must be in (0, 1), got {shown(c.tolist())}. Omit 0 and 1, where a cost is infinite."
        )
    return c


@dataclass(frozen=True, eq=False)
class _SortedPredictions:
    """Sorted predictions for two classes, and the error rates at each threshold."""

    values: Tensor  # Predictions in ascending order `(..., N)`, N >= 1
    from_logits: bool  # Whether the predictions are logits
    missed: Tensor  # Relative weight of class 1 among the k lowest predictions (misses), for k = 0 to N, `(..., N + 1)`
    accepted: Tensor  # Relative weight of class 0 among the N - k largest predictions (false alarms), `(..., N + 1)`


def _sorted_predictions(p: Predictions, priors: Tensor | Sequence[float] | None) -> _SortedPredictions:
    wide = wide_dtype(p.values.device)
    shares = [weighted(part, p.weights, wide) for part in (1 - p.target, p.target)]
    # Rows with weight 0 may contain NaN. A finite value in its place does not change the result.
    middle = 0.0 if p.from_logits else 0.5
    values = p.values if p.weights is None else torch.where(p.weights == 0, middle, p.values)
    if not values.shape[-1]:  # without data, a row of weight 0 makes the result 0 / 0 = NaN
        values = values.new_full((*values.shape[:-1], 1), middle)
        shares = [share.new_zeros(values.shape) for share in shares]
    totals = [share.sum(-1, keepdim=True) for share in shares]
    if priors is None:
        shares = [share / (totals[0] + totals[1]) for share in shares]
    else:
        given = read_priors(priors, 2).to(shares[0])
        shares = [xmul(given[..., k : k + 1], shares[k] / totals[k]) for k in range(2)]
    _, order = stable_sort(order_bits(values))
    negative, positive = (share.gather(-1, order) for share in shares)
    accepted = _cumulative_sums(negative.flip(-1)).flip(-1)
    return _SortedPredictions(values.gather(-1, order), p.from_logits, _cumulative_sums(positive), accepted)


def _cumulative_sums(share: Tensor) -> Tensor:
    """Return the sum of the first k entries for k = 0 to N, `(..., N + 1)`; all NaN if any entry is NaN."""
    zero = torch.zeros_like(share[..., :1]) + 0 * share.sum(-1, keepdim=True)
    return torch.cat((zero, share.cumsum(-1)), -1)
