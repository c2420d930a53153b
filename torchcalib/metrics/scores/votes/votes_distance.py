"""Squared distance between prediction and votes, which can be freed of the noise of few votes."""

from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.metrics.proper_scores import evaluate, per_sample
from torchcalib.metrics.scores.votes.engine import Parts, VotesComponent, VotesMetric, shares_of, votes_score


def _distance(p: Predictions) -> Tensor:
    return p.squared_error


def _by_chance(p: Predictions) -> Tensor:
    of = shares_of(p)
    return _as_many(p, of.q * (1 - of.q) / of.n)


def _corrected(p: Predictions) -> Tensor:
    of = shares_of(p)
    return p.squared_error - _as_many(p, of.t * (1 - of.t) / (of.n - 1))


def _as_many(p: Predictions, variances: Tensor) -> Tensor:
    """Sum variances of shares over as many classes as the squared error does: one of two that mirror each other."""
    return variances.sum(-1) if p.task == "multiclass" else variances[..., 1]


_PARTS: Parts = {
    "value": _distance,
    "noise_floor": _by_chance,
    "corrected": _corrected,
}


def votes_distance(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: VotesComponent = "value",
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Squared distance between predictions and votes, the mean of sum_k (q_k - t_k)^2, binary (p - t)^2.

    The Brier score of votes. Of the distances to votes it is the one that can be freed of their noise exactly:
    corrected, its expectation is the distance to what the votes were drawn from, however few they are.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: counts of votes: integers, multi-class `(..., N, C)`, binary `(..., N, 2)` and multi-label
            `(..., N, L, 2)` for no and yes; or their shares, floating, without that last axis of binary and multi-label
            votes; or labels, which are one vote each.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        component: `"value"`; `"noise_floor"`, what the value would be on average if the votes had been drawn from the
            predictions, sum_k q_k (1-q_k) / n; or `"corrected"`, less sum_k t_k (1-t_k) / (n-1), the unbiased estimate
            of what n votes add.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [0, 2], binary [0, 1] (corrected also less than 0), in the dtype of `preds` (at least float32); NaN
        without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold. A noise floor needs counts of votes or
            labels, a correction counts of at least 2 votes in every row.

    Gradient:
        Everywhere.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 9, with shares of votes in the place of the
        indicator. Correction: the sample variance of n draws, and n - 1.

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> votes_distance(preds, votes, task="multiclass")
        tensor(0.0400)
        >>> votes_distance(preds, votes, task="multiclass", component="corrected")
        tensor(-0.0057)
    """
    score = votes_score(_PARTS, component)
    return evaluate(score, preds, target, options, task=task, normalize=None, priors=None, average=average)


def votes_distance_per_sample(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: VotesComponent = "value",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Squared distance of every sample; see `votes_distance`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> votes_distance_per_sample(preds, votes, task="multiclass")
        tensor([0.0800, 0.0000])
    """
    return per_sample(votes_score(_PARTS, component), preds, target, task, options)


class VotesDistance(VotesMetric):
    """Squared distance between predictions and votes, streamed; see `votes_distance`.

    Example:
        >>> import torch
        >>> metric = VotesDistance(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.0400, dtype=torch.float64)
    """

    parts = _PARTS
    unit, perfect = "squared probability", 0.0  # and no lower bound: corrected, it may be less
    question = "how far are the predictions from how people voted, without the noise of few votes"
    source = "Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 9, of shares of votes"
