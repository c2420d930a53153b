"""Local regression (loess) at the points themselves, with tricube weights, exactly and in pieces."""

import torch
from torch import Tensor

# Pairs of points that are worked on at a time: by one thread, in memory that is at hand.
_TOGETHER = 2**13
_FLAT = 1e-10  # share of its usual size from which on what spreads the points around one is rounding


def loess(x: Tensor, y: Tensor, n: Tensor, span: float, degree: int) -> Tensor:
    """Fit a polynomial around every point, to its nearest neighbours, and return its value there.

    The neighbours of a point are the share `span` of all samples that is nearest to it, weighed by
    (1 - (distance / that of the farthest)^3)^3. Where they do not determine the polynomial, its degree is less: points
    of one x have their mean.

    Args:
        x: `(..., M)`, rising, of the dtype of sums; where n is 0 anything, NaN too.
        y: `(..., M)`, as x.
        n: samples that each point stands for `(..., M)`, whole numbers.
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
    # A neighbourhood begins at some point and ends at the first by which it holds enough.
    wanted = upto - n + n_neighbours.unsqueeze(-1)
    last = torch.searchsorted(upto, wanted - 0.5)
    whole = ~absent & (last < x.shape[-1])
    right = x.gather(-1, last.clamp(max=x.shape[-1] - 1))
    rows = max(1, _TOGETHER // max(1, x.numel()))
    at = torch.split(x, rows, -1)
    return torch.cat([_at(some, x, y, n, right, whole, degree) for some in at], -1).masked_fill(absent, 0)


def _at(at: Tensor, x: Tensor, y: Tensor, n: Tensor, right: Tensor, whole: Tensor, degree: int) -> Tensor:
    """Fit around points `at (..., K)`, by polynomials that are orthogonal under the weights of the neighbours."""
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
