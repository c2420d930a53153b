"""Negative log-likelihood, Brier score, entropic calibration difference and accuracy, averaged over samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Reduction,
    Task,
    check_choice,
    check_count,
    check_level,
    task_by_position,
)
from torchcalib.core.arrays import as_tensor
from torchcalib.core.checks import check_weights
from torchcalib.core.events import top_label
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum, weighted
from torchcalib.functional.estimator import Declaration, declared, factory_of, metric_function
from torchcalib.functional.scores import Score, ScoreEstimator, scored
from torchcalib.io.errors import shown
from torchcalib.ops.bisection import bisect
from torchcalib.ops.logs import safe_log, wide_dtype, xmul

if TYPE_CHECKING:
    from torchcalib.core.images import Images


@dataclass(frozen=True, eq=False)
class Density:
    """Predictive distributions that are given by a log-density and an entropy, as an argument of `ecd`.

    Args:
        log_prob: function from the observed values x to the log-density at x, `(..., N)` in nats.
        entropy: entropy of the distributions in nats, `(..., N)`, or one number for all.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, eq. 8.

    Example:
        A Laplace distribution with scale b has the entropy log(2 b) + 1.

        >>> from torchcalib.functional import Density, ecd
        >>> mean, b = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])
        >>> density = Density(lambda x: -(x - mean).abs() / b - (2 * b).log(), (2 * b).log() + 1)
        >>> ecd(density, torch.tensor([0.5, 4.0]), reduction="none")
        tensor([-0.5000,  0.5000])
    """

    log_prob: Callable[[Tensor], Tensor]
    entropy: Tensor | float


def ecd_of_distribution(distribution: Distribution | Density, value: Tensor) -> Tensor:
    """Return -log p(x) minus the entropy of p, for each distribution p and value x, in the batch shape; see `ecd`."""
    if isinstance(distribution, Density):
        log_prob = distribution.log_prob(value)
        entropy = torch.as_tensor(distribution.entropy, dtype=log_prob.dtype, device=log_prob.device)
        if entropy.dim() and entropy.shape != log_prob.shape:
            raise ValueError(
                f"`entropy` must have the shape of the log-densities {tuple(log_prob.shape)}, or be one number, got "
                f"shape {tuple(entropy.shape)}. Pass one entropy for each distribution."
            )
        return -log_prob - entropy
    _check_shape(distribution, value)
    try:
        return -distribution.log_prob(value) - distribution.entropy()
    except NotImplementedError as error:  # torch raises it for a distribution without one of the two methods
        raise TypeError(
            f"`preds` must be a distribution with log_prob and entropy, got {type(distribution).__name__}. "
            "Pass a distribution that implements both methods."
        ) from error


def _check_shape(distribution: Distribution, value: Tensor) -> None:
    """Raise ValueError unless there is one value per distribution, or only one distribution."""
    batch, event = distribution.batch_shape, distribution.event_shape
    fits = value.shape == batch + event or (batch == () and value.shape[value.dim() - len(event) :] == event)
    if not fits:
        raise ValueError(
            f"`target` must have the batch and event shape of the distribution {tuple(batch + event)}, got "
            f"{tuple(value.shape)}. Reshape one of them; shapes are not broadcast."
        )


def _nees_of(distribution: Distribution, value: Tensor) -> Tensor:
    """Return (x - mu)^T Sigma^-1 (x - mu) for values x, means mu and covariances Sigma, in the batch shape."""
    _check_shape(distribution, value)
    if isinstance(distribution, Independent):
        per_part = _nees_of(distribution.base_dist, value)
        event_axes = tuple(range(-distribution.reinterpreted_batch_ndims, 0))
        return per_part.sum(event_axes) if event_axes else per_part
    if isinstance(distribution, Normal):
        standardised: Tensor = (value - distribution.loc) / distribution.scale
        return standardised.square()
    if isinstance(distribution, MultivariateNormal):
        error = (value - distribution.loc).unsqueeze(-1)
        whitened: Tensor = torch.linalg.solve_triangular(distribution.scale_tril, error, upper=False)
        return whitened.square().sum((-1, -2))
    raise TypeError(
        "`distribution` must be Normal, MultivariateNormal or an Independent Normal, got "
        f"{type(distribution).__name__}. For other distributions use ecd."
    )


def nees(
    distribution: Distribution,
    value: Tensor,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Normalised estimation error squared of Gaussian predictions: the mean of (x - mu)^T Sigma^-1 (x - mu).

    If the predicted means mu and covariances Sigma are correct, the expected value is the dimension d of x. The
    entropic calibration difference (`ecd`) of Gaussian predictions is (NEES - d) / 2.

    Args:
        distribution: `Normal` (d = 1), `MultivariateNormal`, or `Independent` with a `Normal`. Batch shape `(..., N)`.
        value: Observed values x, with the batch and event shape of the distribution.
        weights: Non-negative weight per sample `(..., N)`.
        reduction: `"mean"` averages over the last axis; `"none"` returns the value per sample, `(..., N)`.

    Returns:
        `(...)` in [0, inf), dimensionless, in the dtype of the distribution (at least float32). NaN without data.

    Raises:
        TypeError: If the distribution is not Gaussian.
        ValueError: If `value` or `weights` has a wrong shape.

    Gradient:
        Defined everywhere.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, eq. 10-11.

    Example:
        >>> nees(Normal(torch.zeros(2), 2.0), torch.tensor([0.0, 4.0]))
        tensor(2.)
    """
    return reduced(_nees_of(distribution, value), weights, reduction)


def nees_interval(n: int, dimension: int = 1, *, level: float = 0.95) -> tuple[float, float]:
    """Interval that contains the mean NEES of n independent samples with probability `level`, for correct predictions.

    n times the mean NEES of correct Gaussian predictions of d dimensions, for example of the states of n targets, has a
    chi-squared distribution with n d degrees of freedom. Predictions are called consistent if their NEES is inside the
    interval. A larger NEES indicates covariances that are too small or biased means, a smaller one covariances that are
    too large.

    Args:
        n: Number of independent samples or targets.
        dimension: Dimension d of the predicted variable.
        level: Probability of the interval, in (0, 1). The probabilities below and above the interval are equal.

    Returns:
        Lower and upper end, dimensionless.

    Raises:
        TypeError, ValueError: For invalid arguments.

    Reference:
        Bar-Shalom, Li, Kirubarajan: Estimation with Applications to Tracking and Navigation (2001), sec. 5.4.2; [ECD]
        Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, eq. 10-11.

    Example:
        >>> low, high = nees_interval(50, dimension=4)
        >>> f"{low:.3f} to {high:.3f}"
        '3.255 to 4.821'
    """
    check_count("n", n)
    check_count("dimension", dimension)
    check_level(level)
    half_degrees = torch.tensor(n * dimension / 2, dtype=torch.float64, device="cpu")
    # Half of a chi-squared variable has a gamma distribution, here with 12 standard deviations above its mean and more.
    most = n * dimension / 2 + 12 * (n * dimension / 2) ** 0.5 + 40

    def quantile(probability: float) -> float:
        def is_below(x: float) -> bool:
            return bool(torch.special.gammainc(half_degrees, half_degrees.new_tensor(x)) < probability)

        return bisect(is_below, 0.0, most, rounds=100)[0]

    return 2 * quantile((1 - level) / 2) / n, 2 * quantile((1 + level) / 2) / n


def reduced(scores: Tensor, weights: Tensor | None, reduction: Reduction) -> Tensor:
    """Return the weighted mean over the last axis, in the dtype of `scores` but at least float32.

    For `reduction="none"`, return the scores, with NaN where the weight is 0.
    """
    check_choice("reduction", reduction, get_args(Reduction))
    if reduction == "none":
        return scores if weights is None else scores.masked_fill(check_weights(weights, scores.shape) == 0, torch.nan)
    scores = scores if scores.dim() else scores.unsqueeze(-1)
    dtype, wide = torch.promote_types(scores.dtype, torch.float32), wide_dtype(scores.device)
    if weights is None:
        return scores.to(wide).mean(-1).to(dtype)
    weights = check_weights(weights, scores.shape)
    return (weighted(scores, weights, wide).sum(-1) / weights.sum(-1)).to(dtype)


def _nll_of(p: Predictions, eps: float | None) -> Tensor:
    return p.cross_entropy if eps is None else p.clipped_cross_entropy(eps)


def _entropy(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return 0 - xmul(priors, safe_log(priors)).sum(-1)  # `0 - x`, because `-x` would be -0.0 for a single class


@metric_function(
    Declaration(
        name="NLL",
        question="mean negative log probability of the true class",
        source="Ferrer & Ramos, Evaluating Posterior Probabilities, arXiv 2408.02841, eq. 8",
        unit="nats",
        perfect=0.0,
        value_range=(0.0, math.inf),
    )
)
def nll(
    task: Task | None = None,
    *,
    eps: float | None = None,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Negative log-likelihood (NLL, log loss, cross entropy): the mean of -log q_h, in nats.

    q_h is the predicted probability of the true class h. For soft targets t the score is -sum_k t_k log q_k. Logits are
    converted with `log_softmax`. The score is therefore accurate even if a probability rounds to 0 or 1. For q_h = 0
    the score is +inf, unless `eps` is given.

    Args:
        eps: Probabilities below `eps` are replaced by `eps`. None does not clip.
        normalize: `"prior"` divides by the entropy of the class priors, the NLL of a model that always predicts
            the priors. The result is the normalised cross entropy (NCE). If the data contain a single class,
            the entropy is 0, and the result is inf or NaN.
        priors: Class priors `(C,)`, binary and per label `(2,)`. Samples are reweighted from the class frequencies to
            these priors. The result is NaN if a class with a positive prior has no samples. Requires integer targets.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, inf], in the dtype of `preds` (at least float32).
        NaN without data.

    Gradient:
        Finite everywhere. Where the score is infinite, the gradient is 0 with respect to probabilities, and q - t with
        respect to logits.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 8; NCE: sec. 2.2; priors: app. A, eq.
        36-37.

    Example:
        >>> import torch
        >>> nll(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.2284)
        >>> nll(torch.tensor([[200.0, 0.0]]), torch.tensor([1]), task="multiclass", from_logits=True)
        tensor(200.)
        >>> nll(torch.tensor([1.0, 0.5]), torch.tensor([1, 0]), task="binary", reduction="none")
        tensor([0.0000, 0.6931])
    """
    if eps is not None and not (isinstance(eps, float) and 0 < eps < 1):
        raise ValueError(f"`eps` must be a float in (0, 1) or None, got {shown(eps)}. A common value is 1e-7.")
    score = Score(_nll_of, _entropy, normalizable=True, arguments=(eps,), score_range=(0, math.inf))
    if eps is None:
        score = score._replace(kind="log", of_statistics=(-1, 0, 0, 0, 0))
    how: dict[str, Any] = {"normalize": normalize, "priors": priors, "average": average, "reduction": reduction}
    return scored(score, task, options, per_image=per_image, **how)


Normalize = Literal["prior", "classes"]


def _brier_of(p: Predictions) -> Tensor:
    return p.squared_error


def _brier_over_classes(p: Predictions) -> Tensor:
    return p.squared_error / p.num_classes if p.task == "multiclass" else p.squared_error


def _brier_of_prior(s: ScoreSum, priors: Tensor, task: Task) -> Tensor:
    """Return the mean Brier score of the constant prediction P (the class priors), `(...)`.

    It is sum_k (E[t_k^2] - P_k^2) for targets t, and half of this sum for binary and multi-label tasks.
    """
    over_classes = s.sums[..., 2, :].sum(-1) / s.total - priors.square().sum(-1)
    return over_classes if task == "multiclass" else over_classes / 2


@metric_function(
    Declaration(
        key="brier",
        name="Brier score",
        question="mean squared distance between probabilities and outcomes",
        source="Sumler et al., An Entropic Metric, arXiv 2502.14545, eq. 2; "
        "Ferrer & Ramos, Evaluating Posterior Probabilities, arXiv 2408.02841, eq. 9",
        unit="squared probability",
        perfect=0.0,
        value_range=(0.0, 2.0),
    )
)
def brier_score(
    task: Task | None = None,
    *,
    normalize: Normalize | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Brier score: the mean squared distance between predicted probabilities and outcomes.

    The binary score, also used per label, is (p - y)^2 in [0, 1]. The multi-class score is sum_k (q_k - 1[h=k])^2 in
    [0, 2] for the true class h. For two classes it is twice the binary score. Soft targets t_k replace 1[h=k].

    Args:
        normalize: `"classes"` divides the multi-class score by the number of classes C. For two classes this is the
            binary score. `"prior"` divides by the Brier score of a model that always predicts the class priors.
            The result is the normalised Brier score (NBS).
        priors: Class priors that replace the class frequencies in the data, as in `nll`.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in the dtype of `preds` (at least float32). NaN without
        data.

    Gradient:
        Defined everywhere.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration, eq. 2 (binary); [EPSR] eq. 9 (multi-class).

    Example:
        >>> import torch
        >>> brier_score(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0467)
    """
    if normalize == "classes":
        score, normalize = Score(_brier_over_classes, _brier_of_prior, kind="square", score_range=(0, 2)), None
    else:
        score = Score(_brier_of, _brier_of_prior, normalizable=True, kind="square", of_statistics=(0, 1, 0, 0, 0))
        score = score._replace(score_range=(0, 2))
    how: dict[str, Any] = {"normalize": normalize, "priors": priors, "average": average, "reduction": reduction}
    return scored(score, task, options, per_image=per_image, **how)


@metric_function(
    Declaration(
        name="stratified Brier score",
        question="mean over classes of the squared distance between probabilities and outcomes",
        source="Wallace & Dahabreh, Class probability estimates are unreliable, ICDM 2012, doi 10.1109/ICDM.2012.115",
        unit="squared probability",
        perfect=0.0,
        value_range=(0.0, 2.0),
        needs_labels=True,
    )
)
def stratified_brier_score(
    task: Task | None = None, *, average: Average | None = "macro", **options: Unpack[InputOptions]
) -> ScoreEstimator:
    """Stratified Brier score: the mean over classes of the Brier score of the samples in each class.

    The score is (1/C) sum_k BS_k, where BS_k is the mean of `brier_score` over the samples of true class k. Every class
    has the same weight, so that errors for a rare class are not hidden by those for frequent ones. It equals the Brier
    score with uniform class priors. Priors with a single 1, such as `brier_score(priors=[0, 1])`, give each BS_k. It
    is not proper: calibrated predictions have a larger value than predictions for the uniform priors.

    Args:
        target: Labels. Soft targets are not supported.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, 1], multi-class [0, 2], in the dtype of `preds` (at
        least float32). NaN if a class has no samples.

    Gradient:
        Defined everywhere, if all classes have samples.

    Reference:
        Wallace, Dahabreh: Class probability estimates are unreliable for imbalanced data (and how to fix them), ICDM
        2012, for two classes.

    Example:
        >>> import torch
        >>> stratified_brier_score(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0450)
    """
    return scored(Score(_brier_of, score_range=(0, 2)), task, options, average=average, stratified=True)


def _ecd_of(p: Predictions) -> Tensor:
    return p.ecd


@metric_function()
def _ecd_of_classes(
    task: Task | None = None,
    *,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    score = Score(_ecd_of, of_statistics=(-1, 0, 1, 0, 0))
    return scored(score, task, options, priors=priors, average=average, reduction=reduction)


@declared(
    Declaration(
        name="ECD",
        question="mean log loss minus mean entropy of the predictions (positive if over-confident)",
        source="Sumler et al., An Entropic Metric, arXiv 2502.14545, eq. 12, 15",
        unit="nats",
        perfect=0.0,
        better="nearer to 0",
    ),
    factory_of(_ecd_of_classes),
)
@task_by_position
def ecd(
    preds: Tensor | Distribution | Density,
    target: Tensor,
    task: Task | None = None,
    *,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Entropic calibration difference (ECD): mean log loss minus mean entropy of the predictions, in nats.

    The score of a sample is sum_k q_k log q_k - log q_h for probabilities q and true class h (0 log 0 = 0). The
    binary score is (p - y) log(p / (1-p)). The expected value for a calibrated model is 0. Positive values indicate
    over-confidence, negative values under-confidence. ECD does not require bins.

    For a prediction of probability 1 the score is 0 if it is correct and +inf if it is wrong. The minimum for a binary
    sample is -W(1/e) = -0.2785, with the Lambert W function. It is lower for more classes (-1.1010 for 10 classes).

    A model with a value near 0 is called *safe*. This includes perfect calibration and perfect uncertainty: constant
    probabilities of 1 / C have the value 0 for any outcomes. Values below 0 are safe too, but over-cautious. Values
    above 0 are over-confident, without an upper bound. `torchcalib.report(safe_threshold=...)` decides with the
    sampling noise. ECD per bin separates calibrated from uncertain predictions: see `calibration_curve`.

    Args:
        preds: Probabilities or logits: binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`. Or a
            `torch.distributions` object with batch shape `(..., N)`, or a `Density`; the score is then -log_prob(x) -
            entropy.
        target: Labels or soft targets, as for `nll`; for a distribution the observed values x.
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None for a distribution.
        priors: Class priors that replace the class frequencies in the data, as in `nll`.
        average: Multi-label: `"macro"` averages over labels, None returns `(..., L)`.
        **options: Input options; see `torchcalib.functional.InputOptions`. A distribution accepts only `weights`.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in (-inf, inf], in the dtype of `preds` (at least float32).
        NaN without data.

    Gradient:
        Finite everywhere. For a distribution, the gradients of its `log_prob` and `entropy` are used.

    Reference:
        [ECD] Sumler, Devlin, Maskell, Lane: An Entropic Metric for Measuring Calibration of Machine Learning Models,
        eq. 8 (distributions), 12 (multi-class), 15 (binary); sec. III.B (safe calibration).

    Example:
        >>> import torch
        >>> ecd(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(-0.2504)
        >>> ecd(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([0.0, 3.0]))
        tensor(1.7500)
    """
    if isinstance(preds, Distribution | Density):
        _check_remaining_options(task=task, priors=priors, average=None if average == "macro" else average, **options)
        return reduced(ecd_of_distribution(preds, as_tensor("target", target)), options.get("weights"), reduction)
    return _ecd_of_classes(preds, target, task, priors=priors, average=average, reduction=reduction, **options)


def _check_remaining_options(**given: Any) -> None:
    if wrong := sorted(name for name, value in given.items() if value is not None and name != "weights"):
        raise ValueError(
            f"`{wrong[0]}` must be omitted for a distribution, got {shown(given[wrong[0]])}. "
            "Only `weights` and `reduction` apply to distributions."
        )


def is_correct(p: Predictions) -> Tensor:
    """Return the target probability of the most probable class, `(..., N)`: 1 or 0 for labels."""
    outcome = top_label(p).outcome
    return outcome.to(wide_dtype(outcome.device))


def _largest_share(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return priors.amax(-1)


@metric_function(
    Declaration(
        name="Accuracy",
        question="fraction of samples whose most probable class is the true class",
        source="Ferrer & Ramos, Evaluating Posterior Probabilities, arXiv 2408.02841, sec. 2.3.1, for 0-1 costs",
        unit="fraction of samples",
        perfect=1.0,
        value_range=(0.0, 1.0),
        better="higher",
    )
)
def accuracy(
    task: Task | None = None,
    *,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Accuracy: fraction of samples whose most probable class is the true class; on ties, the first class.

    It equals 1 minus the Bayes risk with zero-one costs, and does not measure calibration.

    Args:
        target: Labels or soft targets. For soft targets, the target probability of the predicted class is averaged.
        priors: Class priors that replace the class frequencies in the data. `[1/C] * C` results in balanced accuracy.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, 1], in the dtype of `preds` (at least float32). NaN
        without data.

    Gradient:
        None, because the value is piecewise constant in the predictions.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1, with zero-one costs.

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.6667)
    """
    score = Score(is_correct, _largest_share, of_statistics=(0, 0, 0, 0, 1), score_range=(0, 1))
    return scored(score, task, options, priors=priors, average=average)
