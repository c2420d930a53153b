"""Building blocks of numba loops: vectorised exp and log for float32 and float64, and threads over rows.

A numba loop calls the scalar library function for `math.exp`, which prevents vector instructions. Every row is computed
separately and in a fixed order. So its result does not depend on its position or on the number of threads.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

from torchcalib.ops.segments import LEAST_WEIGHT, MOST_WEIGHT
from torchcalib.ops.threads import in_threads

FEW_CLASSES = 48  # largest number of classes for which vector instructions span `LANES` rows instead of one row
LANES = 64  # rows per block for few classes; the last block has unused rows, because scalar code rounds differently
BLOCK = 1024  # entries of a row per pass; three float32 arrays of this size fill a third of the level-1 cache
CONVERTED = 2**16  # entries per copy of rows that are not contiguous float32 or float64; copies stay in the cache

LOGITS_PER_RANGE = 2**17  # smallest number of entries of rows per range of a thread

F = np.float32
ZERO, _HALF, ONE, NAN, INF = (F(x) for x in (0, 0.5, 1, math.nan, math.inf))
# exp x = 2^n exp r with n = round(x / log 2) and |r| < 0.35 (range reduction of Cody and Waite).
# Adding _ROUND moves n into the last bits of a float. _LOG2_HIGH has 9 bits, so its product with n is exact.
# The Taylor series of exp r ends at degree 7, because further terms add less than 1e-8.
_LOWEST = F(-88.2)  # smallest argument of `exp32`; it has n = -127, for which `_power_of_two` returns 0
_ROUND = F(1.5 * 2**23)
_INV_LOG2, _LOG2_HIGH, _LOG2_LOW = F(1 / math.log(2)), F(0.693359375), F(math.log(2) - 0.693359375)
_E2, _E3, _E4, _E5, _E6, _E7 = (F(1 / math.factorial(k)) for k in range(2, 8))
# log x = n log 2 + log r with sqrt(1/2) < r < sqrt(2), and log r = 2 artanh s with s = (r - 1) / (r + 1).
# The Taylor series of artanh s ends at degree 9, because s^2 < 0.03.
_ROOT2 = F(math.sqrt(2))
_LOG2 = math.log(2)
_T1, _T3, _T5, _T7, _T9 = (F(2 / k) for k in (1, 3, 5, 7, 9))
_SMALLEST = F(2.0**-126)  # smallest normal float32

# Smallest and largest weight except 0. All positive and finite numbers of float32 are valid weights.
_LIMITS = {
    np.dtype(np.float32): np.array((2.0**-149, np.finfo(np.float32).max), np.float32),
    np.dtype(np.float64): np.array((LEAST_WEIGHT, MOST_WEIGHT)),
    np.dtype(np.int64): np.array((1, np.iinfo(np.int64).max)),
}

# Decorator for functions to inline in loops. "contract" allows fused multiply-add, but no reordering of sums.
step = numba.njit(cache=True, fastmath={"contract"}, error_model="numpy")
# Decorator for sums. "reassoc" allows one partial sum per vector lane, so results depend on the vector width.
lanes = numba.njit(cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
compiled_loop = numba.njit(cache=True, nogil=True, error_model="numpy")


@step
def copy(x, out):
    """Fill `out` with x. `out[:] = x` would take 3 s to compile, for the text of the error for different shapes."""
    for k in range(x.size):
        out[k] = x[k]


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
def exp32(x):
    """Return exp x for -88.2 <= x <= 88, with relative error below 2e-7 if the result is a normal number."""
    rounded = x * _INV_LOG2 + _ROUND
    n = rounded - _ROUND
    r = x - n * _LOG2_HIGH
    r = r - n * _LOG2_LOW
    series = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    return ((series * r + ONE) * r + ONE) * _power_of_two(rounded)


@step
def log32(x):
    """Return log x for x > 0, with relative error below 3e-7, also near x = 1; smaller x as the smallest normal x."""
    x = max(x, _SMALLEST)
    n, r = _exponent(x), _significand(x)
    large = r > _ROOT2
    r = r * _HALF if large else r
    n = n + ONE if large else n
    s = (r - ONE) / (r + ONE)
    square = s * s
    series = (((_T9 * square + _T7) * square + _T5) * square + _T3) * square + _T1
    return n * _LOG2_HIGH + (n * _LOG2_LOW + s * series)


@step
def log1p32(x):
    """Return log(1 + x) for float32 x >= 0 in float64, by the series of `log32` up to degree 21.

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


# Float64 versions of the same methods. The series of log ends where further terms add less than 1e-17.
_LOWEST64 = -709.1  # smallest argument of `exp64`; it has n = -1023, for which the power of two is 0
_ROUND64 = 1.5 * 2.0**52
_LOG2_HIGH64 = 0x162E42FEE00000 * 2.0**-53  # 32 bits of log 2, so its product with n is exact
_LOG2_LOW64 = 1.90821492927058770002e-10  # the next 53 bits
_SMALLEST64, _SCALE64 = 2.0**-1022, 2.0**54  # smaller numbers are multiplied by 2^54, which makes them normal
_EXPONENT64, _INTEGER64 = np.uint64(1023 << 52), np.uint64(0x433 << 52)  # bits of the floats 1 and 2^52
_SIGNIFICAND64, _SHIFT64 = np.uint64(2**52 - 1), np.uint64(52)
# (exp r - 1 - r) / r^2 for |r| < 0.347: interpolation at 10 Chebyshev nodes, with an error of 2e-17 relative to exp r
_E64 = (
    *(0.5000000000000001, 0.16666666666666669, 0.04166666666662413, 0.008333333333330062, 0.0013888888917213717),
    *(0.00019841269863053618, 2.4801521295954376e-05, 2.7557268459997064e-06, 2.7620088445409746e-07),
    2.510038549551032e-08,
)


@step
def exp64(x):
    """Return exp x for x <= 709, with relative error below 4e-16, and 0 for x <= -709.1.

    With n = round(x / log 2) and r = x - n log 2, it is 2^n (1 + r + r^2 p(r)) for a polynomial p of degree 9. Pairs of
    its terms are added first (Estrin's scheme), so that few operations wait for each other.
    """
    inside = _LOWEST64 if x < _LOWEST64 else x
    rounded = inside * (1 / _LOG2) + _ROUND64
    n = rounded - _ROUND64
    r = (inside - n * _LOG2_HIGH64) - n * _LOG2_LOW64
    square = r * r
    low = (_E64[0] + _E64[1] * r) + square * (_E64[2] + _E64[3] * r)
    middle = (_E64[4] + _E64[5] * r) + square * (_E64[6] + _E64[7] * r)
    high = _E64[8] + _E64[9] * r
    fourth = square * square
    series = low + fourth * (middle + fourth * high)
    # The last bits of `rounded` are n. Shifting them to the exponent drops all others.
    power = np.uint64((np.float64(rounded).view(np.uint64) << _SHIFT64) + _EXPONENT64).view(np.float64)
    return (1 + (r + square * series)) * power


@step
def _twice_artanh(s):
    """Return 2 artanh s for |s| < 0.172 by its Taylor series up to degree 21, with relative error below 4e-16."""
    square = s * s
    series = (((2 / 21 * square + 2 / 19) * square + 2 / 17) * square + 2 / 15) * square + 2 / 13
    series = ((((series * square + 2 / 11) * square + 2 / 9) * square + 2 / 7) * square + 2 / 5) * square + 2 / 3
    return series * square * s + 2 * s


@step
def log64(x):
    """Return log x for x > 0 with relative error below 1e-15, also near x = 1, and -inf for x = 0.

    With x = 2^n r and sqrt(1/2) < r < sqrt(2), it is n log 2 + 2 artanh s for s = (r - 1) / (r + 1). r - 1 is exact, so
    that the error is relative also for x near 1.
    """
    tiny = x < _SMALLEST64
    bits = np.float64(x * _SCALE64 if tiny else x).view(np.uint64)
    # The exponent as the last bits of a float near 2^52: there are no vector instructions to convert integers.
    n = np.uint64((bits >> _SHIFT64) | _INTEGER64).view(np.float64) - (2.0**52 + 1023)
    n = n - 54 if tiny else n
    r = np.uint64((bits & _SIGNIFICAND64) | _EXPONENT64).view(np.float64)
    large = r > math.sqrt(2)
    r = r * 0.5 if large else r
    n = n + 1 if large else n
    s = (r - 1) / (r + 1)
    result = n * _LOG2_HIGH64 + (n * _LOG2_LOW64 + _twice_artanh(s))
    return result if x > 0 else -np.inf


@step
def log_of_complement(p):
    """Return log(1 - p) for 0 <= p <= 1, with relative error below 1e-15.

    With u = 1 - p in float64 and its rounding error c, it is log(u + c) = log u + c. c is 0 for p > 1/2, and otherwise
    at most 1e-16.
    """
    u = 1 - p
    return log64(u) + ((1 - u) - p)


@step
def log1p_of_fraction(x):
    """Return log(1 + x) for 0 <= x <= 1, with relative error below 1e-15.

    It is log 2 + log r for r = (1 + x) / 2 and x > sqrt(2) - 1, and otherwise log r for r = 1 + x. The numerator of
    s = (r - 1) / (r + 1), scaled to x - 1 or x, has no cancellation. The series is that of `log64`.
    """
    large = x > math.sqrt(2) - 1
    s = (x - 1 if large else x) / (x + 3 if large else x + 2)
    return (_LOG2 if large else 0.0) + _twice_artanh(s)


@step
def log1p_of_fraction32(x):
    """Return log(1 + x) for float32 0 <= x <= 1, with relative error below 3e-7, as `log1p_of_fraction`."""
    large = x > _ROOT2 - ONE
    s = (x - ONE if large else x) / (x + F(3) if large else x + F(2))
    square = s * s
    series = (((_T9 * square + _T7) * square + _T5) * square + _T3) * square + _T1
    return (F(_LOG2) if large else ZERO) + s * series


@step
def log1p64(x):
    """Return log(1 + x) for finite x >= 0, with relative error below 1e-15: log u + c / u, where u + c = 1 + x."""
    u = 1 + x
    c = x - (u - 1) if x < 1 else 1 - (u - x)
    return log64(u) + c / u


@lanes
def count_outside(x, low, high):
    """Return the number of values that are NaN or not in [low, high], as a float."""
    count = ZERO
    for k in range(x.size):
        count += ZERO if (x[k] >= low) & (x[k] <= high) else ONE
    return count


@step
def is_absent(label, ignored, weight):
    """Return whether a row is not added: it has the label `ignored` or the weight 0. Its values may be invalid."""
    absent = False
    if ignored is not None:
        absent |= label == ignored
    if weight is not None:
        absent |= weight == 0
    return absent


@step
def is_weight(weight, limits):
    """Return whether a weight that is not 0 is valid; `limits` are those of `weights_for_loops`."""
    return (weight >= limits[0]) & (weight <= limits[1])


@step
def all_bits(x):
    """Return the bitwise "or" of all integers: 0 or 1 if every integer is 0 or 1, and another number otherwise."""
    bits = x[0]
    for i in range(x.size):
        bits |= x[i]
    return bits


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


@intrinsic
def borrowed(_, array):
    """Return an argument of a loop as an array without reference count, for as long as the caller keeps it.

    Every slice takes and drops a reference by atomic operations. They are a fifth of the time of rows of 100 classes.
    """

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        return view._getvalue()

    return array(array), generate


@intrinsic
def add_four(_, array, at, a, b, c, d):  # noqa: ARG001 - numba reads the names
    """Add four float64 numbers to adjacent ones of an array, by one vector instruction instead of four scalar ones.

    The compiler would not combine the scalar ones, because numba switches this step off.
    """

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        vector = ir.VectorType(ir.DoubleType(), 4)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer())
        terms = ir.Constant(vector, ir.Undefined)
        for k, x in enumerate(arguments[2:]):
            terms = builder.insert_element(terms, x, ir.Constant(ir.IntType(32), k))
        builder.store(builder.fadd(builder.load(place, align=8), terms), place, align=8)
        return context.get_dummy_value()

    return types.void(array, types.uintp, *[types.float64] * 4), generate


# Functions for loops over both dtypes. The type of the argument determines the compiled code.


def exp(x):
    """Return exp x for x <= 0 from `clipped`, in the dtype of x; 0 for the smallest one."""


def clipped(x):
    """Return the larger of x and the smallest argument of `exp`."""


def log(x):
    """Return log x for finite x > 0, in the dtype of x."""


def log1p(x):
    """Return log(1 + x) in float64, for finite x >= 0."""


def bits_of(x):
    """Return a float as an integer of the same size."""


def float_of_bits(x):
    """Return the float with the bits of an integer of the same size."""


@overload(exp)
def _exp(x):
    return (lambda x: exp64(x)) if x == types.float64 else (lambda x: exp32(x))


@overload(clipped)
def _clipped(x):
    return (lambda x: max(x, _LOWEST64)) if x == types.float64 else (lambda x: max(x, _LOWEST))


@overload(log)
def _log(x):
    return (lambda x: log64(x)) if x == types.float64 else (lambda x: log32(x))


@overload(log1p)
def _log1p(x):
    return (lambda x: log1p64(x)) if x == types.float64 else (lambda x: log1p32(x))


@overload(bits_of)
def _bits_of(x):
    return (lambda x: np.float64(x).view(np.int64)) if x == types.float64 else (lambda x: np.float32(x).view(np.int32))


@overload(float_of_bits)
def _float_of_bits(x):
    if x == types.int64:
        return lambda x: np.int64(x).view(np.float64)
    return lambda x: np.int32(x).view(np.float32)


@step
def fill_exps(x, top, shifted, exps):
    """Fill `shifted` with `clipped` x - top, and `exps` with exp(shifted); `top` is the largest entry of the row."""
    for k in range(x.size):
        shift = clipped(x[k] - top)
        shifted[k] = shift
        exps[k] = exp(shift)


@step
def fill_limits(x, shifted, exps):
    """Fill `shifted` and `exps` like `fill_exps`, but for a row with +inf: `exps` is 1 at +inf, NaN at NaN, else 0."""
    for k in range(x.size):
        infinite = x[k] == INF
        shifted[k] = (ZERO if infinite else _LOWEST) if x[k] == x[k] else NAN
        exps[k] = (ONE if infinite else ZERO) if x[k] == x[k] else NAN


@step
def fill_logs(q, logs):
    """Fill `logs` with log q, with 0 for q = 0 (because 0 log 0 = 0), and with NaN for q < 0."""
    for k in range(q.size):
        x = q[k]
        value = log(x)  # outside of the conditions, which would be branches
        value = value if x != ZERO else ZERO
        logs[k] = value if x >= ZERO else NAN


def weights_for_loops(weights: Any) -> tuple[Any, Any]:
    """Return contiguous weights in a dtype for which loops are compiled, and their limits in this dtype."""
    if weights.dtype not in _LIMITS:
        weights = weights.astype(np.int64)
    return np.ascontiguousarray(weights), _LIMITS[weights.dtype]


def contiguous_array(x: Tensor) -> Any:
    """Return a contiguous array; float16 and bfloat16 are converted to float32."""
    return np.ascontiguousarray((x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy())


@compiled_loop
def _widen_bfloat16(bits, out):
    """Fill `out` with the numbers of bfloat16 bits, which are the upper half of the bits of float32."""
    for i in range(len(bits)):
        x, y = bits[i], out[i]
        for k in range(x.size):
            y[k] = float_of_bits(np.int32(np.int32(x[k]) << 16))


@compiled_loop
def _widen_float16(bits, out):
    """Fill `out` with the numbers of float16 bits: 1 of the sign, 5 of the exponent, and 10 of the significand.

    At the places of float32, whose exponents are larger by 127 - 15, they are numbers divided by 2^112. The largest
    exponent is that of infinity and NaN.
    """
    for i in range(len(bits)):
        x, y = bits[i], out[i]
        for k in range(x.size):
            size = np.int32(np.int32(x[k] & 0x7FFF) << 13)
            value = float_of_bits(size) * F(2.0**112)
            limit = float_of_bits(np.int32(size | 0x7F800000))
            value = limit if size >= 0x7C00 << 13 else value
            y[k] = -value if x[k] < 0 else value


_WIDEN = {torch.bfloat16: _widen_bfloat16, torch.float16: _widen_float16}


def float_rows(values: Tensor) -> Callable[..., Iterator[tuple[slice, Any]]]:
    """Return a function of a range of rows and of classes, which yields pieces of the rows and their slices.

    Pieces are contiguous arrays of float64 for float64 `values` `(N, C)`, and otherwise of float32. Rows that need no
    copy are one piece with all classes. Threads call the function: it uses no operators of torch, because each of those
    releases the lock of the interpreter and waits for it.
    """
    widen = _WIDEN.get(values.dtype)
    array = (values.view(torch.int16) if widen else values).numpy()
    is_ready = widen is None and values.is_contiguous()

    def pieces(begin: int, end: int, classes: slice = slice(None)) -> Iterator[tuple[slice, Any]]:
        if is_ready:
            yield slice(begin, end), array[begin:end]
            return
        part = array[begin:end, classes]
        n = max(1, CONVERTED // max(1, part.shape[1]))
        buffer = np.empty((min(n, len(part)), part.shape[1]), np.float32 if widen else array.dtype)
        for start in range(0, len(part), n):
            found = part[start : start + n]
            rows = buffer[: len(found)]
            if widen:
                widen(found, rows)
            else:
                np.copyto(rows, found)
            yield slice(begin + start, begin + start + len(found)), rows

    return pieces


def by_rows(
    loop: Callable[..., None],
    values: Tensor,
    columns: Sequence[Any],
    options: tuple[Any, ...] = (),
    out: Tensor | None = None,
) -> None:
    """Call `loop(rows, *columns, *options[, out])` on ranges of contiguous rows in several threads.

    Rows are float64 for float64 `values`, and otherwise float32. The result of the loop must not depend on the division
    into ranges. `columns` are `(..., N)` or None, and are divided as the rows. `out` `(N, C)` can have any floating
    dtype.
    """
    pieces = float_rows(values)
    filled = None if out is None or out.dtype not in (torch.float32, torch.float64) else out.numpy()

    def run(begin: int, end: int) -> None:
        for part, rows in pieces(begin, end):
            arguments = [rows, *(None if x is None else x[..., part] for x in columns), *options]
            if out is None:
                loop(*arguments)
            elif filled is not None and filled.dtype == rows.dtype:
                loop(*arguments, filled[part])
            else:
                gradient = np.empty_like(rows)
                loop(*arguments, gradient)
                out[part] = torch.from_numpy(gradient)

    in_threads(run, len(values), values.numel(), LOGITS_PER_RANGE)
