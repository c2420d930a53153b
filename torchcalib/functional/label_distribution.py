"""Comparison of predictions and label distributions (the proportions of annotators that chose each class).

With few annotators a label distribution is noisy, and a distance is positive even for a perfect prediction. Every
distance therefore has two or three components: the value, the noise floor and, if available, the value corrected for
the noise. The noise floor is the expected value if annotations are sampled from the predictions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Reduction, Task, check_choice
from torchcalib.core.predictions import Predictions
from torchcalib.functional.estimator import Declaration, metric_function
from torchcalib.functional.scores import Score, ScoreEstimator, scored
from torchcalib.ops.logs import neg_entropy, safe_log, wide_dtype, xmul
from torchcalib.ops.sorting import order_of
from torchcalib.special.shares import entropy_of_counts, mean_distance_of_share, mean_log_share

Component = Literal["value", "noise_floor", "corrected"]
_MIN_ANNOTATORS: Mapping[Component, int] = {"value": 0, "noise_floor": 1, "corrected": 2}
"""Minimum number of annotators per sample, by component. The correction needs two to estimate a variance."""


_SOURCE = "Pavlovic, Beyond Accuracy; Baan et al., Stop Measuring Calibration When Humans Disagree, arXiv 2210.16133"


def _probs(p: Predictions) -> Tensor:
    """Return the predicted probabilities q `(..., N, C)`. For binary and multi-label C = 2 (y = 0 and y = 1)."""
    if p.task == "multiclass":
        return p.probs.to(wide_dtype(p.values.device))
    return torch.stack((p.not_probs, p.probs), -1)


def _log_probs(p: Predictions) -> Tensor:
    """Return log q `(..., N, C)`, accurate even for logits whose probability rounds to 0 or 1."""
    if p.task == "multiclass":
        return p.log_probs.to(wide_dtype(p.values.device))
    log_yes, log_no = p.binary_log_probs
    return torch.stack((log_no, log_yes), -1)


def _label_probs(p: Predictions) -> Tensor:
    """Return the label distributions t `(..., N, C)`. A label is converted to its one-hot vector."""
    wide = wide_dtype(p.values.device)
    if p.task != "multiclass":
        return torch.stack((1 - p.target, p.target), -1)
    if p.soft:
        return p.target.to(wide)
    return (p.target.unsqueeze(-1) == torch.arange(p.num_classes, device=p.target.device)).to(wide)


def _n_annotators(p: Predictions) -> Tensor:
    """Return the number of annotators per sample, `(..., N, 1)`; 1 for labels."""
    n = torch.ones(p.samples, dtype=wide_dtype(p.values.device), device=p.values.device)
    return (n if p.n_annotators is None else p.n_annotators).unsqueeze(-1)


def _label_entropy(p: Predictions) -> Tensor:
    t = _label_probs(p)
    return 0 - neg_entropy(t, safe_log(t))


def _kl(p: Predictions) -> Tensor:
    t = _label_probs(p)
    return xmul(t, safe_log(t) - _log_probs(p)).sum(-1)


def _expected_entropy_loss(p: Predictions) -> Tensor:
    """Return the entropy of q minus the expected entropy of the class proportions in n samples of q, `(..., N)`."""
    q = _probs(p)
    return xmul(q, mean_log_share(q, _n_annotators(p)) - _log_probs(p)).sum(-1)


def _variance(p: Predictions, shares: Tensor, n: Tensor) -> Tensor:
    """Return the variance of the class proportions in a multinomial sample of size n, summed over classes, `(..., N)`.

    For binary and multi-label tasks, only the proportion of y = 1 is included, as in the squared distance.
    """
    variance = shares * (1 - shares) / n
    return variance.sum(-1) if p.task == "multiclass" else variance[..., 1]


_DISTANCES: Mapping[str, Mapping[Component, Callable[[Predictions], Tensor]]] = {
    "total variation": {
        "value": lambda p: (_probs(p) - _label_probs(p)).abs().sum(-1) / 2,
        "noise_floor": lambda p: mean_distance_of_share(_probs(p), _n_annotators(p)).sum(-1) / 2,
    },
    "Kullback-Leibler": {
        "value": _kl,
        "noise_floor": _expected_entropy_loss,
        "corrected": lambda p: p.cross_entropy - entropy_of_counts(_label_probs(p), _n_annotators(p)),
    },
    "entropy": {
        "value": lambda p: 0 - p.neg_entropy - _label_entropy(p),
        "noise_floor": _expected_entropy_loss,
        "corrected": lambda p: 0 - p.neg_entropy - entropy_of_counts(_label_probs(p), _n_annotators(p)),
    },
    "squared": {
        "value": lambda p: p.squared_error,
        "noise_floor": lambda p: _variance(p, _probs(p), _n_annotators(p)),
        "corrected": lambda p: p.squared_error - _variance(p, _label_probs(p), _n_annotators(p) - 1),
    },
}
"""Functions from `Predictions` to the distance per sample `(..., N)`, by distance and component."""


def _distance(p: Predictions, distance: str, component: Component) -> Tensor:
    return _DISTANCES[distance][component](p)


def _score(distance: str, component: Component) -> Score:
    check_choice("component", component, tuple(_DISTANCES[distance]))
    has_sign = component == "corrected" or (distance == "entropy" and component == "value")
    score_range = -math.inf if has_sign else 0, 1 if distance == "total variation" else math.inf
    arguments = distance, component
    return Score(_distance, arguments=arguments, min_annotators=_MIN_ANNOTATORS[component], score_range=score_range)


@metric_function(
    Declaration(
        name="Total variation",
        question="mean total variation distance between predictions and label distributions",
        source=_SOURCE,
        unit="probability",
        perfect=0.0,
        value_range=(0.0, 1.0),
        noise_increases=True,
    )
)
def total_variation(
    task: Task | None = None,
    *,
    component: Literal["value", "noise_floor"] = "value",
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Total variation distance between predictions q and label distributions t: the mean of sum_k |q_k - t_k| / 2.

    It is the largest difference between q and t in the probability of any set of classes. For a binary task it is
    |p - t|, where p and t are the probabilities of y = 1.

    Args:
        target: Integer annotator counts: multi-class `(..., N, C)`, binary `(..., N, 2)` and multi-label
            `(..., N, L, 2)` with counts for y = 0 and y = 1. Floating proportions with the shape of `preds` and labels
            (one annotator each) are also accepted.
        component: `"value"`, or `"noise_floor"`: the exact expected value if annotations are sampled from the
            predictions.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, 1], in the dtype of `preds` (at least float32). NaN
        without data.

    Raises:
        TypeError, ValueError: for invalid input. A noise floor requires counts or labels.

    Gradient:
        Defined everywhere; 0 where q_k = t_k. The gradient of the noise floor is 0 at q_k = 0 and q_k = 1.

    Reference:
        [TALK] Pavlovic: Beyond Accuracy: Understanding Model Calibration (human-uncertainty calibration); Baan, Aziz,
        Plank, Fernandez: Stop Measuring Calibration When Humans Disagree (EMNLP 2022). Noise floor: De Moivre's formula
        for the mean absolute deviation of a binomial distribution.

    Example:
        >>> preds, counts = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> total_variation(preds, counts, task="multiclass")
        tensor(0.1000)
        >>> total_variation(preds, counts, task="multiclass", component="noise_floor")
        tensor(0.1244)
    """
    return scored(_score("total variation", component), task, options, average=average, reduction=reduction)


@metric_function(
    Declaration(
        name="KL divergence",
        question="mean Kullback-Leibler divergence of predictions from label distributions",
        source="Pavlovic, Beyond Accuracy; "
        "Peterson et al., Human Uncertainty Makes Classification More Robust, arXiv 1908.07086",
        unit="nats",
        perfect=0.0,
        noise_increases=True,
    )
)
def kl_divergence(
    task: Task | None = None,
    *,
    component: Component = "value",
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Kullback-Leibler divergence of predictions q from label distributions t: the mean of sum_k t_k log(t_k / q_k).

    It equals the negative log-likelihood with soft targets t minus the entropy of t, with 0 log 0 = 0. It is +inf if
    q_k = 0 and t_k > 0. With few annotators it is biased upwards, because the entropy of t is underestimated.

    Args:
        target: Annotator counts, proportions or labels, as for `total_variation`.
        component: `"value"`; `"noise_floor"`, the expected value if annotations are sampled from the predictions; or
            `"corrected"`, with a bias-corrected entropy of t. The noise floor is exact for up to 49 annotators per
            sample, otherwise within 2e-9 nats per class. If n annotations are sampled from p, the bias of the
            corrected value is sum_k p_k (sum_(v >= n) (1-p_k)^v / v - (1-p_k)^(n-1)).

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in nats, in [0, inf]. The dtype is that of `preds` (at
        least float32). A corrected value may be negative. NaN without data.

    Raises:
        TypeError, ValueError: see `total_variation`. A correction requires at least 2 annotators in every row.

    Gradient:
        Finite everywhere. Where the divergence is infinite, the gradient is 0 with respect to probabilities, and q - t
        with respect to logits.

    Reference:
        Pavlovic: Beyond Accuracy (talk); Peterson, Battleday, Griffiths, Russakovsky: Human Uncertainty Makes
        Classification More Robust (ICCV 2019). Correction: the jackknife of Zhang: Entropy estimation in Turing's
        perspective (Neural Computation 24, 2012).

    Example:
        >>> preds, counts = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> kl_divergence(preds, counts, task="multiclass")
        tensor(0.0582)
        >>> kl_divergence(preds, counts, task="multiclass", component="corrected")
        tensor(-0.0539)
    """
    return scored(_score("Kullback-Leibler", component), task, options, average=average, reduction=reduction)


@metric_function(
    Declaration(
        name="Entropy gap",
        question="mean entropy of the predictions minus entropy of the label distributions",
        source=_SOURCE,
        unit="nats",
        perfect=0.0,
        better="nearer to 0",
        noise_increases=True,
    )
)
def entropy_gap(
    task: Task | None = None,
    *,
    component: Component = "value",
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Entropy of the predictions q minus the entropy of the label distributions t, averaged over samples.

    It is the mean of sum_k t_k log t_k - sum_k q_k log q_k. A positive value means that the model is less certain
    than the annotators. Differences of opposite sign cancel. The value does not depend on which classes are predicted.
    With few annotators the entropy of t is underestimated, and the value is biased upwards.

    Args:
        target: Annotator counts, proportions or labels, as for `total_variation`.
        component: `"value"`; `"noise_floor"`, the expected value if annotations are sampled from the predictions; or
            `"corrected"`. Accuracy and bias are as for `torchcalib.functional.kl_divergence`.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in nats, in [-log C, log C]. The dtype is that of `preds`
        (at least float32). A corrected value may be smaller. NaN without data.

    Raises:
        TypeError, ValueError: see `total_variation`. A correction requires at least 2 annotators in every row.

    Gradient:
        Finite everywhere; 0 with respect to probabilities where q_k = 0.

    Reference:
        Pavlovic: Beyond Accuracy (talk); Baan, Aziz, Plank, Fernandez: Stop Measuring Calibration When Humans Disagree
        (EMNLP 2022). Correction: the jackknife of Zhang: Entropy estimation in Turing's perspective (Neural Computation
        24, 2012).

    Example:
        >>> preds, counts = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> entropy_gap(preds, counts, task="multiclass")
        tensor(0.1429)
        >>> entropy_gap(preds, counts, task="multiclass", component="corrected")
        tensor(0.0308)
    """
    return scored(_score("entropy", component), task, options, average=average, reduction=reduction)


@metric_function(
    Declaration(
        name="Squared distance",
        question="mean squared distance between predictions and label distributions",
        source="Ferrer & Ramos, Evaluating Posterior Probabilities, arXiv 2408.02841, eq. 9, with label distributions",
        unit="squared probability",
        perfect=0.0,
        noise_increases=True,
    )
)
def squared_distance(
    task: Task | None = None,
    *,
    component: Component = "value",
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Squared distance between predictions q and label distributions t: the mean of sum_k (q_k - t_k)^2.

    It is the Brier score with soft targets t. For a binary task it is (p - t)^2, where p and t are the probabilities of
    y = 1. For any number of annotators, the corrected value is an unbiased estimate of the distance to the population
    label distribution.

    Args:
        target: Annotator counts, proportions or labels, as for `total_variation`.
        component: `"value"`; `"noise_floor"`, the expected value sum_k q_k (1-q_k) / n if n annotations are sampled
            from the predictions; or `"corrected"`, the value minus the estimated variance sum_k t_k (1-t_k) / (n-1).

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, 2], binary [0, 1]. The dtype is that of `preds` (at
        least float32). A corrected value may be negative. NaN without data.

    Raises:
        TypeError, ValueError: see `total_variation`. A correction requires at least 2 annotators in every row.

    Gradient:
        Defined everywhere.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 9, with the label distribution instead of
        the indicator. Correction: the unbiased sample variance, with denominator n - 1.

    Example:
        >>> preds, counts = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> squared_distance(preds, counts, task="multiclass")
        tensor(0.0400)
        >>> squared_distance(preds, counts, task="multiclass", component="corrected")
        tensor(-0.0057)
    """
    return scored(_score("squared", component), task, options, average=average, reduction=reduction)


def _ordered_by_q(p: Predictions) -> Tensor:
    """Return values `(..., N, C)` in the order of q: logits if given, whose probabilities can round to the same number.

    For binary and multi-label C = 2 (y = 0 and y = 1).
    """
    if p.task == "multiclass":
        return p.values
    return torch.stack((-p.values, p.values) if p.from_logits else (p.not_probs, p.probs), -1)


def _same_ranking(p: Predictions) -> Tensor:
    """Return 1 if q and t do not order any two classes in opposite directions, else 0, `(..., N)`.

    The classes are sorted by t, and by q where t is equal. Two classes have opposite orders if and only if q then
    decreases somewhere. A comparison of all pairs would need memory for N * C * C values.
    """
    q, t = _ordered_by_q(p), _label_probs(p)
    order = order_of(q)
    order = order.gather(-1, order_of(t.gather(-1, order)))
    q = q.gather(-1, order)
    return (q[..., 1:] >= q[..., :-1]).all(-1).to(t.dtype)


@metric_function(
    Declaration(
        name="Ranking score",
        question="fraction of samples whose predictions rank the classes as the annotators do",
        source="Baan et al., Stop Measuring Calibration When Humans Disagree, arXiv 2210.16133",
        unit="fraction of samples",
        perfect=1.0,
        value_range=(0.0, 1.0),
        better="higher",
    )
)
def ranking_score(
    task: Task | None = None,
    *,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Human ranking calibration score (RankCS): fraction of samples whose predictions q rank classes as annotators do.

    A sample counts if no two classes have opposite orders: q_j < q_k and t_j > t_k, for label distributions t. Classes
    that are tied in q or in t agree with every order. A uniform prediction therefore has the value 1. With few
    annotators, the expected value of a perfect prediction is below 1. The published score compares the argsort of q
    and t instead. It therefore decides ties by the index of the class, and is never larger. Logits are compared before
    the softmax.

    For labels, a sample counts if no class is more probable than the label: accuracy, with ties counted as correct. For
    binary and multi-label tasks the classes are y = 0 and y = 1.

    Args:
        target: Annotator counts, proportions or labels, as for `total_variation`.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, 1], in the dtype of `preds` (at least float32). NaN
        without data.

    Gradient:
        None, because the value is piecewise constant in the predictions.

    Reference:
        Baan, Aziz, Plank, Fernandez: Stop Measuring Calibration When Humans Disagree (EMNLP 2022), with another
        rule for ties.

    Example:
        >>> preds, counts = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]]), torch.tensor([[8, 1, 1], [5, 4, 1]])
        >>> ranking_score(preds, counts, task="multiclass")
        tensor(0.5000)
        >>> ranking_score(preds, counts, task="multiclass", reduction="none")
        tensor([1., 0.])
    """
    return scored(Score(_same_ranking, score_range=(0, 1)), task, options, average=average, reduction=reduction)
