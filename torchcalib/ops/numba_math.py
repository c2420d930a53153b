"""Building blocks of numba loops: vectorised float32 exp and log, and threads over rows.

A numba loop calls the scalar library function for `math.exp`, which prevents vector instructions. Every row is computed
separately and in a fixed order. So its result does not depend on its position or on the number of threads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.threads import PER_THREAD, in_threads

BLOCK = 1024  # entries of a row per pass; three float32 arrays of this size fill a third of the level-1 cache
CONVERTED = 2**15  # entries converted to float32 per copy; torch would use threads for larger copies

F = np.float32
ZERO, _HALF, ONE, NAN, INF = (F(x) for x in (0, 0.5, 1, math.nan, math.inf))
# exp x = 2^n exp r with n = round(x / log 2) and |r| < 0.35 (range reduction of Cody and Waite).
# Adding _ROUND moves n into the last bits of a float. _LOG2_HIGH has 9 bits, so its product with n is exact.
# The Taylor series of exp r ends at degree 7, because further terms add less than 1e-8.
LOWEST = F(-88.2)  # smallest argument of `exp`; it has n = -127, for which `_power_of_two` returns 0
_ROUND = F(1.5 * 2**23)
_INV_LOG2, _LOG2_HIGH, _LOG2_LOW = F(1 / math.log(2)), F(0.693359375), F(math.log(2) - 0.693359375)
_E2, _E3, _E4, _E5, _E6, _E7 = (F(1 / math.factorial(k)) for k in range(2, 8))
# log x = n log 2 + log r with sqrt(1/2) < r < sqrt(2), and log r = 2 artanh s with s = (r - 1) / (r + 1).
# The Taylor series of artanh s ends at degree 9, because s^2 < 0.03.
_ROOT2 = F(math.sqrt(2))
_LOG2 = math.log(2)
_T1, _T3, _T5, _T7, _T9 = (F(2 / k) for k in (1, 3, 5, 7, 9))
SMALLEST = F(2.0**-126)  # smallest normal float32, which replaces smaller numbers in `fill_logs`

# Decorator for functions to inline in loops. "contract" allows fused multiply-add, but no reordering of sums.
step = numba.njit(cache=True, fastmath={"contract"}, error_model="numpy")
# Decorator for sums. "reassoc" allows one partial sum per vector lane, so results depend on the vector width.
lanes = numba.njit(cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
compiled_loop = numba.njit(cache=True, nogil=True, error_model="numpy")


@step
def _power_of_two(rounded):
    """Return 2^n for `rounded` = n + _ROUND and -126 <= n <= 127, and 0 for n = -127, by shifting n to the exponent."""
    return np.int32((np.float32(rounded).view(np.int32) << 23) + (127 << 23)).view(np.float32)


@step
def _exponent(x):
    """Return the exponent n of x = 2^n r, where 1 <= r < 2."""
    return F(np.int32((np.float32(x).view(np.int32) >> 23) - 127))


@step
def _significand(x):
    """Return the significand r of x = 2^n r, where 1 <= r < 2."""
    return np.int32((np.float32(x).view(np.int32) & 0x007FFFFF) | 0x3F800000).view(np.float32)


@step
def exp(x):
    """Return exp x for -88.2 <= x <= 88, with relative error below 2e-7 if the result is a normal number."""
    rounded = x * _INV_LOG2 + _ROUND
    n = rounded - _ROUND
    r = x - n * _LOG2_HIGH
    r = r - n * _LOG2_LOW
    series = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    return ((series * r + ONE) * r + ONE) * _power_of_two(rounded)


@step
def log(x):
    """Return log x for normal x > 0, with relative error below 3e-7, also near x = 1."""
    n, r = _exponent(x), _significand(x)
    large = r > _ROOT2
    r = r * _HALF if large else r
    n = n + ONE if large else n
    s = (r - ONE) / (r + ONE)
    square = s * s
    series = (((_T9 * square + _T7) * square + _T5) * square + _T3) * square + _T1
    return n * _LOG2_HIGH + (n * _LOG2_LOW + s * series)


@step
def log1p(x):
    """Return log(1 + x) for float32 x >= 0 in float64, by the series of `log` up to degree 21.

    Gradients contain differences of scores, which require float64 precision.
    """
    n = _exponent(ONE + x)
    wide = np.float64(x)
    r = (1 + wide) * np.float64(_power_of_two(_ROUND - n))
    large = r > _ROOT2
    r = r * 0.5 if large else r
    n = n + ONE if large else n
    s = wide / (2 + wide) if n == ZERO else (r - 1) / (r + 1)
    square = s * s
    series = (((2 / 21 * square + 2 / 19) * square + 2 / 17) * square + 2 / 15) * square + 2 / 13
    series = (((series * square + 2 / 11) * square + 2 / 9) * square + 2 / 7) * square + 2 / 5
    return np.float64(n) * _LOG2 + s * ((series * square + 2 / 3) * square + 2)


@step
def bin_of(value, edges, right):
    """Return the `segments.bin_index` of one float64 value; `edges` contains the B + 1 bin edges."""
    last = edges.size - 2
    scaled = value * (last + 1)
    scaled = scaled if scaled > 0 else 0.0  # NaN becomes 0
    scaled = scaled if scaled < last + 1 else last + 1.0
    if right:
        k: Any = max(np.intp(math.ceil(scaled)) - 1, 0)
        k += np.intp(value > edges[k + 1]) - np.intp(value <= edges[k])
    else:
        k = min(np.intp(scaled), last)
        k += np.intp(value >= edges[k + 1]) - np.intp(value < edges[k])
    return min(max(k, 0), last)


@step
def fill_exps(x, top, shifted, exps):
    """Fill `shifted` with max(x - top, LOWEST) and `exps` with exp(shifted); `top` is the largest entry of the row."""
    for k in range(x.size):
        shift = max(x[k] - top, LOWEST)
        shifted[k] = shift
        exps[k] = exp(shift)


@step
def fill_limits(x, shifted, exps):
    """Fill `shifted` and `exps` like `fill_exps`, but for a row with +inf: `exps` is 1 at +inf, NaN at NaN, else 0."""
    for k in range(x.size):
        infinite = x[k] == INF
        shifted[k] = (ZERO if infinite else LOWEST) if x[k] == x[k] else NAN
        exps[k] = (ONE if infinite else ZERO) if x[k] == x[k] else NAN


@step
def fill_logs(q, logs):
    """Fill `logs` with log q, with 0 for q = 0 (because 0 log 0 = 0), and with NaN for q < 0."""
    for k in range(q.size):
        x = q[k]
        value = log(SMALLEST if x < SMALLEST else x)
        value = value if x != ZERO else ZERO
        logs[k] = value if x >= ZERO else NAN


def by_rows(
    loop: Callable[..., None],
    values: Tensor,
    columns: Sequence[Any],
    options: tuple[Any, ...] = (),
    out: Tensor | None = None,
) -> None:
    """Call `loop(rows, *columns, *options[, out])` on ranges of contiguous float32 rows in several threads.

    Its result must not depend on the division into ranges. `columns` are `(..., N)` or None, and are divided as the
    rows. `out` `(N, C)` can have any floating dtype.
    """
    ready = values.dtype == torch.float32 and values.is_contiguous()
    direct = ready and (out is None or out.dtype == torch.float32)
    if direct and values.numel() < PER_THREAD:
        loop(values.numpy(), *columns, *options, *(() if out is None else (out.numpy(),)))
        return

    def run(begin: int, end: int) -> None:
        n = end - begin if direct else max(1, CONVERTED // values.shape[-1])
        buffer = torch.empty(0 if ready else min(n, end - begin), values.shape[-1], dtype=torch.float32)
        for start in range(begin, end, n):
            part = slice(start, min(start + n, end))
            rows = values[part] if ready else buffer[: part.stop - start].copy_(values[part])
            arguments = [rows.numpy(), *(None if x is None else x[..., part] for x in columns), *options]
            if out is None:
                loop(*arguments)
            else:
                filled = out[part] if out.dtype == torch.float32 else torch.empty_like(out[part], dtype=torch.float32)
                loop(*arguments, filled.numpy())
                if out.dtype != torch.float32:
                    out[part] = filled

    in_threads(run, len(values), values.numel())
