"""Training penalties of events by Triton kernels.

Results are reproducible although programs run in any order: each program stores its own sums, which one program adds in
a fixed order.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.ops.bin_sums.triton import bin_errors
from torchcalib.ops.host_values import constant
from torchcalib.ops.penalties.options import Embedding, SoftBinning

_CHUNK, _TILE = 32, 1024  # largest numbers of events, and of memberships in bins, that a program computes at a time
_PIECE, _PIECES = 128, 128  # smallest number of events per program, and largest number of programs that share them
_N_SUMS = tl.constexpr(5)  # sums over pairs and events, see `_add_pairs`


def soft_error(
    confidence: Tensor, others: tuple[Tensor, Tensor], bins: SoftBinning, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the error of soft bins in two launches, and its derivatives in the sums over bins `(3, B)`."""
    n = len(confidence)
    size = max(_PIECE, triton.cdiv(n, _PIECES))
    parts = torch.empty(triton.cdiv(n, size), 3, bins.n_bins, dtype=torch.float64, device=confidence.device)
    chunk, width = _tile(bins)
    with torch.cuda.device_of(parts):
        _add_soft[(len(parts),)](
            confidence, *others, number(bins.temperature, parts.device), parts, n, size, bins.n_bins, chunk, width,
            num_warps=4,
        )  # fmt: skip
    return bin_errors(parts, bins.norm, None, dtype, in_parts=True)


def soft_gradient(
    confidence: Tensor,
    others: tuple[Tensor, Tensor],
    bins: SoftBinning,
    results: tuple[Tensor, Tensor],
    upstream: Tensor,
) -> Tensor:
    """Return the gradient in the confidences in one launch, from the results of `soft_error`."""
    out, (chunk, width) = torch.empty_like(confidence), _tile(bins)
    with torch.cuda.device_of(out):
        _fill_soft_gradient[(triton.cdiv(len(out), chunk),)](
            confidence, *others, number(bins.temperature, out.device), results[1], upstream, out, len(out), bins.n_bins,
            chunk, width, num_warps=4,
        )  # fmt: skip
    return out


def _tile(bins: SoftBinning) -> tuple[int, int]:
    """Return the numbers of events and bins whose memberships a program computes at a time."""
    width = triton.next_power_of_2(bins.n_bins)
    return min(_CHUNK, _TILE // width), width


def embedding_error(
    confidence: Tensor, others: tuple[Tensor, Tensor], embedding: Embedding, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the error of an embedding in two launches, with sums of each event, and factors of its residual."""
    n = len(confidence)
    of_events = torch.empty(4, n, dtype=torch.float64, device=confidence.device)
    parts = of_events.new_empty(triton.cdiv(n, _CHUNK), _N_SUMS.value)
    error, factors = of_events.new_empty((), dtype=dtype), of_events.new_empty(3)
    with torch.cuda.device_of(parts):
        _add_pairs[(len(parts),)](
            confidence, *others, number(embedding.bandwidth, parts.device), of_events, parts, n, _CHUNK, num_warps=4
        )
        _fill_embedding_error[(1,)](
            parts, error, factors, len(parts), embedding.weighted, triton.next_power_of_2(len(parts)), num_warps=1
        )
    return error, of_events, factors


def embedding_gradient(
    confidence: Tensor,
    others: tuple[Tensor, Tensor],
    _: Embedding,
    results: tuple[Tensor, Tensor, Tensor],
    upstream: Tensor,
) -> Tensor:
    """Return the gradient in the confidences in one launch, from the results of `embedding_error`."""
    out = torch.empty_like(confidence)
    with torch.cuda.device_of(out):
        _fill_embedding_gradient[(triton.cdiv(len(out), _PIECE),)](
            confidence, *others, *results[1:], upstream, out, len(out), _PIECE, num_warps=4
        )
    return out


@lru_cache(maxsize=64)
def number(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor, because Triton rounds numbers of Python to float32."""
    return constant((value,), torch.float64, device)


@triton.jit
def _members(p, temperature, n_bins, bins: tl.constexpr):
    """Return the membership softmax_b(-(p - centre_b)^2 / temperature) `[bins, chunk]`, and the centres `[bins, 1]`."""
    index = tl.arange(0, bins)
    centre = ((index + 0.5) / n_bins.to(tl.float64))[:, None]
    distance = p[None, :] - centre
    x = tl.where((index < n_bins)[:, None], -(distance * distance) / temperature, float("-inf"))
    e = tl.exp(x - tl.max(x, 0)[None, :])
    return e / tl.sum(e, 0)[None, :], centre


@triton.jit(do_not_specialize=["n", "size", "n_bins"])
def _add_soft(
    confidence, outcome, weights, temperature, parts, n, size, n_bins, chunk: tl.constexpr, bins: tl.constexpr
):  # fmt: skip
    """Sum w m_b, w p m_b and w y m_b over a piece of the events with membership m_b. One program for each piece."""
    piece = tl.program_id(0).to(tl.int64)
    softness = tl.load(temperature)
    count = tl.zeros([bins, chunk], tl.float64)
    sum_confidence = tl.zeros([bins, chunk], tl.float64)
    sum_outcome = tl.zeros([bins, chunk], tl.float64)
    end = tl.minimum((piece + 1) * size, n)
    for start in range(piece * size, end, chunk):
        event = start + tl.arange(0, chunk)
        w = tl.load(weights + event, mask=event < end, other=0)
        p = tl.load(confidence + event, mask=event < end, other=0.5)
        y = tl.load(outcome + event, mask=event < end, other=0)
        member, _ = _members(p, softness, n_bins, bins)
        count += w[None, :] * member
        sum_confidence += (w * p)[None, :] * member
        sum_outcome += (w * y)[None, :] * member
    index = tl.arange(0, bins)
    to = parts + piece * 3 * n_bins + index
    tl.store(to, tl.sum(count, 1), mask=index < n_bins)
    tl.store(to + n_bins, tl.sum(sum_confidence, 1), mask=index < n_bins)
    tl.store(to + 2 * n_bins, tl.sum(sum_outcome, 1), mask=index < n_bins)


@triton.jit(do_not_specialize=["n", "n_bins"])
def _fill_soft_gradient(
    confidence, outcome, weights, temperature, slopes, upstream, out, n, n_bins, chunk: tl.constexpr,
    bins: tl.constexpr,
):  # fmt: skip
    """Store the gradient of an error in the confidences of a chunk of events.

    Let s_b, t_b and u_b be its derivatives in the sums of w m_b, w p m_b and w y m_b. The derivative of m_b is
    2 m_b (centre_b - sum_k m_k centre_k) / temperature.
    """
    event = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = event < n
    w = tl.load(weights + event, mask=inside, other=0)
    p = tl.load(confidence + event, mask=inside, other=0.5)
    y = tl.load(outcome + event, mask=inside, other=0)
    softness = tl.load(temperature)
    member, centre = _members(p, softness, n_bins, bins)
    index = tl.arange(0, bins)
    of_count = tl.load(slopes + index, mask=index < n_bins, other=0)[:, None]
    of_confidence = tl.load(slopes + n_bins + index, mask=index < n_bins, other=0)[:, None]
    of_outcome = tl.load(slopes + 2 * n_bins + index, mask=index < n_bins, other=0)[:, None]
    of_member = of_count + p[None, :] * of_confidence + y[None, :] * of_outcome
    mean = tl.sum(member * centre, 0)
    slope = tl.sum(member * of_confidence, 0)
    slope += 2 * tl.sum(member * of_member * (centre - mean[None, :]), 0) / softness
    slope = tl.where(w == 0, 0.0, w * slope * tl.load(upstream).to(tl.float64))
    tl.store(out + event, slope, mask=inside)


@triton.jit
def _residuals(p, y, w):
    """Return the residuals w y (1 - p) of events that occurred, and -w (1 - y) p of other events."""
    return w * y * (1 - p), -w * (1 - y) * p


@triton.jit(do_not_specialize=["n"])
def _add_pairs(confidence, outcome, weights, bandwidth, of_events, parts, n, chunk: tl.constexpr):
    """Sum over the pairs of a chunk of events i with all events j. One program for each chunk.

    Let h and f be the `_residuals`, and k_ij = exp(-|p_i - p_j| / bandwidth). Each event gets the four sums over j of
    k_ij h_j, k_ij f_j and their derivatives in p_i. A chunk gets the sums over i and j of h_i k_ij h_j, h_i k_ij f_j
    and f_i k_ij f_j, and those over i of w y and w (1 - y).
    """
    event = tl.program_id(0) * chunk + tl.arange(0, chunk)
    inside = event < n
    p = tl.load(confidence + event, mask=inside, other=0.5)
    y = tl.load(outcome + event, mask=inside, other=0)
    w = tl.load(weights + event, mask=inside, other=0)
    width = tl.load(bandwidth)
    # 1. Sums over all events j, a tile of events i x j at a time
    sum_h = tl.zeros([chunk, chunk], tl.float64)
    sum_f = tl.zeros([chunk, chunk], tl.float64)
    slope_h = tl.zeros([chunk, chunk], tl.float64)
    slope_f = tl.zeros([chunk, chunk], tl.float64)
    for start in range(0, n, chunk):
        other = start + tl.arange(0, chunk)
        q = tl.load(confidence + other, mask=other < n, other=0.5)
        o = tl.load(outcome + other, mask=other < n, other=0)
        v = tl.load(weights + other, mask=other < n, other=0)
        h, f = _residuals(q, o, v)
        gap = q[None, :] - p[:, None]
        k = tl.exp(-tl.abs(gap) / width)
        slope = k * ((gap > 0).to(tl.float64) - (gap < 0).to(tl.float64))  # 0 where p_i = p_j
        sum_h += k * h[None, :]
        sum_f += k * f[None, :]
        slope_h += slope * h[None, :]
        slope_f += slope * f[None, :]
    of_h, of_f = tl.sum(sum_h, 1), tl.sum(sum_f, 1)
    at = of_events + event
    tl.store(at, of_h, mask=inside)
    tl.store(at + n, of_f, mask=inside)
    tl.store(at + 2 * n, tl.sum(slope_h, 1) / width, mask=inside)
    tl.store(at + 3 * n, tl.sum(slope_f, 1) / width, mask=inside)
    # 2. Sums over the events i of the chunk
    h, f = _residuals(p, y, w)
    to = parts + tl.program_id(0) * _N_SUMS
    tl.store(to, tl.sum(h * of_h, 0))
    tl.store(to + 1, tl.sum(h * of_f, 0))
    tl.store(to + 2, tl.sum(f * of_f, 0))
    tl.store(to + 3, tl.sum(w * y, 0))
    tl.store(to + 4, tl.sum(w * (1 - y), 0))


@triton.jit
def _column(parts, n_parts, k, block: tl.constexpr):
    """Return the total of a sum of `_add_pairs` over all chunks."""
    part = tl.arange(0, block)
    return tl.sum(tl.load(parts + part * _N_SUMS + k, mask=part < n_parts, other=0), 0)


@triton.jit(do_not_specialize=["n_parts"])
def _fill_embedding_error(parts, error, factors, n_parts, weighted: tl.constexpr, block: tl.constexpr):
    """Store the error E, and the factors a, b and 1 / (2 E) or 0, in one program.

    E^2 is the sum over pairs of d_i d_j k_ij for d = a h + b f. With `weighted`, a and b are 1 / sum w y and
    1 / sum w (1 - y), or 0 without such events. Otherwise both are 1 / sum w.
    """
    hits, misses = _column(parts, n_parts, 3, block), _column(parts, n_parts, 4, block)
    is_valid = hits + misses > 0
    if not weighted:
        hits += misses
        misses = hits
    a = tl.where(hits == 0, 0.0, 1 / tl.where(hits == 0, 1.0, hits))
    b = tl.where(misses == 0, 0.0, 1 / tl.where(misses == 0, 1.0, misses))
    square = a * a * _column(parts, n_parts, 0, block) + 2 * a * b * _column(parts, n_parts, 1, block)
    square += b * b * _column(parts, n_parts, 2, block)
    e = tl.sqrt(tl.where(square < 0, 0.0, square))
    e = tl.where(is_valid, e, float("nan"))
    tl.store(error, e.to(error.dtype.element_ty))
    tl.store(factors, a)
    tl.store(factors + 1, b)
    tl.store(factors + 2, tl.where(e == 0, 0.0, 0.5 / tl.where(e == 0, 1.0, e)))


@triton.jit(do_not_specialize=["n"])
def _fill_embedding_gradient(
    confidence, outcome, weights, of_events, factors, upstream, out, n, chunk: tl.constexpr
):  # fmt: skip
    """Store the gradient of the error E in the confidences: the derivative of E^2 over 2 E.

    The derivative of E^2 in p_i is 2 d'_i sum_j k_ij d_j + 2 d_i sum_j k'_ij d_j, with derivatives d' and k' in p_i.
    """
    event = tl.program_id(0) * chunk + tl.arange(0, chunk)
    inside = event < n
    p = tl.load(confidence + event, mask=inside, other=0.5)
    y = tl.load(outcome + event, mask=inside, other=0)
    w = tl.load(weights + event, mask=inside, other=0)
    a, b, scale = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    at = of_events + event
    sums = a * tl.load(at, mask=inside, other=0) + b * tl.load(at + n, mask=inside, other=0)
    slopes = a * tl.load(at + 2 * n, mask=inside, other=0) + b * tl.load(at + 3 * n, mask=inside, other=0)
    h, f = _residuals(p, y, w)
    slope = (a * h + b * f) * slopes - w * (a * y + b * (1 - y)) * sums
    slope *= 2 * scale * tl.load(upstream).to(tl.float64)
    tl.store(out + event, tl.where(w == 0, 0.0, slope), mask=inside)
