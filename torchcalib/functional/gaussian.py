"""Calibration scores for predictive distributions: `torch.distributions`, or a log-density with its entropy.

Entropic calibration difference (ECD) for distributions with a known entropy, and normalised estimation error squared
(NEES) for Gaussian distributions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from torchcalib.core.arguments import Reduction, check_choice, check_count, check_level
from torchcalib.core.checks import check_weights
from torchcalib.core.sums import weighted
from torchcalib.ops.bisection import bisect
from torchcalib.ops.logs import wide_dtype


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
    half_degrees = torch.tensor(n * dimension / 2, dtype=torch.float64)
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
