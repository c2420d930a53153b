"""Standard form of the scores s for fits of softmax(alpha s + beta), codes of outcomes, and stopping criteria.

In standard form, the largest score of a row is 0, and scores are divided by a scale, usually the root mean square of
row means. A factor of the scores does not change the standard form. NLL is the negative log-likelihood.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype

CONVERGED, AT_ZERO, SEPARABLE, STOPPED, NO_DATA = range(5)
"""Outcomes of a fit, defined in `AffineFit`."""

GRADIENT = 1e-10  # largest gradient norm of the mean NLL at convergence, in original and in standard units of alpha
DECREMENT = 1e-15  # largest Newton decrement at convergence: twice the expected decrease of the NLL in the next step
ROUNDING_LIMITS = 1e-9, 1e-12  # gradient norm and Newton decrement accepted where rounding errors prevent convergence
ZERO_SLOPE = 1e-14  # largest absolute derivative of the NLL in alpha that counts as 0, because of rounding errors
NLL_ROUNDING = 1e-13  # rounding error of the NLL, relative to 1 + NLL
ROUNDS = 200  # largest number of iterations
MASKED_SCORE = -1e18  # replaces a score of -inf, because -inf times a probability of 0 is NaN
LARGE_SCALE = 1e6  # scale above which very low scores, such as -1e9, may represent the -inf of masked classes
PIECE = 2**18  # number of scores that are processed together: 2 MB of float64


@dataclass(frozen=True)
class Problem:
    """Scores, labels and weights of a batch of fits.

    Attributes:
        scores: scores in standard form `(S, N, C)`, or the original scores if `top` is given.
        top: largest original score of every row `(S, N, 1)`, or None. With `top`, rows are converted piece by piece,
            without a float64 copy of all scores.
        mean: mean score of every row, in standard form `(S, N)`.
        label_score: score of the label of every row, in standard form `(S, N)`.
        target: labels, int64 `(S, N)`.
        w: weights with sum 1 over the samples, `(R, S, N)`.
        share: weighted class frequencies `(R, S, C)`.
        scale: divisor of the original scores `(S,)`.
        label_mean: weighted mean of `label_score`, `(R, S)`.
        has_masked: whether some scores may be `MASKED_SCORE`.
    """

    scores: Tensor
    top: Tensor | None
    mean: Tensor
    label_score: Tensor
    target: Tensor
    w: Tensor
    share: Tensor
    scale: Tensor
    label_mean: Tensor
    has_masked: bool = False

    @property
    def rows_of_piece(self) -> int:
        """Number of rows of a piece that fits into the cache."""
        return max(1, PIECE // max(1, self.w[..., 0].numel() * self.scores.shape[-1]))

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores in standard form `(S, n, C)` and weights `(R, S, n)`, in pieces that fit into the cache."""
        rows = self.rows_of_piece
        weights = torch.split(self.w, rows, -1) if self.w.shape[-1] else ()
        if self.top is None:
            return zip((s.to(self.w.dtype) for s in torch.split(self.scores, rows, 1)), weights, strict=True)
        pieces = standard_pieces(self.scores, self.top, 1 / self.scale, self.w.dtype, rows)
        return zip(pieces, weights, strict=True)

    def averaged(self, at_most: int | None = None) -> "Problem":
        """Return a float32 problem with the mean of all replicate weights, for about `at_most` samples if given."""
        subsample = slice(None, None, 1 if at_most is None else max(1, self.scores.shape[1] // at_most))
        w = self.w.mean(0, keepdim=True)[..., subsample]
        w = w / w.sum(-1, keepdim=True)
        label_score = self.label_score[:, subsample]
        label_mean = (w * label_score).sum(-1)
        return Problem(
            self.scores[:, subsample],
            None if self.top is None else self.top[:, subsample],
            self.mean[:, subsample].float(),
            label_score.float(),
            self.target[:, subsample],
            w.float(),
            self.share.mean(0, keepdim=True).float(),
            self.scale.float(),
            label_mean.float(),
        )

    def for_replicates(self, replicates: slice) -> "Problem":
        """Return the problem with a slice of the replicate weights."""
        return replace(self, w=self.w[replicates], share=self.share[replicates], label_mean=self.label_mean[replicates])


Solution = tuple[Tensor, Tensor, Tensor, Tensor]
"""Alpha (for scores in standard form), beta, gradient norm (for original scores) and outcome."""


def all_true(flag: Tensor) -> bool:
    """Return whether all elements are True; False under `vmap` and `torch.compile`, where values cannot be read."""
    return value_if_available(flag.all()) is True


def is_within_rounding(norm: Tensor, slope: Tensor) -> Tensor:
    """Return True where the gradient norm and the Newton decrement, -slope, are within `ROUNDING_LIMITS`."""
    gradient, decrement = ROUNDING_LIMITS
    return (norm < gradient) & (slope >= -decrement)


def newton_direction(hessian: Tensor, gradient: Tensor) -> Tensor:
    """Return -H^-1 g `(..., K)` for positive semidefinite Hessians H `(..., K, K)` and gradients g `(..., K)`.

    The diagonal is scaled to 1, because class frequencies and units can differ by orders of magnitude. A small ridge is
    added, and increased where the Cholesky decomposition fails. Parameters with a diagonal of 0 do not move.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    nonzero = diagonal > 0
    unit = torch.where(nonzero, diagonal, 1).rsqrt()
    matrix = hessian * unit.unsqueeze(-1) * unit.unsqueeze(-2) + torch.diag_embed((~nonzero).to(unit.dtype))
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    eps = torch.finfo(unit.dtype).eps
    factor, failed = torch.linalg.cholesky_ex(matrix + 50 * eps * eye)
    for ridge in (1e5 * eps, 1e-4, 1e-1):
        if all_true(failed == 0):
            break
        new_factor, new_failed = torch.linalg.cholesky_ex(matrix + max(ridge, 1e2 * eps) * eye)
        factor = torch.where((failed > 0)[..., None, None], new_factor, factor)
        failed = torch.where(failed > 0, new_failed, failed)
    return -torch.cholesky_solve((gradient * unit).unsqueeze(-1), factor).squeeze(-1) * unit


def standard_form(scores: Tensor, top: Tensor, unused: Tensor) -> tuple[Tensor | None, Tensor, Tensor, bool | None]:
    """Convert scores to standard form.

    Args:
        scores: original scores `(S, N, C)`.
        top: largest score of every row, `(S, N, 1)`.
        unused: True for samples whose weights are all 0, and whose scores may be NaN, `(S, N)`.

    Returns:
        Scores in standard form `(S, N, C)`, or None if `standard_pieces` must convert them; row means in standard form
        `(S, N)`; scales `(S,)`; and whether all scales are at most `LARGE_SCALE`, None if unknown.
    """
    wide = wide_dtype(scores.device)
    any_unused = value_if_available(unused.any())
    if any_unused is False and scores.numel() > PIECE:
        one = torch.ones(scores.shape[0], dtype=wide, device=scores.device)
        pieces = standard_pieces(scores, top, one, wide, max(1, PIECE // scores.shape[-1]))
        mean = torch.cat([s.mean(-1) for s in pieces], 1)
        scale = _rms(mean)
        if value_if_available((scale <= LARGE_SCALE).all()):
            scale = torch.where(scale > 0, scale, 1)
            return None, mean / scale.unsqueeze(-1), scale, True
    s = scores.to(wide, copy=True).sub_(top)  # the only copy, modified in place
    if any_unused is not False:
        s = s.masked_fill_(unused.unsqueeze(-1), 0)
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
    buffer: Tensor | None = None
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
    second = -s.topk(2, -1).values[..., 1]
    return second.masked_fill((second == 0) | (second == torch.inf), torch.nan).nanmedian(-1).values


def _scale_without_masked(s: Tensor, scale: Tensor) -> Tensor:
    """Return the root mean square of the scores `(S,)`, without scores that represent -inf; see `is_near_top`."""
    if not s.shape[1]:
        return scale
    distance = _median_distance(s)
    is_near = s >= -1e9 * distance[:, None, None]
    size = s.masked_fill(~is_near, 0).abs_().amax((-1, -2))
    size = torch.where(size > 0, size, 1)
    square = (s / size[:, None, None]).masked_fill_(~is_near, 0).square_().sum((-1, -2))
    near_scale = size * (square / is_near.sum((-1, -2))).sqrt()
    return torch.where(distance.isnan(), scale.nan_to_num(1, 1, 1), near_scale)
