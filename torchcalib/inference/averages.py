"""Averages over classes, whose outcomes depend on each other. Sums for each class do not contain the dependence."""

import math

import torch
from torch import Tensor


def cauchy_combination(p_values: Tensor, tied: Tensor, n_replicates: int) -> Tensor:
    """Combine the p-values on the last axis `(..., C)` into one `(...)`.

    Each p-value becomes the Cauchy quantile tan((1/2 - p) pi), and the mean of these becomes a p-value again. The
    result is exact for independent continuous p-values and for equal ones. For others it is nearly exact where small.

    A p-value that is large only because of ties has a very negative quantile. A class without outcomes, with p = 1,
    would then outweigh all other classes. So a p-value above 1/2 contributes the mean quantile over its ties, if the
    result is at most 1/2. A larger result uses the p-values as they are. No result is below the smallest p-value.

    Args:
        p_values: (1 + number of replicates at least as large as the data) / (R + 1), in (0, 1].
        tied: the part of each p-value that is due to ties, (1 + number of replicates equal to the data) / (R + 1).
        n_replicates: R.

    Source:
        Liu, Xie: Cauchy combination test (Journal of the American Statistical Association, 2020), eq. 1.
    """
    least = 0.5 / (n_replicates + 1)  # half a step from 0 and 1, where quantiles are infinite
    low, high = (p_values - tied).clamp(min=least), p_values.clamp(max=1 - least)
    quantile = torch.tan((0.5 - high) * math.pi)
    # The integral of tan((1/2 - x) pi) = cot(pi x) is log(sin(pi x)) / pi.
    over_ties = ((math.pi * high).sin().log() - (math.pi * low).sin().log()) / (math.pi * (high - low))
    mean = torch.where(p_values > 0.5, over_ties, quantile).mean(-1)
    mean = torch.where(mean >= 0, mean, quantile.mean(-1))
    return (0.5 - torch.atan(mean) / math.pi).maximum(p_values.amin(-1))


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
