"""Scores s with labels and weights, for fits of softmax(alpha s + beta), and their standard form.

In standard form, the largest score of a row is 0, and scores are divided by a scale, usually the root mean square of
row means. A factor of the scores does not change the standard form. NLL is the negative log-likelihood.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.dispatch import source_of
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype

ZERO_SLOPE = 1e-14  # largest absolute derivative of the NLL in alpha that counts as 0, because of rounding errors
MASKED_SCORE = -1e18  # replaces a score of -inf, because -inf times a probability of 0 is NaN
LARGE_SCALE = 1e6  # scale above which very low scores, such as -1e9, may represent the -inf of masked classes
PIECE = 2**18  # number of scores that are processed together: 2 MB of float64


class WeightedSamples(NamedTuple):
    """Samples of S batch elements with R replicate weights."""

    x: Tensor  # scores `(S, N, C)`, or features `(S, D, N)`
    target: Tensor  # labels `(S, N)`
    w: Tensor  # weights `(R, S, N)`
    batch_shape: torch.Size  # batch axes of the call, with S elements

    @classmethod
    def flattened(cls, x: Tensor, target: Tensor, weights: Tensor, sample_axis: int = -2) -> "WeightedSamples":
        """Flatten the batch axes of x `(..., S, N, C)`, target `(..., S, N)` and weights `(..., R, S, N)`."""
        batch_shape, n_replicates = target.shape[:-1], weights.shape[-3]
        n_elements, n = batch_shape.numel(), target.shape[-1]
        x, target = x.reshape(n_elements, *x.shape[-2:]), target.reshape(n_elements, n)
        weights = weights.movedim(-3, 0).reshape(n_replicates, n_elements, n)
        if not n:  # add a sample of weight 0, because solvers need at least one
            x = pad(x, (0, 1) if sample_axis == -1 else (0, 0, 0, 1))
            target, weights = pad(target, (0, 1)), pad(weights, (0, 1))
        return cls(x, target, weights, batch_shape)

    def batch_axes_restored(self, results: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return results `(R, S, *)` with the batch axes of the call, `(..., R, S, *)`."""
        shape = len(self.w), *self.batch_shape
        return tuple([x.reshape(*shape, *x.shape[2:]).movedim(0, len(self.batch_shape) - 1) for x in results])


@dataclass(frozen=True)
class LabelledScores:
    """Scores, labels and weights of a batch of fits."""

    scores: Tensor  # scores in standard form `(S, N, C)`, or the original scores if `top` is given
    top: Tensor | None  # largest original scores `(S, N, 1)`; rows are then converted in pieces, without a float64 copy
    mean: Tensor  # mean score of every row, in standard form `(S, N)`
    label_score: Tensor  # score of the label of every row, in standard form `(S, N)`
    target: Tensor  # labels, int64 `(S, N)`
    w: Tensor  # weights with sum 1 over the samples, `(R, S, N)`
    share: Tensor  # weighted class frequencies `(R, S, C)`
    scale: Tensor  # divisor of the original scores `(S,)`
    label_mean: Tensor  # weighted mean of `label_score`, `(R, S)`
    has_masked: bool = False  # whether some scores may be `MASKED_SCORE`

    @property
    def rows_of_piece(self) -> int:
        """Number of rows of a piece. On a CPU, the piece and a buffer of its size fit into the cache together."""
        size = PIECE // 2 if self.scores.is_cpu else PIECE
        return max(1, size // max(1, self.w[..., 0].numel() * self.scores.shape[-1]))

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores in standard form `(S, n, C)` and weights `(R, S, n)`, in pieces that fit into the cache."""
        rows = self.rows_of_piece
        weights = torch.split(self.w, rows, -1) if self.w.shape[-1] else ()
        if self.top is None:
            return zip(map(methodcaller("to", self.w.dtype), torch.split(self.scores, rows, 1)), weights, strict=True)
        pieces = standard_pieces(self.scores, self.top, 1 / self.scale, self.w.dtype, rows)
        return zip(pieces, weights, strict=True)

    def averaged(self, at_most: int | None = None) -> "LabelledScores":
        """Return a float32 copy with the mean of all replicate weights, for about `at_most` samples if given."""
        subsample = slice(None, None, 1 if at_most is None else max(1, self.scores.shape[1] // at_most))
        w = self.w.mean(0, keepdim=True)[..., subsample]
        w = w / w.sum(-1, keepdim=True)
        label_score = self.label_score[:, subsample]
        return LabelledScores(
            self.scores[:, subsample],
            None if self.top is None else self.top[:, subsample],
            self.mean[:, subsample].float(),
            label_score.float(),
            self.target[:, subsample],
            w.float(),
            self.share.mean(0, keepdim=True).float(),
            self.scale.float(),
            (w * label_score).sum(-1).float(),
        )

    def for_replicates(self, replicates: slice) -> "LabelledScores":
        """Return the fits for a slice of the replicate weights."""
        return replace(self, w=self.w[replicates], share=self.share[replicates], label_mean=self.label_mean[replicates])


Solution = tuple[Tensor, Tensor, Tensor, Tensor]
"""Alpha (for scores in standard form), beta, gradient norm (for original scores) and outcome."""


def standard_form(scores: Tensor, top: Tensor, unused: Tensor) -> tuple[Tensor | None, Tensor, Tensor, bool | None]:
    """Convert scores `(S, N, C)` to standard form, given the largest score of every row `top` `(S, N, 1)`.

    `unused` `(S, N)` is True for samples whose weights are all 0, and whose scores may be NaN. Return scores, or None
    if `standard_pieces` must convert them; row means in standard form `(S, N)`; scales `(S,)`; and whether all scales
    are at most `LARGE_SCALE`, None if unknown.
    """
    wide = wide_dtype(scores.device)
    any_unused = value_if_available(unused.any())
    # Large input is converted in pieces by every iteration, without a float64 copy of all scores.
    if any_unused is False and scores.numel() > PIECE:
        source: Any = source_of("moments", scores.device.type, scores.dtype, scores.numel(), "auto")
        mean = source.row_means(scores, top)
        scale = _rms(mean)
        if value_if_available((scale <= LARGE_SCALE).all()):
            scale = torch.where(scale > 0, scale, 1)
            return None, mean / scale.unsqueeze(-1), scale, True
    s = scores.to(wide, copy=True).sub_(top)  # the only copy, modified in place
    if any_unused is not False:
        s = s.masked_fill_(unused.unsqueeze(-1), 0)
    # The scale is the root mean square of the row means, unless they contain scores that represent -inf.
    scale = _rms(s.mean(-1))
    is_moderate = value_if_available((scale <= LARGE_SCALE).all())
    scale = scale if is_moderate else _scale_without_masked(s, scale)
    scale = torch.where(scale > 0, scale, 1)
    s = s.div_(scale[:, None, None])
    s = s if is_moderate else s.clamp_(min=MASKED_SCORE)
    return s, s.mean(-1), scale, is_moderate


def _rms(mean: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(mean, dim=-1)
    return norm / math.sqrt(max(1, mean.shape[-1]))


def standard_pieces(scores: Tensor, top: Tensor, factor: Tensor, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
    """Yield (scores - top) * factor for `rows` rows at a time, `(S, n, C)` of the given dtype, in a reused buffer."""
    wide = torch.promote_types(scores.dtype, dtype)
    top, factor = top.to(wide), factor.to(wide)[:, None, None]
    buffer: Tensor | None = None  # reused, because allocation is slower than the arithmetic
    for given, largest in zip(torch.split(scores, rows, 1), torch.split(top, rows, 1), strict=True):
        buffer = torch.empty_like(given, dtype=wide) if buffer is None else buffer[:, : given.shape[1]]
        yield buffer.copy_(given).sub_(largest).mul_(factor).to(dtype)


def is_near_top(s: Tensor) -> Tensor:
    """Return False for scores that represent -inf, as for masked classes; the largest score of each row is 0.

    Let d be the median over the rows of the distance between the two largest scores. A score represents -inf if it is
    more than 1e9 d below the largest score of its row. All are True if d is unknown.
    """
    distance = _median_distance(s)
    return (s >= -1e9 * distance[:, None, None]) | distance.isnan()[:, None, None]


def is_certain(scores: Tensor) -> Tensor:
    """Return True for rows with a single score above -inf `(S, N)`.

    If it is the score of the label, the NLL of the row is 0 for all parameters. Fits exclude such rows. If all samples
    of a class are in such rows, its optimal bias is -inf.
    """
    return (scores > -torch.inf).sum(-1) == 1


def _median_distance(s: Tensor) -> Tensor:
    # The largest score is 0, so the distance is minus the second largest. Ignore rows with a tie or a single class.
    second = -s.topk(2, -1).values[..., 1]
    return second.masked_fill((second == 0) | (second == torch.inf), torch.nan).nanmedian(-1).values


def _scale_without_masked(s: Tensor, scale: Tensor) -> Tensor:
    """Return the root mean square of the scores `(S,)`, without scores that represent -inf; see `is_near_top`."""
    distance = _median_distance(s)
    is_near = s >= -1e9 * distance[:, None, None]
    # Divide by the largest score first, because squares of large scores would overflow.
    size = s.masked_fill(~is_near, 0).abs_().amax((-1, -2))
    size = torch.where(size > 0, size, 1)
    square = (s / size[:, None, None]).masked_fill_(~is_near, 0).square_().sum((-1, -2))
    near_scale = size * (square / is_near.sum((-1, -2))).sqrt()
    return torch.where(distance.isnan(), scale.nan_to_num(1, 1, 1), near_scale)
