"""The fits in standard form: the largest score of a row is 0, and the scores are divided by their scale.

So fits of logits that differ by a factor take the same steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from torchcalib.ops.logs import wide_dtype

CONVERGED, AT_ZERO, SEPARABLE, STOPPED, NO_DATA = range(5)
"""Outcomes of a fit; see `fits.AffineFit`."""

FAR = -1e18  # replaces a score of -inf: its probability is 0, and 0 times it is 0
UNUSUAL = 1e6  # scale above which scores may stand for -inf
PIECE = 2**18  # scores of a piece: 2 MB of float64


@dataclass(frozen=True)
class Problem:
    """Fits in standard form.

    Attributes:
        scores: in standard form `(S, N, C)`; with `top`, the original scores.
        top: largest score of every row `(S, N, 1)`, where rows are converted piece by piece: a float64 copy of many
            scores costs more than the computations on it. None if `scores` are in standard form.
        s_label: scores of the labels, in standard form `(S, N)`.
        target: labels `(S, N)`.
        w: weights of sum 1 `(R, S, N)`.
        scale: divisor of the scores `(S,)`.
    """

    scores: Tensor
    top: Tensor | None
    s_label: Tensor
    target: Tensor
    w: Tensor
    scale: Tensor

    @cached_property
    def share(self) -> Tensor:
        """Class frequencies `(R, S, C)`."""
        zeros = self.w.new_zeros((*self.w.shape[:-1], self.scores.shape[-1]))
        return zeros.scatter_add(-1, self.target.expand(self.w.shape), self.w)

    @cached_property
    def of_label(self) -> Tensor:
        """Mean score of the label `(R, S)`."""
        return (self.w * self.s_label).sum(-1)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of scores in standard form `(S, n, C)` and of `w` `(R, S, n)` that fit into the cache."""
        rows = max(1, PIECE // max(1, self.w.shape[:-1].numel() * self.scores.shape[-1]))
        if self.top is None:
            scores: Iterator[Tensor] = (s.to(self.w.dtype) for s in torch.split(self.scores, rows, 1))
        else:
            scores = standard_pieces(self.scores, self.top, 1 / self.scale, self.w.dtype, rows)
        return zip(scores, torch.split(self.w, rows, -1), strict=True)

    def rough(self, at_most: int | None = None) -> "Problem":
        """Return the problem of the mean of all weightings in float32, on about `at_most` samples if given."""
        every = slice(None, None, 1 if at_most is None else max(1, self.scores.shape[1] // at_most))
        w = self.w.mean(0, keepdim=True)[..., every]
        top = None if self.top is None else self.top[:, every]
        labels = self.s_label[:, every].float(), self.target[:, every]
        return Problem(self.scores[:, every], top, *labels, (w / w.sum(-1, keepdim=True)).float(), self.scale.float())

    def some(self, weightings: slice) -> "Problem":
        """Return the problem of some of the weightings."""
        return replace(self, w=self.w[weightings])


def standard_form(
    scores: Tensor, top: Tensor, unread: Tensor
) -> tuple[tuple[Tensor, Tensor | None], Tensor, Tensor, bool]:
    """Return `Problem.scores` and `top`, the means of the rows `(S, N)`, the scale `(S,)`, and whether it is usual.

    Rows that are `unread` may hold any values.
    """
    wide = wide_dtype(scores.device)
    has_unread = bool(unread.any())
    if not has_unread and scores.numel() > PIECE:
        one = torch.ones(scores.shape[0], dtype=wide, device=scores.device)
        pieces = standard_pieces(scores, top, one, wide, max(1, PIECE // scores.shape[-1]))
        mean = torch.cat([s.mean(-1) for s in pieces], 1)
        scale = _rms(mean)
        if bool((scale <= UNUSUAL).all()):
            scale = torch.where(scale > 0, scale, 1)
            return (scores, top), mean / scale.unsqueeze(-1), scale, True
    s = scores.to(wide, copy=True).sub_(top)  # the one copy, worked on in place
    if has_unread:
        s = s.masked_fill_(unread.unsqueeze(-1), 0)
    scale = _rms(s.mean(-1))
    usual = bool((scale <= UNUSUAL).all())
    scale = scale if usual else _scale_of_near(s, scale)
    scale = torch.where(scale > 0, scale, 1)
    s = s.div_(scale[:, None, None])
    s = s if usual else s.clamp_(min=FAR)
    return (s, None), s.mean(-1), scale, usual


def _rms(mean: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(mean, dim=-1)
    return norm / math.sqrt(max(1, mean.shape[-1]))


def standard_pieces(scores: Tensor, top: Tensor, factor: Tensor, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
    """Convert `rows` rows at a time to standard form, in one buffer."""
    wide = torch.promote_types(scores.dtype, dtype)
    top, factor = top.to(wide), factor.to(wide)[:, None, None]
    buffer: Tensor | None = None
    for given, largest in zip(torch.split(scores, rows, 1), torch.split(top, rows, 1), strict=True):
        buffer = torch.empty_like(given, dtype=wide) if buffer is None else buffer[:, : given.shape[1]]
        yield buffer.copy_(given).sub_(largest).mul_(factor).to(dtype)


def _scale_of_near(s: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of the scores that are not -inf, nor a number that stands for -inf (a masked class).

    The distance between the two largest scores of the median row is the unit: 1e9 of it stands for -inf.
    """
    second = -s.topk(2, -1).values[..., 1]
    usual = second.masked_fill((second == 0) | (second == torch.inf), torch.nan).nanmedian(-1).values
    near = s >= -1e9 * usual[:, None, None]
    size = s.masked_fill(~near, 0).abs_().amax((-1, -2))
    size = torch.where(size > 0, size, 1)
    square = (s / size[:, None, None]).masked_fill_(~near, 0).square_().sum((-1, -2))
    found = size * (square / near.sum((-1, -2))).sqrt()
    return torch.where(usual.isnan(), scale.nan_to_num(1, 1, 1), found)
