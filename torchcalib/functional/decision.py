"""Bayes risk (mean cost of the optimal decisions under the predictions), and expected cost of given decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Reduction,
    Task,
    check_average,
    check_count,
    check_flag,
    task_read_as,
)
from torchcalib.core.arrays import as_tensor, check_has_values
from torchcalib.core.checks import Problem, Rule, enforce, read_priors
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.core.sums import ScoreSum, weighted
from torchcalib.core.tasks import infers_task
from torchcalib.functional.cost_matrix import CostMatrix, Costs, read_costs
from torchcalib.functional.estimator import Declaration, metric_function
from torchcalib.functional.proper_scores import is_correct
from torchcalib.functional.scores import Score, ScoreEstimator, scored
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype, xmul
from torchcalib.ops.operation import is_plain
from torchcalib.ops.sorting import order_bits, stable_sort

_MIN_SCREENED = 2**20  # smallest number of products for which float32 decisions are computed first
_PIECE = 2**20  # number of probabilities or gains that are computed together


def _decisions(p: Predictions, cost: CostMatrix | None) -> Tensor:
    """Return the decision with the smallest expected cost per row, `(..., N)`. `cost=None` means zero-one costs."""
    if cost is None:
        return p.values.argmax(-1) if p.task == "multiclass" else p.predicts_one.long()
    matrix = read_costs(cost, p.num_classes)
    if p.task == "multiclass":
        return (
            _screened(p, matrix) if _can_screen(p, matrix) else matrix.cheapest(p.probs.to(wide_dtype(p.probs.device)))
        )
    return matrix.cheapest(torch.stack((p.not_probs, p.probs), -1))


def _can_screen(p: Predictions, cost: CostMatrix) -> bool:
    """Return True if float32 sums are accurate and faster, and if the rows that require float64 can be selected."""
    is_large = p.values.numel() * cost.num_decisions >= _MIN_SCREENED
    if not is_large or p.values.device.type != "cpu" or not is_plain(p.values.detach()):
        return False
    try:
        is_float32 = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set for each backend
        return False
    return is_float32 and not torch.is_autocast_enabled("cpu")


def _screened(p: Predictions, cost: CostMatrix) -> Tensor:
    """Return the decisions of `CostMatrix.cheapest`, in float32 except in rows where rounding errors matter."""
    rows = (p.log_probs if p.from_logits else p.values).detach().reshape(-1, p.num_classes)
    pieces = torch.split(rows, max(1, _PIECE // max(p.num_classes, cost.num_decisions)))
    parts = [cost.screened((piece.exp() if p.from_logits else piece).float()) for piece in pieces]
    decisions, is_certain = (torch.cat(part) for part in zip(*parts, strict=True))
    unclear = is_certain.logical_not().nonzero().squeeze(-1)
    wide = rows[unclear].double()
    decisions[unclear] = cost.cheapest(wide.exp() if p.from_logits else wide)
    return decisions.reshape(p.samples)


def _cost_of(p: Predictions, decisions: Tensor, cost: CostMatrix) -> Tensor:
    """Return the cost of the decision per row, `(..., N)`. For soft targets it is the mean over the target classes."""
    costs = cost.shared_tensor(decisions.device)
    if p.task == "multiclass" and not p.soft:
        return costs[p.target, decisions]
    if p.soft:
        return xmul(p.target.to(costs.dtype), costs.T[decisions]).sum(-1)
    return xmul(1 - p.target, costs[0][decisions]) + xmul(p.target, costs[1][decisions])


def _bayes_cost(p: Predictions, cost: CostMatrix | None) -> Tensor:
    """Return the cost of the optimal decision per row, `(..., N)`. `cost=None` means zero-one costs."""
    return 1 - is_correct(p) if cost is None else _cost_of(p, _decisions(p, cost), cost)


def _cheapest_constant(_: ScoreSum, priors: Tensor, __: Task, *, cost: CostMatrix | None) -> Tensor:
    """Return the mean cost of the best constant decision under the class priors, `(...)`."""
    if cost is not None:
        return (priors @ cost.shared_tensor(priors.device)).amin(-1)
    # Sum all priors except the largest. The difference 1 - largest would lose digits by cancellation near 1.
    return priors.scatter(-1, priors.argmax(-1, keepdim=True), 0.0).sum(-1)


@metric_function(
    Declaration(
        name="Bayes risk",
        question="mean cost of the optimal decisions under the predictions",
        source="Ferrer & Ramos, Evaluating Posterior Probabilities, arXiv 2408.02841, sec. 2.3.1",
        unit="cost",
        perfect=0.0,
    )
)
def bayes_risk(
    task: Task | None = None,
    *,
    cost: CostMatrix | Costs | None = None,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Bayes risk: the mean cost of the decisions that minimise the expected cost under the predictions.

    The Bayes risk is the mean over samples of cost[y, d] for the true class y. The decision d minimises
    sum_k q_k cost[k, d] for predicted probabilities q; on ties it is the first minimiser. With zero-one costs the Bayes
    risk is the error rate. It is a proper score for every cost matrix: the true probabilities minimise its expected
    value. It is not strictly proper, because it depends only on the decisions.

    Args:
        cost: `CostMatrix`, or a matrix `(C, M)`. Rows are true classes and columns are decisions, for example with a
            reject option. For binary and multi-label the shape is `(2, M)`, with rows y = 0 and y = 1. None means
            zero-one costs. For `torch.compile`, `vmap` or costs on a GPU, create a `CostMatrix` beforehand.
        normalize: `"prior"` divides by the cost of the best constant decision. A result above 1 means that the
            predictions are worse than this decision. If its cost is 0, the result is inf or NaN.
        priors: Class priors that replace the class frequencies in the data, as in `nll`. They do not change the
            decisions.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in the unit of `cost`, in the dtype of `preds` (at least
        float32). NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None, because the decisions are piecewise constant in the predictions.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1; priors app. A, eq. 36-37.

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0])
        >>> bayes_risk(preds, target, task="binary")
        tensor(0.2500)
        >>> bayes_risk(preds, target, task="binary", cost=CostMatrix.zero_one(2).with_reject(0.25))
        tensor(0.1250)
        >>> bayes_risk(preds, target, task="binary", reduction="none")
        tensor([0., 0., 0., 1.])
    """
    matrix = cost if cost is None or isinstance(cost, CostMatrix) else CostMatrix(cost)
    constant = partial(_cheapest_constant, cost=matrix)
    costs = [0.0, 1.0] if matrix is None else [cost for row in matrix.costs for cost in row]
    score_range = min(costs), max(costs)
    score = Score(_bayes_cost, constant, normalizable=True, arguments=(matrix,), score_range=score_range)
    return scored(score, task, options, normalize=normalize, priors=priors, average=average, reduction=reduction)


def bayes_decisions(
    preds: Tensor,
    task: Task,
    *,
    cost: CostMatrix | Costs | None = None,
    from_logits: bool = False,
    class_axis: int | None = None,
    validate_args: bool = True,
) -> Tensor:
    """Return the decision with the smallest expected cost for every prediction; the first one on ties.

    Args:
        preds: Probabilities, or logits with `from_logits=True`. Binary `(...)`; other tasks require a class axis.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        cost: Cost matrix `(C, M)`; see `bayes_risk`. None means zero-one costs.
        from_logits: `preds` are logits.
        class_axis: Axis of classes or labels in `preds`. None selects the last axis, if `preds` has at most two axes.
        validate_args: Raise an error for invalid values.

    Returns:
        Column indices of `cost`, int64, with the shape of the samples; multi-label with the shape of `preds`.

    Raises:
        TypeError, ValueError: for invalid input.

    Example:
        >>> bayes_decisions(torch.tensor([0.1, 0.45, 0.9]), task="binary", cost=[[0, 1, 0.25], [1, 0, 0.25]])
        tensor([0, 2, 1])
    """
    preds = as_tensor("preds", preds)
    how = InputFormat(task, from_logits=from_logits, class_axis=class_axis, validate_args=validate_args).resolved(preds)
    how.check_axis(preds)
    samples = how.samples_of(preds) if task != "multilabel" else preds.shape
    p = how.read(preds, torch.zeros(samples, dtype=torch.int64, device=preds.device))  # unused labels
    decisions = _decisions(p, None if cost is None else read_costs(cost, p.num_classes))
    if task != "multilabel":
        return decisions.reshape(samples)
    labels_first = preds.movedim(how.axis, 0).shape
    return decisions.reshape(labels_first).movedim(0, how.axis)


def expected_cost(
    decisions: Tensor,
    target: Tensor,
    *,
    cost: CostMatrix | Costs,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    weights: Tensor | None = None,
    ignore_index: int | None = None,
    validate_args: bool = True,
) -> Tensor:
    """Expected cost of given decisions: the mean of `cost[target, decision]` over samples.

    Args:
        decisions: Column indices of `cost`, integers `(..., N)`.
        target: True classes, integers `(..., N)`; or soft targets `(..., N, C)`.
        cost: Cost matrix `(C, M)`; see `bayes_risk`.
        normalize: `"prior"` divides by the cost of the best constant decision.
        priors: Class priors `(C,)` that replace the class frequencies in the data.
        weights: Non-negative weights `(..., N)`. Weight k is equivalent to k copies of the sample.
        ignore_index: Target value of rows to ignore.
        validate_args: Raise an error for invalid values.

    Returns:
        `(...)` float64, in the unit of `cost`. NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1.

    Example:
        >>> expected_cost(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 1]), cost=[[0, 1, 0.25], [1, 0, 0.25]])
        tensor(0.3125, dtype=torch.float64)
    """
    check_flag("validate_args", validate_args)
    if not isinstance(decisions, Tensor):
        raise TypeError(f"`decisions` must be a torch.Tensor, got {type(decisions).__name__}. Use torch.as_tensor.")
    decisions = as_tensor("decisions", decisions)
    check_has_values("decisions", decisions)
    target = as_tensor("target", target, decisions.device)
    if decisions.is_floating_point():
        raise TypeError(
            f"`decisions` must be integer column indices of `cost`, got {decisions.dtype}. "
            "For probabilities use bayes_risk, which computes the decisions."
        )
    matrix = cost if isinstance(cost, CostMatrix) else CostMatrix(cost)
    if target.shape not in (decisions.shape, (*decisions.shape, matrix.num_classes)):
        raise ValueError(
            f"`target` must have the shape {tuple(decisions.shape)} of `decisions`, or for soft targets an additional "
            f"axis of {matrix.num_classes} classes, got {tuple(target.shape)}. Pass one target per decision."
        )
    options: InputOptions = {
        "weights": weights,
        "ignore_index": ignore_index,
        "validate_args": validate_args,
        "class_axis": -1,
    }
    # `read_input`, which checks target and weights, requires predictions. Their values are not used.
    wide = wide_dtype(decisions.device)
    uniform = torch.full((), 1 / matrix.num_classes, dtype=wide, device=decisions.device)
    p = read_input(
        "multiclass",
        uniform.expand(*decisions.shape, matrix.num_classes),
        target,
        options,
        hard_targets=priors is not None,
    )
    decisions = decisions.long().reshape(p.samples)
    outside = (decisions < 0) | (decisions >= matrix.num_decisions)
    if validate_args:
        absent = None if p.weights is None else in_all_replicates(p.weights == 0, decisions.dim())
        rule = (
            f"`decisions` must be a column of `cost` in [0, {matrix.num_decisions - 1}], got "
            "{found} ({n} of {total} rows)."
        )

        def explain(rows: Tensor) -> str:
            return rule.format(found=int(decisions[rows][0]), n=int(rows.sum()), total=rows.numel())

        checked, _ = enforce([Rule(lambda: [Problem(outside, explain)])], p.weights, absent, False)
        p = replace(p, weights=checked)
    score = Score(
        partial(_cost_of, decisions=decisions.masked_fill(outside, 0), cost=matrix),
        partial(_cheapest_constant, cost=matrix),
        normalizable=True,
    )
    estimator = scored(score, "multiclass", {}, normalize=normalize, priors=priors)
    return by_replicates(estimator.from_predictions, p, estimator.accumulator.n_events(p))


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
