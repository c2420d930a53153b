"""Kullback-Leibler divergence from votes to prediction."""

from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.metrics.proper_scores import evaluate, per_sample
from torchcalib.metrics.scores.votes.engine import Parts, VotesComponent, VotesMetric, shares_of, votes_score
from torchcalib.ops.logs import safe_log, xmul
from torchcalib.special.shares import entropy_of_counts


def _divergence(p: Predictions) -> Tensor:
    of = shares_of(p)
    return xmul(of.t, safe_log(of.t) - of.log_q).sum(-1)


def _by_chance(p: Predictions) -> Tensor:
    return shares_of(p).entropy_lost_to_chance


def _corrected(p: Predictions) -> Tensor:
    of = shares_of(p)
    return 0 - xmul(of.t, of.log_q).sum(-1) - entropy_of_counts(of.t, of.n)


_PARTS: Parts = {
    "value": _divergence,
    "noise_floor": _by_chance,
    "corrected": _corrected,
}


def kl_divergence(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: VotesComponent = "value",
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Kullback-Leibler divergence from votes to predictions: the mean of sum_k t_k log(t_k / q_k), in nats.

    What the NLL of the votes has beyond their own entropy, which no prediction can avoid; +inf where q_k = 0 < t_k,
    with 0 log 0 = 0. The shares of few votes have less entropy than what they were drawn from, which makes it too
    large.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: counts of votes: integers, multi-class `(..., N, C)`, binary `(..., N, 2)` and multi-label
            `(..., N, L, 2)` for no and yes; or their shares, floating, without that last axis of binary and multi-label
            votes; or labels, which are one vote each.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        component: `"value"`; `"noise_floor"`, what the value would be on average if the votes had been drawn from the
            predictions, exact for up to 49 votes a sample (else within 2e-9 nats a class); or `"corrected"`, with an
            estimate of the entropy behind the votes in the place of theirs. What remains of its bias, for n votes
            drawn from p, is sum_k p_k (sum_(v >= n) (1-p_k)^v / v - (1-p_k)^(n-1)), of either sign.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [0, inf] (corrected also less than 0), in the dtype of `preds` (at least float32); NaN without
        data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold. A noise floor needs counts of votes or
            labels, a correction counts of at least 2 votes in every row.

    Gradient:
        Everywhere and finite; where the divergence is infinite it is 0 in probabilities, and q - t in logits.

    Source:
        [TALK] Pavlovic: Beyond Accuracy: Understanding Model Calibration (human-uncertainty calibration); Peterson,
        Battleday, Griffiths, Russakovsky: Human Uncertainty Makes Classification More Robust (ICCV 2019). Correction:
        the jackknife of Zhang: Entropy estimation in Turing's perspective (Neural Computation 24, 2012).

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> kl_divergence(preds, votes, task="multiclass")
        tensor(0.0582)
        >>> kl_divergence(preds, votes, task="multiclass", component="corrected")
        tensor(-0.0539)
    """
    score = votes_score(_PARTS, component)
    return evaluate(score, preds, target, options, task=task, normalize=None, priors=None, average=average)


def kl_divergence_per_sample(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: VotesComponent = "value",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Kullback-Leibler divergence of every sample, in nats; see `kl_divergence`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> kl_divergence_per_sample(preds, votes, task="multiclass")
        tensor([0.1163, 0.0000])
    """
    return per_sample(votes_score(_PARTS, component), preds, target, task, options)


class KLDivergence(VotesMetric):
    """Kullback-Leibler divergence from votes to predictions in nats, streamed; see `kl_divergence`.

    Example:
        >>> import torch
        >>> metric = KLDivergence(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.0582, dtype=torch.float64)
    """

    parts = _PARTS
    unit, perfect = "nats", 0.0  # and no lower bound: corrected, it may be less
    question = "how much do the predictions lose on how people voted"
    source = "Pavlovic, Beyond Accuracy; Peterson et al., Human Uncertainty Makes Classification More Robust"
