"""Differences of harmonic numbers H(n) = 1 + 1/2 + ... + 1/n."""

import torch
from torch import Tensor

_LARGE = 40
"""Smallest number for which the omitted terms of the asymptotic series are below the precision of float64."""


def harmonic_difference(start: Tensor, stop: Tensor) -> Tensor:
    """Return H(stop) - H(start), the sum of 1/i for start < i <= stop, for floating tensors of whole numbers >= 0.

    With x = n + 1/2, H(n) = log(x) + Euler's constant + 1 / (24 x^2) - 7 / (960 x^4) + ... The difference of the
    logarithms is computed by `log1p`, because subtracting two harmonic numbers near 14 would lose the digits of a
    difference near 1e-6. Small numbers use the digamma function, H(n) = digamma(n + 1) + Euler's constant.
    """
    x, y = start + 0.5, stop + 0.5
    large = torch.log1p((stop - start) / x) + (_series(y) - _series(x))
    small = torch.digamma(stop + 1) - torch.digamma(start + 1)
    return torch.where(start < _LARGE, small, large)


def _series(x: Tensor) -> Tensor:
    """Return 1 / (24 x^2) - 7 / (960 x^4) + 31 / (8064 x^6) - 127 / (30720 x^8)."""
    u = 1 / x.square()
    return u * (1 / 24 + u * (-7 / 960 + u * (31 / 8064 - u * (127 / 30720))))
