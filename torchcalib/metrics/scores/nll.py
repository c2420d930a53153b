"""Negative log-likelihood, and normalised cross entropy."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.metrics.scores.engine import Score, ScoreMetric, evaluate, per_sample
from torchcalib.ops.logs import safe_log, xmul


def _nll(p: Predictions, eps: float | None = None) -> Tensor:
    return p.cross_entropy if eps is None else p.clipped_cross_entropy(eps)


def _entropy(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return 0 - xmul(priors, safe_log(priors)).sum(-1)  # not -x, which makes -0 of the entropy of a single class


def _nll_score(eps: float | None = None) -> Score:
    if eps is not None and not (isinstance(eps, float) and 0 < eps < 1):
        raise ValueError(f"`eps` must be in (0, 1) or None, got {eps!r}.")
    return Score(_nll, _entropy, normalizable=True, arguments=(eps,))


def nll(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    eps: float | None = None,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Negative log-likelihood (log loss, cross entropy): the mean of -log q_h, in nats.

    q_h is the probability given to the true class h; with soft targets the score is -sum_k t_k log q_k. From logits it
    comes from `log_softmax`, so a saturated prediction is exact. q_h = 0 gives +inf unless `eps` is given.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels: binary `(..., N)`, multi-class `(..., N)`, multi-label `(..., N, L)`; or soft targets, floating,
            binary and multi-label of the same shape, multi-class `(..., N, C)`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        eps: probabilities below it count as `eps`.
        normalize: `"prior"` divides by the NLL of always predicting the class priors, their entropy (NCE): 1 is what
            that naive predictor gets. A single class in the data has entropy 0, and the result is inf or NaN.
        priors: class priors `(C,)` (binary and each label: `(2,)`) that the score is reported for, whatever the class
            shares in the data; a class with a positive prior but no samples gives NaN. Integer targets only.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [0, inf], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere and finite; where the score is infinite it is 0 in probabilities, and q - t in logits.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 8; NCE sec. 2.2; priors app. A, eq. 36-37.

    Example:
        >>> import torch
        >>> nll(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.2284)
        >>> nll(torch.tensor([[200.0, 0.0]]), torch.tensor([1]), task="multiclass", from_logits=True)
        tensor(200.)
    """
    return evaluate(
        _nll_score(eps), preds, target, options, task=task, normalize=normalize, priors=priors, average=average
    )


def nll_per_sample(
    preds: Tensor, target: Tensor, *, task: Task, eps: float | None = None, **options: Unpack[InputOptions]
) -> Tensor:
    """-log q_h of every sample, in nats; see `nll`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows that `ignore_index` or weight 0 leave
        out are NaN.

    Example:
        >>> import torch
        >>> nll_per_sample(torch.tensor([1.0, 0.5]), torch.tensor([1, 0]), task="binary")
        tensor([0.0000, 0.6931])
    """
    return per_sample(_nll_score(eps), preds, target, task, options)


class NLL(ScoreMetric):
    """Negative log-likelihood in nats, streamed; see `nll`. `eps`: probabilities below it count as `eps`.

    Example:
        >>> import torch
        >>> metric = NLL(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.2284, dtype=torch.float64)
    """

    score = _nll_score()
    unit, perfect, plot_lower_bound = "nats", 0.0, 0.0
    question = "how improbable was what happened"
    source = "Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 8"

    def __init__(self, *, eps: float | None = None, **options: Any) -> None:
        super().__init__(_nll_score(eps), **options)
