"""Difference of the entropies of prediction and votes."""

from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.metrics.proper_scores import evaluate, per_sample
from torchcalib.metrics.scores.votes.engine import Parts, VotesComponent, VotesMetric, shares_of, votes_score
from torchcalib.ops.logs import neg_entropy
from torchcalib.special.shares import entropy_of_counts


def _difference(p: Predictions) -> Tensor:
    of = shares_of(p)
    return 0 - neg_entropy(of.q, of.log_q) - of.entropy_of_votes


def _by_chance(p: Predictions) -> Tensor:
    return shares_of(p).entropy_lost_to_chance


def _corrected(p: Predictions) -> Tensor:
    of = shares_of(p)
    return 0 - neg_entropy(of.q, of.log_q) - entropy_of_counts(of.t, of.n)


_PARTS: Parts = {
    "value": _difference,
    "noise_floor": _by_chance,
    "corrected": _corrected,
}


def entropy_difference(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: VotesComponent = "value",
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Entropy of the predictions less that of the votes, in nats: whether a model is as sure as people are.

    Positive where the model is less sure than people, negative where it is surer; the mean over samples, in which both
    may cancel. It says nothing of which classes. The shares of few votes have less entropy than what they were drawn
    from, which makes it too large.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: counts of votes: integers, multi-class `(..., N, C)`, binary `(..., N, 2)` and multi-label
            `(..., N, L, 2)` for no and yes; or their shares, floating, without that last axis of binary and multi-label
            votes; or labels, which are one vote each.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        component: `"value"`; `"noise_floor"`, what the value would be on average if the votes had been drawn from the
            predictions, which is that of `torchcalib.kl_divergence` too; or `"corrected"`, with an estimate of the
            entropy behind the votes in the place of theirs; what remains of its bias is said there.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [-log C, log C] (corrected also less), in the dtype of `preds` (at least float32); NaN
        without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold. A noise floor needs counts of votes or
            labels, a correction counts of at least 2 votes in every row.

    Gradient:
        Everywhere and finite; where q_k = 0 it is 0 in probabilities.

    Source:
        [TALK] Pavlovic: Beyond Accuracy: Understanding Model Calibration (human-uncertainty calibration); Baan, Aziz,
        Plank, Fernandez: Stop Measuring Calibration When Humans Disagree (EMNLP 2022). Correction: the
        jackknife of Zhang: Entropy estimation in Turing's perspective (Neural Computation 24, 2012).

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> entropy_difference(preds, votes, task="multiclass")
        tensor(0.1429)
        >>> entropy_difference(preds, votes, task="multiclass", component="corrected")
        tensor(0.0308)
    """
    score = votes_score(_PARTS, component)
    return evaluate(score, preds, target, options, task=task, normalize=None, priors=None, average=average)


def entropy_difference_per_sample(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: VotesComponent = "value",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Difference of the entropies of every sample, in nats; see `entropy_difference`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> entropy_difference_per_sample(preds, votes, task="multiclass")
        tensor([0.2858, 0.0000])
    """
    return per_sample(votes_score(_PARTS, component), preds, target, task, options)


class EntropyDifference(VotesMetric):
    """Entropy of predictions less that of votes in nats, streamed; see `entropy_difference`.

    Example:
        >>> import torch
        >>> metric = EntropyDifference(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.1429, dtype=torch.float64)
    """

    parts = _PARTS
    higher_is_better = None  # 0 is as sure as people are
    unit, perfect = "nats", 0.0
    question = "is the model less sure than people (+) or surer (-)"
    source = "Pavlovic, Beyond Accuracy; Baan et al., Stop Measuring Calibration When Humans Disagree"
