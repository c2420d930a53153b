"""Proper scores, NLL, Brier score and entropic calibration difference, and accuracy: means over samples."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchcalib.core.arguments import Average, InputOptions, Reduction, Task, task_of
from torchcalib.core.documentation import documented
from torchcalib.core.events import top_label
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.metrics.estimator import functional
from torchcalib.metrics.gaussian import ecd_of_distribution, reduced
from torchcalib.metrics.scores import Score, ScoreEstimator, ScoreMetric, score_function, scored
from torchcalib.ops.logs import safe_log, wide_dtype, xmul


def _nll_of(p: Predictions, eps: float | None = None) -> Tensor:
    return p.cross_entropy if eps is None else p.clipped_cross_entropy(eps)


def _entropy(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return 0 - xmul(priors, safe_log(priors)).sum(-1)  # not -x, which makes -0 of the entropy of a single class


def _nll_score(eps: float | None = None) -> Score:
    if eps is not None and not (isinstance(eps, float) and 0 < eps < 1):
        raise ValueError(f"`eps` must be in (0, 1) or None, got {eps!r}.")
    return Score(_nll_of, _entropy, normalizable=True, arguments=(eps,))


def _nll(
    *,
    task: Task,
    eps: float | None = None,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Negative log-likelihood (log loss, cross entropy): the mean of -log q_h, in nats.

    q_h is the probability given to the true class h; with soft targets the score is -sum_k t_k log q_k. From logits it
    comes from `log_softmax`, so a saturated prediction is exact. q_h = 0 gives +inf unless `eps` is given.

    Args:
        eps: probabilities below it count as `eps`.
        normalize: `"prior"` divides by the NLL of always predicting the class priors, their entropy (NCE): 1 is what
            that naive predictor gets. A single class in the data has entropy 0, and the result is inf or NaN.
        priors: class priors `(C,)` (binary and each label: `(2,)`) that the score is reported for, whatever the class
            shares in the data; a class with a positive prior but no samples gives NaN. Integer targets only.

    Returns:
        `(...)` in [0, inf], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere and finite; where the score is infinite it is 0 in probabilities, and q - t in logits.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 8; NCE sec. 2.2; priors app. A, eq. 36-37.

    Example:
        >>> nll(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.2284)
        >>> nll(torch.tensor([[200.0, 0.0]]), torch.tensor([1]), task="multiclass", from_logits=True)
        tensor(200.)
        >>> nll(torch.tensor([1.0, 0.5]), torch.tensor([1, 0]), task="binary", reduction="none")
        tensor([0.0000, 0.6931])
    """
    return scored(_nll_score(eps), task=task, normalize=normalize, priors=priors, average=average, **options)


nll = score_function(_nll)


class NLL(ScoreMetric):
    """Negative log-likelihood in nats, streamed; see `nll`.

    Example:
        >>> import torch
        >>> metric = NLL(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.2284, dtype=torch.float64)
    """

    factory = staticmethod(_nll)
    score = _nll_score()
    unit, perfect, plot_lower_bound = "nats", 0.0, 0.0
    question = "how improbable was what happened"
    source = "Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 8"


Normalize = Literal["prior", "classes"]


def _brier_of(p: Predictions) -> Tensor:
    return p.squared_error


def _brier_over_classes(p: Predictions) -> Tensor:
    return p.squared_error / p.num_classes if p.task == "multiclass" else p.squared_error


def _brier_of_prior(s: ScoreSum, priors: Tensor, task: Task) -> Tensor:
    """E sum_k (P_k - t_k)^2, which is 1 - sum P^2 for hard labels; half of it where one class stands for two."""
    both = s.label_square.sum(-1) / s.total - priors.square().sum(-1)
    return both if task == "multiclass" else both / 2


_BRIER = Score(_brier_of, _brier_of_prior, normalizable=True)
_BRIER_OVER_CLASSES = Score(_brier_over_classes, _brier_of_prior)


def _brier_score(
    *,
    task: Task,
    normalize: Normalize | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Brier score: the mean squared distance between the prediction and what happened.

    Binary and per label (p - y)^2, in [0, 1]; multi-class sum_k (q_k - 1[h=k])^2, in [0, 2]: the two-class form is
    twice the binary one. Soft targets take the place of the indicator.

    Args:
        normalize: `"classes"` divides the multi-class sum by C (the binary score is that already); `"prior"` divides by
            the same score of always predicting the class priors (NBS): 1 is what that naive predictor gets.
        priors: class priors that the score is reported for, as for `nll`.

    Returns:
        `(...)`, in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration, eq. 2 (binary); [EPSR] eq. 9 (multi-class).

    Example:
        >>> brier_score(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0467)
    """
    score, by = (_BRIER_OVER_CLASSES, None) if normalize == "classes" else (_BRIER, normalize)
    return scored(score, task=task, normalize=by, priors=priors, average=average, **options)


brier_score = score_function(_brier_score)


class BrierScore(ScoreMetric):
    """Brier score, streamed; see `brier_score`.

    Example:
        >>> import torch
        >>> metric = BrierScore(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0467, dtype=torch.float64)
    """

    factory = staticmethod(_brier_score)
    score = _BRIER
    unit, perfect, plot_lower_bound = "squared probability", 0.0, 0.0
    question = "how far were the probabilities from what happened"
    source = "Sumler et al., An Entropic Metric, eq. 2; Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 9"


def _ecd_of(p: Predictions) -> Tensor:
    return p.ecd


def _zero(s: ScoreSum, _: Tensor, __: Task) -> Tensor:
    return torch.zeros_like(s.total)


_ECD = Score(_ecd_of, _zero)


def _ecd(
    *,
    task: Task,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    return scored(_ECD, task=task, priors=priors, average=average, **options)


_ecd_of_classes = score_function(_ecd)


@documented
def ecd(
    preds: Tensor | Distribution,
    target: Tensor,
    task: Task | None = None,
    *,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
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
        **options: see `torchcalib.functional.InputOptions`; for a distribution only `weights`.

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
        return reduced(ecd_of_distribution(preds, target), options.get("weights"), reduction)
    task = task_of(task, options.get("num_classes"), options.get("num_labels"))
    given: dict[str, Any] = {"task": task, "priors": priors, "average": average, "reduction": reduction}
    return _ecd_of_classes(preds, target, **given, **options)


def _check_left_out(**given: Any) -> None:
    if wrong := sorted(name for name, value in given.items() if value is not None and name != "weights"):
        raise ValueError(
            f"`{wrong[0]}` must be left out for a torch Distribution, got {given[wrong[0]]!r}. "
            "It says itself how values are read; only `weights` mean something."
        )


class ECD(ScoreMetric):
    """Entropic calibration difference in nats, streamed; see `ecd`.

    Example:
        >>> metric = ECD(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(-0.2504, dtype=torch.float64)
    """

    factory = staticmethod(_ecd)
    score = _ECD
    higher_is_better = None  # 0 is calibrated; below is under-confident, above over-confident
    unit, perfect = "nats", 0.0
    question = "were the outcomes more surprising than the predictions expected (+) or less (-)"
    source = "Sumler et al., An Entropic Metric, eq. 12, 15"


def share_right(p: Predictions) -> Tensor:
    """Return whether the most probable class is the true one `(..., N)`; for soft targets its share."""
    outcome = top_label(p).outcome
    return outcome.to(wide_dtype(outcome.device))


def _largest_share(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return priors.amax(-1)


_ACCURACY = Score(share_right, _largest_share)


def _accuracy(
    *,
    task: Task,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Accuracy: share of samples whose most probable class is the true one; ties go to the first class.

    It equals 1 minus the Bayes risk with a cost of 1 for every error. It does not measure calibration, but it costs
    nothing beside the scores, which need the same statistics of a row.

    Args:
        target: labels; or soft targets, where the share of the most probable class counts; see
            `torchcalib.functional.nll`.
        priors: class priors that replace the class frequencies of the data; `[1/C] * C` gives balanced accuracy.

    Returns:
        `(...)` in [0, 1], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None: decisions are piecewise constant.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1, for 0-1 costs.

    Example:
        >>> accuracy(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.6667)
    """
    return scored(_ACCURACY, task=task, priors=priors, average=average, **options)


accuracy = functional(_accuracy)


class Accuracy(ScoreMetric):
    """Accuracy, streamed; see `accuracy`.

    Example:
        >>> import torch
        >>> metric = Accuracy(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.6667, dtype=torch.float64)
    """

    factory = staticmethod(_accuracy)
    score = _ACCURACY
    is_differentiable = False
    higher_is_better = True
    unit, perfect, plot_lower_bound, plot_upper_bound = "share of samples", 1.0, 0.0, 1.0
    question = "how often is the most probable class the true one"
    source = "Ferrer & Ramos, Evaluating Posterior Probabilities, sec. 2.3.1, for 0-1 costs"
