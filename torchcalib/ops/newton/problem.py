"""The fits in standard form, their outcomes, and when a fit is good enough.

In standard form, the largest score of a row is 0 and the scores are divided by their scale. So fits of logits that
differ by a factor take the same steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.logs import wide_dtype

CONVERGED, AT_ZERO, SEPARABLE, STOPPED, NO_DATA = range(5)
"""Outcomes of a fit; see `AffineFit`."""

GRADIENT = 1e-10  # target for the gradient norm of the mean NLL, in units of the scores and of their scale
DECREMENT = 1e-15  # target for the Newton decrement: twice the NLL that one more step would gain
PROMISED = 1e-9, 1e-12  # both, where rounding prevents the targets
FLAT = 1e-14  # a slope within rounding error of 0
NOISE = 1e-13  # rounding error of an NLL, relative to 1 + NLL
ROUNDS = 200
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
        mean: mean of every row, in standard form `(S, N)`.
        s_label: scores of the labels, in standard form `(S, N)`.
        target: labels `(S, N)`.
        w: weights of sum 1 `(R, S, N)`.
        share: class frequencies `(R, S, C)`.
        scale: divisor of the scores `(S,)`.
        of_label: mean score of the label `(R, S)`.
    """

    scores: Tensor
    top: Tensor | None
    mean: Tensor
    s_label: Tensor
    target: Tensor
    w: Tensor
    share: Tensor
    scale: Tensor
    of_label: Tensor

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of scores in standard form `(S, n, C)` and of `w` `(R, S, n)` that fit into the cache."""
        n_weightings, n_series, n = self.w.shape
        rows = max(1, PIECE // max(1, n_weightings * n_series * self.scores.shape[-1]))
        weights = torch.split(self.w, rows, -1) if n else ()
        if self.top is None:
            return zip((s.to(self.w.dtype) for s in torch.split(self.scores, rows, 1)), weights, strict=True)
        pieces = standard_pieces(self.scores, self.top, 1 / self.scale, self.w.dtype, rows)
        return zip(pieces, weights, strict=True)

    def rough(self, at_most: int | None = None) -> "Problem":
        """Return the problem of the mean of all weightings in float32, on about `at_most` samples if given."""
        every = slice(None, None, 1 if at_most is None else max(1, self.scores.shape[1] // at_most))
        w = self.w.mean(0, keepdim=True)[..., every]
        w = w / w.sum(-1, keepdim=True)
        s_label = self.s_label[:, every]
        of_label = (w * s_label).sum(-1)
        return Problem(
            self.scores[:, every],
            None if self.top is None else self.top[:, every],
            self.mean[:, every].float(),
            s_label.float(),
            self.target[:, every],
            w.float(),
            self.share.mean(0, keepdim=True).float(),
            self.scale.float(),
            of_label.float(),
        )

    def some(self, weightings: slice) -> "Problem":
        """Return the problem of some of the weightings."""
        return replace(self, w=self.w[weightings], share=self.share[weightings], of_label=self.of_label[weightings])


Solved = tuple[Tensor, Tensor, Tensor, Tensor]
"""alpha and beta, in units of the standard form, gradient norm and outcome"""


def all_true(flag: Tensor) -> bool:
    """Return whether all flags are set; False where values cannot be read back."""
    return look(flag.all()) is True


def enough(norm: Tensor, slope: Tensor) -> Tensor:
    """Return whether a fit that could not improve is good enough, from its gradient and the slope along a step."""
    gradient, decrement = PROMISED
    return (norm < gradient) & (slope >= -decrement)


def standard_form(scores: Tensor, top: Tensor, unread: Tensor) -> tuple[Tensor | None, Tensor, Tensor, bool | None]:
    """Return scores in standard form, the means of their rows `(S, N)`, their scale `(S,)`, and whether it is usual.

    The scores are None if there are many and `standard_pieces` can convert them piece by piece.
    """
    wide = wide_dtype(scores.device)
    any_unread = look(unread.any())
    if any_unread is False and scores.numel() > PIECE:
        one = torch.ones(scores.shape[0], dtype=wide, device=scores.device)
        pieces = standard_pieces(scores, top, one, wide, max(1, PIECE // scores.shape[-1]))
        mean = torch.cat([s.mean(-1) for s in pieces], 1)
        scale = _rms(mean)
        if look((scale <= UNUSUAL).all()):
            scale = torch.where(scale > 0, scale, 1)
            return None, mean / scale.unsqueeze(-1), scale, True
    s = scores.to(wide, copy=True).sub_(top)  # the one copy, worked on in place
    if any_unread is not False:
        s = s.masked_fill_(unread.unsqueeze(-1), 0)
    scale = _rms(s.mean(-1))
    usual = look((scale <= UNUSUAL).all())
    scale = scale if usual else _scale_of_near(s, scale)
    scale = torch.where(scale > 0, scale, 1)
    s = s.div_(scale[:, None, None])
    s = s if usual else s.clamp_(min=FAR)
    return s, s.mean(-1), scale, usual


def _rms(mean: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(mean, dim=-1)
    return norm / math.sqrt(max(1, mean.shape[-1]))


def standard_pieces(scores: Tensor, top: Tensor, factor: Tensor, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
    """Convert `rows` rows at a time to standard form, in one buffer."""
    wide = torch.promote_types(scores.dtype, dtype)
    top, factor = top.to(wide), factor.to(wide)[:, None, None]
    room: Tensor | None = None
    for given, largest in zip(torch.split(scores, rows, 1), torch.split(top, rows, 1), strict=True):
        room = torch.empty_like(given, dtype=wide) if room is None else room[:, : given.shape[1]]
        yield room.copy_(given).sub_(largest).mul_(factor).to(dtype)


def _scale_of_near(s: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of the scores that are not -inf, nor a number that stands for -inf (a masked class).

    The distance between the two largest scores of the median row is the unit: 1e9 of it stands for -inf.
    """
    if not s.shape[1]:
        return scale
    second = -s.topk(2, -1).values[..., 1]
    usual = second.masked_fill((second == 0) | (second == torch.inf), torch.nan).nanmedian(-1).values
    near = s >= -1e9 * usual[:, None, None]
    size = s.masked_fill(~near, 0).abs_().amax((-1, -2))
    size = torch.where(size > 0, size, 1)
    square = (s / size[:, None, None]).masked_fill_(~near, 0).square_().sum((-1, -2))
    found = size * (square / near.sum((-1, -2))).sqrt()
    return torch.where(usual.isnan(), scale.nan_to_num(1, 1, 1), found)
