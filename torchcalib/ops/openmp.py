"""Compiled functions in the OpenMP threads of torch, which start within a few microseconds.

A sleeping Python thread takes about 50 microseconds to start. OpenMP threads keep running for a moment after every
operator of torch, and start at once. So two threads halve the time of 256 rows with 1,000 classes. torch loads its
OpenMP library with global symbols. On Linux, the libraries of GNU, LLVM and Intel all have GOMP_parallel, which calls a
function in every thread.

A process that is forked after torch has used its threads, and imports this module only then, waits forever at its first
large batch. Operators of torch have the same limitation. Workers of a `DataLoader` use one thread, and do not wait.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.ir
import numba
import torch
from numba import types
from numba.extending import intrinsic

PER_THREAD = 2**15  # smallest number of input values per thread, as for the operators of torch

_own_thread = types.ExternalFunction("omp_get_thread_num", types.intc())
_n_threads = types.ExternalFunction("omp_get_num_threads", types.intc())
_PROCESS = os.getpid()  # a forked process has no OpenMP threads, and would wait for them forever


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """Convert an address to a pointer for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(arguments[0], llvmlite.ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@numba.njit(cache=True)
def range_of_thread(n: Any) -> Any:
    """Return begin and end of the part of `0..n-1` for the calling thread."""
    thread, n_threads = _own_thread(), _n_threads()
    return n * thread // n_threads, n * (thread + 1) // n_threads


@cache
def _parallel() -> Callable[..., None] | None:
    """Return GOMP_parallel(function, task, number of threads, flags), or None if there is no such function."""
    try:
        library = ctypes.CDLL(None)
        parallel = library.GOMP_parallel
        library.omp_get_thread_num  # noqa: B018 the compiled functions call it
    except (AttributeError, OSError, TypeError):  # Windows raises TypeError
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@cache
def _compiled(function: Callable[[Any], None]) -> Any:
    return numba.cfunc("void(voidptr)", cache=True)(function)


def in_openmp(function: Callable[[Any], None], task: bytes, n_entries: int) -> bool:
    """Call `function(task)` in up to `torch.get_num_threads()` threads. Return False if OpenMP is not available.

    Args:
        function: Python function that numba compiles. It reads its arguments from the memory `task`, and computes the
            part that `range_of_thread` returns. It must not raise.
        task: numbers and addresses for `function`.
        n_entries: total number of input values; at least `PER_THREAD` values are required per thread.
    """
    parallel = _parallel()
    if parallel is None or os.getpid() != _PROCESS:
        return False
    n_threads = max(1, min(torch.get_num_threads(), n_entries // PER_THREAD))
    parallel(_compiled(function).address, task, n_threads, 0)
    return True
