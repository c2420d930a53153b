"""Brier score, and normalised Brier score."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.metrics.scores.engine import Score, ScoreMetric, evaluate, per_sample

Normalize = Literal["prior", "classes"]


def _brier(p: Predictions) -> Tensor:
    return p.squared_error


def _brier_over_classes(p: Predictions) -> Tensor:
    return p.squared_error / p.num_classes if p.task == "multiclass" else p.squared_error


def _brier_of_prior(s: ScoreSum, priors: Tensor, task: Task) -> Tensor:
    """E sum_k (P_k - t_k)^2, which is 1 - sum P^2 for hard labels; half of it where one class stands for two."""
    both = s.label_square.sum(-1) / s.total - priors.square().sum(-1)
    return both if task == "multiclass" else both / 2


_BRIER = Score(_brier, _brier_of_prior, normalizable=True)
_BRIER_OVER_CLASSES = Score(_brier_over_classes, _brier_of_prior)


def brier_score(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    normalize: Normalize | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Brier score: the mean squared distance between the prediction and what happened.

    Binary and per label (p - y)^2, in [0, 1]; multi-class sum_k (q_k - 1[h=k])^2, in [0, 2]: the two-class form is
    twice the binary one. Soft targets take the place of the indicator.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets, as for `nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        normalize: `"classes"` divides the multi-class sum by C (the binary score is that already); `"prior"` divides by
            the same score of always predicting the class priors (NBS): 1 is what that naive predictor gets.
        priors: class priors that the score is reported for, as for `nll`.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)`, in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration, eq. 2 (binary); [EPSR] eq. 9 (multi-class).

    Example:
        >>> import torch
        >>> brier_score(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0467)
    """
    score, normalize = (_BRIER_OVER_CLASSES, None) if normalize == "classes" else (_BRIER, normalize)
    return evaluate(score, preds, target, options, task=task, normalize=normalize, priors=priors, average=average)


def brier_per_sample(preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[InputOptions]) -> Tensor:
    """Squared distance of every sample; see `brier_score`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> import torch
        >>> brier_per_sample(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]), task="multiclass")
        tensor([0.5000, 2.0000])
    """
    return per_sample(_BRIER, preds, target, task, options)


class Brier(ScoreMetric):
    """Brier score, streamed; see `brier_score`.

    Example:
        >>> import torch
        >>> metric = Brier(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0467, dtype=torch.float64)
    """

    score = _BRIER
    unit, perfect, plot_lower_bound = "squared probability", 0.0, 0.0
    question = "how far were the probabilities from what happened"
    source = "Sumler et al., An Entropic Metric, eq. 2; Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 9"

    def __init__(self, *, normalize: Normalize | None = None, **options: Any) -> None:
        if normalize == "classes":
            super().__init__(_BRIER_OVER_CLASSES, **options)
        else:
            super().__init__(normalize=normalize, **options)
