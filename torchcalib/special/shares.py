"""Expectations of functions of a proportion t = X / n for binomial X, and an entropy estimate.

These expectations correct metrics on annotator counts for a small number of annotators.
"""

import torch
from torch import Tensor

from torchcalib.ops.logs import safe_log, xmul

# Gauss quadrature with 24 nodes s in (0, 1) for the weight function (1 - s) / -log s: pairs of 1 - s and the weight w.
# Moment j of the weight function is log((j + 2) / (j + 1)). It equals the sum of w s^j for j < 48.
_RULE = (
    (0.9970279539646636, 0.001206643468497179),
    (0.9858464503050582, 0.0035349911652561693),
    (0.966609456122952, 0.006580318247827097),
    (0.9397057113245108, 0.010233390673565206),
    (0.9056176737689319, 0.014385353344887669),
    (0.8649290201513244, 0.018910332968103415),
    (0.8183210319552018, 0.02366308302177727),
    (0.766564347529382, 0.02848118233583915),
    (0.7105080583810887, 0.033189510726417654),
    (0.6510669784899953, 0.03760612926983668),
    (0.5892075653576923, 0.04154904519910242),
    (0.5259328484322622, 0.0448434423850719),
    (0.46226667340719285, 0.04732899000005945),
    (0.3992375514723647, 0.04886685829966802),
    (0.33786239308890637, 0.04934609041896575),
    (0.2791303989225832, 0.048689009685106296),
    (0.2239873729076057, 0.04685538533115193),
    (0.17332071244691097, 0.043845135370527574),
    (0.1279453176223225, 0.0396994121710242),
    (0.08859064410166584, 0.03449999207299204),
    (0.05588910042429098, 0.028366976238733584),
    (0.03036594415786502, 0.021454931358589984),
    (0.012430635717979846, 0.013948054821429866),
    (0.0023671531650777907, 0.006062921985514805),
)
_MANY = 100.0  # expected count n p from which a series in 1 / (n p) replaces the less accurate quadrature


def mean_distance_of_share(p: Tensor, n: Tensor) -> Tensor:
    """Return the mean absolute deviation E|X / n - p| for binomial X with n trials and probability p.

    It is 2 v C(n, v) p^v (1-p)^(n-v+1) / n with v = floor(np) + 1.

    Gradient: everywhere; 0 at p = 0 and p = 1. If np is a whole number, it is the derivative from the right.

    Source: De Moivre: Miscellanea Analytica (1730); Diaconis, Zabell: Closed form summation for classical distributions
    (Statistical Science 6, 1991).
    """
    v = (p.detach() * n).floor() + 1
    # log C(n, v); for p = 1, v is n + 1 and the logarithm is -inf
    log_binomial = torch.lgamma(n + 1) - torch.lgamma(v + 1) - torch.lgamma(n - v + 1)
    log_probability = log_binomial + xmul(v, safe_log(p)) + xmul(n - v + 1, safe_log(1 - p))
    return 2 * v / n * log_probability.exp()


def mean_log_share(p: Tensor, n: Tensor) -> Tensor:
    """Return E log((1 + Y) / n) for binomial Y with n - 1 trials and probability p. It equals E[t log t] / p.

    E log(1 + Y) is the integral of (1 - (1 - p (1-s))^(n-1)) / -log s over s from 0 to 1. The integrand is a polynomial
    of degree n - 2 times the weight function of `_RULE`. The quadrature is exact for n <= 49. For n p up to 100 its
    error is at most 1e-10. For larger n p, a series in the central moments of X has an error of at most 2e-9.

    Gradient: everywhere, finite at p = 0 and p = 1.
    """
    few = torch.zeros_like(p * n)
    for c, w in _RULE:
        few = few - torch.expm1((n - 1) * torch.log1p(-c * p)) * (w / c)
    many = p * n >= _MANY
    return torch.where(many, _log_share_of_many(p.masked_fill(~many, 1), n.clamp(min=_MANY)), few - n.log())


def _log_share_of_many(p: Tensor, n: Tensor) -> Tensor:
    """Return log p + E[(1 + d) log(1 + d)] for d = t / p - 1: a series in the moments of d, up to (np)^-3."""
    scale, q = n * p, 1 - p
    skew = q * (1 - 2 * p)
    second, third = q / scale, skew / scale**2
    fourth = 3 * second**2 + q * (1 - 6 * p * q) / scale**3
    fifth, sixth = 10 * second * third, 15 * second**3
    return p.log() + second / 2 - third / 6 + fourth / 12 - fifth / 20 + sixth / 30


def entropy_of_counts(shares: Tensor, n: Tensor) -> Tensor:
    """Return an estimate of the entropy of the annotators' label distribution, in nats `(..., N)`; `n` is at least 2.

    The entropy is the series sum_v sum_k p_k (1-p_k)^v / v. The plug-in entropy with the digamma function psi instead
    of log is sum_k t_k (psi(n) - psi(n t_k)). It is unbiased for the first n - 1 terms. The returned jackknife estimate
    adds the proportion of annotators whose class no other annotator chose. Its expectation, sum_k p_k (1-p_k)^(n-1),
    replaces the missing terms. The bias is exactly

        sum_k p_k ((1-p_k)^(n-1) - sum_(v >= n) (1-p_k)^v / v).

    It has either sign, and is almost 0 for many annotators, or if almost all choose one of few classes. The bias of the
    plug-in entropy is about -(C - 1) / 2n. The estimate may exceed log C.

    Source: Zhang: Entropy estimation in Turing's perspective (Neural Computation 24, 2012), in the digamma form of
    Schürmann: A note on entropy estimation (Neural Computation 27, 2015); Zahl: Jackknifing an index of diversity
    (Ecology 58, 1977).
    """
    counts = (shares * n).round()
    known = xmul(shares, torch.digamma(n) - torch.digamma(counts)).sum(-1)
    return known + (counts == 1).sum(-1) / n.squeeze(-1)
