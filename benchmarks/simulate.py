"""Predictions whose truth is known: the generators of the source papers, with their parameters.

All draw from numpy's generators on the CPU, whose streams are fixed for good, and move the result: a seed gives the
same numbers on every device. With the parameters and the seed given as defaults they give the samples that the
published tables were computed from, but where a docstring says otherwise.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import check_count


def noisy_evidence(
    sigma: float, n: int = 10_000, *, seed: int = 0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Binary predictions that take noise for evidence: over-confident from sigma > 0.

    The log-odds x are uniform on [-5, 5], the label is 1 with probability sigmoid(x), and what is predicted is
    sigmoid(x + e) with e ~ N(0, sigma^2). Different sigma at the same seed share x, the labels and the shape of e.

    This is the paper's text, read literally. Its Table I shows for sigma = 0.5 and 2 an ECE of 0.170 and 0.404, which
    the text does not give (it gives about 0.01 and 0.08); how those columns were made cannot be known from it.

    Args:
        sigma: standard deviation of the noise on the log-odds, at least 0; the paper has 0, 0.5 and 2.
        n: number of samples.
        seed: of `numpy.random.default_rng`.
        device: where the result is to be.

    Returns:
        P(y=1), float64 `(n,)`, and labels, int64 `(n,)`.

    Raises:
        TypeError, ValueError: for a sigma or n that is no such number.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, sec. V-A,
        eq. 16-19.

    Example:
        >>> preds, target = noisy_evidence(2.0, n=3)
        >>> preds, target
        (tensor([0.8291, 0.0331, 0.0205], dtype=torch.float64), tensor([1, 0, 0]))
    """
    check_count("n", n)
    _check_positive("sigma", sigma, zero=True)
    random = np.random.default_rng(seed)
    x = random.uniform(-5, 5, n)
    noise = random.standard_normal(n)
    target = random.random(n) < _sigmoid(x)
    return _moved(_sigmoid(x + sigma * noise), device), _moved(target.astype(np.int64), device)


@dataclass(frozen=True, eq=False)
class MismatchedSystems:
    """Four systems over one sample: log-posteriors `(N, C)`, float64. Made by `mismatched_systems`.

    Attributes:
        target: labels, int64 `(N,)`, class after class.
        cal: the true posteriors.
        mcp: those for other class priors than the data's, as of a system that was trained elsewhere.
        mcs: the true log-posteriors times a scale, and normalised: over-confident from a scale > 1, as by overfitting.
        mcps: both: `mcp` scaled.
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
    device: torch.device | str | None = None,
) -> MismatchedSystems:
    """Posteriors of Gaussian classes, true, for wrong priors, scaled, and both.

    Every class is a Gaussian in C dimensions of covariance `variance` times the identity, its mean at distance 1 from
    the mean of every other. Counts of the classes are truncated: 320 + 79 = 399 samples for C = 2 and n = 400, as
    0.2 is a little less in float64.

    The paper's sec. 3.1 and fig. 3-4 have `mismatched_systems(2, 100_000, prior=0.6)`: its `cal`, and its `mcs` for
    scales of 2 and 0.48; there the wider classes are `variance=0.19`. (Variances and scales of that section were
    found from the scores it reports, which they give to six digits.)

    Args:
        num_classes: C.
        n: number of samples before truncation; None is the paper's 200 C.
        variance: of each feature within a class; None is the paper's, 0.15 for two classes and 0.08 for more.
        prior: share of the first class; the others share the rest evenly.
        assumed_prior: what `mcp` takes for the share of the last class; the others share the rest evenly.
        scale: what `mcs` and `mcps` multiply log-posteriors by.
        seed: of `numpy.random.RandomState`.
        device: where the result is to be.

    Returns:
        The systems and the labels that all of them predict.

    Raises:
        TypeError, ValueError: for bad parameters.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 3 and app. C.

    Example:
        >>> systems = mismatched_systems(2)
        >>> systems.target.bincount()
        tensor([320,  79])
    """
    check_count("num_classes", num_classes, at_least=2)
    n = 200 * num_classes if n is None else n
    check_count("n", n)
    variance = (0.15 if num_classes == 2 else 0.08) if variance is None else variance
    for name, value in (("variance", variance), ("scale", scale)):
        _check_positive(name, value)
    for name, value in (("prior", prior), ("assumed_prior", assumed_prior)):
        _check_number(name, value)
        if not 0 < value < 1:
            raise ValueError(f"`{name}` must be in (0, 1), got {value!r}.")
    rest = [(1 - prior) / (num_classes - 1)] * (num_classes - 1)
    priors = np.array([prior, *rest])
    assumed = np.array([(1 - assumed_prior) / (num_classes - 1)] * (num_classes - 1) + [assumed_prior])
    counts = (priors * n).astype(np.int64)
    random = np.random.RandomState(seed)
    means = np.eye(num_classes) / np.sqrt(2)
    features = np.concatenate(
        [
            mean + np.sqrt(variance) * random.standard_normal((count, num_classes))
            for mean, count in zip(means, counts, strict=True)
        ]
    )
    # All means are equally long, so that of -|x - mean|^2 / 2 only x . mean tells the classes apart.
    log_likelihood = torch.from_numpy(features @ means.T / variance)
    cal, mcp = ((log_likelihood + torch.from_numpy(np.log(p))).log_softmax(-1) for p in (priors, assumed))
    systems = cal, mcp, (scale * cal).log_softmax(-1), (scale * mcp).log_softmax(-1)
    target = np.repeat(np.arange(num_classes), counts)
    return MismatchedSystems(_moved(target, device), *(log_posterior.to(device) for log_posterior in systems))


@dataclass(frozen=True, eq=False)
class DiscriminantSample:
    """Test data of a logistic fit to other data; made by `gaussian_discriminant`. Everything is float64 but labels.

    Attributes:
        preds: P(y=1) of the logistic fit for the test features `(n_test,)`.
        target: test labels, int64 `(n_test,)`.
        features: test features `(n_test,)`.
        posterior: the true P(y=1) for the test features, in closed form `(n_test,)`.
        train_features: `(n_train,)`.
        train_target: int64 `(n_train,)`.
        slope: of the fit.
        intercept: of the fit.
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
    device: torch.device | str | None = None,
) -> DiscriminantSample:
    """Logistic regression tested on data with another share of positives than it was trained on.

    A label is 1 with probability `train_share` (in the test data `test_share`), and its one feature is drawn from
    N(+mean, std^2) for 1 and N(-mean, std^2) for 0. The paper's six cases are shares of 50 % tested at 50, 40 and 60 %,
    and of 1 % tested at 1, 0 and 2 %. Its text has means of +-1; its Table 2 comes from +-0.5, and from a fit with a
    tight tolerance, which is Newton's method here, to rounding.

    Args:
        train_share: share of positives that the fit sees, in (0, 1).
        test_share: share of positives that it is tested on, in [0, 1].
        n_train: samples to fit.
        n_test: samples to predict.
        mean: of the feature of class 1; that of class 0 is minus it.
        std: of the feature within a class.
        ridge: the fit minimises the sum of log losses and ridge / 2 times the squared slope; at least 0.
        seed: of `numpy.random.RandomState`.
        device: where the result is to be.

    Raises:
        TypeError, ValueError: for bad parameters, and where no fit exists: for training labels that are all alike and,
            without a ridge, for labels that a threshold on the feature separates.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), sec. 4.1.

    Example:
        >>> sample = gaussian_discriminant(0.5, 0.4)
        >>> round(sample.slope, 4), round(sample.target.double().mean().item(), 4)
        (0.2582, 0.391)
    """
    check_count("n_train", n_train)
    check_count("n_test", n_test)
    _check_positive("std", std)
    _check_positive("ridge", ridge, zero=True)
    for name, value in (("train_share", train_share), ("test_share", test_share), ("mean", mean)):
        _check_number(name, value)
    if not np.isfinite(mean):
        raise ValueError(f"`mean` must be finite, got {mean!r}.")
    if not (0 < train_share < 1 and 0 <= test_share <= 1):
        raise ValueError(
            f"`train_share` must be in (0, 1) and `test_share` in [0, 1], got {train_share!r} and {test_share!r}."
        )
    random = np.random.RandomState(seed)
    train_target = random.binomial(1, train_share, n_train)
    target = random.binomial(1, test_share, n_test)
    train_features = mean * (2 * train_target - 1) + std * random.standard_normal(n_train)
    features = mean * (2 * target - 1) + std * random.standard_normal(n_test)
    if not 0 < train_target.sum() < n_train:
        raise ValueError(f"`train_share` must give labels of both classes, got {train_target.sum()} of {n_train} ones.")
    low, high = train_features[train_target == 0], train_features[train_target == 1]
    if not ridge and (low.max() <= high.min() or high.max() <= low.min()):
        raise ValueError("`ridge` must be above 0 where a threshold separates the training labels, got 0.")
    slope, intercept = _logistic_fit(train_features, train_target, ridge)
    share = torch.tensor(test_share, dtype=torch.float64)
    posterior = (share.logit() + torch.from_numpy(2 * mean * features / std**2)).sigmoid()
    return DiscriminantSample(
        _moved(_sigmoid(slope * features + intercept), device),
        _moved(target, device),
        _moved(features, device),
        posterior.to(device),
        _moved(train_features, device),
        _moved(train_target, device),
        slope,
        intercept,
    )


def _logistic_fit(x: np.ndarray, y: np.ndarray, ridge: float) -> tuple[float, float]:
    """Slope and intercept of least log loss, by Newton's method with step halving."""
    design = np.stack((x, np.ones_like(x)), -1)
    penalty = np.array([ridge, 0.0])

    def objective(w: np.ndarray) -> float:
        z = design @ w
        return float(np.logaddexp(0, np.where(y == 1, -z, z)).sum() + (penalty * w * w).sum() / 2)

    w = np.array([0.0, np.log(y.mean() / (1 - y.mean()))])
    while True:  # the objective falls with every step, and is convex
        p = _sigmoid(design @ w)
        gradient = design.T @ (p - y) + penalty * w
        curvature = (design * (p * (1 - p))[:, None]).T @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        lower = (w - size * step for size in 0.5 ** np.arange(50) if objective(w - size * step) < objective(w))
        better = next(lower, None)
        if better is None:  # no lower value can be told from this one: what is left of the way is below rounding
            return float(w[0] - step[0]), float(w[1] - step[1])
        w = better


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(z)).sigmoid().numpy()


def _check_positive(name: str, value: float, zero: bool = False) -> None:
    _check_number(name, value)
    if not (np.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise ValueError(f"`{name}` must be finite and {'at least' if zero else 'above'} 0, got {value!r}.")


def _check_number(name: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def _moved(x: np.ndarray, device: torch.device | str | None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(device)
