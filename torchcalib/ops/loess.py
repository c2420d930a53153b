"""Local polynomial regression (loess) with tricube weights, evaluated exactly at every point.

Source: Cleveland, Devlin: Locally weighted regression (JASA 1988).
"""

import torch
from torch import Tensor

_PAIRS = 2**13  # number of pairs of points computed at a time; more would exceed the CPU cache
_FLAT = 1e-10  # largest variance of scaled positions that counts as 0, because of rounding errors


def loess(x: Tensor, y: Tensor, n: Tensor, span: float, degree: int) -> Tensor:
    """Return the local polynomial regression of y on x at every point, in the shape of y; 0 where n is 0.

    The neighbours of a point are its nearest samples, a fraction `span` of all samples. They have tricube weights
    (1 - (distance / largest distance)^3)^3. The degree (0, 1 or 2) is reduced if the neighbours have too few distinct
    positions. Positions `x` `(..., M)` ascend, with `n` samples at each, and are arbitrary where n is 0. `y` is
    `(..., M)`, or `(R, ..., M)` for R replicates.

    Gradient: in x and y. The dependence of the weights on x is included.
    """
    absent = n <= 0
    x, y = x.masked_fill(absent, 0), y.masked_fill(absent, 0)
    # 1. Number of neighbours: floor(span N), but enough to determine the polynomial. Rounding must not lower the floor.
    n_neighbours = (span * n.sum(-1) + 1e-5).floor().maximum((n.sum(-1)).clamp(max=degree + 1))
    n_up_to = n.cumsum(-1)
    # 2. For every first point of a neighbourhood, find the earliest last point with enough samples.
    wanted = n_up_to - n + n_neighbours.unsqueeze(-1)
    last = torch.searchsorted(n_up_to, wanted - 0.5)
    is_complete = ~absent & (last < x.shape[-1])
    right = x.gather(-1, last.clamp(max=x.shape[-1] - 1))
    # 3. The fitted values are linear in y. The rows of the smoother matrix are computed for a few points at a time.
    n_at_once = max(1, _PAIRS // max(1, x.numel()))
    smoothers = (_smoother(at, x, n, right, is_complete, degree) for at in torch.split(x, n_at_once, -1))
    if y.dim() == x.dim():
        fitted = torch.cat([(smoother * y.unsqueeze(-2)).sum(-1) for smoother in smoothers], -1)
    else:  # one matrix product for all replicates
        replicates = y.movedim(0, -1)
        fitted = torch.cat([smoother @ replicates for smoother in smoothers], -2).movedim(-1, 0)
    return fitted.masked_fill(absent, 0)


def _smoother(at: Tensor, x: Tensor, n: Tensor, right: Tensor, is_complete: Tensor, degree: int) -> Tensor:
    """Return the rows `(..., K, M)` of the smoother matrix, whose products with y are the fitted values at `at`.

    Let u be the scaled distance from a point. The polynomials 1, u - mean and (u - mean)^2 - skew (u - mean) - spread
    are orthogonal under the weights (Gram-Schmidt). So each coefficient is a ratio of two sums. `right[m]` is the last
    position of the neighbourhood that begins at `x[m]`. `is_complete[m]` is False if it has too few samples.
    """
    at = at.unsqueeze(-1)
    x, right, is_complete = x.unsqueeze(-2), right.unsqueeze(-2), is_complete.unsqueeze(-2)
    # Distance to the farthest neighbour, in the neighbourhood where this distance is smallest.
    reach = torch.maximum(at - x, right - at).masked_fill(~is_complete, torch.inf).amin(-1, keepdim=True)
    # Scaled distances u and tricube weights. If all neighbours have u = 0, other samples have weight 0.
    all_equal = reach <= 0
    u = (x - at) / reach.masked_fill(all_equal, 1)
    w = (1 - u.abs().pow(3)).clamp(min=0).pow(3).masked_fill(all_equal & (u != 0), 0) * n.unsqueeze(-2)
    total = w.sum(-1, keepdim=True)
    share = w / total.masked_fill(total == 0, 1)
    if degree == 0:
        return share
    # Degree 1: add the coefficient of u - mean times its value at u = 0, which is -mean.
    mean = (share * u).sum(-1, keepdim=True)
    first = u - mean
    spread = (share * first.square()).sum(-1, keepdim=True)
    linear = 1 - _ratio(mean, spread, _FLAT) * first
    if degree == 1:
        return share * linear
    # Degree 2: add the coefficient of the quadratic polynomial times its value at u = 0.
    flat = spread <= _FLAT
    skew = (share * first.pow(3)).sum(-1, keepdim=True) / spread.masked_fill(flat, 1)
    second = first.square() - skew * first - spread
    size = (share * second.square()).sum(-1, keepdim=True)
    second_at_0 = mean.square() + skew * mean - spread
    return share * (linear + _ratio(second_at_0, size.masked_fill(flat, 0), _FLAT**2) * second)


def _ratio(numerator: Tensor, size: Tensor, least: float) -> Tensor:
    """Return `numerator / size`, or 0 if `size`, the squared norm of a polynomial, is at most `least`."""
    flat = size <= least
    return (numerator / size.masked_fill(flat, 1)).masked_fill(flat, 0)
