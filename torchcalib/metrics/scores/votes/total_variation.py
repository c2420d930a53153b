"""Total variation distance between prediction and votes."""

from typing import Literal, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.metrics.proper_scores import evaluate, per_sample
from torchcalib.metrics.scores.votes.engine import Parts, VotesMetric, shares_of, votes_score
from torchcalib.special.shares import mean_distance_of_share


def _distance(p: Predictions) -> Tensor:
    of = shares_of(p)
    return (of.q - of.t).abs().sum(-1) / 2


def _by_chance(p: Predictions) -> Tensor:
    of = shares_of(p)
    return mean_distance_of_share(of.q, of.n).sum(-1) / 2


_PARTS: Parts = {"value": _distance, "noise_floor": _by_chance}


def total_variation(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: Literal["value", "noise_floor"] = "value",
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Total variation distance between predictions and votes: the mean of sum_k |q_k - t_k| / 2.

    The largest difference between the probabilities that model and people give to any set of classes; binary |p - t|.
    0 is what a model gets that predicts how people vote, if votes are many: see the noise floor.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: counts of votes: integers, multi-class `(..., N, C)`, binary `(..., N, 2)` and multi-label
            `(..., N, L, 2)` for no and yes; or their shares, floating, without that last axis of binary and multi-label
            votes; or labels, which are one vote each.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        component: `"value"`; or `"noise_floor"`, what the value would be on average if the votes had been drawn from
            the predictions, exactly: what there is beyond it is no chance.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [0, 1], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold. A noise floor needs counts of votes or
            labels.

    Gradient:
        Everywhere; 0 where q_k = t_k. Of the noise floor everywhere but at q_k = 0 and 1, where it is 0.

    Source:
        [TALK] Pavlovic: Beyond Accuracy: Understanding Model Calibration (human-uncertainty calibration); Baan, Aziz,
        Plank, Fernandez: Stop Measuring Calibration When Humans Disagree (EMNLP 2022). Noise floor: De Moivre's
        mean absolute deviation of the binomial, class by class.

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> total_variation(preds, votes, task="multiclass")
        tensor(0.1000)
        >>> total_variation(preds, votes, task="multiclass", component="noise_floor")
        tensor(0.1244)
    """
    score = votes_score(_PARTS, component)
    return evaluate(score, preds, target, options, task=task, normalize=None, priors=None, average=average)


def total_variation_per_sample(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    component: Literal["value", "noise_floor"] = "value",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Total variation distance of every sample; see `total_variation`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> import torch
        >>> preds, votes = torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]])
        >>> total_variation_per_sample(preds, votes, task="multiclass")
        tensor([0.2000, 0.0000])
    """
    return per_sample(votes_score(_PARTS, component), preds, target, task, options)


class TotalVariation(VotesMetric):
    """Total variation distance between predictions and votes, streamed; see `total_variation`.

    Example:
        >>> import torch
        >>> metric = TotalVariation(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.1000, dtype=torch.float64)
    """

    parts = _PARTS
    unit, perfect, plot_lower_bound, plot_upper_bound = "probability", 0.0, 0.0, 1.0
    question = "how far are the predictions from how people voted"
    source = "Pavlovic, Beyond Accuracy; Baan et al., Stop Measuring Calibration When Humans Disagree"
