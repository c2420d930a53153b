"""Entropic calibration difference."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.metrics.scores.engine import Score, ScoreMetric, evaluate, per_sample
from torchcalib.metrics.scores.gaussian import ecd_of_distribution, mean_over_samples, without_absent


def _ecd(p: Predictions) -> Tensor:
    return p.ecd


def _zero(s: ScoreSum, _: Tensor, __: Task) -> Tensor:
    return torch.zeros_like(s.total)


_ECD = Score(_ecd, _zero)


def ecd(
    preds: Tensor | Distribution,
    target: Tensor,
    *,
    task: Task | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Entropic calibration difference: how surprising outcomes are beyond what the prediction expects, in nats.

    The mean of -log q_h minus the prediction's own entropy: sum_k q_k log q_k - log q_h, with 0 log 0 = 0. Binary it is
    (p - y) log(p / (1-p)). 0 is what a calibrated model gets on average; negative means under-confident, positive
    over-confident. p = 1 and right gives 0, p = 1 and wrong +inf. One binary datum is bounded below by
    -W(1/e) = -0.2785, one of C classes by less (-1.1010 for 10). The total does not depend on any binning.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`; or a
            `torch.distributions` object with batch shape `(..., N)`, for which the score is -log_prob(x) - entropy.
        target: labels or soft targets, as for `nll`; or the observed values of the distribution.
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None for a distribution.
        priors: class priors that the score is reported for, as for `nll`.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`; for a distribution only `weights`.

    Returns:
        `(...)` in (-inf, inf], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere and finite, but for distributions, which have their own.

    Source:
        [ECD] Sumler, Devlin, Maskell, Lane: An Entropic Metric for Measuring Calibration of Machine Learning Models,
        eq. 8 (distributions), 12 (multi-class), 15 (binary).

    Example:
        >>> ecd(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(-0.2504)
        >>> ecd(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([0.0, 3.0]))
        tensor(1.7500)
    """
    if isinstance(preds, Distribution):
        _check_left_out(task=task, priors=priors, average=None if average == "macro" else average, **options)
        return mean_over_samples(ecd_of_distribution(preds, target), options.get("weights"))
    return evaluate(_ECD, preds, target, options, task=_required(task), normalize=None, priors=priors, average=average)


def ecd_per_sample(
    preds: Tensor | Distribution,
    target: Tensor,
    *,
    task: Task | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Entropic calibration difference of every sample, in nats; see `ecd`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> ecd_per_sample(torch.tensor([1.0, 1.0, 0.5]), torch.tensor([1, 0, 1]), task="binary")
        tensor([0., inf, 0.])
    """
    if isinstance(preds, Distribution):
        _check_left_out(task=task, **options)
        return without_absent(ecd_of_distribution(preds, target), options.get("weights"))
    return per_sample(_ECD, preds, target, _required(task), options)


def _check_left_out(**given: Any) -> None:
    if wrong := sorted(name for name, value in given.items() if value is not None and name != "weights"):
        raise ValueError(
            f"`{wrong[0]}` must be left out for a torch Distribution, got {given[wrong[0]]!r}. "
            "It says itself how values are read; only `weights` mean something."
        )


def _required(task: Task | None) -> Task:
    if task is None:
        raise TypeError("`task` must be 'binary', 'multiclass' or 'multilabel' for a tensor, got None. Pass task=...")
    return task


class ECD(ScoreMetric):
    """Entropic calibration difference in nats, streamed; see `ecd`.

    Example:
        >>> metric = ECD(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(-0.2504, dtype=torch.float64)
    """

    score = _ECD
    higher_is_better = None  # 0 is calibrated; below is under-confident, above over-confident
    unit, perfect = "nats", 0.0
    question = "were the outcomes more surprising than the predictions expected (+) or less (-)"
    source = "Sumler et al., An Entropic Metric, eq. 12, 15"
