"""Building blocks of numba loops: float32 exp and log that compile to vector instructions, and rows in threads.

`math.exp` in a numba loop is one scalar library call for each entry, which is several times as slow. Every row is
computed separately and in a fixed order, so its bits depend neither on its place nor on the number of threads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir
import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from torchcalib.ops.threads import PER_THREAD, in_threads

BLOCK = 1024  # entries: three arrays of float32 fill a third of a first cache
CONVERTED = 2**15  # entries that torch copies in the calling thread


F = np.float32
ZERO, _HALF, ONE, NAN, INF = (F(x) for x in (0, 0.5, 1, math.nan, math.inf))
# exp x = 2^n exp r with n = round(x / log 2) and |r| < 0.35 (Cody and Waite's range reduction). Adding _ROUND leaves n
# in the last bits. log 2 is subtracted in two parts; the first has 9 bits, so that its product with n is exact. The
# Taylor series of exp r ends at degree 7: further terms add less than 1e-8.
LOWEST = F(-88.2)  # n = -127, for which 2^n is 0
_ROUND = F(1.5 * 2**23)
_INV_LOG2, _LOG2_HIGH, _LOG2_LOW = F(1 / math.log(2)), F(0.693359375), F(math.log(2) - 0.693359375)
_E2, _E3, _E4, _E5, _E6, _E7 = (F(1 / math.factorial(k)) for k in range(2, 8))
# log x = n log 2 + log r with sqrt(1/2) < r < sqrt(2), and log r = 2 artanh s with s = (r - 1) / (r + 1), as a series
# in s^2 < 0.03 up to degree 9 in s.
_ROOT2 = F(math.sqrt(2))
_LOG2 = math.log(2)
_T1, _T3, _T5, _T7, _T9 = (F(2 / k) for k in (1, 3, 5, 7, 9))
SMALLEST = F(2.0**-126)  # the least normal number; smaller ones are replaced by it in log

# A function inlined into loops. "contract" allows fused multiply-add and no reordering.
step = numba.njit(cache=True, fastmath={"contract"}, error_model="numpy")
# A sum of a block: "reassoc" allows one partial sum for each vector lane. The number of lanes is fixed per processor.
lanes = numba.njit(cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
compiled_loop = numba.njit(cache=True, nogil=True, error_model="numpy")

_INT = llvmlite.ir.IntType(32)


@intrinsic
def _power_of_two(_: Any, rounded: Any) -> Any:
    """Return 2^n for -127 (as 0) <= n <= 127, from n + _ROUND: the last bits become those of the exponent."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        bits = builder.shl(builder.bitcast(arguments[0], _INT), _INT(23))
        return builder.bitcast(builder.add(bits, _INT(127 << 23)), llvmlite.ir.FloatType())

    return types.float32(rounded), generate


@intrinsic
def _exponent(_: Any, x: Any) -> Any:
    """Return n of x = 2^n r with 1 <= r < 2."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        bits = builder.lshr(builder.bitcast(arguments[0], _INT), _INT(23))
        return builder.sitofp(builder.sub(bits, _INT(127)), llvmlite.ir.FloatType())

    return types.float32(x), generate


@intrinsic
def _significand(_: Any, x: Any) -> Any:
    """Return r of x = 2^n r with 1 <= r < 2."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        bits = builder.and_(builder.bitcast(arguments[0], _INT), _INT(0x007FFFFF))
        return builder.bitcast(builder.or_(bits, _INT(0x3F800000)), llvmlite.ir.FloatType())

    return types.float32(x), generate


@intrinsic
def as_float(_: Any, bits: Any) -> Any:
    """Return the float of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], llvmlite.ir.FloatType())

    return types.float32(bits), generate


@step
def exp(x: Any) -> Any:
    """Return exp x for -88.2 <= x <= 88 with relative error below 2e-7; 0 below the least normal number."""
    rounded = x * _INV_LOG2 + _ROUND
    n = rounded - _ROUND
    r = x - n * _LOG2_HIGH
    r = r - n * _LOG2_LOW
    series = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    return ((series * r + ONE) * r + ONE) * _power_of_two(rounded)


@step
def log(x: Any) -> Any:
    """Return log x for normal x > 0 with relative error below 3e-7, also near 1."""
    n, r = _exponent(x), _significand(x)
    large = r > _ROOT2
    r = r * _HALF if large else r
    n = n + ONE if large else n
    s = (r - ONE) / (r + ONE)
    square = s * s
    series = (((_T9 * square + _T7) * square + _T5) * square + _T3) * square + _T1
    return n * _LOG2_HIGH + (n * _LOG2_LOW + s * series)


@step
def log1p(x: Any) -> Any:
    """Return log(1 + x) for x >= 0 in float64, which gradients need as differences of scores.

    The series of `log`, up to degree 21.
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
def exps_of(x: Any, top: Any, shifted: Any, exps: Any) -> None:
    """Fill in x - top, not below the point where exp is 0, and its exp. NaN stays NaN."""
    for k in range(x.size):
        shift = max(x[k] - top, LOWEST)
        shifted[k] = shift
        exps[k] = exp(shift)


@step
def limits_of(x: Any, shifted: Any, exps: Any) -> None:
    """Do the same in the limit for a row with +inf: these entries share the mass."""
    for k in range(x.size):
        infinite = x[k] == INF
        shifted[k] = (ZERO if infinite else LOWEST) if x[k] == x[k] else NAN
        exps[k] = (ONE if infinite else ZERO) if x[k] == x[k] else NAN


@step
def logs_of(q: Any, logs: Any) -> None:
    """Fill in log q; 0 for q = 0, and NaN for q < 0."""
    for k in range(q.size):
        x = q[k]
        found = log(SMALLEST if x < SMALLEST else x)
        found = found if x != ZERO else ZERO
        logs[k] = found if x >= ZERO else NAN


def by_rows(
    loop: Callable[..., None],
    values: Tensor,
    columns: Sequence[Any],
    options: tuple[Any, ...] = (),
    out: Tensor | None = None,
) -> None:
    """Call `loop(rows, *columns, *options)` for ranges of rows, which are contiguous and float32 there.

    Args:
        loop: its result must not depend on how the rows are cut.
        values: `(N, C)` of any floating dtype, with any strides.
        columns: arrays `(..., N)` or None, of which the loop gets the part of its rows.
        options: further arguments.
        out: `(N, C)` of any floating dtype, filled in by the loop as its last argument.
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


def columns_of(*columns: Tensor | None) -> list[Any]:
    """Return columns as contiguous arrays; bool as uint8, on which numba computes without a branch, half as float."""
    found: list[Any] = list(columns)
    for k, x in enumerate(columns):
        if x is not None:
            narrow = x.dtype in (torch.float16, torch.bfloat16)
            numbers = x.view(torch.uint8) if x.dtype == torch.bool else x.float() if narrow else x
            found[k] = np.ascontiguousarray(numbers.numpy())
    return found
