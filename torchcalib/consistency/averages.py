"""Averages over classes, whose outcomes exclude each other: what sums of each class do not tell is how far."""

import math

import torch
from torch import Tensor


def cauchy_combination(p_values: Tensor) -> Tensor:
    """Return one p-value for the last axis of several `(..., C)`, each inside (0, 1).

    It is exact for p-values that are independent, and for equal ones; for others nearly so where it is small.

    Source:
        Liu, Xie: Cauchy combination test (Journal of the American Statistical Association, 2020), eq. 1.
    """
    quantiles = torch.tan((0.5 - p_values) * math.pi).mean(-1)
    return 0.5 - torch.atan(quantiles) / math.pi


def widening(n_classes: int) -> float:
    """Return how much wider an average over C dependent classes is spread than one over independent ones.

    Errors of classes go up together, for an outcome that one class gets another one loses: with a correlation of
    -1 / (C - 1) between classes, and for absolute values of normal variables with what follows from that. Of two
    classes the errors are equal.
    """
    if n_classes == 1:
        return 1.0
    rho = -1 / (n_classes - 1)
    # E|X||Y| = 2 / pi (sqrt(1 - rho^2) + rho asin(rho)) for standard normal X and Y.
    product = 2 / math.pi * (math.sqrt(1 - rho**2) + rho * math.asin(rho))
    correlation = (product - 2 / math.pi) / (1 - 2 / math.pi)
    return math.sqrt(1 + (n_classes - 1) * correlation)
