"""Derivatives of the negative log-likelihood (NLL) of softmax(alpha s) in alpha: sums of moments of the scores."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.scores import PIECE, LabelledScores, standard_pieces

Derivatives = tuple[Tensor, Tensor, Tensor]


def nll_derivatives(p: LabelledScores, backend: Backend = "auto") -> Callable[[Tensor], Derivatives]:
    """Return a function from alpha `(R, S)` to the first three derivatives of the mean NLL in alpha, `(R, S)` each.

    Each is a weighted mean over the rows. The scores of a row have the distribution softmax(alpha s). The derivatives
    are their mean minus the score of the label, their variance, and their third central moment.
    """
    if p.top is None or p.w[..., 0].numel() > 1:  # few scores, or several fits, which share operations of torch
        return partial(derivatives_of, p)
    source: Any = source_of("moments", p.scores.device.type, p.scores.dtype, p.scores.numel(), backend)
    return partial(source.derivatives_of, p)


def row_means(scores: Tensor, top: Tensor) -> Tensor:
    """Return the mean of scores - top for each row `(S, N)`, in plain torch and pieces that fit into the cache."""
    wide = wide_dtype(scores.device)
    one = torch.ones(scores.shape[0], dtype=wide, device=scores.device)
    pieces = standard_pieces(scores, top, one, wide, max(1, PIECE // scores.shape[-1]))
    return torch.cat([s.mean(-1) for s in pieces], 1)


def derivatives_of(p: LabelledScores, alpha: Tensor) -> Derivatives:
    """Return the derivatives in plain torch; see `nll_derivatives`."""
    slope, curvature, skew = -p.label_mean, torch.zeros_like(p.label_mean), torch.zeros_like(p.label_mean)
    alpha = alpha[..., None, None]
    buffer: Tensor | None = None  # reused, because allocation is slower than the arithmetic
    for s, w in p.pieces():
        buffer = s.new_empty(*w.shape, s.shape[-1]) if buffer is None else buffer[..., : s.shape[1], :]
        q = torch.mul(alpha, s, out=buffer).exp_()  # at most 1, because no score is positive
        norm = q.sum(-1)
        # Compute the raw moments of the scores of order 1 to 3: multiply by s once more for each order.
        mean = q.mul_(s).sum(-1).div_(norm)
        square = q.mul_(s).sum(-1).div_(norm)
        cube = q.mul_(s).sum(-1).div_(norm)
        variance = square - mean.square()
        slope = slope + (w * mean).sum(-1)
        curvature = curvature + (w * variance).sum(-1)
        skew = skew + (w * (cube - mean * (square + 2 * variance))).sum(-1)
    return slope, curvature, skew
