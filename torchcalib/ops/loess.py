"""Local regression (loess) with tricube weights, computed exactly at every point.

Source: Cleveland, Devlin: Locally weighted regression (JASA 1988).
"""

import torch
from torch import Tensor

# Pairs of points of a piece: small enough for one thread and the cache.
_TOGETHER = 2**13
_FLAT = 1e-10  # relative spread of the neighbours below which it is rounding error


def loess(x: Tensor, y: Tensor, n: Tensor, span: float, degree: int) -> Tensor:
    """Fit a polynomial to the nearest neighbours of every point, and return its value at the point.

    The neighbours are the share `span` of all samples nearest to the point, with tricube weights
    (1 - (distance / largest distance)^3)^3. If they do not determine the polynomial, its degree is reduced: points of
    equal x get their mean.

    Args:
        x: `(..., M)`, rising, of the dtype of sums; arbitrary where n is 0.
        y: `(..., M)`, as x.
        n: copies of each point `(..., M)`, whole numbers.
        span: in (0, 1].
        degree: 0, 1 or 2.

    Returns:
        `(..., M)`; where n is 0, 0.

    Gradient: in x and y, also through the distances.
    """
    absent = n <= 0
    x, y = x.masked_fill(absent, 0), y.masked_fill(absent, 0)
    n_neighbours = (span * n.sum(-1) + 1e-5).floor().maximum((n.sum(-1)).clamp(max=degree + 1))
    upto = n.cumsum(-1)
    # The neighbourhood that begins at a point ends at the first point with enough samples up to it.
    wanted = upto - n + n_neighbours.unsqueeze(-1)
    last = torch.searchsorted(upto, wanted - 0.5)
    whole = ~absent & (last < x.shape[-1])
    right = x.gather(-1, last.clamp(max=x.shape[-1] - 1))
    rows = max(1, _TOGETHER // max(1, x.numel()))
    at = torch.split(x, rows, -1)
    return torch.cat([_at(some, x, y, n, right, whole, degree) for some in at], -1).masked_fill(absent, 0)


def _at(at: Tensor, x: Tensor, y: Tensor, n: Tensor, right: Tensor, whole: Tensor, degree: int) -> Tensor:
    """Fit around points `at (..., K)`.

    The polynomials 1, u - mean, and the second one are orthogonal under the weights of the neighbours (Gram-Schmidt),
    so each coefficient is a ratio of two sums and no linear system is solved.
    """
    at = at.unsqueeze(-1)
    x, right, whole = x.unsqueeze(-2), right.unsqueeze(-2), whole.unsqueeze(-2)
    reach = torch.maximum(at - x, right - at).masked_fill(~whole, torch.inf).amin(-1, keepdim=True)
    one_place = reach <= 0
    u = (x - at) / reach.masked_fill(one_place, 1)
    w = (1 - u.abs().pow(3)).clamp(min=0).pow(3).masked_fill(one_place & (u != 0), 0) * n.unsqueeze(-2)
    total = w.sum(-1, keepdim=True)
    share = w / total.masked_fill(total == 0, 1)
    y = y.unsqueeze(-2)
    fitted = (share * y).sum(-1)
    if degree == 0:
        return fitted
    mean = (share * u).sum(-1, keepdim=True)
    first = u - mean
    spread = (share * first.square()).sum(-1)
    fitted = fitted - mean.squeeze(-1) * _coefficient((share * first * y).sum(-1), spread, _FLAT)
    if degree == 1:
        return fitted
    flat = spread <= _FLAT
    skew = (share * first.pow(3)).sum(-1) / spread.masked_fill(flat, 1)
    second = first.square() - skew.unsqueeze(-1) * first - spread.unsqueeze(-1)
    size = (share * second.square()).sum(-1)
    mean = mean.squeeze(-1)
    here = mean.square() + skew * mean - spread
    return fitted + here * _coefficient((share * second * y).sum(-1), size.masked_fill(flat, 0), _FLAT**2)


def _coefficient(product: Tensor, size: Tensor, least: float) -> Tensor:
    flat = size <= least
    return (product / size.masked_fill(flat, 1)).masked_fill(flat, 0)
