"""Simulated predictions with known true probabilities: the generators of the source papers.

All generators draw from numpy on the CPU, whose streams do not change between versions. The default parameters and
seeds reproduce the samples of the published tables, except where a docstring states a difference.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor


def noisy_evidence(sigma: float, n: int = 10_000, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return P(y=1) and labels of a binary model that is over-confident for sigma > 0.

    The log-odds x are uniform on [-5, 5], the label is 1 with probability sigmoid(x), and the prediction is
    sigmoid(x + e) with e ~ N(0, sigma^2). Different sigma with the same seed share x, the labels and the shape of e.

    This follows the text of the paper, which results in an expected calibration error (ECE) of about 0.01 for
    sigma = 0.5 and 0.08 for sigma = 2. Table I of the paper has 0.170 and 0.404. Their computation is unknown.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, sec. V-A,
        eq. 16-19.

    Example:
        >>> noisy_evidence(2.0, n=3)
        (tensor([0.8291, 0.0331, 0.0205], dtype=torch.float64), tensor([1, 0, 0]))
    """
    random = np.random.default_rng(seed)
    x = random.uniform(-5, 5, n)
    noise = random.standard_normal(n)
    target = random.random(n) < _sigmoid(x)
    return torch.from_numpy(_sigmoid(x + sigma * noise)), torch.from_numpy(target.astype(np.int64))


@dataclass(frozen=True, eq=False)
class MismatchedSystems:
    """Log-posteriors `(N, C)` of four systems for the same samples, float64.

    Attributes:
        target: labels, int64 `(N,)`, ordered by class.
        cal: true posteriors.
        mcp: posteriors for wrong class priors.
        mcs: true log-posteriors times a scale, normalised; over-confident for scale > 1.
        mcps: `mcp` times the scale, normalised.
    """

    target: Tensor
    cal: Tensor
    mcp: Tensor
    mcs: Tensor
    mcps: Tensor


def mismatched_systems(
    num_classes: int = 2,
    n: int | None = None,
    *,
    variance: float | None = None,
    prior: float = 0.8,
    assumed_prior: float = 0.9,
    scale: float = 5.0,
    seed: int = 0,
) -> MismatchedSystems:
    """Return posteriors of Gaussian classes: true, for wrong priors, scaled, and both.

    Every class is a Gaussian in C dimensions with covariance `variance` times the identity; all means have distance 1
    from each other. Class counts are truncated: 320 + 79 = 399 samples for C = 2 and n = 400, as 0.2 * 400 is slightly
    less than 80 in float64.

    Sec. 3.1 and fig. 3-4 of the paper use `cal` and `mcs` of `mismatched_systems(2, 100_000, prior=0.6)`, with
    scales of 2 and 0.48. The wider classes have `variance=0.19`. These variances and scales were fitted to the
    reported scores, which they reproduce to six digits.

    Args:
        num_classes: C.
        n: number of samples before truncation; by default 200 C, as in the paper.
        variance: variance of each feature within a class; by default 0.15 for two classes and 0.08 for more.
        prior: frequency of the first class; the others are equally frequent.
        assumed_prior: prior of the last class in `mcp`; the others have equal priors.
        scale: factor of the log-posteriors of `mcs` and `mcps`.
        seed: seed of `numpy.random.RandomState`.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 3 and app. C.

    Example:
        >>> mismatched_systems(2).target.bincount()
        tensor([320,  79])
    """
    n = 200 * num_classes if n is None else n
    variance = (0.15 if num_classes == 2 else 0.08) if variance is None else variance
    priors = np.array([prior, *[(1 - prior) / (num_classes - 1)] * (num_classes - 1)])
    assumed = np.array([*[(1 - assumed_prior) / (num_classes - 1)] * (num_classes - 1), assumed_prior])
    counts = (priors * n).astype(np.int64)
    random = np.random.RandomState(seed)
    means = np.eye(num_classes) / np.sqrt(2)
    target = np.repeat(np.arange(num_classes), counts)
    features = means[target] + np.sqrt(variance) * random.standard_normal((len(target), num_classes))
    # All means have the same norm, so that only the term x . mean of -|x - mean|^2 / 2 differs between classes.
    log_likelihood = torch.from_numpy(features @ means.T / variance)
    cal, mcp = ((log_likelihood + torch.from_numpy(np.log(p))).log_softmax(-1) for p in (priors, assumed))
    mcs, mcps = ((scale * log_posterior).log_softmax(-1) for log_posterior in (cal, mcp))
    return MismatchedSystems(torch.from_numpy(target), cal, mcp, mcs, mcps)


@dataclass(frozen=True, eq=False)
class DiscriminantSample:
    """Test data of a logistic fit to training data; labels are int64, everything else is float64.

    Attributes:
        preds: P(y=1) of the fit `(n_test,)`.
        target: test labels `(n_test,)`.
        features: test features `(n_test,)`.
        posterior: true P(y=1) in closed form `(n_test,)`.
        train_features: training features `(n_train,)`.
        train_target: training labels `(n_train,)`.
        slope: slope of the fit.
        intercept: intercept of the fit.
    """

    preds: Tensor
    target: Tensor
    features: Tensor
    posterior: Tensor
    train_features: Tensor
    train_target: Tensor
    slope: float
    intercept: float


def gaussian_discriminant(
    train_share: float,
    test_share: float,
    *,
    n_train: int = 14_000,
    n_test: int = 6_000,
    mean: float = 0.5,
    std: float = 2.0,
    ridge: float = 1.0,
    seed: int = 0,
) -> DiscriminantSample:
    """Return predictions of a logistic regression for test data with another class frequency than its training data.

    A label is 1 with probability `train_share` in the training data and `test_share` in the test data. Its feature is
    drawn from N(+mean, std^2) for 1 and N(-mean, std^2) for 0. The fit minimises the sum of log losses plus ridge / 2
    times the squared slope.

    The six cases of the paper are 50 % tested at 50, 40 and 60 %, and 1 % tested at 1, 0 and 2 %. The text of the paper
    has means of +-1, but its Table 2 was computed with +-0.5.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), sec. 4.1.

    Example:
        >>> sample = gaussian_discriminant(0.5, 0.4)
        >>> round(sample.slope, 4), round(sample.target.double().mean().item(), 4)
        (0.2582, 0.391)
    """
    random = np.random.RandomState(seed)
    train_target = random.binomial(1, train_share, n_train)
    target = random.binomial(1, test_share, n_test)
    train_features = mean * (2 * train_target - 1) + std * random.standard_normal(n_train)
    features = mean * (2 * target - 1) + std * random.standard_normal(n_test)
    fit = LogisticRegression(C=1 / ridge if ridge else np.inf, solver="newton-cholesky", tol=1e-14)
    fit.fit(train_features[:, None], train_target)
    slope, intercept = fit.coef_.item(), fit.intercept_.item()
    log_odds = torch.tensor(test_share, dtype=torch.float64).logit() + torch.from_numpy(2 * mean * features / std**2)
    return DiscriminantSample(
        torch.from_numpy(_sigmoid(slope * features + intercept)),
        torch.from_numpy(target),
        torch.from_numpy(features),
        log_odds.sigmoid(),
        torch.from_numpy(train_features),
        torch.from_numpy(train_target),
        slope,
        intercept,
    )


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(z)).sigmoid().numpy()
