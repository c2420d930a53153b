"""Calibration scores for predictive distributions from `torch.distributions`.

Entropic calibration difference (ECD) for distributions with a known entropy, and normalised estimation error squared
(NEES) for Gaussian distributions.
"""

from typing import get_args

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from torchcalib.core.arguments import Reduction, check_choice
from torchcalib.core.checks import check_weights
from torchcalib.core.sums import weighted
from torchcalib.ops.logs import wide_dtype


def ecd_of_distribution(distribution: Distribution, value: Tensor) -> Tensor:
    """Return -log p(x) minus the entropy of p, for each distribution p and value x, in the batch shape; see `ecd`."""
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
