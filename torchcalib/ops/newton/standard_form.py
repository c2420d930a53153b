"""Scores divided by their scale, with the greatest of a row at 0: the form in which all problems look alike."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.logs import wide_dtype

FAR = -1e18  # stands for a score of -inf: its probability is 0, and 0 times it is 0
UNUSUAL = 1e6  # a scale from which scores are looked at for such as stand for -inf
PIECE = 2**18  # scores that are worked on at a time


def standard_form(scores: Tensor, top: Tensor, unread: Tensor) -> tuple[Tensor | None, Tensor, Tensor, bool | None]:
    """Return scores in standard form, means of their rows `(S, N)`, their scale `(S,)`, and whether it is usual.

    In place of the scores None, where they are many and need no more than what `standard_pieces` does.
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
    """Bring so many rows at a time to standard form, all in the same memory."""
    wide = torch.promote_types(scores.dtype, dtype)
    top, factor = top.to(wide), factor.to(wide)[:, None, None]
    room: Tensor | None = None
    for given, largest in zip(torch.split(scores, rows, 1), torch.split(top, rows, 1), strict=True):
        room = torch.empty_like(given, dtype=wide) if room is None else room[:, : given.shape[1]]
        yield room.copy_(given).sub_(largest).mul_(factor).to(dtype)


def _scale_of_near(s: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of the scores that do not stand for -inf, as masked classes do, or are it.

    Which these are is told by how far the second class of a row is from its first, in the median row.
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
